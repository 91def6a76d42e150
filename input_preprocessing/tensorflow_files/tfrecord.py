"""TFRecord files of training instances, as the reference's create_pretraining_data.py writes them, and of packed rows.

A record is its length (8 bytes), a checksum of the length, the data, a checksum of the data; the data is a tf.train
Example, its features zero padded. The reference's has seven and holds one sequence: input_ids, input_mask, segment_ids
(int64, max_seq_length), masked_lm_positions, masked_lm_ids (int64, max_predictions_per_seq), masked_lm_weights
(float32), next_sentence_labels (int64, 1). A packed row has the same of all its sequences end to end, positions counted
from the row's first token, one next-sentence label a sequence, and two features more, by NVIDIA's names:
packed_input_len and packed_masked_lm_len (int64), the tokens and masked tokens of each sequence. Features come in any
order. TensorFlow is not needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert.data.compiled import compiled
from bert.data.records import IDS, DataError, Metadata, Records, id_dtype
from input_preprocessing.tensorflow_files.crc32c import TABLES, masked_crc
from input_preprocessing.tensorflow_files.protobuf import fields

Integers = npt.NDArray[np.int64]

PACKED_NAMES = ("packed_input_len", "packed_masked_lm_len")
NAMES = (  # in the order of protobuf's deterministic serialisation
    "input_ids",
    "input_mask",
    "masked_lm_ids",
    "masked_lm_positions",
    "masked_lm_weights",
    "next_sentence_labels",
    *PACKED_NAMES,
    "segment_ids",
)
HEADER, FOOTER = 12, 4
_LARGEST, _LARGEST_ID = 32767, (1 << 21) - 1  # a number of three bytes


@compiled
def _number(data, at, width):  # type: ignore[no-untyped-def]
    value = 0
    for k in range(width):
        value |= np.int64(data[at + k]) << (8 * k)
    return value


@compiled
def _frame(data, at, tables):  # type: ignore[no-untyped-def]
    """(start, end) of the data of the record at `at`; start -1: cut short, -2: wrong checksum."""
    if at + HEADER + FOOTER > data.size:
        return -1, at
    if _number(data, at + 8, 4) != np.int64(masked_crc(data[at : at + 8], tables)):
        return -2, at
    size = _number(data, at, 8)
    start = at + HEADER
    if size < 0 or size > data.size - start - FOOTER:
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
    rows, packed = [0], False
    at = width = 0
    while at < data.size:
        start, end = _frame(data, at, TABLES)
        if start < 0:
            what = "ends within a record" if start == -1 else "is damaged: a checksum does not match"
            where = f"record {len(rows) - 1}, byte {at}"
            raise DataError(f"{path} {what} ({where}); copy it again, or it is no TFRecord file")
        try:
            features = parse_example(data[start:end].tobytes())
            parts += _sequences(features)
        except ValueError as error:
            number = len(rows) - 1
            raise DataError(f"{path}: record {number} is not a training instance: {error}; check the path") from error
        if len(rows) > 1 and packed != (PACKED_NAMES[0] in features):
            raise DataError(f"{path} has packed rows and single sequences; they belong in files of their own")
        packed = PACKED_NAMES[0] in features
        rows.append(len(parts))
        width = max(width, len(features["input_ids"]))
        at = end + FOOTER
    records = _records(parts).with_rows(rows if packed else None)
    return records, Metadata(max_seq_length=max(width, 1), vocab_md5="", random_seed=-1, dupe_factor=0)


def _sequences(features: dict[str, Integers]) -> list[tuple[Integers, ...]]:
    """Tokens, start of B, positions, labels and next-sentence label of each sequence of an Example, without padding."""
    missing = [name for name in NAMES if name not in features and name not in PACKED_NAMES]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}")
    total, masks = (int(features[name].sum()) for name in ("input_mask", "masked_lm_weights"))
    packed = [features[name] for name in PACKED_NAMES if name in features]
    if not packed:
        packed = [np.array([total]), np.array([masks])]
    sizes = [len(features[name]) for name in NAMES if name in features]
    if not (
        len({len(features[name]) for name in ("input_ids", "input_mask", "segment_ids")}) == 1
        and len({len(features[name]) for name in NAMES[2:5]}) == 1
        and [len(lengths) for lengths in packed] == [len(features["next_sentence_labels"])] * 2
    ):
        raise ValueError(f"its features have {sizes} values")
    if features["input_mask"][total:].any() or features["masked_lm_weights"][masks:].any():
        raise ValueError("its padding is not at the end")
    for name, values in features.items():
        largest = _LARGEST_ID if name in IDS else _LARGEST
        if name in NAMES and int(values.max(initial=0)) > largest:
            raise ValueError(f"a number is above {largest}")
    count = int(np.count_nonzero(packed[0]))
    if packed[0][count:].any() or [int(lengths[:count].sum()) for lengths in packed] != [total, masks]:
        raise ValueError(f"its {' and '.join(PACKED_NAMES)} do not add up")
    ends = [np.concatenate([[0], np.cumsum(lengths[:count])]).tolist() for lengths in packed]
    return [_sequence(features, i, *(slice(end[i], end[i + 1]) for end in ends)) for i in range(count)]


def _sequence(features: dict[str, Integers], number: int, tokens: slice, masked: slice) -> tuple[Integers, ...]:
    segments = features["segment_ids"][tokens]
    if (np.diff(segments) < 0).any() or segments.max(initial=0) > 1:
        raise ValueError("its segment_ids are not zeros and then ones")
    return (
        features["input_ids"][tokens],
        np.array([np.count_nonzero(segments == 0)]),
        features["masked_lm_positions"][masked] - tokens.start,
        features["masked_lm_ids"][masked],
        features["next_sentence_labels"][number : number + 1],
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
