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

from bert.data.digests import add_multiset_digests
from bert.data.format import open_records, verify_records
from bert.data.records import DataError
from input_preprocessing.records.import_records import plan_files
from input_preprocessing.records.nvidia_shards import write_nvidia_shard
from input_preprocessing.stage import manifest
from input_preprocessing.stage.cli import add_jobs, human_bytes, positive, run, stage_parser
from input_preprocessing.stage.folder import StageFolder
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.tensorflow_files.tfrecord_writer import Widths, widths_of, write_tfrecord

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


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What a record file says of itself."""

    content_digest: str
    multiset_digest: str
    sequences: int
    rows: int
    packed: bool
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
    found = [_describe(path, unpack) for path, _ in files]
    if len({one.packed for one in found}) > 1:
        raise DataError(f"{source} holds packed and unpacked records; give one folder of either")
    widths = Widths(*(max(column) for column in zip(*(one.widths for one in found), strict=True)))
    if kind == "nvidia":
        widths = Widths(0, 0)
    elif not found[0].packed:
        widths = Widths(widths.tokens, max_predictions_per_seq)
    recipe = {
        "format": kind,
        "unpack": unpack,
        "widths": widths,
        "source": {path.name: one.content_digest for (path, _), one in zip(files, found, strict=True)},
    }
    folder = StageFolder(target, "export_records", [f"*{SUFFIXES[kind]}"], recipe)
    if not folder.finished:
        tasks = [_Task(path, made, unpack, widths) for path, made in files if not made.exists()]
        weights = [task.source.stat().st_size for task in tasks]
        run_tasks("export", _export_file, tasks, jobs=jobs, weights=weights)
        folder.finish([made.name for _, made in files])
    return Exported(
        target=str(target),
        files=len(files),
        sequences=sum(one.sequences for one in found),
        rows=sum(one.rows for one in found),
        multiset_digest=add_multiset_digests([one.multiset_digest for one in found]),
        widths=widths,
    )


def _describe(path: Path, unpack: bool) -> _Source:
    records, metadata = open_records(path)
    if not metadata.content_digest:
        raise DataError(f"{path} is a file of others; make records of it with import_records first")
    packed = records.row_offsets is not None and not unpack
    held = widths_of(records) if packed else Widths(0, 0)
    return _Source(
        content_digest=metadata.content_digest,
        multiset_digest=metadata.multiset_digest,
        sequences=records.num_sequences,
        rows=records.num_rows if packed else records.num_sequences,
        packed=packed,
        widths=held._replace(tokens=metadata.max_seq_length),
    )


@dataclass(frozen=True)
class _Task:
    source: Path
    target: Path
    unpack: bool
    widths: Widths


def _export_file(task: _Task) -> None:
    records, metadata = verify_records(task.source)
    if task.unpack:
        records = records.with_rows(None)
    if task.widths.tokens:
        write_tfrecord(task.target, records, task.widths)
    else:
        write_nvidia_shard(task.target, records, metadata.max_seq_length)


def _report(exported: Exported) -> str:
    rows = f" in {exported.rows:,} rows" if exported.widths.sequences or exported.rows != exported.sequences else ""
    tokens, masks, sequences = exported.widths
    widths = f"; an Example has {tokens} tokens, {masks} masked" if tokens else ""
    widths += f", {sequences} sequences" if sequences else ""
    folder = Path(exported.target)
    size = human_bytes(sum(path.stat().st_size for path in folder.iterdir() if path.suffix in SUFFIXES.values()))
    return f"{folder}: {exported.sequences:,} sequences{rows}, {exported.files} files, {size}{widths}"


def _main(options: argparse.Namespace) -> None:
    done = []
    for source, target in folders_of(options.source, options.target):
        exported = export_folder(
            source, target, kind=options.format, unpack=options.unpack,
            max_predictions_per_seq=options.max_predictions_per_seq, jobs=options.jobs,
        )  # fmt: skip
        done.append(exported)
        print(_report(exported), file=sys.stderr)
    if options.json:
        folders = [{**dataclasses.asdict(one), "widths": one.widths._asdict()} for one in done]
        print(json.dumps({"format": options.format, "folders": folders}))


def main() -> None:
    """Command line."""
    parser = stage_parser("export_records", __doc__)
    parser.add_argument("--source", type=Path, required=True, help="record file, folder of them, or prepared folder")
    parser.add_argument("--target", type=Path, required=True, help="folder for the files")
    parser.add_argument("--format", choices=tuple(SUFFIXES), required=True)
    parser.add_argument("--unpack", action="store_true", help="write the sequences of packed rows one by one")
    parser.add_argument(
        "--max-predictions-per-seq", type=positive, default=76,
        help="masked tokens that a TFRecord Example of one sequence has room for (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    add_jobs(parser)
    run(parser, _main)
