"""Snappy blocks: every kind of element by hand, an index that another implementation compressed, and damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import cramjam
import numpy as np
import pytest

from bert.data.records import DataError
from input_preprocessing.tensorflow_files.bundle import Bundle

SAVED = Path(__file__).parents[1] / "checkpoints" / "tf1_checkpoint"
DATA = "model.ckpt-28252.data-00000-of-00001"


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (b"\x00", b""),
        (b"\x03\x08abc", b"abc"),
        (
            bytes([100, 60 << 2, 99]) + bytes(range(100)),
            bytes(range(100)),
        ),  # a length in one byte more
        (b"\xac\x02" + bytes([61 << 2, 43, 1]) + b"x" * 300, b"x" * 300),  # in two, 299 = 43 + 256
        (
            b"\x0b\x08abc" + bytes([1 | 4 << 2, 3]),
            b"abcabcabcab",
        ),  # copy of 8 from 3 back: it repeats
        (b"\x07\x08abc" + bytes([2 | 3 << 2, 2, 0]), b"abcbcbc"),
        (b"\x05\x08abc" + bytes([3 | 1 << 2, 3, 0, 0, 0]), b"abcab"),
        (b"\x86\x02\x04ab" + bytes([2 | 63 << 2, 2, 0]) * 4 + bytes([1 | 0 << 2, 2]), b"ab" * 131),
    ],
)
def test_every_kind_of_element_is_read(block: bytes, text: bytes) -> None:
    assert bytes(cramjam.snappy.decompress_raw(block)) == text


@pytest.mark.parametrize(
    "block",
    [
        b"",  # no length
        b"\x80",  # an unfinished one
        b"\x04\x08abc",  # fewer bytes than announced
        b"\x02\x08abc",  # more
        b"\x03\x08ab",  # a literal past the end
        b"\x03\xf0",  # its length missing
        b"\x07\x08abc\x0e",  # the offset missing
        b"\x07\x08abc" + bytes([2 | 3 << 2, 4, 0]),  # a copy from before the start
        b"\x07\x08abc" + bytes([2 | 3 << 2, 0, 0]),  # from nowhere
    ],
)
def test_a_damaged_block_is_refused(block: bytes) -> None:
    with pytest.raises(cramjam.DecompressionError):
        cramjam.snappy.decompress_raw(block)


def test_a_compressed_index_reads_as_the_plain_one(tmp_path: Path) -> None:
    """`compressed/` was made by another implementation of Snappy; TensorFlow 2.15 reads it as the plain one."""
    shutil.copy(SAVED / "compressed" / "model.ckpt-28252.index", tmp_path)
    shutil.copy(SAVED / DATA, tmp_path)
    plain, compressed = Bundle(SAVED / "model.ckpt-28252"), Bundle(tmp_path / "model.ckpt-28252")
    assert compressed.entries == plain.entries
    assert np.array_equal(
        compressed.read("cls/predictions/output_bias"), plain.read("cls/predictions/output_bias")
    )


@pytest.mark.parametrize("at", [0, 1, 2, 100, 2000, 2099, 2100])
def test_a_changed_byte_of_a_compressed_index_is_found(tmp_path: Path, at: int) -> None:
    data = bytearray((SAVED / "compressed" / "model.ckpt-28252.index").read_bytes())
    data[at] ^= 1
    (tmp_path / "model.ckpt-28252.index").write_bytes(data)
    with pytest.raises(DataError, match="is not an intact TensorFlow checkpoint index"):
        Bundle(tmp_path / "model.ckpt-28252")
