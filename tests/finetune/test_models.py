"""Batches without padding have the losses of their sequences; saved models load in Hugging Face,
and back.
"""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bert.model.config import BertConfig
from common.env import ConfigError
from finetune import models, saved
from finetune.batches import Order, Samples

from . import made_up

SHAPE = BertConfig(vocab_size=len(made_up.VOCABULARY), hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
                   intermediate_size=40, max_position_embeddings=32, initializer_range=0.2)  # fmt: skip
LENGTHS = [5, 1, 17, 9, 2]


def model_of(kind, shape=SHAPE):
    return made_up.model_of(kind, shape)


def samples_of(kind):
    generator = np.random.default_rng(0)
    sequences = [
        (generator.integers(5, SHAPE.vocab_size, n).astype(np.int32), (n + 1) // 2)
        for n in LENGTHS
    ]
    lengths = np.array(LENGTHS, dtype=np.int32)
    if kind == "squad":
        ends = (lengths - 1).astype(np.int32)
        return Samples(
            sequences, {"starts": (ends // 2).astype(np.int32), "ends": ends}
        )
    return Samples(sequences, {"labels": np.array([0, 2, 1, 1, 0])})


def numbers(*values):
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("kind", ["squad", "MNLI"])
def test_the_loss_of_a_batch_is_the_mean_of_the_losses_of_its_sequences(kind):
    model, samples = model_of(kind), samples_of(kind)
    (together,) = model(samples.batch(numbers(0, 1, 2, 3, 4)))
    alone = [model(samples.batch(numbers(i)))[0] for i in range(5)]
    torch.testing.assert_close(together, torch.stack(alone).mean())
    if kind == "squad":
        for i in range(5):
            scores = model.scores(samples.batch(numbers(i)))
            places = [
                torch.tensor(labels[i]).long() for labels in samples.labels.values()
            ]
            pairs = zip(scores.T, places, strict=True)
            wanted = [F.cross_entropy(column, place) for column, place in pairs]
            torch.testing.assert_close(alone[i], sum(wanted) / 2)


def test_a_last_layer_of_only_first_tokens_changes_neither_loss_nor_gradient():
    batch, found = samples_of("MNLI").batch(numbers(3, 1, 2)), []
    for rows in (True, False):
        model = model_of("MNLI")
        first = batch.cu_seqlens[:-1]
        hidden = (
            model.bert(batch, first)
            if rows
            else model.bert(batch).index_select(0, first)
        )
        loss = F.cross_entropy(
            model.classifier(model.bert.pooler(hidden)), batch.labels
        )
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
        if rows:
            torch.testing.assert_close(model(batch)[0], loss)
    torch.testing.assert_close(*found)


def save(model, folder, kind="MNLI"):
    """The model's folder, as training writes it."""
    (folder / "v.txt").write_text("\n".join(made_up.VOCABULARY))
    labels = ["a", "b", "c"] if kind == "MNLI" else []
    facts = {"task": kind, "lower_case": True, "labels": labels}
    weights = dict(model.named_parameters())
    models.save(folder / "model", model, weights, folder / "v.txt", facts)
    return folder / "model"


@pytest.mark.parametrize("kind", ["squad", "MNLI"])
def test_a_saved_model_has_the_same_scores_in_hugging_face_and_loads_again(
    kind, tmp_path
):
    transformers = pytest.importorskip("transformers")
    model, samples = model_of(kind), samples_of(kind)
    folder = save(model, tmp_path, kind)
    kinds = {
        "squad": transformers.AutoModelForQuestionAnswering,
        "MNLI": transformers.AutoModelForSequenceClassification,
    }
    other, info = kinds[kind].from_pretrained(folder, output_loading_info=True)
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
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1, "others may read all of it or none"
    shape = BertConfig.from_json(folder / "config.json")
    again = model_of(kind, shape)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    assert models.load(again, folder / "model.safetensors") == ([], [])
    assert shape.gelu_approximation == SHAPE.gelu_approximation
    batch = samples.batch(numbers(0, 2))
    torch.testing.assert_close(again.scores(batch), model.scores(batch))


def test_a_pre_ln_model_is_saved_only_for_our_loader(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = dataclasses.replace(SHAPE, layer_norm_large_model=True)
    folder = save(model_of("MNLI", shape), tmp_path)
    kept = BertConfig.from_json(folder / "config.json")
    assert kept == dataclasses.replace(shape, hidden_act="gelu_new")
    with pytest.raises(ValueError, match="model"):
        transformers.AutoModelForSequenceClassification.from_pretrained(folder)


def test_an_encoder_without_head_and_other_heads_are_accepted_and_reported(tmp_path):
    model = model_of("MNLI")
    encoder = {
        name.removeprefix("bert."): p
        for name, p in model.named_parameters()
        if name.startswith("bert.")
    }
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
    loaded = models.load(model, tmp_path / "x.pt")
    assert loaded.new == ["classifier.weight", "classifier.bias"]
    assert torch.equal(model.classifier.weight, drawn)
    pooler = "bert.pooler.dense.weight"
    assert torch.equal(model.get_parameter(pooler), other[pooler])


def without_a_bias(state):
    del state["bert.encoder.layer.1.output.dense.bias"]
    state["bert.embeddings.LayerNorm.bias"] = torch.zeros(3)


def not_finite(state):
    state["qa_outputs.bias"][1] = float("nan")


@pytest.mark.parametrize(("change", "message"), [
    (without_a_bias, r"LayerNorm.bias is \(3,\), expected \(24,\); bert.encoder.layer.1.output.dense.bias is missing"),
    (not_finite, r"x.pt: qa_outputs.bias holds NaN or infinity"),
])  # fmt: skip
def test_weights_that_do_not_fit_or_are_not_finite_are_one_line(
    tmp_path, change, message
):
    state = model_of("squad").state_dict()
    change(state)
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=message):
        models.load(model_of("squad"), tmp_path / "x.pt")


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_epoch_has_every_sample_once_in_its_own_order(world_size):
    orders = [
        Order(20, 2, 2, seed=4, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    stream: list[int] = []
    for step in range(1, 11):
        taken = [np.concatenate(order.step(step)) for order in orders]
        stream += np.stack(taken, axis=1).ravel().tolist()
        assert [len(micro) for micro in orders[0].step(step)] == [2, 2]
    epochs = [stream[i : i + 20] for i in range(0, 40, 20)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != list(range(20))
    late = Order(20, 2, 2, seed=4, rank=0, world_size=world_size)
    assert [x.tolist() for x in late.step(9)] == [x.tolist() for x in orders[0].step(9)]
    firsts = [Order(20, 2, 2, seed=seed).step(1)[0].tolist() for seed in (5, 4)]
    assert firsts[0] != firsts[1]


@pytest.mark.parametrize("kind", ["squad", "MNLI"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_sequence_is_predicted_by_exactly_one_rank(kind, world_size):
    model, samples = model_of(kind), samples_of(kind)
    parts: list[list] = []

    def objects(part):
        parts.append(part)
        return [part] * world_size

    cpu = torch.device("cpu")
    ranks = [
        SimpleNamespace(rank=rank, size=world_size, device=cpu, is_main=False, objects=objects)
        for rank in range(world_size)
    ]  # fmt: skip
    if world_size > 1:
        for world in ranks:
            assert saved.predict(model, samples, world, 2) == []
        numbered = sorted(number for part in parts for number in part)
        assert numbered == [*range(len(LENGTHS))]
        ranks[0].objects = lambda _: parts
    ranks[0].is_main = True
    found = saved.predict(model, samples, ranks[0], 2)
    for number, scores in enumerate(found):
        (alone,) = saved.batch_scores(model, samples.batch(numbers(number)))
        np.testing.assert_allclose(scores, alone, atol=1e-5)
    assert len(found) == len(LENGTHS)


def test_config_json_names_the_head():
    named = models.hugging_face_config(model_of("squad"))["architectures"]
    assert named == ["BertForQuestionAnswering"]
    assert json.dumps(models.hugging_face_config(model_of("MNLI"), ("x", "y", "z")))
