"""Reader of shards made by NVIDIA's scripts (fixed-length, variable-length, packed), and by Habana's packing script.

A sequence's length and segment B come from packed_input_len, input_mask or the length of the variable-length entry, and
from segment_ids. Fixed and variable-length files have no count of masked tokens: it is the number of nonzero positions,
since position 0 is [CLS]. Rows without a sequence, which NVIDIA's packer sometimes leaves, are kept.

Habana's rows (Model-References, pack_pretraining_data_pytorch.py) are tables: input_mask has at each token the number
of its sequence, from 1, and 0 at padding, next_sentence_weights a 1 for each sequence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from bert.data.records import IDS, Array, DataError, Metadata, Records, id_dtype, offsets_of

_COLUMNS: dict[str, Any] = {
    "input_ids": np.int32, "segment_ids": np.int8, "masked_lm_positions": np.int16, "masked_lm_ids": np.int32,
    "next_sentence_labels": np.int8,
}  # fmt: skip
_PACKED = {
    "packed_input_len": np.int64,
    "packed_masked_lm_len": np.int64,
    "masked_lm_positions": np.int64,
}  # in a row


def read(path: Path, file: h5py.File) -> tuple[Records, Metadata]:
    """Records of an open file of one of the four schemas, read into memory.

    Raises:
        DataError: another schema, or lengths that do not add up.
    """
    names = set(file)
    if not names >= _COLUMNS.keys():
        found = ", ".join(sorted(names)[:8]) or "nothing"
        raise DataError(
            f"{path} holds no training records (found {found}); prepare the data or check the path"
        )
    columns = _COLUMNS | (_PACKED if names >= _PACKED.keys() else {})
    numbers = {name: _numbers(path, file, name, dtype) for name, dtype in columns.items()}
    flat, entries = ({name: pair[i] for name, pair in numbers.items()} for i in (0, 1))
    width, rows = 512, None
    if "next_sentence_weights" in names and flat["input_ids"].ndim == 2:
        width = flat["input_ids"].shape[1]
        mask, weights = file["input_mask"][:], file["next_sentence_weights"][:]
        flat, entries = _rows_of_tables(path, flat, mask, weights)
    positions = flat["masked_lm_positions"]
    if "packed_input_len" in flat:
        lengths, masked, per_row = (
            flat["packed_input_len"],
            flat["packed_masked_lm_len"],
            entries["packed_input_len"],
        )
        rows, starts = offsets_of(per_row), offsets_of(lengths)
        if len(masked) != len(lengths) or not np.array_equal(
            np.diff(starts[rows]), entries["input_ids"]
        ):
            raise DataError(
                f"{path} is inconsistent: packed_input_len does not add up to input_ids; prepare it again"
            )
        if masked.sum() != len(positions):
            raise DataError(
                f"{path} is inconsistent: packed_masked_lm_len does not add up; copy or prepare it again"
            )
        in_row = starts[:-1] - np.repeat(
            starts[rows[:-1]], per_row
        )  # first token of each sequence within its row
        flat["masked_lm_positions"] = (positions - np.repeat(in_row, masked)).astype(np.int16)
    else:
        is_masked, lengths, owner = (
            positions != 0,
            entries["input_ids"],
            entries["masked_lm_positions"],
        )
        if flat["input_ids"].ndim == 2:
            if "input_mask" not in file:
                raise DataError(
                    f"{path} has fixed-length input_ids but no input_mask; copy or prepare it again"
                )
            real, width = file["input_mask"][:] != 0, flat["input_ids"].shape[1]
            flat |= {name: flat[name][real] for name in ("input_ids", "segment_ids")}
            lengths, owner = real.sum(axis=1), np.full(len(positions), positions.shape[1])
        masked = np.bincount(
            np.repeat(np.arange(len(owner)), owner)[is_masked.reshape(-1)], minlength=len(owner)
        )
        flat |= {name: flat[name][is_masked] for name in ("masked_lm_positions", "masked_lm_ids")}
        flat["next_sentence_labels"] = flat["next_sentence_labels"].reshape(-1)
    if not (
        len(flat["input_ids"]) == len(flat["segment_ids"]) == lengths.sum()
        and len(flat["masked_lm_positions"]) == len(flat["masked_lm_ids"]) == masked.sum()
        and len(flat["next_sentence_labels"]) == len(lengths) == len(masked)
        and (lengths > 0).all()
    ):
        raise DataError(
            f"{path} is inconsistent: lengths of its datasets do not add up; copy or prepare it again"
        )
    sequence_offsets, dtype = (
        offsets_of(lengths),
        id_dtype(1 + max(int(flat[name].max(initial=0)) for name in IDS)),
    )
    starts_of_b = np.zeros(len(lengths), np.int16)
    if len(lengths):
        np.add.reduceat(flat["segment_ids"] == 0, sequence_offsets[:-1], out=starts_of_b)
    records = Records(
        input_ids=flat["input_ids"].astype(dtype),
        sequence_offsets=sequence_offsets,
        segment_b_start=starts_of_b,
        masked_lm_positions=flat["masked_lm_positions"],
        masked_lm_ids=flat["masked_lm_ids"].astype(dtype),
        masked_lm_offsets=offsets_of(masked),
        next_sentence_labels=flat["next_sentence_labels"],
    )
    if file["input_ids"].ndim == 1:  # only shards of export_records record the length limit
        width = int(file.attrs.get("max_seq_length", width))
    return records.with_rows(rows), Metadata(
        max_seq_length=width, vocab_md5="", random_seed=-1, dupe_factor=0
    )


def _rows_of_tables(
    path: Path, flat: dict[str, Array], mask: Array, weights: Array
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Habana's tables [rows, width] as NVIDIA's packed columns, with the entries of each row.

    Raises:
        DataError: sequences of a row that do not follow one another, or counts that disagree.
    """
    real, per_row = mask > 0, mask.max(axis=1, initial=0).astype(np.int64)
    first = np.concatenate([np.zeros((len(mask), 1), mask.dtype), mask[:, :-1]], axis=1)
    steps = (mask.astype(np.int64) - first)[real]
    padded_inside = (real[:, 1:] & ~real[:, :-1]).any()
    if padded_inside or not np.isin(steps, (0, 1)).all() or (weights.sum(axis=1) != per_row).any():
        raise DataError(
            f"{path} is inconsistent: input_mask does not number the sequences of a row; copy or pack it again"
        )
    number = offsets_of(per_row)[:-1, None] - 1 + mask  # of each token's sequence in the file
    masked = flat["masked_lm_ids"] != 0
    row, _ = np.nonzero(masked)
    positions = flat["masked_lm_positions"][masked].astype(np.int64)
    if (
        (positions < 0).any()
        or (positions >= mask.shape[1]).any()
        or not real[row, positions].all()
    ):
        raise DataError(
            f"{path} is inconsistent: a masked position is outside of its row; copy or pack it again"
        )
    count = int(per_row.sum())
    columns = {name: flat[name][real] for name in ("input_ids", "segment_ids")}
    columns |= {"masked_lm_positions": positions, "masked_lm_ids": flat["masked_lm_ids"][masked]}
    columns["next_sentence_labels"] = flat["next_sentence_labels"][weights > 0]
    columns["packed_input_len"] = np.bincount(number[real], minlength=count)
    columns["packed_masked_lm_len"] = np.bincount(number[row, positions], minlength=count)
    return columns, {"input_ids": real.sum(axis=1), "packed_input_len": per_row}


def _numbers(path: Path, file: h5py.File, name: str, dtype: Any) -> tuple[Array, Array]:
    """A dataset as `dtype`: a table unchanged; variable-length entries flattened, with their lengths.

    Raises:
        DataError: a number does not fit.
    """
    values, lengths, limits = file[name][:], np.zeros(0, np.int64), np.iinfo(dtype)
    if stored := h5py.check_vlen_dtype(file[name].dtype):
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        values = np.concatenate([np.zeros(0, stored), *values])
    if (
        values.size
        and values.dtype != dtype
        and not limits.min <= values.min() <= values.max() <= limits.max
    ):
        odd = values.max() if values.max() > limits.max else values.min()
        raise DataError(
            f"{path}: {name} has {odd}, and records hold {limits.min} to {limits.max}; prepare it again"
        )
    return values.astype(dtype), lengths
