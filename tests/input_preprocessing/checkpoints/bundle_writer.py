"""Writes TensorFlow 2 checkpoints, including damaged and renamed ones that TensorFlow would not write."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from input_preprocessing.tensorflow_files.bundle import OBJECT_GRAPH, masked_crc

_MAGIC = 0xDB4775248B80FB57
_FLOAT, _STRING = 1, 7
QKV = ("query", "key", "value")


def write_varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + write_varint(value >> 7)


def message(number: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    return write_varint(number << 3 | 2) + write_varint(len(payload)) + payload


def object_graph(names: dict[str, str]) -> bytes:
    """A TrackableObjectGraph with one node per variable: key -> variable name."""
    return b"".join(
        message(
            1,
            message(
                2,
                message(1, b"VARIABLE_VALUE")
                + message(2, name.encode())
                + message(3, key.encode()),
            ),
        )
        for key, name in names.items()
    )


def write_bundle(prefix: Path, tensors: dict[str, np.ndarray], graph: bytes | None) -> None:
    """Writes float32 tensors by key, and the object graph if given, as one shard."""
    entries, data = {b"": b"\x08\x01"}, b""
    values: dict[str, np.ndarray | bytes] = {**tensors}
    if graph is not None:
        values[OBJECT_GRAPH] = graph
    for key, value in sorted(values.items()):
        if isinstance(value, bytes):
            lengths = masked_crc(struct.pack("<I", len(value)))
            raw, kind, sizes = write_varint(len(value)) + lengths + value, _STRING, b""
            covered = struct.pack("<I", len(value)) + lengths + value
        else:
            raw, kind = value.astype("<f4").tobytes(), _FLOAT
            sizes = b"".join(message(2, b"\x08" + write_varint(size)) for size in value.shape)
            covered = raw
        entries[key.encode()] = (
            b"\x08" + write_varint(kind) + message(2, sizes) + b"\x20" + write_varint(len(data))
            + b"\x28" + write_varint(len(raw)) + b"\x35" + masked_crc(covered)
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
    return out + _block(index) + footer + bytes(40 - len(footer)) + struct.pack("<Q", _MAGIC)


def _handle(before: bytes, records: dict[bytes, bytes]) -> bytes:
    return write_varint(len(before)) + write_varint(len(_block(records)) - 5)


def _block(records: dict[bytes, bytes]) -> bytes:
    """Every record is a restart point, so that no key is shortened."""
    body, restarts = b"", []
    for key, value in sorted(records.items()):
        restarts.append(len(body))
        body += b"\x00" + write_varint(len(key)) + write_varint(len(value)) + key + value
    body += b"".join(struct.pack("<I", at) for at in restarts or [0]) + struct.pack(
        "<I", len(restarts) or 1
    )
    return body + b"\x00" + masked_crc(body + b"\x00")


def write_bert(prefix: Path, config: dict[str, int], seed: int) -> None:
    """A TensorFlow 2 checkpoint of random weights for the sizes of a bert_config.json."""
    h, f, v, n = (
        config[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
    )
    heads, norm = (h, n, h // n), {"gamma": (h,), "beta": (h,)}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "word_embeddings": {"embeddings": (v, h)},
        "position_embedding": {"embeddings": (config["max_position_embeddings"], h)},
        "type_embeddings": {"embeddings": (2, h)},
        "embeddings/layer_norm": norm,
        "pooler_transform": {"kernel": (h, h), "bias": (h,)},
        "cls/predictions/transform/dense": {"kernel": (h, h), "bias": (h,)},
        "cls/predictions/transform/LayerNorm": norm,
        "cls/predictions/output_bias": {"bias": (v,)},
        "predictions/transform/logits": {"kernel": (h, 2), "bias": (2,)},
    }
    for layer in range(config["num_hidden_layers"]):
        scope = f"transformer/layer_{layer}"
        shapes |= {
            f"{scope}/self_attention/{part}": {"kernel": heads, "bias": heads[1:]} for part in QKV
        }
        shapes[f"{scope}/self_attention/attention_output"] = {
            "kernel": (*heads[1:], h),
            "bias": (h,),
        }
        shapes[f"{scope}/intermediate"] = {"kernel": (h, f), "bias": (f,)}
        shapes[f"{scope}/output"] = {"kernel": (f, h), "bias": (h,)}
        shapes[f"{scope}/self_attention_layer_norm"] = shapes[f"{scope}/output_layer_norm"] = norm
    names = [
        (f"{scope}/{leaf}", shape)
        for scope, leaves in shapes.items()
        for leaf, shape in leaves.items()
    ]
    random = np.random.default_rng(seed)
    tensors = {
        f"model/{i}/.ATTRIBUTES/VARIABLE_VALUE": random.normal(size=shape)
        for i, (_, shape) in enumerate(names)
    }
    write_bundle(
        prefix,
        tensors,
        object_graph({key: name for key, (name, _) in zip(tensors, names, strict=True)}),
    )
