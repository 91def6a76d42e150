"""Writes TensorFlow's checkpoints, including ones that TensorFlow would not write."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from input_preprocessing.tensorflow_files.bundle import masked_crc

_MAGIC = 0xDB4775248B80FB57
_FLOAT = 1  # of tensorflow.DataType


def write_varint(value: int) -> bytes:
    return (
        bytes([value])
        if value < 128
        else bytes([value & 127 | 128]) + write_varint(value >> 7)
    )


def message(number: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    return write_varint(number << 3 | 2) + write_varint(len(payload)) + payload


def write_bundle(prefix: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes float32 tensors by key, as one shard."""
    entries, data = {b"": b"\x08\x01"}, b""
    for key, value in sorted(tensors.items()):
        raw = value.astype("<f4").tobytes()
        sizes = b"".join(
            message(2, b"\x08" + write_varint(size)) for size in value.shape
        )
        entries[key.encode()] = (
            b"\x08" + write_varint(_FLOAT) + message(2, sizes) + b"\x20" + write_varint(len(data))
            + b"\x28" + write_varint(len(raw)) + b"\x35" + masked_crc(raw)
        )  # fmt: skip
        data += raw
    Path(f"{prefix}.data-00000-of-00001").write_bytes(data)
    Path(f"{prefix}.index").write_bytes(_table(entries))


def _table(entries: dict[bytes, bytes]) -> bytes:
    """A data block, an empty filter block, an index block and the footer."""
    out = b""
    handles = []
    for records in (entries, {}):
        handles.append(_handle(out, records))
        out += _block(records)
    index = {max(entries) + b"\x00": handles[0]}
    footer = handles[1] + _handle(out, index)
    return (
        out
        + _block(index)
        + footer
        + bytes(40 - len(footer))
        + struct.pack("<Q", _MAGIC)
    )


def _handle(before: bytes, records: dict[bytes, bytes]) -> bytes:
    return write_varint(len(before)) + write_varint(len(_block(records)) - 5)


def _block(records: dict[bytes, bytes]) -> bytes:
    """Every record is a restart point, so that no key is shortened."""
    body, restarts = b"", []
    for key, value in sorted(records.items()):
        restarts.append(len(body))
        body += (
            b"\x00" + write_varint(len(key)) + write_varint(len(value)) + key + value
        )
    body += b"".join(struct.pack("<I", at) for at in restarts or [0]) + struct.pack(
        "<I", len(restarts) or 1
    )
    return body + b"\x00" + masked_crc(body + b"\x00")


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
        dense[f"{scope}/intermediate/dense"], dense[f"{scope}/output/dense"] = (
            (h, f),
            (f, h),
        )
    for name in norms:
        shapes |= dict.fromkeys(
            (f"{name}/LayerNorm/gamma", f"{name}/LayerNorm/beta"), (h,)
        )
    for name, shape in dense.items():
        shapes |= {f"{name}/kernel": shape, f"{name}/bias": shape[1:]}
    random = np.random.default_rng(seed)
    write_bundle(
        prefix, {name: random.normal(size=shape) for name, shape in shapes.items()}
    )
