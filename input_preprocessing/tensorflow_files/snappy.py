"""Decompresses Snappy blocks (github.com/google/snappy, format_description.txt).

TensorFlow writes its checkpoint indexes uncompressed, but reads compressed ones, and the benchmark's own are.
"""

from __future__ import annotations

from input_preprocessing.tensorflow_files.protobuf import read_varint


def decompress(data: bytes) -> bytes:
    """The bytes that a Snappy block stands for.

    Raises:
        ValueError: the data are damaged.
    """
    size, at = read_varint(data, 0)
    out = bytearray()
    while at < len(data):
        kind, length, offset, at = _element(data, at)
        if kind == 0:
            out += data[at : at + length]
            at += length
        else:
            if not 0 < offset <= len(out):
                raise ValueError("damaged compression: copy from before the start")
            start = len(out) - offset
            while length > 0:  # a copy may overlap what it makes: then it repeats
                piece = out[start : start + length]
                out += piece
                length -= len(piece)
        if len(out) > size:
            break
    if len(out) != size or at > len(data):
        raise ValueError(f"damaged compression: {len(out)} bytes instead of {size}")
    return bytes(out)


def _element(data: bytes, at: int) -> tuple[int, int, int, int]:
    """Kind (0: literal), length, offset back (0 for a literal) and what follows of the element at `at`."""
    tag = data[at]
    kind, rest = tag & 3, tag >> 2
    at += 1
    if kind == 0:
        extra = max(0, rest - 59)
        length = rest + 1 if extra == 0 else _number(data, at, extra) + 1
        return kind, length, 0, at + extra
    if kind == 1:
        return kind, (rest & 7) + 4, (rest >> 3) << 8 | _number(data, at, 1), at + 1
    width = 2 if kind == 2 else 4
    return kind, rest + 1, _number(data, at, width), at + width


def _number(data: bytes, at: int, width: int) -> int:
    if at + width > len(data):
        raise ValueError("damaged compression: unfinished number")
    return int.from_bytes(data[at : at + width], "little")
