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

from bert.data.records import IDS, Array, DataError, Metadata, Records, id_dtype, offsets_of

_COMMON = {"input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels"}
_PACKED = _COMMON | {"packed_input_len", "packed_masked_lm_len"}


def read(path: Path, file: h5py.File) -> tuple[Records, Metadata]:
    """Records of an open file of one of the three schemas; whole in memory.

    Raises:
        DataError: another schema, or lengths that do not add up.
    """
    names = set(file)
    if not names >= _COMMON:
        found = ", ".join(sorted(names)[:8]) or "nothing"
        raise DataError(f"{path} holds no training records (found {found}); prepare the data or check the path")
    flat, lengths, masked, rows = _packed(path, file) if names >= _PACKED else _unpacked(path, file)
    sequence_offsets = offsets_of(lengths)
    largest = max(int(flat[name].max(initial=0)) for name in IDS)
    ids = {name: flat[name].astype(id_dtype(largest + 1)) for name in IDS}
    if not (
        len(flat["input_ids"]) == len(flat["segment_ids"]) == sequence_offsets[-1]
        and len(flat["masked_lm_positions"]) == len(flat["masked_lm_ids"]) == masked.sum()
        and len(flat["next_sentence_labels"]) == len(lengths) == len(masked)
        and (lengths > 0).all()
    ):
        raise DataError(f"{path} is inconsistent: lengths of its datasets do not add up; copy or prepare it again")
    in_a = flat["segment_ids"] == 0
    starts = np.add.reduceat(in_a, sequence_offsets[:-1], dtype=np.int16) if len(lengths) else np.zeros(0, np.int16)
    records = Records(
        sequence_offsets=sequence_offsets,
        segment_b_start=starts.astype(np.int16),
        masked_lm_positions=flat["masked_lm_positions"],
        masked_lm_offsets=offsets_of(masked),
        next_sentence_labels=flat["next_sentence_labels"],
        **ids,
    )
    # Of variable-length shards only those that export_records wrote say how long a sequence may be.
    longest = int(file.attrs.get("max_seq_length", 512))
    width = longest if file["input_ids"].ndim == 1 else file["input_ids"].shape[1]
    return records.with_rows(rows), Metadata(max_seq_length=width, vocab_md5="", random_seed=-1, dupe_factor=0)


def _numbers(path: Path, file: h5py.File, name: str, dtype: Any) -> tuple[Array, Array]:
    """A dataset as `dtype`: a table as it is; of variable-length entries flat numbers, and the length of each.

    Raises:
        DataError: a number does not fit.
    """
    values, lengths, limits = file[name][:], np.zeros(0, np.int64), np.iinfo(dtype)
    if stored := h5py.check_vlen_dtype(file[name].dtype):
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        values = np.concatenate([np.zeros(0, stored), *values])
    if values.size and values.dtype != dtype and not limits.min <= values.min() <= values.max() <= limits.max:
        odd = values.max() if values.max() > limits.max else values.min()
        raise DataError(f"{path}: {name} has {odd}, and records hold {limits.min} to {limits.max}; prepare it again")
    return values.astype(dtype), lengths


Flat = tuple[dict[str, Array], Array, Array, Array | None]  # numbers by name, tokens and masked of a sequence, rows


def _packed(path: Path, file: h5py.File) -> Flat:
    lengths, per_row = _numbers(path, file, "packed_input_len", np.int64)
    masked, _ = _numbers(path, file, "packed_masked_lm_len", np.int64)
    input_ids, row_tokens = _numbers(path, file, "input_ids", np.int32)
    positions, _ = _numbers(path, file, "masked_lm_positions", np.int64)
    rows = offsets_of(per_row)
    starts = offsets_of(lengths)
    if len(masked) != len(lengths) or not np.array_equal(np.diff(starts[rows]), row_tokens):
        raise DataError(f"{path} is inconsistent: packed_input_len does not add up to input_ids; prepare it again")
    in_row = starts[:-1] - np.repeat(starts[rows[:-1]], per_row)  # first token of each sequence within its row
    if masked.sum() != len(positions):
        raise DataError(f"{path} is inconsistent: packed_masked_lm_len does not add up; copy or prepare it again")
    flat = {
        "input_ids": input_ids,
        "segment_ids": _numbers(path, file, "segment_ids", np.int8)[0],
        "masked_lm_positions": (positions - np.repeat(in_row, masked)).astype(np.int16),
        "masked_lm_ids": _numbers(path, file, "masked_lm_ids", np.int32)[0],
        "next_sentence_labels": _numbers(path, file, "next_sentence_labels", np.int8)[0],
    }
    return flat, lengths, masked, rows


def _unpacked(path: Path, file: h5py.File) -> Flat:
    """Of fixed or variable length."""
    positions, entries = _numbers(path, file, "masked_lm_positions", np.int16)
    input_ids, lengths = _numbers(path, file, "input_ids", np.int32)
    segment_ids, _ = _numbers(path, file, "segment_ids", np.int8)
    masked = positions != 0
    if input_ids.ndim == 2:
        if "input_mask" not in file:
            raise DataError(f"{path} has fixed-length input_ids but no input_mask; copy or prepare it again")
        real = file["input_mask"][:] != 0
        input_ids, segment_ids, lengths = input_ids[real], segment_ids[real], real.sum(axis=1)
        num_masked = masked.sum(axis=1)
    else:
        num_masked = np.bincount(np.repeat(np.arange(len(entries)), entries)[masked], minlength=len(entries))
    flat = {
        "input_ids": input_ids,
        "segment_ids": segment_ids,
        "masked_lm_positions": positions[masked],
        "masked_lm_ids": _numbers(path, file, "masked_lm_ids", np.int32)[0][masked],
        "next_sentence_labels": _numbers(path, file, "next_sentence_labels", np.int8)[0].reshape(-1),
    }
    return flat, lengths, num_masked, None
