"""Writes TensorFlow 2 checkpoints: a tensor bundle (bundle.py) with its graph of objects."""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bert.data.format import atomic_file
from bert.data.records import Array
from input_preprocessing.tensorflow_files.bundle import (
    MAGIC,
    OBJECT_GRAPH,
    STRING,
    masked_crc,
)

Variables = Mapping[str, tuple[str, Array]]
_FLOAT, _INT64 = 1, 9  # of tensorflow.DataType
# BundleHeaderProto: one shard, version 1.
_HEADER = b"\x08\x01\x1a\x02\x08\x01"


def _varint(value: int) -> bytes:
    return (
        bytes([value])
        if value < 128
        else bytes([value & 127 | 128]) + _varint(value >> 7)
    )


def _field(number: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def write_checkpoint(prefix: Path, variables: Variables) -> None:
    """Writes PREFIX.data-00000-of-00001, then PREFIX.index, without which it is no checkpoint.

    variables: key -> name and value; a key is the path of objects to the variable.
    """
    # As tf.train.Checkpoint counts; its readers look for it.
    counter = "save_counter/.ATTRIBUTES/VARIABLE_VALUE"
    everything = {**variables, counter: ("save_counter", np.array(1, np.int64))}
    index, at = {b"": _HEADER}, 0
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_file(Path(f"{prefix}.data-00000-of-00001")) as data,
        open(data, "wb") as file,
    ):
        for key in sorted([*everything, OBJECT_GRAPH]):
            if key == OBJECT_GRAPH:
                graph = _graph({key: name for key, (name, _) in everything.items()})
                length = struct.pack("<I", len(graph))
                checked = masked_crc(length) + graph
                raw, covered = _varint(len(graph)) + checked, length + checked
                dtype, shape = STRING, b""
            else:
                value = everything[key][1]
                dtype = _INT64 if key == counter else _FLOAT
                raw = covered = value.astype(
                    "<i8" if key == counter else "<f4"
                ).tobytes()
                shape = b"".join(
                    _field(2, b"\x08" + _varint(size)) for size in value.shape
                )
            file.write(raw)
            # BundleEntryProto: 1 dtype, 2 shape, 4 offset, 5 size, 6 checksum.
            entry = b"\x08" + _varint(dtype) + _field(2, shape)
            entry += b"\x20" + _varint(at) if at else b""  # zeros are not stored
            entry += b"\x28" + _varint(len(raw)) + b"\x35" + masked_crc(covered)
            index[key.encode()] = entry
            at += len(raw)
    with atomic_file(Path(f"{prefix}.index")) as partial:
        partial.write_bytes(_table(index))


def _graph(names: Mapping[str, str]) -> bytes:
    """The TrackableObjectGraph of variables by key: each part of a path is a child by that name."""
    children: list[dict[str, int]] = [{}]  # of each node; node 0 is the root
    attributes: dict[int, bytes] = {}
    for key, name in names.items():
        node = 0
        for part in key.split("/")[:-2]:
            if part not in children[node]:
                children[node][part] = len(children)
                children.append({})
            node = children[node][part]
        value = _field(1, b"VARIABLE_VALUE") + _field(2, name.encode())
        attributes[node] = _field(2, value + _field(3, key.encode()))
    nodes = []
    for number, named in enumerate(children):
        references = (
            _field(1, b"\x08" + _varint(child) + _field(2, name.encode()))
            for name, child in named.items()
        )
        nodes.append(b"".join(references) + attributes.get(number, b""))
    return b"".join(_field(1, node) for node in nodes)


def _table(records: Mapping[bytes, bytes]) -> bytes:
    """LevelDB's: a block of records, an empty one, the index block and the footer."""
    out, handles = b"", []
    index = {max(records) + b"\x00": b""}
    for block in (records, {}, index):
        made = _block(block)
        handles.append(_varint(len(out)) + _varint(len(made) - 5))
        if block is records:
            index[max(records) + b"\x00"] = handles[0]
        out += made
    footer = handles[1] + handles[2]
    return out + footer + bytes(40 - len(footer)) + struct.pack("<Q", MAGIC)


def _block(records: Mapping[bytes, bytes]) -> bytes:
    """Every record is a restart point, so that no key is shortened by the one before."""
    body, restarts = b"", []
    for key, value in sorted(records.items()):
        restarts.append(len(body))
        body += b"\x00" + _varint(len(key)) + _varint(len(value)) + key + value
    for number in (*(restarts or [0]), len(restarts) or 1):
        body += struct.pack("<I", number)
    return body + b"\x00" + masked_crc(body + b"\x00")
