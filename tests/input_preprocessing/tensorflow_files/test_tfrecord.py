"""TFRecord files: byte for byte protobuf's own, read back as written, damage found by their checksums."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert.data.records import DataError, Records
from input_preprocessing.instances import sampling as instances
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.tensorflow_files.bundle import masked_crc
from input_preprocessing.tensorflow_files.tfrecord import Widths, read_tfrecord, write_tfrecord
from input_preprocessing.text import vocabulary

from ... import forked
from ...bert.data.samples import assert_equal, make_records

LENGTH, MASKS = 64, 12


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def field(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def example(features: dict[str, list[int] | list[float]], packed: bool = True) -> bytes:
    """A tf.train.Example, encoded in the simplest way."""
    entries = b""
    for name, values in features.items():
        if isinstance(values[0], float):
            lists = field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
        elif packed:
            lists = field(3, field(1, b"".join(varint(int(value)) for value in values)))
        else:
            lists = field(3, b"".join(b"\x08" + varint(int(value)) for value in values))
        entries += field(1, field(1, name.encode()) + field(2, lists))
    return field(1, entries)


def frame(data: bytes) -> bytes:
    size = struct.pack("<Q", len(data))
    return size + masked_crc(size) + data + masked_crc(data)


def features_of(records: Records, i: int) -> dict[str, list[int] | list[float]]:
    """The reference's features of sequence i."""
    ids = records.input_ids[slice(*records.sequence_offsets[i : i + 2])].tolist()
    masked = slice(*records.masked_lm_offsets[i : i + 2])
    positions, labels = (
        records.masked_lm_positions[masked].tolist(),
        records.masked_lm_ids[masked].tolist(),
    )
    start = int(records.segment_b_start[i])

    def pad(values: list[int], size: int) -> list[int]:
        return values + [0] * (size - len(values))

    return {
        "input_ids": pad(ids, LENGTH),
        "input_mask": pad([1] * len(ids), LENGTH),
        "masked_lm_ids": pad(labels, MASKS),
        "masked_lm_positions": pad(positions, MASKS),
        "masked_lm_weights": [1.0] * len(labels) + [0.0] * (MASKS - len(labels)),
        "next_sentence_labels": [int(records.next_sentence_labels[i])],
        "segment_ids": pad([0] * start + [1] * (len(ids) - start), LENGTH),
    }


@pytest.mark.parametrize("count", [0, 1, 530])
def test_a_file_is_the_plain_encoding_and_reads_back(tmp_path: Path, count: int) -> None:
    records = make_records(count)
    write_tfrecord(tmp_path / "a", records, Widths(LENGTH, MASKS))
    assert (tmp_path / "a").read_bytes() == b"".join(
        frame(example(features_of(records, i))) for i in range(count)
    )
    found, metadata = read_tfrecord(tmp_path / "a")
    assert_equal(found, records)
    assert metadata.max_seq_length == (LENGTH if count else 1)


def row_features_of(
    records: Records, row: range, masks: int, sequences: int
) -> dict[str, list[int] | list[float]]:
    """Features of a packed row, built from those of its sequences."""
    joined: dict[str, list[Any]] = {name: [] for name in features_of(records, 0)}
    lengths, counts = records.sequence_lengths.tolist(), np.diff(records.masked_lm_offsets).tolist()
    for i in row:
        shift = len(joined["input_ids"])
        for name, values in features_of(records, i).items():
            count = {"next_sentence_labels": 1}.get(
                name, counts[i] if name.startswith("masked") else lengths[i]
            )
            moved = shift if name == "masked_lm_positions" else 0
            joined[name] += [value + moved for value in values[:count]]
    joined["packed_input_len"] = [lengths[i] for i in row]
    joined["packed_masked_lm_len"] = [counts[i] for i in row]
    for name, values in joined.items():
        width = masks if name.startswith("masked") else LENGTH * 3
        width = sequences if name.startswith(("packed", "next")) else width
        joined[name] = values + [0.0 if name == "masked_lm_weights" else 0] * (width - len(values))
    return dict(sorted(joined.items()))


def test_a_file_of_packed_rows_is_the_plain_encoding_and_reads_back(tmp_path: Path) -> None:
    offsets = [0, 1, 4, 6, 9]
    records = make_records(9).with_rows(offsets)
    write_tfrecord(tmp_path / "a", records, Widths(3 * LENGTH, 30, 4))
    rows = [range(*offsets[i : i + 2]) for i in range(4)]
    plain = b"".join(frame(example(row_features_of(records, row, 30, 4))) for row in rows)
    assert (tmp_path / "a").read_bytes() == plain
    found, metadata = read_tfrecord(tmp_path / "a")
    assert_equal(found, records)
    assert metadata.max_seq_length == 3 * LENGTH
    with pytest.raises(DataError, match="would hold 3 sequences, at most 2"):
        write_tfrecord(tmp_path / "b", records, Widths(3 * LENGTH, 30, 2))
    (tmp_path / "a").write_bytes(plain + frame(example(features_of(records, 0))))
    with pytest.raises(DataError, match="packed rows and single sequences"):
        read_tfrecord(tmp_path / "a")
    wrong = {**row_features_of(records, rows[1], 30, 4), "packed_input_len": [5, 5, 5, 0]}
    (tmp_path / "a").write_bytes(frame(example(wrong)))
    with pytest.raises(DataError, match="packed_input_len and packed_masked_lm_len do not add up"):
        read_tfrecord(tmp_path / "a")


def test_ids_of_a_large_vocabulary_are_written_and_read(tmp_path: Path) -> None:
    records = make_records(30)
    ids = {
        name: getattr(records, name).astype(np.int32) + 90_000
        for name in ("input_ids", "masked_lm_ids")
    }
    records = dataclasses.replace(records, **ids)
    write_tfrecord(tmp_path / "a", records, Widths(LENGTH, MASKS))
    assert (tmp_path / "a").read_bytes() == b"".join(
        frame(example(features_of(records, i))) for i in range(30)
    )
    assert_equal(read_tfrecord(tmp_path / "a")[0], records)


def test_the_references_instances_are_protobufs_own_bytes(shared: Path, tmp_path: Path) -> None:
    """The digest is of the file after protobuf 7.36.2 parsed and serialised (deterministic) every Example in it."""
    words = vocabulary.load(shared / "golden" / "vocab.txt")
    records, _ = instances.instances_of(shared / "golden" / "en_a.txt", words, SamplingConfig())
    write_tfrecord(tmp_path / "a", records, Widths(512, 76))
    digest = hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()
    assert digest == "c009b0123186e2aa11e3b7a5dd41090bcd30b37c01832eb7aff70f2f643dcf27"


def test_any_order_of_features_and_unpacked_numbers_are_read(tmp_path: Path) -> None:
    records = make_records(3)
    shuffled = [
        dict(sorted(features_of(records, i).items(), key=lambda pair: pair[0][::-1]))
        for i in range(3)
    ]
    (tmp_path / "a").write_bytes(
        b"".join(frame(example(features, packed=i != 1)) for i, features in enumerate(shuffled))
    )
    assert_equal(read_tfrecord(tmp_path / "a")[0], records)


def test_sequences_longer_than_asked_for_are_not_written(tmp_path: Path) -> None:
    for length, masks in ((32, MASKS), (LENGTH, 3)):
        with pytest.raises(DataError, match=r"would hold \d+ (masked )?tokens, at most"):
            write_tfrecord(tmp_path / "a", make_records(20), Widths(length, masks))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", range(40))
def test_any_changed_byte_or_cut_is_found(tmp_path: Path, seed: int) -> None:
    write_tfrecord(tmp_path / "a", make_records(3), Widths(LENGTH, MASKS))
    data, rng = bytearray((tmp_path / "a").read_bytes()), np.random.default_rng(seed)
    at = int(rng.integers(1, len(data)))
    if seed % 2:
        del data[at:]
        sizes = len(data) // 3
        if at in (sizes, 2 * sizes):
            return
    else:
        data[at] ^= 1 << int(rng.integers(8))
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(DataError, match=r"ends within a record|checksum does not match"):
        read_tfrecord(tmp_path / "a")


ODD = {
    "another kind of example": ({"image": [1]}, "no input_ids"),
    "lists of other sizes": ({"segment_ids": [0] * 63}, "values"),
    "padding in the middle": ({"input_mask": [1, 0, *[1] * 62]}, "padding"),
    "a position too large": ({"masked_lm_positions": [32768] * MASKS}, "above 32767"),
    "a number of four bytes": ({"input_ids": [1 << 30] * LENGTH}, "negative or too large"),
    "three segments": (
        {"segment_ids": [0, 1, 2, *[2] * 61], "input_mask": [1] * LENGTH},
        "zeros and then ones",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_examples_of_something_else_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    change, message = ODD[name]
    features = (
        change if name.startswith("another") else {**features_of(make_records(1), 0), **change}
    )
    (tmp_path / "a").write_bytes(frame(example(features)))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message) as caught:
        read_tfrecord(tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_the_command_writes_a_tfrecord_file(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\n")
    (tmp_path / "text").write_text("the cat\nthe cat the\n\ncat\n")
    line = ["--input-file", tmp_path / "text", "--vocab-file", tmp_path / "vocab.txt"]
    line += ["--output-file", tmp_path / "out", "--format", "tfrecord"]
    line += ["--max-seq-length", 16, "--max-predictions-per-seq", 5]
    done = forked.run("input_preprocessing", "instances", *line)
    assert done.returncode == 0, done.stderr
    config = SamplingConfig(max_seq_length=16, max_predictions_per_seq=5)
    expected, _ = instances.instances_of(
        tmp_path / "text", vocabulary.load(tmp_path / "vocab.txt"), config
    )
    found, metadata = read_tfrecord(tmp_path / "out")
    assert_equal(found, expected)
    assert metadata.max_seq_length == 16
