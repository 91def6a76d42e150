"""Import and export of third-party formats of training instances: TFRecord, NVIDIA's HDF5."""

import argparse
import dataclasses
from functools import partial
from pathlib import Path

import h5py
import numpy as np

from bert.data import prepared
from bert.data.digests import add_multiset_digests
from bert.data.format import (
    atomic_file,
    check_contents,
    open_records,
    verify_records,
    write_records,
)
from bert.data.records import IDS, DataError, Metadata, Records, id_dtype
from input_preprocessing.stage import manifest
from input_preprocessing.stage.cli import human_bytes, say
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.stage.reading import readable
from input_preprocessing.tensorflow_files import tfrecord
from input_preprocessing.text import vocabulary

SUFFIXES = {"tfrecord": ".tfrecord", "nvidia": ".hdf5"}
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SUFFIXES = (".hdf5", ".hdf", ".h5", ".tfrecord", ".tfrecords")
# Found beside shards: NVIDIA's shard lists (.lst) and checksums (.chk), manifests, vocabularies.
NOT_RECORDS = (".lst", ".json", ".txt", ".md5", ".chk")


def read_third_party(path: Path) -> tuple[Records, Metadata]:
    """Sequences (and rows, if packed) of a TFRecord or HDF5 file.

    Raises:
        DataError: unreadable, damaged or in another format.
    """
    # By content, since NVIDIA's packing script writes shards without a suffix.
    with readable(path, "check --source"), open(path, "rb") as file:
        start = file.read(len(_HDF5_SIGNATURE))
    if not start:
        raise DataError(f"{path} is empty; copy it again")
    return (
        open_records(path) if start == _HDF5_SIGNATURE else tfrecord.read_tfrecord(path)
    )


def read_any(path: Path) -> tuple[Records, Metadata]:
    """Sequences of a record file, verified by its digests, or of a third party's, by its contents.

    Raises:
        DataError: unreadable, damaged or in another format.
    """
    records, metadata = read_third_party(path)
    if metadata.content_digest:
        return verify_records(path)
    check_contents(path, records, metadata)
    return records, metadata


def import_file(
    words: vocabulary.Vocabulary | None, task: tuple[Path, Path]
) -> tuple[int, int, int]:
    """Writes the record file of a third-party one, unless up to date; returns (sequences, rows,
    empty rows dropped).

    Raises:
        DataError: unreadable source, tokens outside the vocabulary, or unwritable target.
    """
    source, target = task
    origin, vocab_md5 = (
        ((source.name, manifest.md5_of(source)),),
        words.md5 if words else "",
    )
    try:
        records, metadata = verify_records(target)
    except DataError:  # missing or damaged
        pass
    else:
        if metadata.source == origin and metadata.vocab_md5 == vocab_md5:
            return records.num_sequences, records.num_rows, 0
        # Made of something else, which this import does not own.
        if [name for name, _ in metadata.source] != [source.name]:
            raise DataError(
                f"{target} was not made by import_records of {source.name}; give another --target"
            )
        say(f"{target}: made again, since its source or vocabulary has changed")
    records, metadata = read_any(source)
    metadata = dataclasses.replace(metadata, source=origin, vocab_md5=vocab_md5)
    largest = max(
        records.input_ids.max(initial=0), records.masked_lm_ids.max(initial=0)
    )
    if words and largest >= len(words):
        raise DataError(
            f"{source} has token {largest}, the vocabulary has {len(words)}; give the one it was made with"
        )
    if words:  # the same dtype in every shard of a data set, whatever ids it contains
        ids = {
            name: getattr(records, name).astype(id_dtype(len(words))) for name in IDS
        }
        records = dataclasses.replace(records, **ids)
    empty = records.num_empty_rows
    if records.row_offsets is not None:
        # An empty row repeats an offset. NVIDIA's packer writes some, with nothing to train on.
        records = records.with_rows(np.unique(records.row_offsets))
    write_records(target, records, metadata)
    return records.num_sequences, records.num_rows, empty


def plan_files(
    source: Path, target: Path, suffix: str = ".hdf5"
) -> list[tuple[Path, Path]]:
    """Pairs of each source file and the file to make from it in `target`, with the same name but
    another suffix.

    Raises:
        DataError: there are none, or two have the same target.
    """
    files = [source]
    # Hidden files are those of a run that was killed.
    if source.is_dir():
        targets = [
            path
            for path in source.iterdir()
            if path.is_file() and not path.name.startswith(".")
        ]
        files = sorted(path for path in targets if path.suffix not in NOT_RECORDS)
    if not files:
        raise DataError(f"no files in {source}; check --source")
    planned: dict[Path, Path] = {}
    for path in files:
        made = (
            target / f"{path.stem if path.suffix in _SUFFIXES else path.name}{suffix}"
        )
        if made in planned:
            raise DataError(
                f"{path} and {planned[made]} would both become {made}; move one of them"
            )
        # By resolved path: a link would hide that both are one file.
        if made.resolve() == path.resolve():
            raise DataError(f"{made} would be overwritten; give another --target")
        planned[made] = path
    return [(path, made) for made, path in planned.items()]


def import_main(options: argparse.Namespace) -> None:
    """Converts third-party files of training instances to record files, one for one, and checks
    them.

    Reads the reference's TFRecord files (verifying checksums) and NVIDIA's HDF5 shards:
    fixed-length, variable-length and packed, whose rows are kept. The format is detected by
    content. Finished files are kept on a second run.
    """
    words = vocabulary.load(options.vocab_file) if options.vocab_file else None
    files = plan_files(options.source, options.target)
    options.target.mkdir(parents=True, exist_ok=True)
    make = partial(import_file, words)
    counts = run_tasks("import", make, files, jobs=options.jobs)
    sequences, rows, empty = (sum(count[i] for count in counts) for i in range(3))
    digest = add_multiset_digests(
        [open_records(made)[1].multiset_digest for _, made in files]
    )
    size = human_bytes(sum(made.stat().st_size for _, made in files))
    note = f"; {empty:,} empty rows dropped" if empty else ""
    summary = f"{sequences:,} sequences in {rows:,} rows, {len(files)} files, {size}, multiset digest {digest}"
    notes = tfrecord.notes_of_sizes([path for path, _ in files])
    say("\n".join([f"{options.target}: {summary}{note}", *notes]))


def folders_of(source: Path, target: Path) -> list[tuple[Path, Path]]:
    """(source, target) folders to export: for a prepared folder, each folder of records in it.

    Raises:
        DataError: the prepared folder's manifest is damaged.
    """
    files = [
        name
        for path in source.glob("prepared-*.json")
        for name in prepared.read(path).files
    ]
    names = {name for name in files if name.endswith(".hdf5")}
    parents = sorted({Path(name).parent for name in names})
    return [(source / parent, target / parent) for parent in parents] or [
        (source, target)
    ]


def export_folder(
    source: Path,
    target: Path,
    *,
    format: str,
    unpack: bool,
    max_predictions_per_seq: int,
    jobs: int,
) -> str:
    """Writes a file of the given format for each record file of `source` to `target`; returns a
    summary.

    Raises:
        DataError: a damaged source, or not a record file; too many masks; or an unwritable target.
    """
    files = plan_files(source, target, SUFFIXES[format])
    opened = [(path, *open_records(path)) for path, _ in files]
    for path, _, metadata in opened:
        if not metadata.content_digest:
            raise DataError(
                f"{path} is not a record file; run import_records on it first"
            )
    # All files of a folder get the same widths: TensorFlow's reader expects features of one size.
    widths = None
    if format == "tfrecord":
        longest = max(metadata.max_seq_length for *_, metadata in opened)
        widths = tfrecord.Widths(longest, max_predictions_per_seq)
    digests = {path.name: metadata.content_digest for path, _, metadata in opened}
    recipe = {"format": format, "unpack": unpack, "widths": widths, "source": digests}
    patterns = [f"*{suffix}" for suffix in SUFFIXES.values()]
    folder = manifest.StageFolder(target, "export_records", patterns, recipe, jobs=jobs)
    if not folder.finished:
        tasks = [(path, made) for path, made in files if not manifest.is_recorded(made)]
        write = partial(_export_file, unpack, widths)
        run_tasks("export", write, tasks, jobs=jobs)
        folder.finish([made.name for _, made in files])
    sequences = sum(records.num_sequences for _, records, _ in opened)
    # Of the same sequences, in whatever format: an import of the export must show it again.
    digest = add_multiset_digests([metadata.multiset_digest for *_, metadata in opened])
    size = human_bytes(sum(made.stat().st_size for _, made in files))
    return (
        f"{sequences:,} sequences, {len(files)} files, {size}, multiset digest {digest}"
    )


def _export_file(
    unpack: bool, widths: tfrecord.Widths | None, task: tuple[Path, Path]
) -> None:
    source, target = task
    records, metadata = verify_records(source)
    if widths:
        tfrecord.write_tfrecord(target, records, widths)
    else:
        records = records.with_rows(None) if unpack else records
        write_nvidia_shard(target, records, metadata.max_seq_length)
    manifest.record(target)


def write_nvidia_shard(path: Path, records: Records, max_seq_length: int) -> None:
    """Writes a shard for bert.data.nvidia_format atomically: packed rows, or single sequences.

    Every dataset has one entry of variable length per row: input_ids, segment_ids,
    masked_lm_positions (from the row's first token), masked_lm_ids, next_sentence_labels, and for
    packed rows packed_input_len and packed_masked_lm_len, the tokens and masked tokens of each
    sequence. For unpacked sequences next_sentence_labels are plain numbers. Ids are int16 like
    NVIDIA's, or int32 for a vocabulary above 32,768. Holds the file in memory.

    Raises:
        DataError: a masked token that the layout cannot tell from padding, or the file cannot be
        written.
    """
    packed = records.row_offsets is not None
    # NVIDIA's loader counts positions other than 0 as masked: at 0 it expects [CLS].
    if not packed and len(zeros := np.flatnonzero(records.masked_lm_positions == 0)):
        sequence = (
            int(np.searchsorted(records.masked_lm_offsets, zeros[0], "right")) - 1
        )
        raise DataError(
            f"{path}: sequence {sequence} has its first token masked, which is padding in NVIDIA's layout"
        )
    features = tfrecord.row_features(records)
    # In memory, since HDF5 fails badly on a full disk.
    with h5py.File(path.name, "w", driver="core", backing_store=False) as file:
        file.attrs["max_seq_length"] = max_seq_length
        for name, (values, offsets) in features.items():
            if name == "next_sentence_labels" and not packed:
                file[name] = values
                continue
            values, ends = np.asarray(values), offsets.tolist()
            # Filled one by one: NumPy would make a matrix of entries that are equally long.
            entries = np.empty(len(ends) - 1, dtype=object)
            for i in range(len(entries)):
                entries[i] = values[ends[i] : ends[i + 1]]
            file.create_dataset(name, data=entries, dtype=h5py.vlen_dtype(values.dtype))
        file.flush()
        image = file.id.get_file_image()
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(image)


def export_main(options: argparse.Namespace) -> None:
    """Converts record files to files for other trainers, one for one: TFRecord, or NVIDIA's HDF5
    layout.

    --source is a record file, a folder of them, or an --outputdir of prepare_data.sh, whose data
    sets and evaluation set are all exported under their folders' names. TFRecord files are the
    reference's, a sequence per Example; with nvidia packed rows stay rows, or --unpack writes their
    sequences one by one, as variable-length shards. import_records makes records of either. Digests
    are checked on reading; finished files are kept on a second run.
    """
    for source, target in folders_of(options.source, options.target):
        summary = export_folder(**{**vars(options), "source": source, "target": target})
        say(f"{target}: {summary}")
