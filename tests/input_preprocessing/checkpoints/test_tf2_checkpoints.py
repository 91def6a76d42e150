"""TensorFlow 2 checkpoints: those that TensorFlow saved are read, and written as its converter does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from input_preprocessing.checkpoints.convert import (
    TENSORFLOW2,
    convert,
    read_pytorch,
    read_tensorflow,
)
from input_preprocessing.checkpoints.tf2_names import ATTRIBUTE, parameter_of
from input_preprocessing.tensorflow_files.bundle import OBJECT_GRAPH, Bundle
from input_preprocessing.tensorflow_files.bundle_writer import write_checkpoint

from ...refused import refused
from .test_convert import CONFIG, PREFIX

SAVED = Path(__file__).parent / "tf2_checkpoints"
OFFICIAL = SAVED / "converted" / "model.ckpt-1"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "bert_config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.mark.parametrize(("family", "left_out"), [
    ("converted", {"object graph": 1, "counters": 1}),
    ("pretrainer_v2", {"object graph": 1, "counters": 1, "unused pooler": 2}),
])  # fmt: skip
def test_the_weights_are_those_of_the_tensorflow_1_checkpoint(family, left_out):
    expected = read_tensorflow(PREFIX).tensors
    found = read_tensorflow(SAVED / family / "model.ckpt-1")
    assert found.tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found.tensors[name], value), name
    assert found.left_out == left_out
    assert found.heads == 2


def test_what_is_written_is_what_the_official_converter_writes(tmp_path, config):
    convert(PREFIX, tmp_path / "model.ckpt-1", TENSORFLOW2, bert_config=config)
    ours, theirs = Bundle(tmp_path / "model.ckpt-1"), Bundle(OFFICIAL)
    assert ours.variable_names() == theirs.variable_names()
    assert ours.entries.keys() == theirs.entries.keys()
    for key in ours.entries.keys() - {OBJECT_GRAPH}:
        assert ours.entries[key].dtype == theirs.entries[key].dtype, key
        assert np.array_equal(ours.read(key), theirs.read(key)), key


def test_weights_go_around_through_every_format(tmp_path, config):
    # The .pt is padded to 32 words; TensorFlow's has the vocabulary's 29.
    convert(OFFICIAL, tmp_path / "a.pt", "mlperf")
    convert(tmp_path / "a.pt", tmp_path / "b.ckpt", TENSORFLOW2, vocab_size=29, bert_config=config)  # fmt: skip
    convert(tmp_path / "b.ckpt", tmp_path / "c.safetensors", "huggingface")
    first, last = (read_pytorch(tmp_path / name) for name in ("a.pt", "c.safetensors"))
    assert first.keys() == last.keys()
    assert all(np.array_equal(first[name], last[name]) for name in first)


def odd(change: dict[str, tuple[str, np.ndarray]], drop: str = "none") -> dict[str, tuple[str, np.ndarray]]:  # fmt: skip
    """The official variables, changed."""
    bundle = Bundle(OFFICIAL)
    names = bundle.variable_names()
    keys = [key for key in names if key.startswith("model/") and drop not in names[key]]
    return {key: (names[key], bundle.read(key)) for key in keys} | change


LAYER = f"model/layer_with_weights-0/layer_with_weights-5/_attention_layer/_key_dense/kernel/{ATTRIBUTE}"
ODD = [
    ({f"model/a/{ATTRIBUTE}": ("adapter/kernel", np.zeros(3))}, "", r"\(adapter/kernel\) is unknown"),
    ({f"model/a/{ATTRIBUTE}": ("pooler_transform_1/kernel", np.zeros((8, 8)))}, "", r"are both bert\.pooler\.dense\.weight"),
    ({LAYER: ("transformer/layer_1/self_attention/key/kernel", np.zeros((8, 4, 2)))}, "", r"layers of \[2, 4\] heads"),
    ({}, "logits", r"cls\.seq_relationship\.weight is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "drop", "message"), ODD)
def test_other_variables_are_refused_by_name(tmp_path, change, drop, message):
    write_checkpoint(tmp_path / "a", odd(change, drop or "none"))
    with refused(message) as caught:
        convert(tmp_path / "a", tmp_path / "a.pt", "mlperf")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a.pt").exists()


def test_a_changed_byte_of_any_part_is_found(tmp_path):
    for path in OFFICIAL.parent.glob("model*"):
        shutil.copy(path, tmp_path)
    prefix, data = tmp_path / "model.ckpt-1", tmp_path / "model.ckpt-1.data-00000-of-00001"  # fmt: skip
    whole = data.read_bytes()
    for key, entry in Bundle(prefix).entries.items():
        if key.startswith("save_counter"):
            continue
        for at in (entry.offset, entry.offset + entry.size - 1):
            data.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with refused("checksum of tensor"):
                read_tensorflow(prefix)


def test_a_target_of_another_kind_or_unknown_heads_are_one_line(tmp_path, config):
    for target, names, said in (
        ("a.pt", TENSORFLOW2, "must be a prefix"),
        ("a.ckpt", "mlperf", "must be .pt or .safetensors"),
        ("a.ckpt", TENSORFLOW2, "give --bert-config"),
    ):
        with refused(said):
            convert(PREFIX, tmp_path / target, names)
    config.write_text(json.dumps(CONFIG | {"num_attention_heads": 4}))
    with refused("num_attention_heads 4, not 2"):
        convert(OFFICIAL, tmp_path / "a.pt", "mlperf", bert_config=config)


@pytest.mark.parametrize(
    ("variable", "parameter"),
    [
        ("bert/encoder/transformer/layer_11/output_1/kernel", "bert.encoder.layer.11.output.dense.weight"),
        ("transformer/layer_3_1/self_attention_layer_norm/gamma", "bert.encoder.layer.3.attention.output.LayerNorm.weight"),
        ("position_embedding_1/embeddings", "bert.embeddings.position_embeddings.weight"),
        ("other_embeddings/layer_norm/beta", None),
        ("cls/predictions/transform/dense/kernel/Adam", None),
        ("layer_3/output/kernel", None),
        ("", None),
    ],
)  # fmt: skip
def test_names_are_known_by_their_ends(variable, parameter):
    assert parameter_of(variable) == parameter
