"""From instances to shards of training files, for the stages shuffle, pack and bins.

Sequences go from many record files to groups of shards. Shuffling and packing work group by group,
so that a worker holds at most about a million sequences. Each sequence goes to a random group. The
sequences of each source file must already be in random order, as written by `instances`: then a
group takes one contiguous run of each file, and a random order within the group makes the whole a
uniformly random permutation. All random numbers come from CPython's Mersenne Twister and do not
depend on versions or --jobs.
"""

import argparse
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert.data.compiled import compiled
from bert.data.digests import add_multiset_digests
from bert.data.format import (
    open_records,
    verify_records,
    without_digests,
    write_records,
)
from bert.data.packing import Integers
from bert.data.records import SUFFIXES, DataError, Metadata, Records, concatenate
from bert.data.shards import INDEX, read_index, write_index
from common.files import text_of
from input_preprocessing.instances.mersenne import initial_state, next_below, shuffle
from input_preprocessing.stage.cli import say
from input_preprocessing.stage.manifest import write_text
from input_preprocessing.stage.parallel import WORTH_WORKERS, run_tasks

SEQUENCES_PER_GROUP = 1_000_000  # at most; 0.7 GB at the mean length of Wikipedia
SEQUENCES_PER_SHARD = 500  # at least, unless the user sets the number of shards
SEQUENCES_OF_SMALLEST_SHARD = 16
# NVIDIA's default for its training shards.
MOST_SHARDS = 4320
_SOURCE = " files of instances"  # in the shards' metadata, after the number

Arrange = Callable[[Records, int], tuple[Integers, "Integers | None"]]


class ShardPlan(NamedTuple):
    """Assignment of source sequences to groups, and of groups to shards."""

    sources: tuple[Path, ...]
    target: Path  # folder of the shards
    num_shards: int
    metadata: Metadata  # of the shards, without digests
    # (groups + 1,): group g makes shards [o[g], o[g + 1])
    shard_offsets: tuple[int, ...]
    # (files, groups + 1): group g takes sequences [o[f, g], o[f, g + 1]) of file f
    run_offsets: Integers
    multiset: str  # digest of all sequences of the sources
    # Only sequences of more than [0] and at most [1] tokens, numbered as such.
    lengths: tuple[int, int] | None = None

    def shard_path(self, shard: int) -> Path:
        return self.target / f"part_{shard:05d}_of_{self.num_shards:05d}.hdf5"


def plan_shards(
    sources: list[Path],
    target: Path,
    *,
    stage: str,
    shards: int | None,
    seed: int,
    group_size: int = SEQUENCES_PER_GROUP,
    lengths: tuple[int, int] | None = None,
) -> ShardPlan:
    """Plans the shards to make from `sources`.

    Args:
        sources: record files with the same vocabulary and options.
        target: folder to write to.
        stage: name and options of the stage, recorded in the shards' source.
        shards: number of shards; None: see `num_shards`.
        seed: of the assignment and everything after it.
        group_size: maximal sequences of a group, approximately.
        lengths: only sequences of more than [0] and at most [1] tokens; None: all.

    Raises:
        DataError: no sources, no sequences, or files made with different options.
    """
    opened = [open_records(path) for path in sources]
    metadata = [of_file for _, of_file in opened]
    sizes = [records.num_sequences for records, _ in opened]
    if lengths:
        for number, (records, _) in enumerate(opened):
            sizes[number] = len(_of_lengths(records, lengths))
            records.release()
    total = sum(sizes)
    if not total:
        of_bin = f" of {lengths[0] + 1} to {lengths[1]} tokens" if lengths else ""
        raise DataError(f"no sequences{of_bin} in {sources[0].parent}")
    _check_alike(sources, metadata)
    shards = num_shards(total, shards)
    # A shard is made by one group, so there are at most as many groups.
    groups = min(shards, -(-total // group_size))
    shard_offsets = tuple(shards * group // groups for group in range(groups + 1))
    recipe = f"{stage} shards={shards} seed={seed} group_size={group_size}"
    source = f"{len(sources)}{_SOURCE}", _contents(metadata)
    made_by = stage, hashlib.md5(recipe.encode()).hexdigest()
    return ShardPlan(
        sources=tuple(sources),
        target=target,
        num_shards=shards,
        shard_offsets=shard_offsets,
        lengths=lengths,
        metadata=dataclasses.replace(
            without_digests(metadata[0]), source=(source, made_by)
        ),
        run_offsets=_run_offsets(sizes, shard_offsets, seed),
        multiset=add_multiset_digests(
            [of_file.multiset_digest for of_file in metadata]
        ),
    )


def _check_alike(paths: Sequence[Path], metadata: Sequence[Metadata]) -> None:
    """Raises DataError for files of different options: a shard mixes sequences of all and states
    these once.
    """
    for path, other in zip(paths, metadata, strict=True):
        for name in ("vocab_md5", "max_seq_length", "random_seed", "dupe_factor"):
            if getattr(other, name) != getattr(metadata[0], name):
                raise DataError(
                    f"{path} and {paths[0]} differ in {name}; prepare both with the same options"
                )


def _contents(sources: Sequence[Metadata]) -> str:
    """Digest of the sources' contents, recorded in the shards."""
    return hashlib.md5(
        "".join(metadata.content_digest for metadata in sources).encode()
    ).hexdigest()


def _of_lengths(records: Records, lengths: tuple[int, int]) -> Integers:
    """Indices of the sequences of more than lengths[0] and at most lengths[1] tokens."""
    sizes = records.sequence_lengths
    return np.flatnonzero((sizes > lengths[0]) & (sizes <= lengths[1]))


def num_shards(num_sequences: int, wanted: int | None) -> int:
    """The number of shards wanted, or by default one per SEQUENCES_PER_SHARD, at most MOST_SHARDS.

    Raises:
        DataError: too few sequences for the number wanted.
    """
    if wanted is None:
        return min(MOST_SHARDS, max(1, num_sequences // SEQUENCES_PER_SHARD))
    if wanted > 1 and wanted * SEQUENCES_OF_SMALLEST_SHARD > num_sequences:
        most = max(1, num_sequences // SEQUENCES_OF_SMALLEST_SHARD)
        raise DataError(
            f"{num_sequences:,} sequences are too few for {wanted} shards; use --shards {most} or fewer"
        )
    return wanted


def _run_offsets(
    sizes: Sequence[int], shard_offsets: Sequence[int], seed: int
) -> Integers:
    """Of each file's sequences, where each group's run begins [files, groups + 1].

    Every sequence draws a shard, and goes to that shard's group.
    """
    groups = len(shard_offsets) - 1
    group_of_shard = np.repeat(np.arange(groups), np.diff(shard_offsets))
    state = initial_state(seed)
    # Column 0 stays zero, so that the sums along a row are offsets.
    counts = np.zeros((len(sizes), groups + 1), dtype=np.int64)
    for row, size in zip(counts, sizes, strict=True):
        _draw_groups(state, size, group_of_shard, row[1:])
    offsets: Integers = np.cumsum(counts, axis=1)
    return offsets


@compiled
def _draw_groups(state, size, group_of_shard, counts):  # type: ignore[no-untyped-def]
    for _ in range(size):
        counts[group_of_shard[next_below(state, group_of_shard.size)]] += 1


def random_order(count: int, seed: int, group: int, use: int) -> Integers:
    """A random permutation of range(count) for a group; ``use`` distinguishes several of a
    group.
    """
    order = np.arange(count)
    # A generator of its own for each group and use: workers and nodes make groups in any order.
    shuffle(initial_state((seed << 64) + (group << 8) + use), order)
    return order


def in_random_order(seed: int, records: Records, group: int) -> tuple[Integers, None]:
    """Arranges a group's sequences, unpacked."""
    return random_order(records.num_sequences, seed, group, use=0), None


@lru_cache(maxsize=1)
def _open_all(sources: tuple[Path, ...], contents: str) -> list[Records]:
    """The source files, opened once per process; `contents` makes changed files a different cache
    key.
    """
    return [open_records(path)[0] for path in sources]


def _views(records: Records, start: int, end: int) -> Records:
    """Sequences [start, end)."""
    tokens = slice(
        int(records.sequence_offsets[start]), int(records.sequence_offsets[end])
    )
    masked = slice(
        int(records.masked_lm_offsets[start]), int(records.masked_lm_offsets[end])
    )
    return Records(
        input_ids=records.input_ids[tokens],
        sequence_offsets=records.sequence_offsets[start : end + 1] - tokens.start,
        segment_b_start=records.segment_b_start[start:end],
        masked_lm_positions=records.masked_lm_positions[masked],
        masked_lm_ids=records.masked_lm_ids[masked],
        masked_lm_offsets=records.masked_lm_offsets[start : end + 1] - masked.start,
        next_sentence_labels=records.next_sentence_labels[start:end],
    )


def _make_group(plan: ShardPlan, arrange: Arrange, group: int) -> list[str]:
    """Writes the missing shards of a group; returns the multiset digests of all its shards."""
    shards = range(plan.shard_offsets[group], plan.shard_offsets[group + 1])
    digests = [_finished(plan, shard) for shard in shards]
    # The sources need not be opened, which takes a while for hundreds of files.
    if all(digests):
        return [digest for digest in digests if digest]
    records = _gather(plan, group)
    order, row_offsets = arrange(records, group)
    packed = row_offsets is not None
    offsets = np.arange(len(order) + 1) if row_offsets is None else row_offsets
    num_rows = len(offsets) - 1
    for i, shard in enumerate(shards):
        if digests[i] is None:
            # Rows are dealt evenly to the group's shards; there is one offset more than rows.
            first, end = (num_rows * part // len(shards) for part in (i, i + 1))
            rows = offsets[first : end + 1]
            content = records.select(order[rows[0] : rows[-1]])
            if packed:
                content = content.with_rows(rows - rows[0])
            path = plan.shard_path(shard)
            written = write_records(path, content, plan.metadata)
            write_text(_digest_file(path), written.content_digest)
            digests[i] = written.multiset_digest
    return [digest for digest in digests if digest]


def _finished(plan: ShardPlan, shard: int) -> str | None:
    """The multiset digest of a shard that is there, undamaged, of these sources and options, and
    not another shard under its name.
    """
    path = plan.shard_path(shard)
    with suppress(DataError):
        records, metadata = verify_records(path)
        records.release()
        is_this = text_of(_digest_file(path)) == metadata.content_digest
        if is_this and without_digests(metadata) == plan.metadata:
            return metadata.multiset_digest
    return None


def _digest_file(path: Path) -> Path:
    """Where a shard's content digest is until all are finished and an index has them."""
    return path.with_name(f".{path.name}.digest")


def _gather(plan: ShardPlan, group: int) -> Records:
    """A group's sequences, one run of each source file."""
    sources = _open_all(plan.sources, plan.metadata.source[0][1])
    starts, ends = plan.run_offsets[:, group], plan.run_offsets[:, group + 1]
    runs = zip(sources, starts.tolist(), ends.tolist(), strict=True)
    if plan.lengths is None:
        parts = [_views(records, start, end) for records, start, end in runs]
    else:
        parts = [
            records.select(_of_lengths(records, plan.lengths)[start:end])
            for records, start, end in runs
        ]
    # Each is let go once copied, or a worker would end up holding all.
    return concatenate(parts, lambda number: sources[number].release())


def check_target(
    target: Path, sources: Sequence[Path] = (), contents: str = ""
) -> None:
    """Checks that shards may be written to the folder, replacing those in it.

    Raises:
        DataError: it is the sources' folder, or has shards not made by this preparation, such as
        NVIDIA's; with
            `contents`, also shards of sources with another digest.
    """
    if target.resolve() in {path.resolve().parent for path in sources}:
        raise DataError(
            f"{target} holds the source; give another folder for the shards"
        )
    check_no_others(target)
    for path in sorted(target.glob("part_*.hdf5")):
        try:
            source = open_records(path)[1].source
        except DataError:  # damaged: made again, or removed
            continue
        if len(source) != 2 or not source[0][0].endswith(_SOURCE):
            raise _not_ours(path, "was not made by this preparation")
        if contents and source[0][1] != contents:
            raise _not_ours(path, "was made from another source")


def check_no_others(target: Path) -> None:
    """Raises DataError for files of other names in the folder that a trainer would read."""
    for path in sorted(target.glob("[!.]*")):
        is_record = path.suffix in SUFFIXES and path.is_file()
        if is_record and not path.name.startswith("part_"):
            raise _not_ours(path, "was not made by this preparation")


def _not_ours(path: Path, message: str) -> DataError:
    return DataError(f"{path} {message}; move it away, or give another folder")


def make_shards(plan: ShardPlan, arrange: Arrange, *, label: str, jobs: int) -> str:
    """Writes all shards and an index, and returns the multiset digest of their sequences.

    Keeps undamaged shards of an interrupted run with the same plan, and removes other shards of
    this preparation.

    Args:
        plan: assignment of sequences to shards. arrange: arrange(records, group) returns the order
        of a group's sequences, and the row offsets if packed. label: of the progress line. jobs:
        worker processes.

    Raises:
        DataError: a shard cannot be written, the target holds other files or the source, or the
        shards are not exactly
            the source's sequences (not checked with `plan.lengths`).
    """
    check_target(plan.target, plan.sources)
    plan.target.mkdir(parents=True, exist_ok=True)
    # A run that is killed below must not leave the index of other shards behind: until it is
    # finished again, each shard's digest is beside it.
    for name, entry in read_index(plan.target).items():
        write_text(_digest_file(plan.target / name), entry.content_digest)
    (plan.target / INDEX).unlink(missing_ok=True)
    groups = range(len(plan.shard_offsets) - 1)
    weights = np.diff(plan.shard_offsets).tolist()
    digests = run_tasks(
        label, partial(_make_group, plan, arrange), groups, jobs=jobs, weights=weights
    )
    made = add_multiset_digests([digest for group in digests for digest in group])
    if plan.lengths is None and made != plan.multiset:
        raise DataError(
            f"{plan.target} does not hold exactly the sequences of its source; remove it and run again"
        )
    wanted = {plan.shard_path(shard) for shard in range(plan.num_shards)}
    digest_files = set(map(_digest_file, wanted))
    for path in plan.target.iterdir():
        # Shards of an earlier plan, and hidden unfinished ones (.part_...) of a killed run.
        is_ours = path.name.lstrip(".").startswith("part_")
        if is_ours and path not in wanted | digest_files:
            path.unlink()
    check_no_others(plan.target)  # which came meanwhile
    write_index(plan.target, sorted(wanted))
    for path in digest_files:  # the index has them
        path.unlink()
    return made


def source_files(folder: Path) -> list[Path]:
    """Record files of a folder, by name. Raises DataError if there are none."""
    files = sorted(
        path for path in folder.glob("*.hdf5") if not path.name.startswith(".")
    )
    if not files:
        raise DataError(
            f"no .hdf5 files in {folder}; check the path or run the previous stage"
        )
    return files


def verified_files(folder: Path, jobs: int) -> list[Path]:
    """Record files of a folder, by name, after all of them were read and compared with their
    digests.

    Raises:
        DataError: there are none, or one is damaged.
    """
    files = source_files(folder)
    run_tasks("check instances", _verify, files, jobs=jobs, worth=WORTH_WORKERS)
    return files


def _verify(path: Path) -> None:
    verify_records(path)[0].release()


def run_stage(options: argparse.Namespace, make: Callable[..., str]) -> None:
    """Calls `make` with the options of the stage, and prints the number of shards."""
    files, target = source_files(options.source), options.target
    # In a stage run by hand another source is more likely a wrong --target than a new text, so its
    # shards are refused; `prepare` replaces them.
    contents = _contents([open_records(path)[1] for path in files])
    for folder in (target, *target.glob("[0-9]*")):  # including those of bins
        check_target(folder, files, contents)
    make(**vars(options))
    say(f"{target}: {len(list(target.rglob('part_*.hdf5')))} shards")
