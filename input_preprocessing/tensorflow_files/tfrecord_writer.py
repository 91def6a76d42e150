"""Writer of the TFRecord files that tfrecord.py describes; features go in the order of their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bert.data.compiled import compiled
from bert.data.format import atomic_file
from bert.data.records import DataError, Records
from input_preprocessing.tensorflow_files.crc32c import TABLES, masked_crc
from input_preprocessing.tensorflow_files.tfrecord import HEADER, NAMES, Integers

Bytes = npt.NDArray[np.uint8]

_INPUT_IDS, _INPUT_MASK, _LABELS, _POSITIONS, _WEIGHTS, _NEXT_SENTENCE, _LENGTHS, _MASKS, _SEGMENTS = range(len(NAMES))
_BLOCK = 512  # Examples written at once


class Widths(NamedTuple):
    """Values of an Example's features: tokens, masked tokens, sequences of a packed row (0: not packed)."""

    tokens: int
    masks: int
    sequences: int = 0


class _Keys(NamedTuple):
    """The features' names, one after the other."""

    text: Bytes
    ends: Integers


class _Sequences(NamedTuple):
    """The arrays of records as the compiled writer takes them; Example i is sequences [rows[i], rows[i + 1])."""

    rows: Integers
    input_ids: npt.NDArray[Any]
    offsets: Integers
    b_starts: npt.NDArray[np.int16]
    positions: npt.NDArray[np.int16]
    labels: npt.NDArray[Any]
    masked_offsets: Integers
    next_labels: npt.NDArray[np.int8]


_KEYS = _Keys(np.frombuffer("".join(NAMES).encode(), dtype=np.uint8), np.cumsum([len(name) for name in NAMES]))


def _rows_of(records: Records) -> Integers:
    return np.arange(records.num_sequences + 1) if records.row_offsets is None else np.asarray(records.row_offsets)


def widths_of(records: Records) -> Widths:
    """The most tokens, masked tokens and sequences that a row holds."""
    rows = _rows_of(records)
    counts = [np.diff(offsets[rows]) for offsets in (records.sequence_offsets, records.masked_lm_offsets)]
    return Widths(*(int(count.max(initial=0)) for count in (*counts, np.diff(rows))))


def write_tfrecord(path: Path, records: Records, widths: Widths) -> None:
    """Writes the records, one row an Example, whole or not at all; a sequence is a row where they are not packed.

    Raises:
        DataError: an Example would hold more than the widths allow, or the file cannot be written.
    """
    held = widths_of(records)
    allowed = widths._replace(sequences=max(widths.sequences, 1))
    for what, most, limit in zip(("tokens", "masked tokens", "sequences"), held, allowed, strict=True):
        if most > limit:
            raise DataError(f"{path}: an Example would hold {most} {what}, at most {limit} were asked for; allow more")
    room = 11 * widths.tokens + 12 * widths.masks + 12 * widths.sequences + 640
    buffer = np.empty(_BLOCK * room, dtype=np.uint8)
    scratch = np.empty(room, dtype=np.uint8)
    sequences = _Sequences(
        _rows_of(records), records.input_ids, records.sequence_offsets, records.segment_b_start,
        records.masked_lm_positions, records.masked_lm_ids, records.masked_lm_offsets, records.next_sentence_labels,
    )  # fmt: skip
    with atomic_file(path) as partial, open(partial, "wb") as file:
        for start in range(0, records.num_rows, _BLOCK):
            end = min(start + _BLOCK, records.num_rows)
            size = _write_block(buffer, scratch, start, end, sequences, widths, _KEYS, TABLES)
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
def _put_positions(out, sequences, first, last, count):  # type: ignore[no-untyped-def]
    """Packs the masked positions of sequences [first, last), from the first token of all, and zeros up to `count`."""
    at = 0
    for i in range(first, last):
        shift = sequences.offsets[i] - sequences.offsets[first]
        for j in range(sequences.masked_offsets[i], sequences.masked_offsets[i + 1]):
            at = _put_varint(out, at, sequences.positions[j] + shift)
    end = at + count - (sequences.masked_offsets[last] - sequences.masked_offsets[first])
    out[at:end] = 0
    return end


@compiled
def _put_segments(out, sequences, first, last, count):  # type: ignore[no-untyped-def]
    """Packs 1 for each token of a segment B of sequences [first, last), else 0; returns the bytes written."""
    out[:count] = 0
    for i in range(first, last):
        start = sequences.offsets[i] - sequences.offsets[first]
        out[start + sequences.b_starts[i] : start + sequences.offsets[i + 1] - sequences.offsets[i]] = 1
    return count


@compiled
def _put_lengths(out, offsets, first, last, count):  # type: ignore[no-untyped-def]
    """Packs the lengths offsets[i + 1] - offsets[i] from first to last, and zeros up to `count` of them."""
    at = 0
    for i in range(first, last):
        at = _put_varint(out, at, offsets[i + 1] - offsets[i])
    end = at + count - (last - first)
    out[at:end] = 0
    return end


@compiled
def _put_features(out, at, scratch, row, sequences, widths, keys):  # type: ignore[no-untyped-def]
    """Appends all features of a row, in the order of NAMES; those of packed rows only where sequences have a width."""
    first, last = sequences.rows[row], sequences.rows[row + 1]
    begin, end = sequences.offsets[first], sequences.offsets[last]
    masked, masked_end = sequences.masked_offsets[first], sequences.masked_offsets[last]
    size = _put_values(scratch, sequences.input_ids, begin, end, widths.tokens)
    at = _put_feature(out, at, keys, _INPUT_IDS, scratch, size)
    size = _put_ones(scratch, 0, end - begin, widths.tokens)
    at = _put_feature(out, at, keys, _INPUT_MASK, scratch, size)
    size = _put_values(scratch, sequences.labels, masked, masked_end, widths.masks)
    at = _put_feature(out, at, keys, _LABELS, scratch, size)
    size = _put_positions(scratch, sequences, first, last, widths.masks)
    at = _put_feature(out, at, keys, _POSITIONS, scratch, size)
    size = _put_weights(scratch, masked_end - masked, widths.masks)
    at = _put_feature(out, at, keys, _WEIGHTS, scratch, size)
    size = _put_values(scratch, sequences.next_labels, first, last, max(widths.sequences, 1))
    at = _put_feature(out, at, keys, _NEXT_SENTENCE, scratch, size)
    if widths.sequences:
        size = _put_lengths(scratch, sequences.offsets, first, last, widths.sequences)
        at = _put_feature(out, at, keys, _LENGTHS, scratch, size)
        size = _put_lengths(scratch, sequences.masked_offsets, first, last, widths.sequences)
        at = _put_feature(out, at, keys, _MASKS, scratch, size)
    size = _put_segments(scratch, sequences, first, last, widths.tokens)
    return _put_feature(out, at, keys, _SEGMENTS, scratch, size)


@compiled
def _write_block(out, scratch, first, last, sequences, widths, keys, tables):  # type: ignore[no-untyped-def]
    """Writes the records of rows [first, last); returns the bytes written."""
    at = 0
    for i in range(first, last):
        # The data's own length goes before it: leave room for the longest header of an Example, move it up after.
        body = at + HEADER + 4
        size = _put_features(out, body, scratch, i, sequences, widths, keys) - body
        start = at + HEADER
        out[start] = 0x0A
        moved = _put_varint(out, start + 1, size)
        for k in range(size):
            out[moved + k] = out[body + k]
        end = moved + size
        _put_number(out, at, end - start, 8)
        _put_number(out, at + 8, masked_crc(out[at : at + 8], tables), 4)
        at = _put_number(out, end, masked_crc(out[start:end], tables), 4)
    return at
