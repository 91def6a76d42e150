"""Writes TensorFlow 2 checkpoints, to damage and rename what TensorFlow itself would not write so."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from input_preprocessing.crc32c import crc32c, masked
from input_preprocessing.protobuf import message, write_varint
from input_preprocessing.tf_bundle import OBJECT_GRAPH

_MAGIC = 0xDB4775248B80FB57
_FLOAT, _STRING = 1, 7


def object_graph(names: dict[str, str]) -> bytes:
    """A TrackableObjectGraph of one node a variable: key -> its own name."""
    return b"".join(
        message(1, message(2, message(1, b"VARIABLE_VALUE") + message(2, name.encode()) + message(3, key.encode())))
        for key, name in names.items()
    )


def write_bundle(prefix: Path, tensors: dict[str, np.ndarray], graph: bytes | None) -> None:
    """Writes float32 tensors by key, and the object graph where one is given, as one shard."""
    entries, data = {b"": b"\x08\x01"}, b""
    values: dict[str, np.ndarray | bytes] = {**tensors}
    if graph is not None:
        values[OBJECT_GRAPH] = graph
    for key, value in sorted(values.items()):
        if isinstance(value, bytes):
            lengths = struct.pack("<I", masked(crc32c(struct.pack("<I", len(value)))))
            raw, kind, sizes = write_varint(len(value)) + lengths + value, _STRING, b""
            covered = struct.pack("<I", len(value)) + lengths + value
        else:
            raw, kind = value.astype("<f4").tobytes(), _FLOAT
            sizes = b"".join(message(2, b"\x08" + write_varint(size)) for size in value.shape)
            covered = raw
        entries[key.encode()] = (
            b"\x08" + write_varint(kind) + message(2, sizes) + b"\x20" + write_varint(len(data))
            + b"\x28" + write_varint(len(raw)) + b"\x35" + struct.pack("<I", masked(crc32c(covered)))
        )  # fmt: skip
        data += raw
    Path(f"{prefix}.data-00000-of-00001").write_bytes(data)
    Path(f"{prefix}.index").write_bytes(_table(entries))


def _table(entries: dict[bytes, bytes]) -> bytes:
    """One data block, an empty block of filters, one of the index, the footer."""
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
    """Every record a restart point of its own, so that no key is shortened."""
    body, restarts = b"", []
    for key, value in sorted(records.items()):
        restarts.append(len(body))
        body += b"\x00" + write_varint(len(key)) + write_varint(len(value)) + key + value
    body += b"".join(struct.pack("<I", at) for at in restarts or [0]) + struct.pack("<I", len(restarts) or 1)
    return body + b"\x00" + struct.pack("<I", masked(crc32c(body + b"\x00")))
