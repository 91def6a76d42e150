"""The few bits of the protobuf wire format that TensorFlow's checkpoints and TFRecords need."""

from __future__ import annotations

from collections.abc import Iterator

Value = int | bytes


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at `at` and the offset after it.

    Raises:
        ValueError: it does not end.
    """
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


def write_varint(value: int) -> bytes:
    """A non-negative number as a varint."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """(field number, value) of a message: numbers of varint and fixed fields, bytes of the others.

    Raises:
        ValueError: the bytes are not a message.
    """
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
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


def message(number: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    return write_varint(number << 3 | 2) + write_varint(len(payload)) + payload
