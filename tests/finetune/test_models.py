"""Batches have the losses of their sequences; saved models load in Hugging Face, and back."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bert.data.tokens import WordPiece
from bert.model.config import BertConfig
from common.env import ConfigError
from finetune import models, saved
from finetune.batches import Order, Samples
from finetune.glue import encode

from . import made_up
from .runs import content

SHAPE = BertConfig(vocab_size=len(made_up.VOCABULARY), hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
                   intermediate_size=40, max_position_embeddings=32, initializer_range=0.2)  # fmt: skip
LENGTHS = [5, 1, 17, 9, 2]


def model_of(kind, shape=SHAPE):
    return made_up.model_of(kind, shape)


def samples_of(kind):
    generator, lengths = np.random.default_rng(0), np.array(LENGTHS, dtype=np.int32)
    drawn = [generator.integers(5, SHAPE.vocab_size, n) for n in LENGTHS]
    sequences = [(ids.astype(np.int32), (len(ids) + 1) // 2) for ids in drawn]
    if kind == "squad":
        labels = {"starts": (lengths - 1) // 2, "ends": lengths - 1}
        return Samples(sequences, labels)
    return Samples(sequences, {"labels": np.array([0, 2, 1, 1, 0])})


def numbers(*values):
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("kind", ["squad", "MNLI"])
def test_the_loss_of_a_batch_is_the_mean_of_the_losses_of_its_sequences(kind):
    model, samples = model_of(kind), samples_of(kind)
    (together,) = model(samples.batch(numbers(0, 1, 2, 3, 4)))
    alone = [model(samples.batch(numbers(i)))[0] for i in range(5)]
    torch.testing.assert_close(together, torch.stack(alone).mean())
    for i in range(5 if kind == "squad" else 0):
        scores = model.scores(samples.batch(numbers(i)))
        places = [torch.tensor(place[i]).long() for place in samples.labels.values()]
        wanted = map(F.cross_entropy, scores.T, places)
        torch.testing.assert_close(alone[i], sum(wanted) / 2)


def test_a_last_layer_of_only_first_tokens_changes_neither_loss_nor_gradient():
    batch, found = samples_of("MNLI").batch(numbers(3, 1, 2)), []
    first = batch.cu_seqlens[:-1]
    for of_all in (False, True):
        model = model_of("MNLI")
        hidden = model.bert(batch)[first] if of_all else model.bert(batch, first)
        scores = model.classifier(model.bert.pooler(hidden))
        loss = F.cross_entropy(scores, batch.labels)
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
        torch.testing.assert_close(model(batch)[0], loss)
    torch.testing.assert_close(*found)


def save(model, folder, kind="MNLI", vocabulary=None):
    """The model's folder, as training writes it."""
    (folder / "v.txt").write_text("\n".join(made_up.VOCABULARY))
    labels = ["a", "b", "c"] if kind == "MNLI" else []
    facts = {"task": kind, "lower_case": True, "labels": labels}
    weights = dict(model.named_parameters())
    models.save(folder / "model", model, weights, vocabulary or folder / "v.txt", facts)
    return folder / "model"


HEADS = {"squad": "QuestionAnswering", "MNLI": "SequenceClassification"}


def assert_the_same_in_hugging_face(folder, kind, model, samples):
    transformers = pytest.importorskip("transformers")
    loads = getattr(transformers, f"AutoModelFor{HEADS[kind]}").from_pretrained
    other, info = loads(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for number, (ids, second) in enumerate(samples.sequences):
        (mine,) = saved.batch_scores(model, samples.batch(numbers(number)))
        segments = (torch.arange(len(ids)) >= second).long()[None]
        words = torch.from_numpy(ids).long()[None]
        theirs = other.eval()(words, token_type_ids=segments)
        if kind == "squad":
            theirs = torch.stack([theirs.start_logits[0], theirs.end_logits[0]], dim=1)
        else:
            assert other.config.id2label == {0: "a", 1: "b", 2: "c"}
            theirs = theirs.logits[0]
        np.testing.assert_allclose(mine, theirs.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", HEADS)
def test_a_saved_model_scores_the_same_in_hugging_face_and_loads_again(kind, tmp_path):
    model, samples = model_of(kind), samples_of(kind)
    folder = save(model, tmp_path, kind)
    named = content(folder / "config.json")["architectures"]
    assert named == [f"BertFor{HEADS[kind]}"]
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1, "others may read all of it or none"
    shape = BertConfig.from_json(folder / "config.json")
    again = made_up.model_of(kind, shape, seed=2)
    assert models.load(again, folder / "model.safetensors") == ([], [])
    assert shape.gelu_approximation == SHAPE.gelu_approximation
    batch = samples.batch(numbers(0, 2))
    torch.testing.assert_close(again.scores(batch), model.scores(batch))
    assert_the_same_in_hugging_face(folder, kind, model, samples)


TEXTS = [
    ("The film is a mess, but a charming one.",),
    ("Who wrote it?", "It was written in 1957 by a Welsh schoolteacher, whose name nobody in town remembered."),
    ("Dreary " * 60,),
    ("Ein Kaffee, bitte!", "\u6f22\u5b57 and caf\u00e9"),
]  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
def test_real_weights_have_ids_and_scores_of_hugging_face(repository, tmp_path, kind):
    demo = Path(os.environ.get("DEMO_DIR", repository / "demo"))
    weights = demo / "finetune" / "weights"
    if not (weights / "vocab.txt").is_file():
        pytest.skip(f"no weights in {weights}: make finetune-demo fetches them")
    transformers = pytest.importorskip("transformers")
    model = model_of(kind, BertConfig.from_json(weights / "config.json"))
    models.load(model, weights / "model.safetensors")
    folder = save(model, tmp_path, kind, weights / "vocab.txt")
    sequences = encode(TEXTS, WordPiece(weights / "vocab.txt"), 128)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, (ids, _) in zip(TEXTS, sequences, strict=True):
        known = tokenizer(*text, truncation=True, max_length=128)["input_ids"]
        assert ids.tolist() == known
    samples = Samples(sequences, {"labels": np.zeros(len(TEXTS), np.int64)})
    assert_the_same_in_hugging_face(folder, kind, model, samples)


def test_a_pre_ln_model_is_saved_only_for_our_loader(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = dataclasses.replace(SHAPE, layer_norm_large_model=True)
    folder = save(model_of("MNLI", shape), tmp_path)
    kept = BertConfig.from_json(folder / "config.json")
    assert kept == dataclasses.replace(shape, hidden_act="gelu_new")
    with pytest.raises(ValueError, match="model"):
        transformers.AutoModelForSequenceClassification.from_pretrained(folder)


def test_an_encoder_without_head_and_other_heads_are_accepted_and_reported(tmp_path):
    encoder = model_of("MNLI").bert.state_dict()
    encoder["embeddings.position_ids"] = torch.arange(32)
    torch.save(encoder, tmp_path / "encoder.pt")
    assert models.load(model_of("MNLI"), tmp_path / "encoder.pt") == (
        ["classifier.weight", "classifier.bias"],
        ["bert.embeddings.position_ids"],
    )
    lacking, left_over = models.load(model_of("squad"), tmp_path / "encoder.pt")
    assert lacking == ["qa_outputs.weight", "qa_outputs.bias"]
    assert left_over[1:] == ["bert.pooler.dense.bias", "bert.pooler.dense.weight"]


def test_a_head_of_other_classes_is_new_and_said(tmp_path):
    """MNLI, three classes, as the start of RTE, two."""
    other = dict(model_of("MNLI").named_parameters())
    torch.save(other, tmp_path / "x.pt")
    model = made_up.model_of("MNLI", SHAPE, num_classes=2, seed=5)
    drawn = model.classifier.weight.detach().clone()
    named = ["classifier.weight", "classifier.bias"]
    assert models.load(model, tmp_path / "x.pt").new == named
    assert torch.equal(model.classifier.weight, drawn)
    pooler = "bert.pooler.dense.weight"
    assert torch.equal(model.get_parameter(pooler), other[pooler])


@pytest.mark.parametrize(("change", "message"), [
    ({"bert.encoder.layer.1.output.dense.bias": None, "bert.embeddings.LayerNorm.bias": torch.zeros(3)},
     r"LayerNorm.bias is \(3,\), expected \(24,\); bert.encoder.layer.1.output.dense.bias is missing"),
    ({"qa_outputs.bias": torch.tensor([0, torch.nan])}, r"x.pt: qa_outputs.bias holds NaN or infinity"),
])  # fmt: skip
def test_weights_that_do_not_fit_or_are_no_numbers_are_one_line(
    tmp_path, change, message
):
    state = model_of("squad").state_dict() | change
    kept = {name: weight for name, weight in state.items() if weight is not None}
    torch.save(kept, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=message):
        models.load(model_of("squad"), tmp_path / "x.pt")


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_epoch_has_every_sample_once_in_its_own_order(world_size):
    ranks = [Order(20, 2, 2, 4, rank, world_size) for rank in range(world_size)]
    stream: list[int] = []
    for step in range(1, 11):
        taken = [np.concatenate(order.step(step)) for order in ranks]
        stream += np.stack(taken, axis=1).ravel().tolist()
        assert [len(micro) for micro in ranks[0].step(step)] == [2, 2]
    epochs = [stream[i : i + 20] for i in range(0, 40, 20)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != list(range(20))
    firsts = [Order(20, 2, 2, seed=seed).step(1)[0].tolist() for seed in (5, 4)]
    assert firsts[0] != firsts[1]


@pytest.mark.parametrize("kind", ["squad", "MNLI"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_sequence_is_predicted_by_exactly_one_rank(kind, world_size):
    model, samples = model_of(kind), samples_of(kind)
    parts: list[dict] = []

    def objects(part):
        """To the last rank, which is the main one here, those of all."""
        parts.append(part)
        return parts

    cpu = torch.device("cpu")
    for rank in reversed(range(world_size)):
        world = SimpleNamespace(rank=rank, size=world_size, device=cpu, is_main=rank == 0, objects=objects)  # fmt: skip
        found = saved.predict(model, samples, world, 2)
        assert bool(found) == world.is_main
    numbered = sorted(number for part in parts for number in part)
    assert numbered == [*range(len(LENGTHS))] == [*range(len(found))]
    for number, scores in enumerate(found):
        (alone,) = saved.batch_scores(model, samples.batch(numbers(number)))
        np.testing.assert_allclose(scores, alone, atol=1e-5)
