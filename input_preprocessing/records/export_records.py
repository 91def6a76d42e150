"""Turns record files into files for other trainers, one for one: TFRecord, or NVIDIA's HDF5 layout.

--source is a record file, a folder of them, or what prepare_data.sh was given as --outputdir, of which every data set
and the evaluation set are exported under their folders' names. Packed rows stay rows: with tfrecord as the reference's
features of all sequences of a row end to end, with packed_input_len and packed_masked_lm_len beside them; with nvidia
as its packed shards. --unpack writes their sequences one by one, as the reference's TFRecord files and NVIDIA's
variable-length shards have them. import_records makes the same records of either again. Every digest is checked on
reading; finished files are kept on a second run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from bert.data.digests import add_multiset_digests
from bert.data.format import atomic_file, open_records, verify_records
from bert.data.records import Array, DataError, Records
from input_preprocessing.records.import_records import plan_files
from input_preprocessing.stage import manifest
from input_preprocessing.stage.cli import add_jobs, human_bytes, positive
from input_preprocessing.stage.folder import StageFolder
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.tensorflow_files.tfrecord import Widths, widths_of, write_tfrecord

SUFFIXES = {"tfrecord": ".tfrecord", "nvidia": ".hdf5"}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What one folder of files holds; widths: values of a TFRecord Example's features, all 0 of NVIDIA's layout."""

    target: str
    files: int
    sequences: int
    rows: int
    multiset_digest: str
    widths: Widths


def folders_of(source: Path, target: Path) -> list[tuple[Path, Path]]:
    """Where records are read and what they become is written: of a prepared folder, each folder of records in it.

    Raises:
        DataError: the prepared folder's manifest is damaged.
    """
    manifests = sorted(source.glob("prepared-*.json")) if source.is_dir() else []
    names = {name for path in manifests for name in manifest.read(path).files if name.endswith(".hdf5")}
    parents = sorted({Path(name).parent for name in names})
    return [(source / parent, target / parent) for parent in parents] or [(source, target)]


def export_folder(
    source: Path, target: Path, *, kind: str, unpack: bool, max_predictions_per_seq: int, jobs: int
) -> Exported:
    """Writes a file of the kind for each record file of `source`, in `target`.

    Raises:
        DataError: a source that is not sound or is no record file, too many masks, or an unwritable target.
    """
    files = plan_files(source, target, SUFFIXES[kind])
    found, all_packed, all_widths, sequences, rows = [], set(), [], 0, 0
    for path, _ in files:
        records, metadata = open_records(path)
        if not metadata.content_digest:
            raise DataError(f"{path} is a file of others; make records of it with import_records first")
        packed = records.row_offsets is not None and not unpack
        found.append(metadata)
        all_packed.add(packed)
        held = widths_of(records) if packed else Widths(0, max_predictions_per_seq)
        all_widths.append(held._replace(tokens=metadata.max_seq_length))
        sequences += records.num_sequences
        rows += records.num_rows if packed else records.num_sequences
    if len(all_packed) > 1:
        raise DataError(f"{source} holds packed and unpacked records; give one folder of either")
    most = Widths(*map(max, zip(*all_widths, strict=True)))
    widths = Widths(0, 0) if kind == "nvidia" else most
    digests = {path.name: metadata.content_digest for (path, _), metadata in zip(files, found, strict=True)}
    recipe = {"format": kind, "unpack": unpack, "widths": widths, "source": digests}
    folder = StageFolder(target, "export_records", [f"*{SUFFIXES[kind]}"], recipe)
    if not folder.finished:
        tasks = [(path, made, unpack, widths) for path, made in files if not made.exists()]
        run_tasks("export", _export_file, tasks, jobs=jobs, weights=[path.stat().st_size for path, *_ in tasks])
        folder.finish([made.name for _, made in files])
    digest = add_multiset_digests([metadata.multiset_digest for metadata in found])
    return Exported(
        target=str(target), files=len(files), sequences=sequences, rows=rows, multiset_digest=digest, widths=widths
    )


def _export_file(task: tuple[Path, Path, bool, Widths]) -> None:
    source, target, unpack, widths = task
    records, metadata = verify_records(source)
    if unpack:
        records = records.with_rows(None)
    if widths.tokens:
        write_tfrecord(target, records, widths)
    else:
        write_nvidia_shard(target, records, metadata.max_seq_length)


def write_nvidia_shard(path: Path, records: Records, max_seq_length: int) -> None:
    """Writes a shard as bert.data.nvidia_format reads it, whole or not at all: packed rows, or single sequences.

    Every dataset has one entry a row, of variable length: input_ids, segment_ids, masked_lm_positions (from the row's
    first token), masked_lm_ids, next_sentence_labels, and for packed rows packed_input_len and packed_masked_lm_len,
    the tokens and masked tokens of each sequence. Sequences that are not packed have next_sentence_labels as plain
    numbers. The ids are int16, as NVIDIA's, but int32 of a vocabulary above 32,768. Holds the file in memory.

    Raises:
        DataError: a masked token that the layout cannot tell from padding, or the file cannot be written.
    """
    rows = records.row_offsets
    if rows is None and len(zeros := np.flatnonzero(records.masked_lm_positions == 0)):
        sequence = int(np.searchsorted(records.masked_lm_offsets, zeros[0], "right")) - 1
        raise DataError(f"{path}: sequence {sequence} has its first token masked, which NVIDIA's layout takes for none")
    sequences = np.arange(records.num_sequences + 1) if rows is None else rows
    lengths, counts = records.sequence_lengths, np.diff(records.masked_lm_offsets)
    tokens, masked = records.sequence_offsets[sequences], records.masked_lm_offsets[sequences]
    in_sequence = np.arange(len(records.input_ids)) - np.repeat(records.sequence_offsets[:-1], lengths)
    segments = (in_sequence >= np.repeat(records.segment_b_start, lengths)).astype(np.int8)
    in_row = records.sequence_offsets[:-1] - np.repeat(tokens[:-1], np.diff(sequences))  # first token of a sequence
    positions = (records.masked_lm_positions + np.repeat(in_row, counts)).astype(np.int16)
    columns: dict[str, tuple[Array, Array]] = {  # values, and the offsets of each entry
        "input_ids": (records.input_ids, tokens),
        "segment_ids": (segments, tokens),
        "masked_lm_positions": (positions, masked),
        "masked_lm_ids": (records.masked_lm_ids, masked),
    }
    if rows is not None:
        columns["packed_input_len"] = lengths.astype(np.int16), rows
        columns["packed_masked_lm_len"] = counts.astype(np.int16), rows
        columns["next_sentence_labels"] = records.next_sentence_labels, rows
    # In memory, not on the disk: HDF5 ends badly on a full one.
    with h5py.File(path.name, "w", driver="core", backing_store=False) as file:
        file.attrs["max_seq_length"] = max_seq_length
        for name, (values, offsets) in columns.items():
            values, ends = np.asarray(values), offsets.tolist()
            entries = np.empty(len(ends) - 1, dtype=object)
            for i in range(len(entries)):
                entries[i] = values[ends[i] : ends[i + 1]]
            file.create_dataset(name, data=entries, dtype=h5py.vlen_dtype(values.dtype))
        if rows is None:
            file["next_sentence_labels"] = records.next_sentence_labels
        file.flush()
        image = file.id.get_file_image()
    with atomic_file(path) as partial:
        partial.write_bytes(image)


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, required=True, help="record file, folder of them, or prepared folder")
    parser.add_argument("--target", type=Path, required=True, help="folder for the files")
    parser.add_argument("--format", choices=tuple(SUFFIXES), required=True)
    parser.add_argument("--unpack", action="store_true", help="write the sequences of packed rows one by one")
    room = "masked tokens that a TFRecord Example of one sequence has room for (default %(default)s)"
    parser.add_argument("--max-predictions-per-seq", type=positive, default=76, help=room)
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    add_jobs(parser)
    options = parser.parse_args()
    done = []
    for source, target in folders_of(options.source, options.target):
        exported = export_folder(
            source, target, kind=options.format, unpack=options.unpack,
            max_predictions_per_seq=options.max_predictions_per_seq, jobs=options.jobs,
        )  # fmt: skip
        tokens, masks, packed = exported.widths
        rows = f" in {exported.rows:,} rows" if packed or exported.rows != exported.sequences else ""
        size = human_bytes(sum(path.stat().st_size for path in target.iterdir() if path.suffix in SUFFIXES.values()))
        widths = f"; an Example has {tokens} tokens, {masks} masked" if tokens else ""
        widths += f", {packed} sequences" if packed else ""
        told = f"{target}: {exported.sequences:,} sequences{rows}, {exported.files} files, {size}{widths}"
        print(told, file=sys.stderr)
        done.append({**dataclasses.asdict(exported), "widths": exported.widths._asdict()})
    if options.json:
        print(json.dumps({"format": options.format, "folders": done}))
