"""TensorFlow checkpoints are converted exactly without TensorFlow; damage and mismatches are
reported by name.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from input_preprocessing.checkpoints import tf_names as names
from input_preprocessing.checkpoints.convert import (
    convert,
    read_pytorch,
    read_tensorflow,
)
from input_preprocessing.tensorflow_files.bundle import Bundle, masked_crc, prefix_of

from ...refused import refused
from .bundle_writer import write_bundle

SAVED = Path(__file__).parent / "tf1_checkpoint"
PREFIX = SAVED / "model.ckpt-28252"
CONFIG = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 32,
          "vocab_size": 29, "max_position_embeddings": 16}  # fmt: skip


@pytest.fixture
def values():
    """The variables as they were before TensorFlow saved them."""
    with np.load(SAVED / "values.npz") as saved:
        return {name.replace("|", "/"): saved[name] for name in saved}


@pytest.fixture
def copied(tmp_path):
    for path in SAVED.glob("model*"):
        shutil.copy(path, tmp_path)
    return tmp_path / "model.ckpt-28252"


@pytest.mark.parametrize(
    ("data", "crc"), [(b"123456789", 0xE3069283), (b"", 0), (bytes(32), 0x8A9136AA)]
)
def test_crc32c_has_its_published_check_value(data, crc):
    masked = int.from_bytes(masked_crc(data), "little")
    assert masked != crc
    rotated = (masked - 0xA282EAD8) % (1 << 32)
    assert (rotated << 15 | rotated >> 17) % (1 << 32) == crc


def test_every_tensor_of_a_tensorflow_checkpoint_reads_as_it_was_saved(values):
    bundle = Bundle(PREFIX)
    for name, value in values.items():
        assert np.array_equal(bundle.read(name), value), name
    assert bundle.read("global_step") == 28252
    assert len(bundle.entries) == 3 * len(values) + 1


def test_conversion_accounts_for_every_variable(tmp_path, values):
    shape, left_out = convert(PREFIX, tmp_path / "a.pt", "mlperf")
    sizes = shape.layers, shape.hidden, shape.feed_forward
    assert (*sizes, shape.vocabulary, shape.positions) == (2, 8, 32, 32, 16)
    assert left_out == {"optimizer": 2 * len(values), "counters": 1}
    state = torch.load(tmp_path / "a.pt", weights_only=True)["model"]
    assert len(state) == len(values) + 1  # the decoder's weight is the word embeddings
    kernel = values["bert/encoder/layer_1/intermediate/dense/kernel"]
    dense = state["bert.encoder.layer.1.intermediate.dense_act.weight"]
    assert np.array_equal(dense, kernel.T)
    words = values["bert/embeddings/word_embeddings"]
    for name in (
        "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.weight",
    ):
        assert np.array_equal(state[name][:29], words)
        assert state[name].shape == (32, 8)
        assert not state[name][29:].any()
    theirs = values["cls/seq_relationship/output_weights"]
    assert np.array_equal(state["cls.seq_relationship.weight"], theirs)
    assert np.array_equal(state["cls.predictions.transform.LayerNorm.bias"],
                          values["cls/predictions/transform/LayerNorm/beta"])  # fmt: skip


def test_gradient_accumulators_are_left_out(tmp_path, values):
    """As the reference's checkpoint_add_gradacc.py names them: a slot of zeros beside every
    variable.
    """
    tensors = dict(values) | {
        f"{name}/GradientAccumulator": np.zeros_like(value)
        for name, value in values.items()
    }
    write_bundle(tmp_path / "model.ckpt-1", tensors)
    found, left_out, _ = read_tensorflow(tmp_path / "model.ckpt-1")
    assert left_out == {"gradient accumulator": len(values)}
    assert found.keys() == read_tensorflow(PREFIX)[0].keys()


def test_a_long_list_of_misfits_is_cut(tmp_path, values):
    write_bundle(
        tmp_path / "model.ckpt-1",
        dict(values) | {f"bert/extra_{i}": np.zeros(1) for i in range(99)},
    )
    with refused(r"bert\.extra_0 is unknown; .* and 91 more$") as caught:
        convert(tmp_path / "model.ckpt-1", tmp_path / "a.pt", "mlperf")
    assert len(str(caught.value)) < 500


def test_all_kinds_of_file_hold_the_same_tensors(tmp_path):
    original = read_tensorflow(PREFIX)[0]
    source = PREFIX
    for number, spelling in enumerate(
        ["mlperf", "huggingface", "huggingface", "mlperf"]
    ):
        target = tmp_path / f"{number}{('.pt', '.safetensors')[number % 2]}"
        multiple = (8, 1)[number % 2]
        convert(source, target, spelling, vocab_size=29, multiple=multiple)
        source = target
    found = read_pytorch(source)
    assert found.keys() == original.keys()
    for name, value in original.items():
        assert np.array_equal(found[name], value), name


def test_hugging_faces_model_takes_the_converted_file(tmp_path):
    transformers = pytest.importorskip("transformers")
    convert(PREFIX, tmp_path / "a.safetensors", "huggingface", multiple=1)
    config = transformers.BertConfig(vocab_size=29, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
                                     intermediate_size=32, max_position_embeddings=16)  # fmt: skip
    model = transformers.BertForPreTraining(config)
    tensors = names.to_huggingface(read_pytorch(tmp_path / "a.safetensors"))
    result = model.load_state_dict(
        {name: torch.from_numpy(t.copy()) for name, t in tensors.items()}, strict=False
    )
    assert not result.unexpected_keys
    assert not [name for name in result.missing_keys if "position_ids" not in name]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 100, 2000, -60, -3])
def test_a_changed_byte_of_the_index_is_found(copied, at):
    flip(Path(f"{copied}.index"), at)
    with refused("index"):
        read_tensorflow(copied)


def test_a_changed_short_or_missing_data_file_is_found(copied):
    data = Path(f"{copied}.data-00000-of-00001")
    flip(data, Bundle(copied).entries["bert/pooler/dense/kernel"].offset + 40)
    with refused("checksum of tensor"):
        read_tensorflow(copied)
    data.write_bytes(data.read_bytes()[:1000])
    with refused("too short"):
        read_tensorflow(copied)
    data.unlink()
    with refused("cannot read"):
        read_tensorflow(copied)


def test_missing_unknown_and_misshapen_parameters_are_all_named(tmp_path):
    tensors = read_tensorflow(PREFIX)[0]
    del tensors["bert.pooler.dense.bias"]
    tensors["bert.extra"] = np.zeros(3)
    tensors["cls.seq_relationship.bias"] = np.zeros(3)
    with refused(
        r"bert\.extra is unknown.*pooler\.dense\.bias is missing.*\(3,\), not \(2,\)"
    ):
        names.check_complete(tensors, "a.pt")
    torch.save({"model": {"x": torch.zeros(2)}}, tmp_path / "a.pt")
    with refused("not a BERT checkpoint: it lacks"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", "mlperf")
    assert not (tmp_path / "b.pt").exists()


@pytest.mark.parametrize(
    "name", ["bad.pt", "bad.safetensors", "none.pt", "none.safetensors", "none.ckpt"]
)
def test_an_unreadable_source_is_refused_in_one_line(tmp_path, name):
    if name.startswith("bad"):
        (tmp_path / name).write_bytes(b"not a checkpoint at all")
    with refused(name.split(".")[0]) as caught:
        convert(tmp_path / name, tmp_path / "out.pt", "mlperf")
    assert "\n" not in str(caught.value)


def test_a_decoder_that_is_not_tied_is_refused(tmp_path):
    tensors = names.to_mlperf(read_tensorflow(PREFIX)[0])
    tensors[names.DECODER] = tensors[names.DECODER] + 1
    torch.save(
        {"model": {name: torch.from_numpy(t.copy()) for name, t in tensors.items()}},
        tmp_path / "a.pt",
    )
    with refused("ties the two"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", "mlperf")


@pytest.mark.parametrize(("changed", "message"), [
    ({"num_hidden_layers": 3}, "num_hidden_layers 3, not 2"),
    ({"hidden_size": 16, "vocab_size": 30}, "hidden_size 16, not 8, vocab_size 30, not 29"),
    ({"vocab_size": None}, "not a BERT configuration"),
])  # fmt: skip
def test_a_checkpoint_of_another_model_than_bert_config_is_refused(
    tmp_path, changed, message
):
    (tmp_path / "fits.json").write_text(json.dumps(CONFIG))
    (tmp_path / "other.json").write_text(json.dumps(CONFIG | changed))
    fits, other = (
        {"bert_config": tmp_path / name} for name in ("fits.json", "other.json")
    )
    convert(PREFIX, tmp_path / "a.pt", "mlperf", **fits)
    convert(tmp_path / "a.pt", tmp_path / "b.pt", "mlperf", vocab_size=29, **fits)
    with refused(message):
        convert(PREFIX, tmp_path / "c.pt", "mlperf", **other)
    assert not (tmp_path / "c.pt").exists()


def test_more_words_than_the_checkpoint_has_are_refused(tmp_path):
    with refused(r"--vocab-size 30: .* has only 29 words"):
        convert(PREFIX, tmp_path / "a.pt", "mlperf", vocab_size=30)


def test_a_checkpoint_is_found_by_prefix_file_or_folder(tmp_path):
    parts = [Path(f"{PREFIX}{end}") for end in ("", ".index", ".data-00000-of-00001")]
    for path in (*parts, SAVED):
        assert prefix_of(path) == PREFIX
    with refused("0 checkpoints"):
        prefix_of(tmp_path)


@pytest.mark.parametrize("name", ["low.pt", "low.safetensors"])
def test_bf16_is_widened_in_both_formats(tmp_path, name):
    convert(PREFIX, tmp_path / "a.pt", "mlperf")
    exact = read_pytorch(tmp_path / "a.pt")
    low = {key: torch.from_numpy(tensor).bfloat16() for key, tensor in exact.items()}
    (torch.save if name.endswith(".pt") else safetensors.torch.save_file)(
        low, tmp_path / name
    )
    for key, tensor in read_pytorch(tmp_path / name).items():
        assert tensor.dtype == np.float32
        assert np.array_equal(tensor, low[key].float().numpy())


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_target_in_a_folder_that_does_not_exist_is_reported(tmp_path, name):
    with refused(rf"cannot write .*none/{name}: No such file or directory"):
        convert(PREFIX, tmp_path / "none" / name, "mlperf")
