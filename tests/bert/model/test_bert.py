"""The model: packing changes nothing, and the numbers are Hugging Face's."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from bert.data.batch import PretrainingCapacity
from bert.model.config import BertConfig
from bert.model.init import uninitialized
from bert.model.recompute import Recomputation

from ..plain import NO_DROPOUT, close, model_of


def _gradients(model, batches, weights):
    model.zero_grad()
    losses = []
    for batch, (mlm_weight, nsp_weight) in zip(batches, weights, strict=True):
        loss = model(batch)
        total = loss.mlm * mlm_weight + loss.nsp * nsp_weight
        total.backward()
        losses.append(float(total.detach()))
    return sum(losses), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("seed", [0, 1])
def test_packed_batch_gives_the_loss_and_every_gradient_of_its_sequences_alone(
    tiny, make_model, make_records, batch_of, seed
):
    config = dataclasses.replace(tiny, **NO_DROPOUT)
    model = make_model(config, seed)
    records = make_records(4, seed=seed)
    packed = batch_of(records, range(records.num_sequences))
    alone = [batch_of(records, [i]) for i in range(records.num_sequences)]

    packed_loss, packed_gradients = _gradients(model, [packed], [(1.0, 1.0)])
    rows = packed.num_sequences
    weights = [(b.num_masked / packed.num_masked, 1 / rows) for b in alone]
    alone_loss, alone_gradients = _gradients(model, alone, weights)

    assert packed_loss == pytest.approx(alone_loss, abs=1e-10)
    close(alone_gradients, packed_gradients, 1e-10, 1e-10)


def test_a_token_never_sees_another_sequence(tiny, make_model, make_records, batch_of):
    model = make_model(tiny).eval()
    records = make_records(2)
    batch = batch_of(records, [0, 1, 2])
    changed = batch.input_ids.clone()
    changed[: int(batch.cu_seqlens[1])] = 5  # only the first sequence
    before = model.bert(batch)
    after = model.bert(dataclasses.replace(batch, input_ids=changed))
    cut = int(batch.cu_seqlens[1])
    assert not torch.allclose(before[:cut], after[:cut])
    assert torch.equal(before[cut:], after[cut:])


def test_padding_changes_no_gradient(tiny, make_model, packed_batch):
    model, batch = make_model(dataclasses.replace(tiny, **NO_DROPOUT)), packed_batch
    sizes = batch.num_tokens + 13, batch.num_sequences + 5, batch.num_masked + 11
    names = "tokens", "sequences", "masked"
    padded = batch.pad_to(PretrainingCapacity(**dict(zip(names, sizes, strict=True))))
    loss, gradients = _gradients(model, [batch], [(1.0, 1.0)])
    padded_loss, padded_gradients = _gradients(model, [padded], [(1.0, 1.0)])
    assert loss == pytest.approx(padded_loss, abs=1e-12)
    close(padded_gradients, gradients, 1e-12, 1e-12)
    with pytest.raises(ValueError, match="exceeds"):
        padded.pad_to(PretrainingCapacity(tokens=1, sequences=1, masked=1))


def _hugging_face(config, state):
    settings = {name: getattr(config, name) for name in config.__dataclass_fields__}
    settings["hidden_act"] = config.hugging_face_hidden_act
    theirs = transformers.BertConfig(**settings, attn_implementation="eager")
    reference = transformers.BertForPreTraining(theirs)
    words, bias = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
    trimmed = dict(state)
    for name, tied in ((words, "decoder.weight"), (bias, "decoder.bias")):
        trimmed[name] = state[name][: config.vocab_size]
        trimmed[f"cls.predictions.{tied}"] = trimmed[name]
    missing, unexpected = reference.load_state_dict(trimmed, strict=False)
    assert not unexpected
    assert all("position_ids" in name or "token_type_ids" in name for name in missing)
    return reference.eval()


@pytest.mark.parametrize("activation", ["gelu", "gelu_erf"])
def test_outputs_are_those_of_hugging_face_on_padded_sequences(
    tiny, make_model, make_records, batch_of, activation
):
    config = dataclasses.replace(tiny, hidden_act=activation)
    model = make_model(config, dtype=torch.float32).eval()
    reference = _hugging_face(config, model.state_dict())
    records = make_records(4, packed=False, seed=3)
    batch = batch_of(records, range(4))
    lengths = np.diff(batch.cu_seqlens.numpy())
    flat_labels = torch.full((batch.num_tokens,), -100)
    flat_labels[batch.masked_positions.long()] = batch.masked_labels
    ids = torch.zeros(4, lengths.max(), dtype=torch.long)
    segments, mask, labels = ids.clone(), ids.clone(), torch.full_like(ids, -100)
    flat = batch.input_ids, batch.segment_ids, torch.ones(batch.num_tokens), flat_labels
    for padded, values in zip((ids, segments, mask, labels), flat, strict=True):
        for row, part in enumerate(values.split(lengths.tolist())):
            padded[row, : len(part)] = part
    with torch.no_grad():
        expected = reference(
            ids, attention_mask=mask, token_type_ids=segments, labels=labels,
            next_sentence_label=batch.next_sentence_labels,
        )  # fmt: skip
        logits, losses = model.scored(batch), model(batch)
    theirs = {"mlm": expected.prediction_logits[labels != -100],
              "nsp": expected.seq_relationship_logits, "loss": expected.loss}  # fmt: skip
    ours = {"mlm": logits.mlm, "nsp": logits.nsp, "loss": losses.mlm + losses.nsp}
    close(ours, theirs, 1e-5, 1e-5)


def test_bert_large_has_the_398_tensors_of_the_published_logs():
    with uninitialized():
        model = model_of(BertConfig(), seed=None)
    assert len(list(model.parameters())) == 398


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_an_evaluation_are_not_rounded_to_the_weights_precision(
    dtype, tiny, make_model, packed_batch
):
    model, batch, seen = make_model(tiny, dtype=dtype).eval(), packed_batch, []
    transform, words = model.cls.predictions.transform, model.bert.embeddings
    transform.register_forward_hook(lambda *given: seen.append(given[2].double()))
    with torch.no_grad():
        scores, losses, _ = model.scored(batch)
        products = seen[0] @ words.word_embeddings.weight.double().t()
        expected = (products + model.cls.predictions.bias)[:, : tiny.vocab_size]
    assert scores.dtype == losses.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, atol=1e-5, rtol=1e-5)
    assert (expected.to(dtype).double() - expected).abs().max() > 1e-3
    truth = F.cross_entropy(expected, batch.masked_labels, reduction="none")
    torch.testing.assert_close(losses.double(), truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recompute", [0, 1, 2])
@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
def test_the_last_layer_computes_only_what_the_heads_read_and_no_gradient_changes(
    pre_norm, recompute, tiny, make_model, packed_batch
):
    shape = dataclasses.replace(tiny, layer_norm_large_model=pre_norm, **NO_DROPOUT)
    model, room = make_model(shape), {"tokens": 200, "sequences": 9, "masked": 60}
    batch = packed_batch.pad_to(PretrainingCapacity(**room))
    if recompute:
        model.recompute(Recomputation(recompute, random_state=False))
    rows = []
    for layer in model.bert.encoder.layer:
        for part in (layer.output.dense, layer.output):
            part.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    loss, gradients = _gradients(model, [batch], [(1.0, 1.0)])
    assert rows[0] == 200
    assert 60 + 9 in rows, "masked tokens, and the first of each sequence"
    encode = model.bert.forward
    model.bert.forward = lambda batch, rows: encode(batch).index_select(0, rows)
    whole_loss, whole = _gradients(model, [batch], [(1.0, 1.0)])
    assert loss == pytest.approx(whole_loss, abs=1e-14)
    close(gradients, whole, 1e-15, 1e-12)
