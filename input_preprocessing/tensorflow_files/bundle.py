"""Reads TensorFlow checkpoints (the V2 "tensor bundle") without TensorFlow, with its checksums and
protobuf messages.

PREFIX.index is a sorted table of key -> BundleEntryProto in LevelDB's block format, which
TensorFlow writes without compression; PREFIX.data-SSSSS-of-NNNNN are the tensors' raw little-endian
bytes. Block, record and tensor checksums are verified.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from bert.data.records import Array, DataError
from input_preprocessing.stage.reading import readable

# The last 48 bytes of a LevelDB table: two block handles, padded to 40 bytes, and this number.
MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
# Numbers of tensorflow.DataType.
_DTYPES: dict[int, Any] = {
    1: np.float32,
    2: np.float64,
    3: np.int32,
    9: np.int64,
    14: "bfloat16",
    19: np.float16,
}
STRING = 7
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
Value = int | bytes


def masked_crc(data: bytes | Array) -> bytes:
    """CRC-32C as TensorFlow stores it: rotated, offset, little-endian."""
    crc = google_crc32c.value(data)
    return ((((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(
        4, "little"
    )


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at `at` and the offset after it. Raises ValueError if it does not end."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("unfinished number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """(field number, value) of a protobuf message: numbers of varint and fixed fields, bytes of the
    others.

    Raises:
        ValueError: the bytes are not a message.
    """
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        # Wire types: 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes.
        kind = key & 7
        if kind == 0:
            value: Value
            value, at = read_varint(data, at)
        elif kind in (1, 5):
            width = 8 if kind == 1 else 4
            value = int.from_bytes(data[at : at + width], "little")
            at += width
        elif kind == 2:
            length, at = read_varint(data, at)
            value = data[at : at + length]
            at += length
        else:
            raise ValueError(f"unknown wire type {kind}")
        if at > len(data):
            raise ValueError("field runs past the end")
        yield key >> 3, value


class Entry(NamedTuple):
    """Type, shape and location of a tensor."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int


class Bundle:
    """An open checkpoint.

    Raises:
        DataError: missing, damaged or of an unknown format.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        index = Path(f"{prefix}.index")
        with readable(index, "give the path without .index"):
            data = index.read_bytes()
        try:
            table = dict(_read_table(data))
            # The empty key has the BundleHeaderProto, whose field 1 is the number of data files.
            shards = dict(fields(table.pop(b""))).get(1, 1)
            self.num_shards = shards if isinstance(shards, int) else 1
            self.entries = {
                str(key, "utf-8"): _parse_entry(value) for key, value in table.items()
            }
        except (ValueError, KeyError, struct.error) as error:
            raise DataError(
                f"{index} is not an intact TensorFlow checkpoint index ({error}); copy it again"
            ) from error

    def read(self, name: str) -> Array:
        """A tensor; bfloat16 is converted to float32.

        Raises:
            DataError: missing or damaged data file, or a type that BERT checkpoints do not have.
        """
        entry = self.entries[name]
        if entry.dtype not in _DTYPES:
            kind = f"has data type number {entry.dtype}"
            raise DataError(
                f"{self.prefix}: tensor {name} {kind}, which is not supported"
            )
        # Little endian, whatever this machine is.
        raw = self.read_bytes(name)
        if _DTYPES[entry.dtype] == "bfloat16":
            # A bfloat16 is the upper half of a float32.
            array = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            array = raw.view(np.dtype(_DTYPES[entry.dtype]).newbyteorder("<"))
        if array.size != int(np.prod(entry.shape)):
            raise DataError(
                f"{self.prefix}: tensor {name} has {array.size} elements for shape {list(entry.shape)}"
            )
        return array.reshape(entry.shape)

    def read_bytes(self, name: str) -> Array:
        """The tensor's bytes, verified.

        Raises:
            DataError: missing or damaged data file.
        """
        entry = self.entries[name]
        path = Path(f"{self.prefix}.data-{entry.shard:05d}-of-{self.num_shards:05d}")
        with (
            readable(path, f"put it beside {self.prefix}.index"),
            open(path, "rb") as file,
        ):
            file.seek(entry.offset)
            raw = np.fromfile(file, dtype=np.uint8, count=entry.size)
        if raw.size != entry.size:
            raise DataError(f"{path} is too short for tensor {name}; copy it again")
        covered: Array | bytes = raw
        if entry.dtype == STRING:
            covered = _checked_string(raw.tobytes())
        if int.from_bytes(masked_crc(covered), "little") != entry.crc:
            raise DataError(
                f"{path}: checksum of tensor {name} is wrong; copy the file again"
            )
        return raw

    def variable_names(self) -> dict[str, str]:
        """Key -> name of each variable, of a TensorFlow 2 checkpoint.

        Raises:
            DataError: its graph of objects is damaged.
        """
        raw = self.read_bytes(OBJECT_GRAPH).tobytes()
        names: dict[str, str] = {}
        try:
            _, at = read_varint(raw, 0)
            # TrackableObjectGraph: 1 nodes, each with 2 attributes: 2 full_name, 3 checkpoint_key.
            for node in _messages(raw[at + 4 :], 1):
                for attribute in _messages(node, 2):
                    parts = dict(fields(attribute))
                    name, key = (parts.get(number, b"") for number in (2, 3))
                    assert isinstance(name, bytes)
                    assert isinstance(key, bytes)
                    names[key.decode()] = name.decode()
        except (ValueError, AssertionError) as error:
            raise DataError(
                f"{self.prefix}: the object graph is damaged ({error}); copy it again"
            ) from error
        return names


def _messages(data: bytes, number: int) -> Iterator[bytes]:
    return (
        value for n, value in fields(data) if n == number and isinstance(value, bytes)
    )


def _checked_string(raw: bytes) -> bytes:
    """What the checksum of a scalar string covers: its length as four bytes, then what follows it."""
    try:
        length, at = read_varint(raw, 0)
        return struct.pack("<I", length) + raw[at:]
    except (ValueError, struct.error):
        return b""  # damaged, so that the checksum will not match


def _parse_entry(data: bytes) -> Entry:
    values: dict[int, Any] = dict(fields(data))
    dimensions = [
        dim
        for n, dim in fields(values.get(2, b""))
        if n == 2 and isinstance(dim, bytes)
    ]
    sizes = (dict(fields(dim)).get(1, 0) for dim in dimensions)
    shape = tuple(size for size in sizes if isinstance(size, int))
    # BundleEntryProto: 1 dtype, 2 shape, 3 shard, 4 offset, 5 size, 6 checksum. Zeros are
    # not stored.
    dtype, shard, offset, size, crc = (values.get(n, 0) for n in (1, 3, 4, 5, 6))
    return Entry(dtype, shape, shard, offset, size, crc)


def _read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """All records of the table, sorted by key."""
    if len(data) < _FOOTER or struct.unpack("<Q", data[-8:])[0] != MAGIC:
        raise ValueError("wrong magic number")
    footer = data[-_FOOTER:]
    # The handle of the metaindex block (two numbers) is skipped; the index block's follows it.
    _, at = read_varint(footer, 0)
    _, at = read_varint(footer, at)
    # The index has a record for each data block, whose value is the block's handle.
    for _, handle in _read_block(data, *_handle(footer, at)):
        yield from _read_block(data, *_handle(handle, 0))


def _handle(data: bytes, at: int) -> tuple[int, int]:
    offset, at = read_varint(data, at)
    return offset, read_varint(data, at)[0]


def _read_block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Records of a block: each key shares a prefix with the previous one."""
    # The trailer is a byte for the compression and the checksum, which covers this byte as well.
    block, trailer = (
        data[offset : offset + size],
        data[offset + size : offset + size + 5],
    )
    if len(trailer) != 5 or size < 4:
        raise ValueError("truncated block")
    if masked_crc(block + trailer[:1]) != trailer[1:]:
        raise ValueError("wrong block checksum")
    # TensorFlow writes checkpoints without compression; only the table format knows it.
    if trailer[0]:
        raise ValueError(f"it is compressed, by method {trailer[0]}")
    # Restart points, for binary searches, follow the records, and their number is last.
    end = len(block) - 4 - 4 * struct.unpack("<I", block[-4:])[0]
    at = 0
    key = b""
    while at < end:
        shared, at = read_varint(block, at)
        fresh, at = read_varint(block, at)
        length, at = read_varint(block, at)
        if shared > len(key) or at + fresh + length > end:
            raise ValueError("damaged record")
        key = key[:shared] + block[at : at + fresh]
        yield key, block[at + fresh : at + fresh + length]
        at += fresh + length


def prefix_of(path: Path) -> Path:
    """The checkpoint's prefix, from the prefix itself, one of its files, or its folder.

    Raises:
        DataError: the folder holds none or several.
    """
    if path.is_dir():
        indices = sorted(path.glob("*.index"))
        if len(indices) != 1:
            raise DataError(
                f"{path} holds {len(indices)} checkpoints (*.index); give the prefix of one"
            )
        path = indices[0]
    return Path(re.sub(r"\.(index|meta|data-\d{5}-of-\d{5})$", "", str(path)))
