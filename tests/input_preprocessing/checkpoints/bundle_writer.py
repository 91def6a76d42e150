"""Writes TensorFlow 1's checkpoints, including ones that TensorFlow would not write."""

from pathlib import Path

import numpy as np

from input_preprocessing.tensorflow_files.bundle import masked_crc
from input_preprocessing.tensorflow_files.bundle_writer import _field, _table, _varint


def write_bundle(prefix: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes float32 tensors by key, as one shard."""
    entries, data = {b"": b"\x08\x01"}, b""
    for key, value in sorted(tensors.items()):
        raw = value.astype("<f4").tobytes()
        shape = b"".join(_field(2, b"\x08" + _varint(size)) for size in value.shape)
        entry = b"\x08\x01" + _field(2, shape) + b"\x20" + _varint(len(data))
        entry += b"\x28" + _varint(len(raw)) + b"\x35" + masked_crc(raw)
        entries[key.encode()] = entry
        data += raw
    Path(f"{prefix}.data-00000-of-00001").write_bytes(data)
    Path(f"{prefix}.index").write_bytes(_table(entries))


def write_bert(prefix: Path, config: dict[str, int], seed: int) -> None:
    """A TensorFlow 1 checkpoint of random weights for the sizes of a bert_config.json."""
    h, f, v = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes = {
        "bert/embeddings/word_embeddings": (v, h),
        "bert/embeddings/position_embeddings": (config["max_position_embeddings"], h),
        "bert/embeddings/token_type_embeddings": (2, h),
        "cls/predictions/output_bias": (v,),
        "cls/seq_relationship/output_weights": (2, h),
        "cls/seq_relationship/output_bias": (2,),
    }
    norms = ["bert/embeddings", "cls/predictions/transform"]
    dense = {"bert/pooler/dense": (h, h), "cls/predictions/transform/dense": (h, h)}
    for layer in range(config["num_hidden_layers"]):
        scope = f"bert/encoder/layer_{layer}"
        norms += [f"{scope}/attention/output", f"{scope}/output"]
        for name in ("self/query", "self/key", "self/value", "output/dense"):
            dense[f"{scope}/attention/{name}"] = h, h
        dense[f"{scope}/intermediate/dense"] = h, f
        dense[f"{scope}/output/dense"] = f, h
    for name in norms:
        shapes |= dict.fromkeys(
            (f"{name}/LayerNorm/gamma", f"{name}/LayerNorm/beta"), (h,)
        )
    for name, shape in dense.items():
        shapes |= {f"{name}/kernel": shape, f"{name}/bias": shape[1:]}
    draw = np.random.default_rng(seed).normal
    write_bundle(prefix, {name: draw(size=shape) for name, shape in shapes.items()})
