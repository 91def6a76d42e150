"""TFRecord files: byte for byte protobuf's own, read back as written, damage found by their
checksums.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct

import numpy as np
import pytest

from bert.data.records import Records
from input_preprocessing.instances import sampling as instances
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.tensorflow_files.bundle import masked_crc
from input_preprocessing.tensorflow_files.tfrecord import (
    Widths,
    notes_of_sizes,
    read_tfrecord,
    write_tfrecord,
)
from input_preprocessing.text import vocabulary

from ... import forked
from ...bert.data.samples import assert_equal, make_records
from ...refused import refused

LENGTH, MASKS = 64, 12


def varint(value: int) -> bytes:
    return (
        bytes([value])
        if value < 128
        else bytes([value & 127 | 128]) + varint(value >> 7)
    )


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
def test_a_file_is_the_plain_encoding_and_reads_back(tmp_path, count):
    records = make_records(count)
    write_tfrecord(tmp_path / "a", records, Widths(LENGTH, MASKS))
    assert (tmp_path / "a").read_bytes() == b"".join(
        frame(example(features_of(records, i))) for i in range(count)
    )
    found, metadata = read_tfrecord(tmp_path / "a")
    assert_equal(found, records)
    assert metadata.max_seq_length == (LENGTH if count else 1)


def test_packed_rows_are_written_sequence_by_sequence(tmp_path):
    records = make_records(9)
    write_tfrecord(tmp_path / "a", records, Widths(LENGTH, MASKS))
    write_tfrecord(
        tmp_path / "b", records.with_rows([0, 1, 4, 6, 9]), Widths(LENGTH, MASKS)
    )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_ids_of_a_large_vocabulary_are_written_and_read(tmp_path):
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


def test_the_references_instances_are_protobufs_own_bytes(shared, tmp_path):
    """The digest is of the file after protobuf 7.36.2 parsed and serialised (deterministic) every
    Example in it.
    """
    words = vocabulary.load(shared / "golden" / "vocab.txt")
    records, _ = instances.instances_of(
        shared / "golden" / "en_a.txt", words, SamplingConfig()
    )
    write_tfrecord(tmp_path / "a", records, Widths(512, 76))
    digest = hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()
    assert digest == "c009b0123186e2aa11e3b7a5dd41090bcd30b37c01832eb7aff70f2f643dcf27"


def test_any_order_of_features_and_unpacked_numbers_are_read(tmp_path):
    records = make_records(3)
    shuffled = [
        dict(sorted(features_of(records, i).items(), key=lambda pair: pair[0][::-1]))
        for i in range(3)
    ]
    (tmp_path / "a").write_bytes(
        b"".join(
            frame(example(features, packed=i != 1))
            for i, features in enumerate(shuffled)
        )
    )
    assert_equal(read_tfrecord(tmp_path / "a")[0], records)


def test_sequences_longer_than_asked_for_are_not_written(tmp_path):
    for length, masks in ((32, MASKS), (LENGTH, 3)):
        with refused(r"would hold \d+ (masked )?tokens, at most"):
            write_tfrecord(tmp_path / "a", make_records(20), Widths(length, masks))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", range(40))
def test_any_changed_byte_or_cut_is_found(tmp_path, seed):
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
    with refused(r"ends within a record|checksum does not match"):
        read_tfrecord(tmp_path / "a")


ODD = {
    "another kind of example": ({"image": [1]}, "no input_ids"),
    "a row of two sequences": ({"next_sentence_labels": [0, 1]}, "values"),
    "lists of other sizes": ({"segment_ids": [0] * 63}, "values"),
    "padding in the middle": ({"input_mask": [1, 0, *[1] * 62]}, "padding"),
    "a position too large": ({"masked_lm_positions": [32768] * MASKS}, "above 32767"),
    "a number of four bytes": ({"input_ids": [1 << 30] * LENGTH}, "negative or too large"),
    "three segments": ({"segment_ids": [0, 1, 2, *[2] * 61], "input_mask": [1] * LENGTH}, "zeros and then ones"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_examples_of_something_else_are_refused_in_one_line(tmp_path, name):
    change, message = ODD[name]
    features = (
        change
        if name.startswith("another")
        else {**features_of(make_records(1), 0), **change}
    )
    (tmp_path / "a").write_bytes(frame(example(features)))  # type: ignore[arg-type]
    with refused(message) as caught:
        read_tfrecord(tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_the_command_writes_a_tfrecord_file(tmp_path):
    (tmp_path / "vocab.txt").write_text(
        "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\n"
    )
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


def test_a_file_of_a_published_name_is_told_by_its_size(tmp_path):
    for name, size in (
        ("eval_10k", 25_382_591),
        ("part-00000-of-00500", 9),
        ("mine", 5),
    ):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)
    notes = notes_of_sizes(sorted(tmp_path.iterdir()))
    assert notes == [
        "eval_10k: 25,382,591 bytes, as published",
        "part-00000-of-00500: 9 bytes, the benchmark's has 514,241,279: made of another text or with other options",
    ]
    for number in range(1, 500):
        (tmp_path / f"part-{number:05d}-of-00500").touch()
    assert "all parts: 9 bytes, the benchmark's has 391,434," in "".join(notes_of_sizes(list(tmp_path.iterdir())))  # fmt: skip
