"""The record format: sequences of any length, flat in HDF5, memory-mapped by readers.

One format for the evaluation set and for unpacked, binned and packed training data. Datasets are
one-dimensional and contiguous, so readers map them without HDF5; sequence i is tokens
[sequence_offsets[i], sequence_offsets[i + 1]). Packed files add row_offsets: row r holds the
sequences [row_offsets[r], row_offsets[r + 1]). There is no padding.

N sequences, R rows, M masked tokens.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from common.files import whole_file

from . import nvidia_format
from .digests import sum_of_hashes
from .hdf5 import Hdf5File, open_hdf5
from .records import DTYPES, IDS, Array, DataError, Metadata, Records, dtypes_of

FORMAT = "bert-records"
# A field that Metadata gains raises it by one. Every version from 1 on is read.
VERSION = 1
# What a file means that is older than a field, by the field's name; nothing is new since version 1.
MEANT_BEFORE: dict[str, Any] = {}


def _datasets(records: Records) -> dict[str, Array]:
    """Datasets by name, in the order they are written and digested."""
    named = {
        name: (getattr(records, name), dtype)
        for name, dtype in dtypes_of([records]).items()
    }
    return {
        name: np.ascontiguousarray(a, dtype=dtype)
        for name, (a, dtype) in named.items()
        if a is not None
    }


def content_digest(records: Records) -> str:
    """Digest (hex) of every dataset: names, sizes and bytes, order of sequences included."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in _datasets(records).items():
        # With sizes: bytes that move from one dataset to the next would go unnoticed.
        digest.update(f"{name} {len(array)}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()


def multiset_digest(records: Records) -> str:
    """Order-free digest (hex) of the sequences: the sum modulo 2^128 of a 128-bit hash of each.

    A shuffle or a packing keeps it; a lost, doubled or changed sequence alters it. Digests of
    several files add up (digests.add_multiset_digests).
    """
    return f"{sum_of_hashes(records):032x}"


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A hidden path beside `path` to write to; on success it is synced and renamed to `path`, on
    failure removed.

    Raises:
        DataError: the target cannot be written (no space, read-only, no such folder).
    """
    try:
        with whole_file(path) as partial:
            yield partial
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {_reason(error)}; check space and permissions, run again"
        ) from error


def _reason(error: Exception) -> str:
    """Short cause of an OSError; HDF5's messages are long."""
    code = getattr(error, "errno", None)
    text = os.strerror(code) if code else str(error)
    return text.splitlines()[0] if text else type(error).__name__


def _with_digests(records: Records, metadata: Metadata) -> Metadata:
    digests: dict[str, Any] = {
        "content_digest": content_digest(records),
        "multiset_digest": multiset_digest(records),
    }
    return dataclasses.replace(metadata, **digests)


def without_digests(metadata: Metadata) -> Metadata:
    """What a file says of its making, for comparison before its contents are known."""
    return dataclasses.replace(metadata, content_digest="", multiset_digest="")


def write_records(
    path: str | os.PathLike[str], records: Records, metadata: Metadata
) -> Metadata:
    """Writes the file, whole or not at all, and returns the metadata with both digests.

    Raises:
        DataError: the file cannot be written.
    """
    path, arrays = Path(path), _datasets(records)
    check_structure(path, records, metadata)
    metadata = _with_digests(records, metadata)
    attributes = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(metadata)}
    # As JSON, since HDF5 has no simple type for a list of pairs of texts.
    attributes["source"] = json.dumps(metadata.source)
    # Python's generator takes seeds that are too large for an HDF5 integer.
    if not -(2**63) <= metadata.random_seed < 2**63:
        attributes["random_seed"] = str(metadata.random_seed)
    # Datasets have their place in the file at once, and nothing is written to it yet.
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with atomic_file(path) as partial:
        try:  # contents are written without HDF5, which may crash on a full disk
            with h5py.File(partial, "w") as file:
                sets = {
                    n: file.create_dataset(n, a.shape, a.dtype, dcpl=layout.copy())
                    for n, a in arrays.items()
                }
                file.attrs.update(attributes)
                offsets = {
                    name: dataset.id.get_offset() or 0 for name, dataset in sets.items()
                }
        # HDF5 reports a failed flush (disk full) this way.
        except RuntimeError as error:
            raise OSError(str(error)) from error
        with open(partial, "r+b") as raw:
            # A full disk is found here, where it is an OSError.
            os.posix_fallocate(raw.fileno(), 0, os.path.getsize(partial))
            for name, array in arrays.items():
                raw.seek(offsets[name])
                raw.write(array.data)
    return metadata


def check_structure(
    path: str | os.PathLike[str], records: Records, metadata: Metadata
) -> None:
    """Checks in O(1) that sizes and ends of the arrays agree.

    Raises:
        DataError: they do not.
    """
    count, num_masked = records.num_sequences, len(records.masked_lm_ids)
    ends = {
        "sequence_offsets": len(records.input_ids),
        "masked_lm_offsets": num_masked,
        "row_offsets": count,
    }
    sizes = {
        "sequence_offsets": count + 1,
        "masked_lm_offsets": count + 1,
        "row_offsets": records.num_rows + 1,
        "segment_b_start": count,
        "masked_lm_positions": num_masked,
    }
    length, problem = metadata.max_seq_length, ""
    if length < 1:
        problem = f"max_seq_length is {length}"
    for name, size in sizes.items():
        array = getattr(records, name)
        if array is None:
            continue
        # Offsets have at least the one entry 0.
        if len(array) != size or size < (name in ends):
            problem = f"{name} has {len(array)} entries, expected {size}"
        elif name in ends and (array[0] != 0 or array[-1] != ends[name]):
            problem = f"{name} runs from {array[0]} to {array[-1]}, expected 0 to {ends[name]}"
    if problem:
        raise DataError(f"{path} is inconsistent: {problem}; prepare it again")


def _map(file: Hdf5File, mapped: Array, name: str) -> Array:
    """A dataset; a view of the file's mapping if contiguous, so that a file takes a single
    descriptor.
    """
    path, dataset = file.path, file.datasets.get(name)
    if dataset is None:
        raise DataError(f"{path} has no dataset {name}; prepare it again")
    allowed = [DTYPES[name], np.int32] if name in IDS else [DTYPES[name]]
    if len(dataset.shape) != 1 or dataset.is_ragged or dataset.dtype not in allowed:
        wanted = " or ".join(np.dtype(dtype).name for dtype in allowed)
        raise DataError(
            f"{path}: dataset {name} is {dataset.dtype} of {len(dataset.shape)} dimensions, expected one of {wanted}"
        )
    if dataset.shape[0] == 0 or dataset.offset is None:
        # Empty, or chunked by another writer: there is nothing to map, so a copy is made.
        return file.read(name)[0]
    end = dataset.offset + dataset.shape[0] * dataset.dtype.itemsize
    if end > len(mapped):
        raise DataError(f"{path} is truncated within {name}; copy or prepare it again")
    return mapped[dataset.offset : end].view(dataset.dtype)


def version_of(path: Path, attributes: dict[str, int | str]) -> int:
    """Raises DataError for a version that this program cannot know."""
    stated = str(attributes.get("version", ""))
    if not stated.isdecimal() or int(stated) < 1:
        raise DataError(f"{path} has no format version ({stated!r}); prepare it again")
    if int(stated) > VERSION:
        raise DataError(
            f"{path} has format version {stated}, and this program reads up to {VERSION}: "
            "use the release of this repository that wrote it, or a newer one"
        )
    return int(stated)


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((str(name), str(md5)) for name, md5 in json.loads(text))


# The attributes of a damaged file may be anything: each is converted.
_CONVERTED: dict[str, Callable[[Any], Any]] = {"int": int, "str": str}


def _read_metadata(path: Path, attributes: dict[str, int | str]) -> Metadata:
    version = version_of(path, attributes)
    values = {}
    try:
        for field in dataclasses.fields(Metadata):
            if version < VERSION and field.name not in attributes:
                values[field.name] = MEANT_BEFORE[field.name]
            elif field.name == "source":
                values["source"] = _pairs(str(attributes["source"]))
            else:
                # Types are texts (from __future__ import annotations, in records.py).
                value = attributes[field.name]
                values[field.name] = _CONVERTED[str(field.type)](value)
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} has a damaged or missing attribute ({error}); prepare it again"
        ) from error
    return Metadata(**values)


def open_records(path: str | os.PathLike[str]) -> tuple[Records, Metadata]:
    """Maps a file of records; NVIDIA-made packed, variable-length and fixed-length shards are read
    and converted.

    Costs O(1) for files of this format: their contents are checked by `verify_records` only.

    Raises:
        DataError: missing, truncated, foreign or inconsistent file.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"no data file {path}; check the path or prepare the data")
    file = open_hdf5(path)
    if file.attributes.get("format") == FORMAT:
        metadata = _read_metadata(path, file.attributes)
        names = [
            name for name in DTYPES if name != "row_offsets" or name in file.datasets
        ]
        mapped = np.memmap(path, np.uint8, "r")
        records = Records(**{name: _map(file, mapped, name) for name in names})
        # The compiled loops (batch.py) know two cases: both in 16 bits, or both in 32.
        if records.input_ids.dtype != records.masked_lm_ids.dtype:
            raise DataError(
                f"{path}: input_ids and masked_lm_ids are of two types; prepare it again"
            )
    else:
        records, metadata = nvidia_format.read(file)
    check_structure(path, records, metadata)
    # No digest proves what others made: a position that is off names a token of another sequence.
    if not metadata.content_digest:
        check_contents(path, records, metadata)
    return records, metadata


def recorded_digest(file: Hdf5File) -> str:
    """The content digest that a file states of itself; empty for one of other makers."""
    is_ours = file.attributes.get("format") == FORMAT
    return str(file.attributes.get("content_digest", "")) if is_ours else ""


def check_contents(
    path: str | os.PathLike[str], records: Records, metadata: Metadata
) -> None:
    """Checks every sequence: offsets grow, lengths, segment starts, masked positions and labels are
    in range.

    Raises:
        DataError: the first kind of fault found, with the sequence it is in.
    """
    lengths = records.sequence_lengths
    counts = np.diff(records.masked_lm_offsets)
    faults = {
        "length out of range": (lengths < 1) | (lengths > metadata.max_seq_length),
        "masked_lm_offsets fall": counts < 0,
        "segment B outside of the sequence": (records.segment_b_start < 0)
        | (records.segment_b_start > lengths),
        # All bits but the lowest: also finds negative labels.
        "next_sentence_label is neither 0 nor 1": (records.next_sentence_labels & ~1)
        != 0,
    }
    if not any(fault.any() for fault in faults.values()):
        # Offsets that do not fall stay within their ends, so these are no larger than the file.
        # owner (M,): the sequence of each masked token.
        owner = np.repeat(np.arange(records.num_sequences), counts)
        positions = records.masked_lm_positions.astype(np.int64)
        outside = (positions < 0) | (positions >= lengths[owner])
        unsorted = np.zeros(len(positions), dtype=bool)
        # Only within a sequence, as positions are relative and begin again in the next.
        unsorted[1:] = (np.diff(positions) <= 0) & (np.diff(owner) == 0)
        faults["masked position outside of the sequence"] = (
            np.bincount(owner[outside], minlength=len(lengths)) > 0
        )
        faults["masked positions are not ascending"] = (
            np.bincount(owner[unsorted], minlength=len(lengths)) > 0
        )
    for description, fault in faults.items():
        if fault.any():
            number = int(np.argmax(fault))
            raise DataError(
                f"{path}: {description} in sequence {number}; prepare it again"
            )
    if min(records.input_ids.min(initial=0), records.masked_lm_ids.min(initial=0)) < 0:
        raise DataError(f"{path} has a negative token id; prepare it again")
    if records.row_offsets is not None:
        per_row = np.diff(records.row_offsets)
        # Others' packers leave rows of no sequence.
        fewest = 1 if metadata.content_digest else 0
        bad = per_row < fewest
        if not bad.any():  # or the offsets may point anywhere
            # Tokens of each row (R): both kinds of offsets are cumulative.
            bad = (
                np.diff(records.sequence_offsets[records.row_offsets])
                > metadata.max_seq_length
            )
        if bad.any():
            raise DataError(
                f"{path}: row {int(np.argmax(bad))} is empty or over {metadata.max_seq_length} tokens"
            )


def verify_records(path: str | os.PathLike[str]) -> tuple[Records, Metadata]:
    """Opens the file, checks every sequence and recomputes both digests.

    For files of other makers, which have no digests, they are computed and returned in the
    metadata.

    Raises:
        DataError: unreadable, out of range, or a digest does not match.
    """
    records, metadata = open_records(path)
    check_contents(path, records, metadata)
    computed = _with_digests(records, metadata)
    if metadata.content_digest and computed != metadata:
        raise DataError(
            f"{path} was changed after it was written ("
            f"digest {computed.content_digest}, recorded {metadata.content_digest}); copy or prepare it again"
        )
    return records, computed
