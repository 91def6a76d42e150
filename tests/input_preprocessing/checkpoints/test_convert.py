"""TensorFlow checkpoints are converted exactly without TensorFlow; damage and mismatches are reported by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from input_preprocessing.checkpoints import tf_names as names
from input_preprocessing.checkpoints.convert import (
    TENSORFLOW2,
    convert,
    read_pytorch,
    read_tensorflow,
)
from input_preprocessing.checkpoints.tf2_names import ATTRIBUTE, parameter_of
from input_preprocessing.tensorflow_files.bundle import (
    OBJECT_GRAPH,
    Bundle,
    masked_crc,
    prefix_of,
)
from input_preprocessing.tensorflow_files.bundle_writer import write_checkpoint

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
def config(tmp_path):
    path = tmp_path / "bert_config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(SAVED, tmp_path, dirs_exist_ok=True)
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
    for name in ("bert.embeddings.word_embeddings", "cls.predictions.decoder"):
        weight = state[f"{name}.weight"]
        assert np.array_equal(weight[:29], words)
        assert weight.shape == (32, 8)
        assert not weight[29:].any()
    theirs = values["cls/seq_relationship/output_weights"]
    assert np.array_equal(state["cls.seq_relationship.weight"], theirs)
    beta = values["cls/predictions/transform/LayerNorm/beta"]
    assert np.array_equal(state["cls.predictions.transform.LayerNorm.bias"], beta)


def test_gradient_accumulators_are_left_out(tmp_path, values):
    """As the reference's checkpoint_add_gradacc.py names them: a slot of zeros beside every variable."""
    slots = {f"{name}/GradientAccumulator": 0 * value for name, value in values.items()}
    write_bundle(tmp_path / "model.ckpt-1", values | slots)
    found, left_out, _ = read_tensorflow(tmp_path / "model.ckpt-1")
    assert left_out == {"gradient accumulator": len(values)}
    assert found.keys() == read_tensorflow(PREFIX)[0].keys()


def test_a_long_list_of_misfits_is_cut(tmp_path, values):
    extra = {f"bert/extra_{i}": np.zeros(1) for i in range(99)}
    write_bundle(tmp_path / "model.ckpt-1", values | extra)
    with refused(r"bert\.extra_0 is unknown; .* and 91 more$") as caught:
        convert(tmp_path / "model.ckpt-1", tmp_path / "a.pt", "mlperf")
    assert len(str(caught.value)) < 500


def test_all_kinds_of_file_hold_the_same_tensors(tmp_path, config):
    original = read_tensorflow(PREFIX)[0]
    source = PREFIX
    # A .pt is padded to 32 words; TensorFlow's has the vocabulary's 29.
    for name, spelling, multiple in (
        ("0.pt", "mlperf", 8),
        ("1.safetensors", "huggingface", 1),
        ("2.pt", "huggingface", 8),
        ("3.ckpt", TENSORFLOW2, 8),
        ("4.safetensors", "mlperf", 1),
    ):
        target, given = tmp_path / name, {"vocab_size": 29, "multiple": multiple}
        convert(source, target, spelling, bert_config=config, **given)
        source = target
    found = read_pytorch(source)
    assert found.keys() == original.keys()
    for name, value in original.items():
        assert np.array_equal(found[name], value), name


def torch_tensors(tensors: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value.copy()) for name, value in tensors.items()}


def test_hugging_faces_model_takes_the_converted_file(tmp_path):
    transformers = pytest.importorskip("transformers")
    convert(PREFIX, tmp_path / "a.safetensors", "huggingface", multiple=1)
    model = transformers.BertForPreTraining(transformers.BertConfig(**CONFIG))
    tensors = names.to_huggingface(read_pytorch(tmp_path / "a.safetensors"))
    result = model.load_state_dict(torch_tensors(tensors), strict=False)
    assert not result.unexpected_keys
    assert not [name for name in result.missing_keys if "position_ids" not in name]


def change(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 100, 2000, -60, -3])
def test_a_changed_byte_of_the_index_is_found(copied, at):
    change(Path(f"{copied}.index"), at)
    with refused("index"):
        read_tensorflow(copied)


def test_a_changed_short_or_missing_data_file_is_found(copied):
    data = Path(f"{copied}.data-00000-of-00001")
    at = Bundle(copied).entries["bert/pooler/dense/kernel"].offset + 40
    for damage, message in (
        (lambda: change(data, at), "checksum of tensor"),
        (lambda: data.write_bytes(data.read_bytes()[:1000]), "too short"),
        (data.unlink, "cannot read"),
    ):
        damage()
        with refused(message):
            read_tensorflow(copied)


def test_missing_unknown_and_misshapen_parameters_are_all_named(tmp_path):
    tensors = read_tensorflow(PREFIX)[0]
    del tensors["bert.pooler.dense.bias"]
    tensors["bert.extra"] = np.zeros(3)
    tensors["cls.seq_relationship.bias"] = np.zeros(3)
    missing = r"pooler\.dense\.bias is missing"
    with refused(rf"bert\.extra is unknown.*{missing}.*\(3,\), not \(2,\)"):
        names.check_complete(tensors, "a.pt")
    torch.save({"model": {"x": torch.zeros(2)}}, tmp_path / "a.pt")
    with refused("not a BERT checkpoint: it lacks"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", "mlperf")
    assert not (tmp_path / "b.pt").exists()


@pytest.mark.parametrize("end", ["pt", "safetensors", "ckpt"])
@pytest.mark.parametrize("name", ["bad", "none"])
def test_an_unreadable_source_is_refused_in_one_line(tmp_path, name, end):
    (tmp_path / f"bad.{end}").write_bytes(b"not a checkpoint at all")
    with refused(name) as caught:
        convert(tmp_path / f"{name}.{end}", tmp_path / "out.pt", "mlperf")
    assert "\n" not in str(caught.value)


def test_a_decoder_that_is_not_tied_is_refused(tmp_path):
    tensors = names.to_mlperf(read_tensorflow(PREFIX)[0])
    tensors[names.DECODER] = tensors[names.DECODER] + 1
    torch.save({"model": torch_tensors(tensors)}, tmp_path / "a.pt")
    with refused("ties the two"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", "mlperf")


@pytest.mark.parametrize(("changed", "message"), [
    ({"num_hidden_layers": 3}, "num_hidden_layers 3, not 2"),
    ({"hidden_size": 16, "vocab_size": 30}, "hidden_size 16, not 8, vocab_size 30, not 29"),
    ({"vocab_size": None}, "not a BERT configuration"),
])  # fmt: skip
def test_another_model_than_bert_config_is_refused(tmp_path, changed, message):
    paths = tmp_path / "fits.json", tmp_path / "other.json"
    for path, config in zip(paths, (CONFIG, CONFIG | changed), strict=True):
        path.write_text(json.dumps(config))
    fits, other = ({"bert_config": path} for path in paths)
    convert(PREFIX, tmp_path / "a.pt", "mlperf", **fits)
    convert(tmp_path / "a.pt", tmp_path / "b.pt", "mlperf", vocab_size=29, **fits)
    with refused(message):
        convert(PREFIX, tmp_path / "c.pt", "mlperf", **other)
    assert not (tmp_path / "c.pt").exists()
    with refused(r"--vocab-size 30: .* has only 29 words"):
        convert(PREFIX, tmp_path / "c.pt", "mlperf", vocab_size=30)


def test_a_checkpoint_is_found_by_prefix_file_or_folder(tmp_path):
    for path in (PREFIX, f"{PREFIX}.index", f"{PREFIX}.data-00000-of-00001", SAVED):
        assert prefix_of(Path(path)) == PREFIX
    with refused("0 checkpoints"):
        prefix_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "save"), [("a.pt", torch.save), ("a.safetensors", safetensors.torch.save_file)]
)  # fmt: skip
def test_bf16_is_widened_in_both_formats(tmp_path, name, save):
    exact = torch_tensors(read_tensorflow(PREFIX)[0])
    low = {key: tensor.bfloat16() for key, tensor in exact.items()}
    save(low, tmp_path / name)
    for key, tensor in read_pytorch(tmp_path / name).items():
        assert tensor.dtype == np.float32
        assert np.array_equal(tensor, low[key].float().numpy())
    with refused(rf"cannot write .*none/{name}: No such file or directory"):
        convert(PREFIX, tmp_path / "none" / name, "mlperf")


SAVED2 = Path(__file__).parent / "tf2_checkpoints"
OFFICIAL = SAVED2 / "converted" / "model.ckpt-1"


@pytest.mark.parametrize(("family", "left_out"), [
    ("converted", {"object graph": 1, "counters": 1}),
    ("pretrainer_v2", {"object graph": 1, "counters": 1, "unused pooler": 2}),
])  # fmt: skip
def test_the_weights_are_those_of_the_tensorflow_1_checkpoint(family, left_out):
    expected = read_tensorflow(PREFIX).tensors
    found = read_tensorflow(SAVED2 / family / "model.ckpt-1")
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


LAYER = f"model/layer_with_weights-0/layer_with_weights-5/_attention_layer/_key_dense/kernel/{ATTRIBUTE}"
# A changed variable, the name that others lose, and what is said
ODD = [
    ({f"model/a/{ATTRIBUTE}": ("adapter/kernel", np.zeros(3))}, "none", r"\(adapter/kernel\) is unknown"),
    ({f"model/a/{ATTRIBUTE}": ("pooler_transform_1/kernel", np.zeros((8, 8)))}, "none", r"are both bert\.pooler\.dense\.weight"),
    ({LAYER: ("transformer/layer_1/self_attention/key/kernel", np.zeros((8, 4, 2)))}, "none", r"layers of \[2, 4\] heads"),
    ({}, "logits", r"cls\.seq_relationship\.weight is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "drop", "message"), ODD)
def test_other_variables_are_refused_by_name(tmp_path, change, drop, message):
    bundle = Bundle(OFFICIAL)
    names = bundle.variable_names().items()
    kept = {
        key: name
        for key, name in names
        if key.startswith("model/") and drop not in name
    }
    variables = {key: (name, bundle.read(key)) for key, name in kept.items()}
    write_checkpoint(tmp_path / "a", variables | change)
    with refused(message) as caught:
        convert(tmp_path / "a", tmp_path / "a.pt", "mlperf")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a.pt").exists()


def test_a_changed_byte_of_any_part_of_tensorflow_2s_is_found(tmp_path):
    shutil.copytree(OFFICIAL.parent, tmp_path, dirs_exist_ok=True)
    prefix = tmp_path / "model.ckpt-1"
    data = Path(f"{prefix}.data-00000-of-00001")
    whole = data.read_bytes()
    for key, entry in Bundle(prefix).entries.items():
        if key.startswith("save_counter"):
            continue
        for at in (entry.offset, entry.offset + entry.size - 1):
            data.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with refused("checksum of tensor"):
                read_tensorflow(prefix)


def test_a_target_of_another_kind_or_unknown_heads_are_one_line(tmp_path, config):
    for target, spelling, said in (
        ("a.pt", TENSORFLOW2, "must be a prefix"),
        ("a.ckpt", "mlperf", "must be .pt or .safetensors"),
        ("a.ckpt", TENSORFLOW2, "give --bert-config"),
    ):
        with refused(said):
            convert(PREFIX, tmp_path / target, spelling)
    config.write_text(json.dumps(CONFIG | {"num_attention_heads": 4}))
    with refused("num_attention_heads 4, not 2"):
        convert(OFFICIAL, tmp_path / "a.pt", "mlperf", bert_config=config)


@pytest.mark.parametrize(("variable", "parameter"), [
    ("bert/encoder/transformer/layer_11/output_1/kernel", "bert.encoder.layer.11.output.dense.weight"),
    ("transformer/layer_3_1/self_attention_layer_norm/gamma", "bert.encoder.layer.3.attention.output.LayerNorm.weight"),
    ("position_embedding_1/embeddings", "bert.embeddings.position_embeddings.weight"),
    ("other_embeddings/layer_norm/beta", None),
    ("cls/predictions/transform/dense/kernel/Adam", None),
    ("layer_3/output/kernel", None),
    ("", None),
])  # fmt: skip
def test_names_are_known_by_their_ends(variable, parameter):
    assert parameter_of(variable) == parameter
