"""TFRecord files: byte for byte protobuf's own, read back as written, damage found by their checksums."""

import dataclasses
import hashlib
import struct

import numpy as np
import pytest

from bert.data.records import IDS, Records
from input_preprocessing.instances import sampling as instances
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.tensorflow_files.bundle import masked_crc
from input_preprocessing.tensorflow_files.bundle_writer import _field, _varint
from input_preprocessing.tensorflow_files.tfrecord import (
    Widths,
    notes_of_sizes,
    read_tfrecord,
    write_tfrecord,
)
from input_preprocessing.text import vocabulary

from ...bert.data.samples import assert_equal, make_records
from ...refused import refused
from ..conftest import run

LENGTH, MASKS = 64, 12


def example(features: dict[str, list[int] | list[float]], packed: bool = True) -> bytes:
    """A tf.train.Example, encoded in the simplest way."""
    entries = b""
    for name, values in features.items():
        numbers = [_varint(int(value)) for value in values]
        if isinstance(values[0], float):
            lists = _field(2, _field(1, struct.pack(f"<{len(values)}f", *values)))
        elif packed:
            lists = _field(3, _field(1, b"".join(numbers)))
        else:
            lists = _field(3, b"".join(b"\x08" + number for number in numbers))
        entries += _field(1, _field(1, name.encode()) + _field(2, lists))
    return _field(1, entries)


def frame(data: bytes) -> bytes:
    size = struct.pack("<Q", len(data))
    return size + masked_crc(size) + data + masked_crc(data)


def features_of(records: Records, i: int) -> dict[str, list[int] | list[float]]:
    """The reference's features of sequence i."""
    ids = records.input_ids[slice(*records.sequence_offsets[i : i + 2])].tolist()
    masked = slice(*records.masked_lm_offsets[i : i + 2])
    positions = records.masked_lm_positions[masked].tolist()
    labels = records.masked_lm_ids[masked].tolist()
    start = int(records.segment_b_start[i])

    def pad(values: list, size: int) -> list:  # type: ignore[type-arg]
        return values + [0] * (size - len(values))

    return {
        "input_ids": pad(ids, LENGTH),
        "input_mask": pad([1] * len(ids), LENGTH),
        "masked_lm_ids": pad(labels, MASKS),
        "masked_lm_positions": pad(positions, MASKS),
        "masked_lm_weights": pad([1.0] * len(labels), MASKS),
        "next_sentence_labels": [int(records.next_sentence_labels[i])],
        "segment_ids": pad([0] * start + [1] * (len(ids) - start), LENGTH),
    }


@pytest.mark.parametrize(
    ("count", "first_id"), [(0, 0), (1, 0), (530, 0), (30, 90_000)]
)
def test_a_file_is_the_plain_encoding_and_reads_back(tmp_path, count, first_id):
    """Also of a large vocabulary, and of packed rows sequence by sequence."""
    records = make_records(count)
    if first_id:
        ids = {name: getattr(records, name).astype(np.int32) + first_id for name in IDS}
        records = dataclasses.replace(records, **ids)
    packed = records.with_rows([0, count // 2, count]) if count > 1 else records
    examples = (example(features_of(records, i)) for i in range(count))
    expected = b"".join(map(frame, examples))
    for each in (packed, records):
        write_tfrecord(tmp_path / "a", each, Widths(LENGTH, MASKS))
        assert (tmp_path / "a").read_bytes() == expected
    found, metadata = read_tfrecord(tmp_path / "a")
    assert_equal(found, records)
    assert metadata.max_seq_length == (LENGTH if count else 1)


def test_the_references_instances_are_protobufs_own_bytes(shared, tmp_path):
    """The digest is of the file after protobuf 7.36.2 parsed and serialised (deterministic) every Example in it."""
    words = vocabulary.load(shared / "golden" / "vocab.txt")
    text = shared / "golden" / "en_a.txt"
    records, _ = instances.instances_of(text, words, SamplingConfig())
    write_tfrecord(tmp_path / "a", records, Widths(512, 76))
    digest = hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()
    assert digest == "c009b0123186e2aa11e3b7a5dd41090bcd30b37c01832eb7aff70f2f643dcf27"


def test_any_order_of_features_and_unpacked_numbers_are_read(tmp_path):
    records, data = make_records(3), b""
    for i in range(3):
        features = sorted(
            features_of(records, i).items(), key=lambda pair: pair[0][::-1]
        )
        data += frame(example(dict(features), packed=i != 1))
    (tmp_path / "a").write_bytes(data)
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
    at = int(rng.integers(1, len(data) // 3))
    if seed % 2:
        del data[at + len(data) // 3 * (seed % 3) :]
    else:
        data[at * 3] ^= 1 << int(rng.integers(8))
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
    whole = {} if name.startswith("another") else features_of(make_records(1), 0)
    features = whole | change
    (tmp_path / "a").write_bytes(frame(example(features)))  # type: ignore[arg-type]
    with refused(message) as caught:
        read_tfrecord(tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_the_command_writes_a_tfrecord_file(tmp_path):
    vocab, text = tmp_path / "vocab.txt", tmp_path / "text"
    vocab.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\n")
    text.write_text("the cat\nthe cat the\n\ncat\n")
    line = [
        "--input-file",
        text,
        "--vocab-file",
        vocab,
        "--output-file",
        tmp_path / "out",
    ]
    line += ["--max-seq-length", 16, "--max-predictions-per-seq", 5]
    run("instances", *line, "--format", "tfrecord")
    config = SamplingConfig(max_seq_length=16, max_predictions_per_seq=5)
    expected, _ = instances.instances_of(text, vocabulary.load(vocab), config)
    found, metadata = read_tfrecord(tmp_path / "out")
    assert_equal(found, expected)
    assert metadata.max_seq_length == 16


def test_a_file_of_a_published_name_is_told_by_its_size(tmp_path):
    sizes = {"eval_10k": 25_382_591, "part-00000-of-00500": 9, "mine": 5}
    for name, size in sizes.items():
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
