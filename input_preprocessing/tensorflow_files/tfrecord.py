"""TFRecord files of training instances, as written by the reference's create_pretraining_data.py.

A record is its length (8 bytes), a checksum of the length, the data, a checksum of the data; the
data is a tf.train Example with seven zero-padded features of one sequence: input_ids, input_mask,
segment_ids (int64, max_seq_length), masked_lm_positions, masked_lm_ids (int64,
max_predictions_per_seq), masked_lm_weights (float32), next_sentence_labels (int64, 1). Features are
read in any order and written sorted by name. TensorFlow is not needed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert.data.compiled import compiled
from bert.data.format import atomic_file
from bert.data.packing import Integers
from bert.data.records import (
    IDS,
    Array,
    DataError,
    Metadata,
    Records,
    id_dtype,
    offsets_of,
)
from input_preprocessing.stage.manifest import PUBLISHED
from input_preprocessing.stage.reading import readable
from input_preprocessing.tensorflow_files.bundle import fields, masked_crc

NAMES = (  # in the order of protobuf's deterministic serialisation
    "input_ids",
    "input_mask",
    "masked_lm_ids",
    "masked_lm_positions",
    "masked_lm_weights",
    "next_sentence_labels",
    "segment_ids",
)
_WEIGHTS = "masked_lm_weights"
_BLOCK = 256  # Examples encoded at once
_LARGEST, _LARGEST_ID = 32767, (1 << 21) - 1  # varints of at most three bytes


class Widths(NamedTuple):
    """Sizes of an Example's features: tokens and masked tokens."""

    tokens: int
    masks: int


def notes_of_sizes(paths: Sequence[Path]) -> list[str]:
    """What the published sizes of TFRecords tell of those that bear their names, a line each."""
    sizes = {path.name.removesuffix(".tfrecord"): path.stat().st_size for path in paths}
    parts = [size for name, size in sizes.items() if name.endswith("-of-00500")]
    if len(parts) == 500:
        sizes["*"] = sum(parts)
    notes = []
    for name, wanted in PUBLISHED["tfrecord_bytes"].items():
        if (size := sizes.get(name)) is None:
            continue
        # A text of one's own may have such names, too: a note, and no error.
        other = f"the benchmark's has {wanted:,}: made of another text or with other options"
        standing = "as published" if size == wanted else other
        notes.append(
            f"{'all parts' if name == '*' else name}: {size:,} bytes, {standing}"
        )
    return notes


def row_features(records: Records) -> dict[str, tuple[Array, Array]]:
    """Features of each row: values and offsets by NVIDIA's names, which the reference's TFRecord
    files share.

    Sequences of a row are end to end, positions count from the row's first token; unpacked
    sequences are rows.
    """
    rows = np.arange(records.num_sequences + 1)
    if records.row_offsets is not None:
        rows = np.asarray(records.row_offsets)
    lengths, counts = records.sequence_lengths, np.diff(records.masked_lm_offsets)
    tokens, masked = records.sequence_offsets[rows], records.masked_lm_offsets[rows]
    # Place of each token within its sequence (T,).
    in_sequence = np.arange(len(records.input_ids)) - np.repeat(
        records.sequence_offsets[:-1], lengths
    )
    # First token of a sequence.
    in_row = records.sequence_offsets[:-1] - np.repeat(tokens[:-1], np.diff(rows))
    positions = records.masked_lm_positions + np.repeat(in_row, counts)
    features = {
        "input_ids": (records.input_ids, tokens),
        "segment_ids": (
            (in_sequence >= np.repeat(records.segment_b_start, lengths)).astype(
                np.int8
            ),
            tokens,
        ),
        "masked_lm_positions": (positions.astype(np.int16), masked),
        "masked_lm_ids": (records.masked_lm_ids, masked),
    }
    if records.row_offsets is not None:
        features["packed_input_len"] = lengths.astype(np.int16), rows
        features["packed_masked_lm_len"] = counts.astype(np.int16), rows
    return features | {"next_sentence_labels": (records.next_sentence_labels, rows)}


def write_tfrecord(path: Path, records: Records, widths: Widths) -> None:
    """Writes the records atomically, one Example per sequence.

    Raises:
        DataError: an Example would exceed the widths, or the file cannot be written.
    """
    records = records.with_rows(None)
    counts = {
        "tokens": (records.sequence_lengths, widths.tokens),
        "masked tokens": (np.diff(records.masked_lm_offsets), widths.masks),
    }
    for name, (count, limit) in counts.items():
        if (most := int(count.max(initial=0))) > limit:
            raise DataError(
                f"{path}: an Example would hold {most} {name}, at most {limit} were asked for; allow more"
            )
    # No Example has more bytes than `room`: varints take at most three each, weights four, and the
    # rest is for names and heads.
    room = 11 * widths.tokens + 12 * widths.masks + 640
    buffer, scratch = np.empty(_BLOCK * room, np.uint8), np.empty(room, np.uint8)
    with atomic_file(path) as partial, open(partial, "wb") as file:
        for first in range(0, records.num_sequences, _BLOCK):
            last = min(first + _BLOCK, records.num_sequences)
            part = records.select(np.arange(first, last))
            features = row_features(part)
            features["input_mask"] = (
                np.ones(len(part.input_ids), np.int8),
                features["input_ids"][1],
            )
            # Without values: _encode() writes ones in their place.
            features[_WEIGHTS] = np.ones(0, np.int8), features["masked_lm_ids"][1]
            prefixes = [b"\x0a" + bytes([len(name)]) + name.encode() for name in NAMES]
            values = [features[name][0] for name in NAMES]
            starts = offsets_of(list(map(len, values)))[:-1]
            positions = [
                features[name][1] + start
                for name, start in zip(NAMES, starts, strict=True)
            ]
            bounds = np.empty((last - first, 2), int)
            _encode(
                buffer,
                bounds,
                scratch,
                np.concatenate(values, dtype=np.int32),
                np.stack(positions),
                np.array([_width_of(name, widths) for name in NAMES]),
                np.frombuffer(b"".join(prefixes), np.uint8),
                offsets_of(list(map(len, prefixes))),
                NAMES.index(_WEIGHTS),
            )
            pieces: list[bytes] = []
            for start, end in bounds.tolist():
                data, size = (
                    buffer[start:end].tobytes(),
                    (end - start).to_bytes(8, "little"),
                )
                pieces += size, masked_crc(size), data, masked_crc(data)
            file.write(b"".join(pieces))


def _width_of(name: str, widths: Widths) -> int:
    """Size of a feature, including padding."""
    if name == "next_sentence_labels":
        return 1
    return widths.masks if name.startswith("masked") else widths.tokens


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
def _put_head(out, at, tag, size):  # type: ignore[no-untyped-def]
    """Writes the head of a length-delimited field of `size` bytes."""
    out[at] = tag
    return _put_varint(out, at + 1, size)


@compiled
def _encode(  # type: ignore[no-untyped-def]
    out, bounds, scratch, values, positions, widths, prefixes, prefix_ends, floats
):
    """Writes an Example per row, the i-th to out[bounds[i, 0]:bounds[i, 1]].

    Feature f is values[positions[f, i]:positions[f, i + 1]], padded to widths[f]; for f == floats it is
    as many ones.
    """
    at = 0
    for row in range(bounds.shape[0]):
        at += 6  # space for the head, whose size is known only at the end
        body = at
        for f in range(widths.size):
            first, last = positions[f, row], positions[f, row + 1]
            # Bytes, and values of padding.
            size, missing = 0, widths[f] - (last - first)
            if f == floats:  # 1.0, little-endian
                size, missing = 4 * (last - first), 4 * missing
                scratch[:size] = 0
                scratch[2:size:4] = 0x80
                scratch[3:size:4] = 0x3F
            else:
                for i in range(first, last):
                    size = _put_varint(scratch, size, values[i])
            scratch[size : size + missing] = 0
            size += missing
            prefix = prefixes[prefix_ends[f] : prefix_ends[f + 1]]
            # From the inside: packed values (tag 0x0A) in an Int64List (0x1A) or FloatList
            # (0x12), in a Feature (0x12) beside its name, both in an entry of the map (0x0A).
            list_size = 1 + _varint_size(size) + size
            feature_size = 1 + _varint_size(list_size) + list_size
            at = _put_head(
                out,
                at,
                0x0A,
                prefix.size + 1 + _varint_size(feature_size) + feature_size,
            )
            out[at : at + prefix.size] = prefix
            at = _put_head(out, at + prefix.size, 0x12, feature_size)
            at = _put_head(out, at, 0x12 if f == floats else 0x1A, list_size)
            at = _put_head(out, at, 0x0A, size)
            out[at : at + size] = scratch[:size]
            at += size
        bounds[row, 0] = body - 1 - _varint_size(at - body)
        bounds[row, 1] = at
        _put_head(out, bounds[row, 0], 0x0A, at - body)


def read_tfrecord(path: Path) -> tuple[Records, Metadata]:
    """All sequences of a file, with checksums verified.

    Raises:
        DataError: unreadable, damaged, or other records.
    """
    with readable(path, "check the path"):
        data = np.fromfile(path, dtype=np.uint8)
    parts: list[tuple[Integers, ...]] = []
    at = width = 0
    while at < data.size:
        # The length, 8 bytes, and its checksum.
        head = data[at : at + 12].tobytes()
        end = at + 12 + int.from_bytes(head[:8], "little")
        number, problem = len(parts), ""
        if data.size >= at + 16 and head[8:] != masked_crc(head[:8]):
            problem = "is damaged: a checksum does not match"
        elif end + 4 > data.size:
            problem = "ends within a record"
        elif data[end : end + 4].tobytes() != masked_crc(
            example := data[at + 12 : end].tobytes()
        ):
            problem = "is damaged: a checksum does not match"
        if problem:
            where = f"record {number}, byte {at}"
            raise DataError(
                f"{path} {problem} ({where}); copy it again, or it is not a TFRecord file"
            )
        try:
            features = _parse_example(example)
            parts.append(_sequence(features))
        except ValueError as error:
            raise DataError(
                f"{path}: record {number} is not a training instance: {error}; check the path"
            ) from error
        width = max(width, len(features["input_ids"]))
        at = end + 4
    columns = list(zip(*parts, strict=True)) or [()] * 5
    ids, b_starts, positions, labels, next_labels = (
        np.concatenate([np.zeros(0, np.int64), *each]) for each in columns
    )
    dtype = id_dtype(1 + max(int(each.max(initial=0)) for each in (ids, labels)))
    ends = [np.cumsum([0, *(len(part) for part in columns[index])]) for index in (0, 2)]
    records = Records(
        input_ids=ids.astype(dtype),
        sequence_offsets=ends[0],
        segment_b_start=b_starts.astype(np.int16),
        masked_lm_positions=positions.astype(np.int16),
        masked_lm_ids=labels.astype(dtype),
        masked_lm_offsets=ends[1],
        next_sentence_labels=next_labels.astype(np.int8),
    )
    # -1 and 0: a TFRecord file does not tell seed and dupe_factor.
    return records, Metadata(
        max_seq_length=max(width, 1), vocab_md5="", random_seed=-1, dupe_factor=0
    )


def _parse_example(data: bytes) -> dict[str, Integers]:
    """Numeric features of a tf.train.Example by name; nonzero floats become 1.

    Raises:
        ValueError: not an Example, or a number is out of range.
    """
    parsed = {}
    for number, features in fields(data):
        for _, entry in (
            fields(features) if number == 1 and isinstance(features, bytes) else ()
        ):
            parts = dict(fields(entry)) if isinstance(entry, bytes) else {}
            name, feature = parts.get(1), parts.get(2, b"")
            if not isinstance(name, bytes) or not isinstance(feature, bytes):
                raise ValueError("a feature has no name")
            arrays = [np.zeros(0, np.int64)]
            for kind, values in fields(feature):
                if kind in (2, 3) and isinstance(values, bytes):
                    arrays += [
                        _numbers(part, kind)
                        for number, part in fields(values)
                        if number == 1
                    ]
            parsed[name.decode("utf-8", "replace")] = np.concatenate(arrays)
    return parsed


def _numbers(part: int | bytes, kind: int) -> Integers:
    """Numbers of a packed or single float (kind 2) or varint field."""
    if kind == 2:
        raw = part.to_bytes(4, "little") if isinstance(part, int) else part
        return (np.frombuffer(raw, dtype="<f4") != 0).astype(np.int64)
    if isinstance(part, int):
        # Cut to what fits int64 and is still refused as too large.
        return np.array([min(part, _LARGEST_ID + 1)])
    out = np.empty(len(part), dtype=np.int64)
    count = _decode(np.frombuffer(part, dtype=np.uint8), out)
    if count < 0:
        raise ValueError("a number is negative or too large")
    return out[:count]


@compiled
def _decode(data, out):  # type: ignore[no-untyped-def]
    """Decodes packed varints; returns their number, -1 if one is unfinished or too large."""
    count = value = shift = 0
    for byte in data:
        # A fourth byte: the number has over 21 bits, or is negative, which takes ten bytes.
        if shift > 14:
            return -1
        value |= np.int64(byte & 127) << shift
        shift += 7
        if byte < 128:
            out[count] = value
            count += 1
            value = shift = 0
    return -1 if shift else count


def _sequence(features: dict[str, Integers]) -> tuple[Integers, ...]:
    """Tokens, start of segment B, positions, labels and next-sentence label, without padding."""
    if missing := [name for name in NAMES if name not in features]:
        raise ValueError(f"it has no {', '.join(missing)}")
    sizes = [len(features[name]) for name in NAMES]
    of_tokens, of_masks = (sizes[0], sizes[1], sizes[-1]), sizes[2:5]
    if len(set(of_tokens)) > 1 or len(set(of_masks)) > 1 or sizes[5] != 1:
        raise ValueError(f"its features have {sizes} values")
    # Padding has input_mask 0 and weight 0, so that the sums count tokens and masked tokens.
    total, masks = (int(features[name].sum()) for name in ("input_mask", _WEIGHTS))
    if features["input_mask"][total:].any() or features[_WEIGHTS][masks:].any():
        raise ValueError("its padding is not at the end")
    for name in NAMES:
        largest = _LARGEST_ID if name in IDS else _LARGEST
        if int(features[name].max(initial=0)) > largest:
            raise ValueError(f"a number is above {largest}")
    segments = features["segment_ids"][:total]
    if (np.diff(segments) < 0).any() or segments.max(initial=0) > 1:
        raise ValueError("its segment_ids are not zeros and then ones")
    return (
        features["input_ids"][:total],
        np.array([np.count_nonzero(segments == 0)]),
        features["masked_lm_positions"][:masks],
        features["masked_lm_ids"][:masks],
        features["next_sentence_labels"],
    )
