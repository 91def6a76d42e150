"""TFRecord files of training instances, as the reference's create_pretraining_data.py writes and reads them.

A record is its length (8 bytes), a checksum of the length, the data, a checksum of the data; the data is a tf.train
Example with seven features, zero padded: input_ids, input_mask, segment_ids (int64, max_seq_length),
masked_lm_positions, masked_lm_ids (int64, max_predictions_per_seq), masked_lm_weights (float32), next_sentence_labels
(int64, 1). Features are written in the order of their names, as protobuf's deterministic serialisation does; readers
take any order. TensorFlow is not needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bert.data.compiled import compiled
from bert.data.format import atomic_file
from bert.data.records import IDS, DataError, Metadata, Records, id_dtype
from input_preprocessing.tensorflow_files.crc32c import TABLES, masked_crc
from input_preprocessing.tensorflow_files.protobuf import fields

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

NAMES = (
    "input_ids",
    "input_mask",
    "masked_lm_ids",
    "masked_lm_positions",
    "masked_lm_weights",
    "next_sentence_labels",
    "segment_ids",
)
_INPUT_IDS, _INPUT_MASK, _LABELS, _POSITIONS, _WEIGHTS, _NEXT_SENTENCE, _SEGMENTS = range(7)
_HEADER, _FOOTER = 12, 4
_BLOCK = 512  # sequences written at once
_LARGEST, _LARGEST_ID = 32767, (1 << 21) - 1  # a number of three bytes


class _Keys(NamedTuple):
    """The features' names, one after the other."""

    text: Bytes
    ends: Integers


class _Sequences(NamedTuple):
    """The arrays of records as the compiled writer takes them."""

    input_ids: npt.NDArray[Any]
    offsets: Integers
    b_starts: npt.NDArray[np.int16]
    positions: npt.NDArray[np.int16]
    labels: npt.NDArray[Any]
    masked_offsets: Integers
    next_labels: npt.NDArray[np.int8]


_KEYS = _Keys(np.frombuffer("".join(NAMES).encode(), dtype=np.uint8), np.cumsum([len(name) for name in NAMES]))


def write_tfrecord(path: Path, records: Records, max_seq_length: int, max_predictions_per_seq: int) -> None:
    """Writes the sequences, whole or not at all.

    Raises:
        DataError: a sequence or its masks are longer than allowed, or the file cannot be written.
    """
    masks = np.diff(records.masked_lm_offsets)
    if records.sequence_lengths.max(initial=0) > max_seq_length or masks.max(initial=0) > max_predictions_per_seq:
        raise DataError(f"{path}: sequences are longer than {max_seq_length} tokens, {max_predictions_per_seq} masks")
    room = 11 * max_seq_length + 12 * max_predictions_per_seq + 512
    buffer = np.empty(_BLOCK * room, dtype=np.uint8)
    scratch = np.empty(room, dtype=np.uint8)
    sequences = _Sequences(
        records.input_ids, records.sequence_offsets, records.segment_b_start, records.masked_lm_positions,
        records.masked_lm_ids, records.masked_lm_offsets, records.next_sentence_labels,
    )  # fmt: skip
    sizes = (max_seq_length, max_predictions_per_seq)
    with atomic_file(path) as partial, open(partial, "wb") as file:
        for start in range(0, records.num_sequences, _BLOCK):
            end = min(start + _BLOCK, records.num_sequences)
            size = _write_block(buffer, scratch, start, end, sequences, sizes, _KEYS, TABLES)
            file.write(buffer[:size].data)


@compiled
def _put_varint(out, at, value):  # type: ignore[no-untyped-def]
    while value >= 128:
        out[at] = (value & 127) | 128
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


@compiled
def _varint_size(value):  # type: ignore[no-untyped-def]
    size = 1
    while value >= 128:
        value >>= 7
        size += 1
    return size


@compiled
def _put_feature(out, at, keys, name, payload, size):  # type: ignore[no-untyped-def]
    """Appends an entry of the map of features: key, and a list of packed values under the tag of its type."""
    start = keys.ends[name - 1] if name else 0
    end = keys.ends[name]
    list_size = 1 + _varint_size(size) + size
    feature_size = 1 + _varint_size(list_size) + list_size
    key_size = end - start
    out[at] = 0x0A
    at = _put_varint(out, at + 1, 1 + _varint_size(key_size) + key_size + 1 + _varint_size(feature_size) + feature_size)
    out[at] = 0x0A
    at = _put_varint(out, at + 1, key_size)
    out[at : at + key_size] = keys.text[start:end]
    at += key_size
    out[at] = 0x12
    at = _put_varint(out, at + 1, feature_size)
    out[at] = 0x12 if name == _WEIGHTS else 0x1A  # floats or integers
    at = _put_varint(out, at + 1, list_size)
    out[at] = 0x0A
    at = _put_varint(out, at + 1, size)
    out[at : at + size] = payload[:size]
    return at + size


@compiled
def _put_values(out, values, first, last, count):  # type: ignore[no-untyped-def]
    """Packs values[first:last] and zeros up to `count` of them; returns the bytes written."""
    at = 0
    for j in range(first, last):
        at = _put_varint(out, at, np.int64(values[j]))
    end = at + count - (last - first)
    out[at:end] = 0
    return end


@compiled
def _put_ones(out, first, last, count):  # type: ignore[no-untyped-def]
    """Packs `count` values, which are 1 from `first` to `last` and else 0; returns the bytes written."""
    out[:count] = 0
    out[first:last] = 1
    return count


@compiled
def _put_number(out, at, value, width):  # type: ignore[no-untyped-def]
    """Little-endian."""
    for k in range(width):
        out[at + k] = (value >> (8 * k)) & 255
    return at + width


@compiled
def _put_weights(out, masks, count):  # type: ignore[no-untyped-def]
    """Packs `count` floats, 1.0 for each of the masks and then 0.0; returns the bytes written."""
    for j in range(count):
        _put_number(out, 4 * j, 0x3F800000 * np.int64(j < masks), 4)
    return 4 * count


@compiled
def _put_features(out, at, scratch, i, sequences, sizes, keys):  # type: ignore[no-untyped-def]
    """Appends all features of sequence i, in the order of NAMES."""
    input_ids, offsets, b_starts, positions, labels, masked_offsets, next_labels = sequences
    max_seq_length, max_predictions = sizes
    begin, end = offsets[i], offsets[i + 1]
    first, last = masked_offsets[i], masked_offsets[i + 1]
    size = _put_values(scratch, input_ids, begin, end, max_seq_length)
    at = _put_feature(out, at, keys, _INPUT_IDS, scratch, size)
    size = _put_ones(scratch, 0, end - begin, max_seq_length)
    at = _put_feature(out, at, keys, _INPUT_MASK, scratch, size)
    size = _put_values(scratch, labels, first, last, max_predictions)
    at = _put_feature(out, at, keys, _LABELS, scratch, size)
    size = _put_values(scratch, positions, first, last, max_predictions)
    at = _put_feature(out, at, keys, _POSITIONS, scratch, size)
    size = _put_weights(scratch, last - first, max_predictions)
    at = _put_feature(out, at, keys, _WEIGHTS, scratch, size)
    size = _put_values(scratch, next_labels, i, i + 1, 1)
    at = _put_feature(out, at, keys, _NEXT_SENTENCE, scratch, size)
    size = _put_ones(scratch, b_starts[i], end - begin, max_seq_length)
    return _put_feature(out, at, keys, _SEGMENTS, scratch, size)


@compiled
def _write_block(out, scratch, first, last, sequences, sizes, keys, tables):  # type: ignore[no-untyped-def]
    """Writes the records of sequences [first, last); returns the bytes written."""
    at = 0
    for i in range(first, last):
        # The data's own length goes before it: leave room for the longest header of an Example, move it up after.
        body = at + _HEADER + 4
        size = _put_features(out, body, scratch, i, sequences, sizes, keys) - body
        start = at + _HEADER
        out[start] = 0x0A
        moved = _put_varint(out, start + 1, size)
        for k in range(size):
            out[moved + k] = out[body + k]
        end = moved + size
        _put_number(out, at, end - start, 8)
        _put_number(out, at + 8, masked_crc(out[at : at + 8], tables), 4)
        at = _put_number(out, end, masked_crc(out[start:end], tables), 4)
    return at


@compiled
def _number(data, at, width):  # type: ignore[no-untyped-def]
    value = 0
    for k in range(width):
        value |= np.int64(data[at + k]) << (8 * k)
    return value


@compiled
def _frame(data, at, tables):  # type: ignore[no-untyped-def]
    """(start, end) of the data of the record at `at`; start -1: cut short, -2: wrong checksum."""
    if at + _HEADER + _FOOTER > data.size:
        return -1, at
    if _number(data, at + 8, 4) != np.int64(masked_crc(data[at : at + 8], tables)):
        return -2, at
    size = _number(data, at, 8)
    start = at + _HEADER
    if size < 0 or size > data.size - start - _FOOTER:
        return -1, at
    if _number(data, start + size, 4) != np.int64(masked_crc(data[start : start + size], tables)):
        return -2, at
    return start, start + size


@compiled
def _varints(data, out):  # type: ignore[no-untyped-def]
    """Decodes packed varints; returns how many, -1 where they do not end or are too large."""
    count = 0
    value = np.int64(0)
    shift = 0
    for byte in data:
        if shift > 14:
            return -1
        value |= np.int64(byte & 127) << shift
        if byte < 128:
            out[count] = value
            count += 1
            value = np.int64(0)
            shift = 0
        else:
            shift += 7
    return -1 if shift else count


def parse_example(data: bytes) -> dict[str, Integers]:
    """Features of a tf.train.Example by name, numbers only; floats become 1 where they are not 0.

    Raises:
        ValueError: the bytes are none, or a number is out of range.
    """
    found = {}
    for number, features in fields(data):
        if number == 1 and isinstance(features, bytes):
            for _, entry in fields(features):
                name, feature = _entry(entry)
                found[name] = _numbers(feature)
    return found


def _entry(entry: int | bytes) -> tuple[str, bytes]:
    parts = dict(fields(entry)) if isinstance(entry, bytes) else {}
    name, feature = parts.get(1), parts.get(2, b"")
    if not isinstance(name, bytes) or not isinstance(feature, bytes):
        raise ValueError("a feature has no name")
    return name.decode("utf-8", "replace"), feature


def _numbers(feature: bytes) -> Integers:
    for kind, values in fields(feature):
        parts = [value for number, value in fields(values) if number == 1] if isinstance(values, bytes) else []
        if kind == 2:
            return np.concatenate([np.zeros(0, np.int64), *(_floats(part) for part in parts)])
        if kind == 3:
            return np.concatenate([np.zeros(0, np.int64), *(_integers(part) for part in parts)])
    return np.zeros(0, np.int64)


def _integers(part: int | bytes) -> Integers:
    if isinstance(part, int):
        return np.array([min(part, _LARGEST_ID + 1)])
    out = np.empty(len(part), dtype=np.int64)
    count = _varints(np.frombuffer(part, dtype=np.uint8), out)
    if count < 0:
        raise ValueError("a number is negative or too large")
    return out[:count]


def _floats(part: int | bytes) -> Integers:
    raw = part.to_bytes(4, "little") if isinstance(part, int) else part
    return (np.frombuffer(raw, dtype="<f4") != 0).astype(np.int64)


def read_tfrecord(path: Path) -> tuple[Records, Metadata]:
    """All sequences of a file, checksums verified.

    Raises:
        DataError: unreadable, damaged, or records of something else.
    """
    try:
        data = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check the path") from error
    parts: list[tuple[Integers, ...]] = []
    at = width = 0
    while at < data.size:
        start, end = _frame(data, at, TABLES)
        if start < 0:
            what = "ends within a record" if start == -1 else "is damaged: a checksum does not match"
            raise DataError(f"{path} {what} (record {len(parts)}, byte {at}); copy it again, or it is no TFRecord file")
        try:
            features = parse_example(data[start:end].tobytes())
            parts.append(_sequence(features))
        except ValueError as error:
            raise DataError(
                f"{path}: record {len(parts)} is not a training instance: {error}; check the path"
            ) from error
        width = max(width, len(features["input_ids"]))
        at = end + _FOOTER
    return _records(parts), Metadata(max_seq_length=max(width, 1), vocab_md5="", random_seed=-1, dupe_factor=0)


def _sequence(features: dict[str, Integers]) -> tuple[Integers, ...]:
    """Tokens, start of B, positions, labels and next-sentence label of an instance, without its padding."""
    missing = [name for name in NAMES if name not in features]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}")
    length, masks = (int(features[name].sum()) for name in ("input_mask", "masked_lm_weights"))
    sizes = [len(features[name]) for name in NAMES]
    if not (sizes[0] == sizes[1] == sizes[6] and sizes[2] == sizes[3] == sizes[4] and sizes[5] == 1):
        raise ValueError(f"its features have {sizes} values")
    segments = features["segment_ids"][:length]
    if features["input_mask"][length:].any() or features["masked_lm_weights"][masks:].any():
        raise ValueError("its padding is not at the end")
    for name in NAMES:
        largest = _LARGEST_ID if name in IDS else _LARGEST
        if int(features[name].max(initial=0)) > largest:
            raise ValueError(f"a number is above {largest}")
    if (np.diff(segments) < 0).any() or segments.max(initial=0) > 1:
        raise ValueError("its segment_ids are not zeros and then ones")
    start_b = np.count_nonzero(segments == 0)
    return (
        features["input_ids"][:length],
        np.array([start_b]),
        features["masked_lm_positions"][:masks],
        features["masked_lm_ids"][:masks],
        features["next_sentence_labels"],
    )


def _records(parts: list[tuple[Integers, ...]]) -> Records:
    ids = id_dtype(1 + max((int(part[index].max(initial=0)) for part in parts for index in (0, 3)), default=0))

    def flat(index: int, dtype: type) -> npt.NDArray[Any]:
        return np.concatenate([np.zeros(0, np.int64), *(part[index] for part in parts)]).astype(dtype)

    def offsets(index: int) -> Integers:
        return np.concatenate([[0], np.cumsum([len(part[index]) for part in parts], dtype=np.int64)]).astype(np.int64)

    return Records(
        input_ids=flat(0, ids),
        sequence_offsets=offsets(0),
        segment_b_start=flat(1, np.int16),
        masked_lm_positions=flat(2, np.int16),
        masked_lm_ids=flat(3, ids),
        masked_lm_offsets=offsets(2),
        next_sentence_labels=flat(4, np.int8),
    )
