"""Reader of the shards that NVIDIA's scripts make (fixed-length, variable-length, packed): people have them on disk.

A sequence's length and segment B come from packed_input_len, input_mask or the length of the variable-length entry, and
from segment_ids. Fixed and variable-length files keep no count of masked tokens: it is the number of positions that are
not 0, since position 0 is [CLS]. Rows of no sequence, which NVIDIA's packer leaves now and then, come as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from .records import IDS, Array, DataError, Metadata, Records, id_dtype

_COMMON = {"input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels"}
_PACKED = _COMMON | {"packed_input_len", "packed_masked_lm_len"}


def read(path: Path, file: h5py.File) -> tuple[Records, Metadata]:
    """Records of an open file of one of the three schemas; whole in memory.

    Raises:
        DataError: another schema, or lengths that do not add up.
    """
    names = set(file)
    if names >= _PACKED:
        records = _packed(path, file)
    elif names >= _COMMON:
        records = _fixed(path, file) if file["input_ids"].ndim == 2 else _variable(path, file)
    else:
        found = ", ".join(sorted(names)[:8]) or "nothing"
        raise DataError(f"{path} holds no training records (found {found}); prepare the data or check the path")
    # Of variable-length shards only those that export_records wrote say how long a sequence may be.
    longest = int(file.attrs.get("max_seq_length", 512))
    width = longest if file["input_ids"].ndim == 1 else file["input_ids"].shape[1]
    return records, Metadata(max_seq_length=width, vocab_md5="", random_seed=-1, dupe_factor=0)


def _offsets(lengths: Array) -> Array:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _narrowed(path: Path, name: str, values: Array, dtype: Any) -> Array:
    """The values as `dtype`.

    Raises:
        DataError: one does not fit.
    """
    limits = np.iinfo(dtype)
    if len(values) and values.dtype != dtype and not limits.min <= values.min() <= values.max() <= limits.max:
        odd = values.max() if values.max() > limits.max else values.min()
        raise DataError(f"{path}: {name} has {odd}, and records hold {limits.min} to {limits.max}; prepare it again")
    return values.astype(dtype)


def _ragged(path: Path, file: h5py.File, name: str, dtype: Any) -> tuple[Array, Array]:
    """A variable-length dataset as flat values and the length of each entry."""
    entries = file[name][:]
    lengths = np.fromiter((len(entry) for entry in entries), dtype=np.int64, count=len(entries))
    stored = h5py.check_vlen_dtype(file[name].dtype) or file[name].dtype
    return _narrowed(path, name, np.concatenate([np.zeros(0, stored), *entries]), dtype), lengths


def _table(path: Path, file: h5py.File, name: str, dtype: Any) -> Array:
    """A dataset of numbers, whole."""
    return _narrowed(path, name, file[name][:], dtype)


def _assemble(path: Path, fields: dict[str, Array], lengths: Array, masked: Array) -> Records:
    """Records from flat arrays, the length of each sequence and its number of masked tokens."""
    sequence_offsets = _offsets(lengths)
    largest = max(int(fields[name].max(initial=0)) for name in IDS)
    fields |= {name: fields[name].astype(id_dtype(largest + 1)) for name in IDS}
    if not (
        len(fields["input_ids"]) == len(fields["segment_ids"]) == sequence_offsets[-1]
        and len(fields["masked_lm_positions"]) == len(fields["masked_lm_ids"]) == masked.sum()
        and len(fields["next_sentence_labels"]) == len(lengths) == len(masked)
        and (lengths > 0).all()
    ):
        raise DataError(f"{path} is inconsistent: lengths of its datasets do not add up; copy or prepare it again")
    in_a = fields["segment_ids"] == 0
    starts = np.add.reduceat(in_a, sequence_offsets[:-1], dtype=np.int16) if len(lengths) else np.zeros(0, np.int16)
    return Records(
        input_ids=fields["input_ids"],
        sequence_offsets=sequence_offsets,
        segment_b_start=starts.astype(np.int16),
        masked_lm_positions=fields["masked_lm_positions"],
        masked_lm_ids=fields["masked_lm_ids"],
        masked_lm_offsets=_offsets(masked),
        next_sentence_labels=fields["next_sentence_labels"],
    )


def _packed(path: Path, file: h5py.File) -> Records:
    lengths, per_row = _ragged(path, file, "packed_input_len", np.int64)
    masked, _ = _ragged(path, file, "packed_masked_lm_len", np.int64)
    input_ids, row_tokens = _ragged(path, file, "input_ids", np.int32)
    positions, _ = _ragged(path, file, "masked_lm_positions", np.int64)
    rows = _offsets(per_row)
    starts = _offsets(lengths)
    if len(masked) != len(lengths) or not np.array_equal(np.diff(starts[rows]), row_tokens):
        raise DataError(f"{path} is inconsistent: packed_input_len does not add up to input_ids; prepare it again")
    in_row = starts[:-1] - np.repeat(starts[rows[:-1]], per_row)  # first token of each sequence within its row
    if masked.sum() != len(positions):
        raise DataError(f"{path} is inconsistent: packed_masked_lm_len does not add up; copy or prepare it again")
    fields = {
        "input_ids": input_ids,
        "segment_ids": _ragged(path, file, "segment_ids", np.int8)[0],
        "masked_lm_positions": (positions - np.repeat(in_row, masked)).astype(np.int16),
        "masked_lm_ids": _ragged(path, file, "masked_lm_ids", np.int32)[0],
        "next_sentence_labels": _ragged(path, file, "next_sentence_labels", np.int8)[0],
    }
    return _assemble(path, fields, lengths, masked).with_rows(rows)


def _variable(path: Path, file: h5py.File) -> Records:
    input_ids, lengths = _ragged(path, file, "input_ids", np.int32)
    positions, entries = _ragged(path, file, "masked_lm_positions", np.int16)
    real = positions != 0
    fields = {
        "input_ids": input_ids,
        "segment_ids": _ragged(path, file, "segment_ids", np.int8)[0],
        "masked_lm_positions": positions[real],
        "masked_lm_ids": _ragged(path, file, "masked_lm_ids", np.int32)[0][real],
        "next_sentence_labels": _table(path, file, "next_sentence_labels", np.int8).reshape(-1),
    }
    owner = np.repeat(np.arange(len(entries)), entries)
    return _assemble(path, fields, lengths, np.bincount(owner[real], minlength=len(entries)))


def _fixed(path: Path, file: h5py.File) -> Records:
    ids = _table(path, file, "input_ids", np.int32)
    if "input_mask" not in file:
        raise DataError(f"{path} has fixed-length input_ids but no input_mask; copy or prepare it again")
    real = file["input_mask"][:] != 0
    positions = _table(path, file, "masked_lm_positions", np.int16)
    masked = positions != 0
    fields = {
        "input_ids": ids[real],
        "segment_ids": file["segment_ids"][:][real],
        "masked_lm_positions": positions[masked],
        "masked_lm_ids": _table(path, file, "masked_lm_ids", np.int32)[masked],
        "next_sentence_labels": _table(path, file, "next_sentence_labels", np.int8).reshape(-1),
    }
    return _assemble(path, fields, real.sum(axis=1), masked.sum(axis=1))
