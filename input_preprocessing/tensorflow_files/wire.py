"""Building blocks of TensorFlow's files: masked CRC-32C checksums and the protobuf wire format."""

from __future__ import annotations

from collections.abc import Iterator

import google_crc32c
import numpy as np
import numpy.typing as npt

Value = int | bytes


def masked_crc(data: bytes | npt.NDArray[np.uint8]) -> bytes:
    """CRC-32C in the form that TensorFlow stores beside the data it covers: rotated, shifted, little-endian."""
    crc = google_crc32c.value(data)
    return ((((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


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
