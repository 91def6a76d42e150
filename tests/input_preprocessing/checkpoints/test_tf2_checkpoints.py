"""TensorFlow 2 checkpoints of every release's names give the TensorFlow 1 weights; mismatches are reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from bert.data.records import DataError
from input_preprocessing.checkpoints.convert import convert, read_pytorch, read_tensorflow
from input_preprocessing.checkpoints.tf_names import parameter_of
from input_preprocessing.tensorflow_files.bundle import OBJECT_GRAPH, Bundle

from .bundle_writer import object_graph, write_bundle

HERE = Path(__file__).parent
TF1 = HERE / "tf1_checkpoint" / "model.ckpt-28252"
SAVED = HERE / "tf2_checkpoints"
ATTRIBUTE = "/.ATTRIBUTES/VARIABLE_VALUE"
COMPLETE = {
    "converted": {"counters": 1, "object graph": 1},
    "pretrainer": {"counters": 1, "object graph": 1},
    "slots": {"counters": 2, "object graph": 1, "optimizer": 96},
    "pretrainer_v2": {"counters": 1, "object graph": 1, "unused pooler": 2},
    "encoder_v2": {"counters": 2, "object graph": 1, "unused pooler": 2, "optimizer": 98},
}

Variables = dict[str, np.ndarray]


@pytest.fixture
def variables() -> tuple[Variables, dict[str, str]]:
    """Tensors and own names, by key, of a checkpoint as TensorFlow wrote it, to change."""
    bundle = Bundle(SAVED / "converted" / "model.ckpt-1")
    names = {
        key: name
        for key, name in bundle.object_names().items()
        if not key.startswith("save_counter")
    }
    return {key: bundle.read(key) for key in names}, names


@pytest.mark.parametrize("family", COMPLETE)
def test_the_weights_are_those_of_the_tensorflow_1_checkpoint_bit_for_bit(family: str) -> None:
    expected = read_tensorflow(TF1).tensors
    source = read_tensorflow(SAVED / family / "model.ckpt-1")
    assert source.tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(source.tensors[name], value), name
    assert source.left_out == COMPLETE[family]
    assert source.heads == 2
    assert (
        len(Bundle(SAVED / family / "model.ckpt-1").entries)
        == len(expected) + source.left_out.total()
    )


def test_a_converted_file_is_the_same_from_either_and_goes_on_to_hugging_faces_names(
    tmp_path: Path,
) -> None:
    convert(TF1, tmp_path / "tf1.pt", "mlperf")
    convert(SAVED / "converted", tmp_path / "tf2.pt", "mlperf")
    convert(SAVED / "converted", tmp_path / "tf2.safetensors", "huggingface")
    one, two = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True)["model"] for name in ("tf1", "tf2")
    )
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    again = read_pytorch(tmp_path / "tf2.safetensors")
    assert all(
        np.array_equal(again[name], value)
        for name, value in read_pytorch(tmp_path / "tf1.pt").items()
    )


def test_the_writer_writes_what_tensorflow_does(
    tmp_path: Path, variables: tuple[Variables, dict[str, str]]
) -> None:
    tensors, names = variables
    write_bundle(tmp_path / "a", tensors, object_graph(names))
    original, written = (
        read_tensorflow(SAVED / "converted" / "model.ckpt-1"),
        read_tensorflow(tmp_path / "a"),
    )
    assert all(
        np.array_equal(written.tensors[name], value) for name, value in original.tensors.items()
    )


def test_a_checkpoint_without_heads_is_refused_by_what_it_lacks(
    tmp_path: Path, variables: tuple[Variables, dict[str, str]]
) -> None:
    with pytest.raises(
        DataError,
        match=r"encoder does not fit BERT: it has no masked-LM head.*no next-sentence head",
    ):
        convert(SAVED / "encoder", tmp_path / "a.pt", "mlperf")
    tensors, names = variables
    kept = {key: tensor for key, tensor in tensors.items() if "logits" not in names[key]}
    write_bundle(tmp_path / "a", kept, object_graph(names))
    with pytest.raises(
        DataError, match=r"a does not fit BERT: it has no next-sentence head, [^;]*$"
    ):
        convert(tmp_path / "a", tmp_path / "a.pt", "mlperf")
    assert not (tmp_path / "a.pt").exists()


def test_variables_of_no_parameter_are_all_named(
    tmp_path: Path, variables: tuple[Variables, dict[str, str]]
) -> None:
    tensors, names = variables
    odd = {
        f"model/adapter/kernel{ATTRIBUTE}": "adapter/kernel",
        f"model/x{ATTRIBUTE}": "transformer/layer_0/gate/bias",
    }
    extra = {key: np.zeros(3, np.float32) for key in [*odd, f"model/nameless{ATTRIBUTE}"]}
    write_bundle(tmp_path / "a", tensors | extra, object_graph(names | odd))
    with pytest.raises(DataError) as caught:
        convert(tmp_path / "a", tmp_path / "a.pt", "mlperf")
    assert "\n" not in str(caught.value)
    for part in (
        "(adapter/kernel) is unknown",
        "(transformer/layer_0/gate/bias) is unknown",
        "(unnamed)",
    ):
        assert part in str(caught.value)


def test_two_variables_of_one_parameter_are_refused(
    tmp_path: Path, variables: tuple[Variables, dict[str, str]]
) -> None:
    tensors, names = variables
    twin = f"model/copy{ATTRIBUTE}"
    write_bundle(
        tmp_path / "a",
        tensors | {twin: np.zeros((8, 8), np.float32)},
        object_graph(names | {twin: "pooler_transform_1/kernel"}),
    )
    with pytest.raises(DataError, match=r"model/copy.* are both bert\.pooler\.dense\.weight"):
        read_tensorflow(tmp_path / "a")


@pytest.mark.parametrize(
    ("own_name", "shape", "message"),
    [
        (
            "transformer/layer_1/self_attention/key/kernel",
            (8, 4, 2),
            "4 heads in .* and 2 heads|2 heads in .* and 4",
        ),
        ("transformer/layer_1/self_attention_output/kernel", (4, 2, 8), "heads in"),
        (
            "transformer/layer_0/self_attention/query/kernel",
            (8, 2, 3),
            r"query.weight is \(6, 8\), not \(8, 8\)",
        ),
        (
            "transformer/layer_0/self_attention/value/bias",
            (2, 2, 2),
            r"value.bias is \(2, 2, 2\), not \(8,\)",
        ),
        (
            "transformer/layer_0/intermediate/kernel",
            (32, 8),
            r"intermediate.dense.weight is \(8, 32\)",
        ),
        (
            "predictions/transform/logits/kernel",
            (2, 8),
            r"seq_relationship.weight is \(8, 2\), not \(2, 8\)",
        ),
        ("pooler_transform/kernel", (), r"pooler.dense.weight is \(\), not \(8, 8\)"),
    ],
)
def test_misshapen_variables_are_refused(
    tmp_path: Path,
    variables: tuple[Variables, dict[str, str]],
    own_name: str,
    shape: tuple[int, ...],
    message: str,
) -> None:
    tensors, names = variables
    key = next(key for key, name in names.items() if name == own_name)
    write_bundle(tmp_path / "a", tensors | {key: np.zeros(shape, np.float32)}, object_graph(names))
    with pytest.raises(DataError, match=message):
        convert(tmp_path / "a", tmp_path / "a.pt", "mlperf")


def test_the_number_of_heads_must_be_that_of_bert_config(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "intermediate_size": 32,
              "vocab_size": 29, "max_position_embeddings": 16}  # fmt: skip
    (tmp_path / "bert_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="num_attention_heads 4, not 2"):
        convert(
            SAVED / "converted",
            tmp_path / "a.pt",
            "mlperf",
            bert_config=tmp_path / "bert_config.json",
        )


def test_a_changed_byte_of_any_part_is_found(tmp_path: Path) -> None:
    for path in (SAVED / "converted").glob("model*"):
        shutil.copy(path, tmp_path)
    prefix, data = tmp_path / "model.ckpt-1", tmp_path / "model.ckpt-1.data-00000-of-00001"
    bundle, whole = Bundle(prefix), data.read_bytes()
    used = [key for key in bundle.entries if not key.startswith("save_counter")]
    assert OBJECT_GRAPH in used
    for key in used:
        entry = bundle.entries[key]
        for at in (entry.offset, entry.offset + entry.size // 2, entry.offset + entry.size - 1):
            data.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(DataError, match="checksum of tensor"):
                read_tensorflow(prefix)


def test_a_graph_that_is_no_message_is_refused(
    tmp_path: Path, variables: tuple[Variables, dict[str, str]]
) -> None:
    tensors, _ = variables
    write_bundle(tmp_path / "a", tensors, b"\x0a\xff\x01")
    with pytest.raises(DataError, match="object graph is damaged"):
        read_tensorflow(tmp_path / "a")


@pytest.mark.parametrize(
    ("own_name", "parameter"),
    [
        ("bert/encoder/transformer/layer_11/output_1/kernel", "bert.encoder.layer.11.output.dense.weight"),
        ("transformer/layer_3_1/self_attention_layer_norm/gamma",
         "bert.encoder.layer.3.attention.output.LayerNorm.weight"),
        ("position_embedding_1/embeddings", "bert.embeddings.position_embeddings.weight"),
        ("embeddings/layer_norm/beta", "bert.embeddings.LayerNorm.bias"),
        ("other_embeddings/layer_norm/beta", None),
        ("cls/predictions/transform/dense/kernel/Adam", None),
        ("transformer/layer_3/self_attention/query/scale", None),
        ("layer_3/output/kernel", None),
        ("", None),
    ],
)  # fmt: skip
def test_names_are_known_by_their_ends_and_numbered_layers(
    own_name: str, parameter: str | None
) -> None:
    assert parameter_of(own_name) == parameter
