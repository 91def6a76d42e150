"""Stages that make training files from instances (shuffled, packed or binned), and the evaluation
set.

Sequences go from many record files to groups of shards. Shuffling and packing work group by group,
so that a worker holds at most about a million sequences. Each sequence goes to a random group. The
sequences of each source file must already be in random order, as written by `instances`: then a
group takes one contiguous run of each file, and a random order within the group makes the whole a
uniformly random permutation. All random numbers come from CPython's Mersenne Twister and do not
depend on versions or --jobs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bert.data.compiled import compiled
from bert.data.digests import add_multiset_digests
from bert.data.format import (
    open_records,
    verify_records,
    without_digests,
    write_records,
)
from bert.data.packing import pack
from bert.data.records import DataError, Metadata, Records, concatenate
from bert.data.shards import INDEX, write_index
from input_preprocessing.instances.mersenne import initial_state, next_below, shuffle
from input_preprocessing.stage.cli import OPTIONS, check_not_source
from input_preprocessing.stage.parallel import WORTH_WORKERS, run_tasks

SEQUENCES_PER_GROUP = 1_000_000  # at most; 0.7 GB at the mean length of Wikipedia
SEQUENCES_PER_SHARD = 500  # at least, unless the user sets the number of shards
SEQUENCES_OF_SMALLEST_SHARD = 16
# NVIDIA's default for its training shards.
MOST_SHARDS = 4320
_SOURCE = " files of instances"  # in the shards' metadata, after the number

Integers = npt.NDArray[np.int64]
Arrange = Callable[[Records, int], tuple[Integers, "Integers | None"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Assignment of source sequences to groups, and of groups to shards."""

    sources: tuple[Path, ...]
    target: Path  # folder of the shards
    num_shards: int
    metadata: Metadata  # of the shards, without digests
    shard_offsets: tuple[
        int, ...
    ]  # (groups + 1,): group g makes shards [o[g], o[g + 1])
    run_offsets: Integers  # (files, groups + 1): group g takes sequences [o[f, g], o[f, g + 1]) of file f
    multiset: str  # digest of all sequences of the sources
    lengths: tuple[int, int] | None = (
        None  # only sequences of more than [0] and at most [1] tokens, numbered as such
    )

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
    sizes = [records.num_sequences for records, _ in opened]
    if lengths:
        for number, (records, _) in enumerate(opened):
            sizes[number] = len(_chosen(records, lengths))
            records.release()
    if not sum(sizes):
        what = (
            f"sequences of {lengths[0] + 1} to {lengths[1]} tokens"
            if lengths
            else "sequences"
        )
        raise DataError(f"no {what} in {sources[0].parent}")
    _check_alike(sources, [metadata for _, metadata in opened])
    shards = num_shards(sum(sizes), shards)
    # A shard is made by one group, so there are at most as many groups.
    groups = min(shards, -(-sum(sizes) // group_size))
    shard_offsets = tuple(shards * g // groups for g in range(groups + 1))
    recipe = f"{stage} shards={shards} seed={seed} group_size={group_size}"
    contents = _contents([metadata for _, metadata in opened])
    made_by = stage, hashlib.md5(recipe.encode()).hexdigest()
    origin = ((f"{len(sources)}{_SOURCE}", contents), made_by)
    # Every sequence draws a shard and goes to that shard's group.
    state = initial_state(seed)
    group_of_shard = np.repeat(np.arange(groups), np.diff(shard_offsets))
    # Column 0 stays zero, so that the sums along a row are offsets.
    counts = np.zeros((len(sizes), groups + 1), dtype=np.int64)
    for row, size in zip(counts, sizes, strict=True):
        _draw_groups(state, size, group_of_shard, row[1:])
    return ShardPlan(
        sources=tuple(sources),
        target=target,
        num_shards=shards,
        shard_offsets=shard_offsets,
        lengths=lengths,
        metadata=dataclasses.replace(without_digests(opened[0][1]), source=origin),
        run_offsets=np.cumsum(counts, axis=1),
        multiset=add_multiset_digests(
            [metadata.multiset_digest for _, metadata in opened]
        ),
    )


def _check_alike(paths: Sequence[Path], found: Sequence[Metadata]) -> None:
    """Raises DataError for files of different options: a shard mixes sequences of all and states
    these once.
    """
    for path, metadata in zip(paths, found, strict=True):
        for name in ("vocab_md5", "max_seq_length", "random_seed", "dupe_factor"):
            if getattr(metadata, name) != getattr(found[0], name):
                both = f"{path} and {paths[0]}"
                raise DataError(
                    f"{both} differ in {name}; prepare both with the same options"
                )


def _contents(sources: Sequence[Metadata]) -> str:
    """Digest of the sources' contents, recorded in the shards."""
    return hashlib.md5(
        "".join(metadata.content_digest for metadata in sources).encode()
    ).hexdigest()


def _chosen(records: Records, lengths: tuple[int, int]) -> Integers:
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
    found: list[str | None] = [None] * len(shards)
    for i, shard in enumerate(
        shards
    ):  # keep those made from the same sources with the same options
        with suppress(DataError):
            kept, metadata = verify_records(plan.shard_path(shard))
            kept.release()
            if without_digests(metadata) == plan.metadata:
                found[i] = metadata.multiset_digest
    # The sources need not be opened, which takes a while for hundreds of files.
    if all(found):
        return [digest for digest in found if digest]
    sources = _open_all(plan.sources, plan.metadata.source[0][1])
    runs = zip(
        sources, plan.run_offsets[:, group], plan.run_offsets[:, group + 1], strict=True
    )
    if plan.lengths is None:
        parts = [_views(records, int(start), int(end)) for records, start, end in runs]
    else:
        parts = [
            records.select(_chosen(records, plan.lengths)[start:end])
            for records, start, end in runs
        ]
    records = concatenate(
        parts, lambda number: sources[number].release()
    )  # or a worker would end up holding all
    order, row_offsets = arrange(records, group)
    num_rows = len(order) if row_offsets is None else len(row_offsets) - 1
    for i, shard in enumerate(shards):
        if found[i] is None:
            # Rows are dealt evenly to the group's shards; there is one offset more than rows.
            rows = slice(
                num_rows * i // len(shards), num_rows * (i + 1) // len(shards) + 1
            )
            offsets = (
                np.arange(num_rows + 1)[rows]
                if row_offsets is None
                else row_offsets[rows]
            )
            chosen = records.select(order[offsets[0] : offsets[-1]])
            if row_offsets is not None:
                chosen = chosen.with_rows(offsets - offsets[0])
            found[i] = write_records(
                plan.shard_path(shard), chosen, plan.metadata
            ).multiset_digest
    return [digest for digest in found if digest]


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
    for path in sorted(target.glob("part_*.hdf5")):
        try:
            source = open_records(path)[1].source
        except DataError:  # damaged: made again, or removed
            continue
        if len(source) != 2 or not source[0][0].endswith(_SOURCE):
            raise DataError(
                f"{path} was not made by this preparation; move it away, or give another folder"
            )
        if contents and source[0][1] != contents:
            raise DataError(
                f"{path} was made from another source; move it away, or give another folder"
            )


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
    # A run that is killed below must not leave the index of other shards behind.
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
    for path in plan.target.iterdir():
        # Shards of an earlier plan, and hidden unfinished ones (.part_...) of a killed run.
        if path not in wanted and path.name.lstrip(".").startswith("part_"):
            path.unlink()
    write_index(plan.target, sorted(wanted))
    return made


NUM_EVAL_SAMPLES: int = OPTIONS["evalset"]["--num-samples"]["default"]


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
    weights = [path.stat().st_size for path in files]
    workers = jobs if sum(weights) > WORTH_WORKERS else 1
    run_tasks("check instances", _verify, files, jobs=workers, weights=weights)
    return files


def _verify(path: Path) -> None:
    verify_records(path)[0].release()


def _shuffled(seed: int, records: Records, group: int) -> tuple[Integers, None]:
    return random_order(records.num_sequences, seed, group, use=0), None


def _packed(
    seed: int, max_tokens: int, max_sequences: int, records: Records, group: int
) -> tuple[Integers, Integers]:
    """Packs a group's sequences in random order into rows, and shuffles the rows."""
    # Before: pack() takes sequences of one length in the order given. After: it leaves rows of one
    # pattern side by side.
    mixed = random_order(records.num_sequences, seed, group, use=0)
    order, row_offsets = pack(
        records.sequence_lengths[mixed], max_tokens, max_sequences
    )
    rows = random_order(len(row_offsets) - 1, seed, group, use=1)
    sizes = np.diff(row_offsets)[rows]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    # Of each sequence (S,), row by row: its index in `order`, the row's start plus its place in it.
    where = np.repeat(row_offsets[rows] - offsets[:-1], sizes) + np.arange(offsets[-1])
    return mixed[order[where]], offsets


def shuffle_records(
    source: Path, target: Path, *, shards: int | None, seed: int, jobs: int
) -> str:
    """Writes the sequences of the files in `source`, shuffled, as shards to `target`; returns their
    multiset digest.
    """
    files = verified_files(source, jobs)
    plan = plan_shards(files, target, stage="shuffle", shards=shards, seed=seed)
    return make_shards(plan, partial(_shuffled, seed), label="shuffle", jobs=jobs)


def pack_records(
    source: Path,
    target: Path,
    *,
    shards: int | None,
    seed: int,
    max_sequences_per_row: int,
    jobs: int,
) -> str:
    """Writes the sequences of the files in `source`, packed, as shards to `target`; returns their
    multiset digest.
    """
    plan = plan_shards(
        verified_files(source, jobs),
        target,
        stage=f"pack {max_sequences_per_row}",
        shards=shards,
        seed=seed,
    )
    arrange = partial(
        _packed, seed, plan.metadata.max_seq_length, max_sequences_per_row
    )
    return make_shards(plan, arrange, label="pack", jobs=jobs)


def edges_of(max_seq_length: int) -> tuple[int, ...]:
    """Maximal tokens of each bin: quarters of the maximal sequence length."""
    return tuple(max_seq_length * quarter // 4 for quarter in (1, 2, 3, 4))


def bin_records(
    source: Path, target: Path, *, shards: int | None, seed: int, jobs: int
) -> str:
    """Writes the sequences of the files in `source` to one folder per bin; returns their multiset
    digest.

    Args:
        source: folder of record files.
        target: parent of the bins' folders.
        shards: of each bin; None: by its size.
        seed: of the shuffle.
        jobs: worker processes.

    Raises:
        DataError: a bin is empty, or the bins do not hold all sequences.
    """
    files = verified_files(source, jobs)
    edges = edges_of(open_records(files[0])[1].max_seq_length)
    digests = []
    for low, high in zip((0, *edges), edges, strict=False):
        stage, folder = f"bin {low} {high}", target / str(high)
        plan = plan_shards(
            files, folder, stage=stage, shards=shards, seed=seed, lengths=(low, high)
        )
        label = f"bin {low + 1}-{high}"
        digests.append(
            make_shards(plan, partial(_shuffled, seed), label=label, jobs=jobs)
        )
    made = add_multiset_digests(digests)
    # Any plan's digest is that of all sequences, of which each bin holds some: compared at the end.
    if made != plan.multiset:
        reason = f"the bins up to {edges[-1]} tokens do not hold exactly the sequences of {source}"
        raise DataError(f"{target}: {reason}; remove it and run again")
    for folder in target.iterdir():  # remove bins of earlier edges
        if folder.is_dir() and folder.name.isdigit() and int(folder.name) not in edges:
            check_target(folder)
            for path in folder.iterdir():
                if path.name == INDEX or path.name.lstrip(".").startswith("part_"):
                    path.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()
    return made


def pick_samples(
    source: Path, target: Path, num_samples: int = NUM_EVAL_SAMPLES
) -> int:
    """Writes `num_samples` evenly spaced sequences, or all if there are fewer; prints and returns
    their number.

    Raises:
        DataError: unreadable or empty source, or unwritable target.
    """
    records, metadata = verify_records(source)
    count = records.num_sequences
    if not count:
        raise DataError(
            f"{source} has no sequences to evaluate on; check the evaluation text"
        )
    # The reference's pick_eval_samples.py, in its order of operations: the quotient is rounded.
    chosen = (
        range(count)
        if count <= num_samples
        else [int(i * (count / num_samples)) for i in range(num_samples)]
    )
    origin = (*metadata.source, (f"evalset {num_samples}", metadata.content_digest))
    write_records(
        target, records.select(chosen), dataclasses.replace(metadata, source=origin)
    )
    short = (
        f" (all available; {num_samples:,} were requested)"
        if count < num_samples
        else ""
    )
    print(f"{target}: {len(chosen):,} evaluation samples{short}", file=sys.stderr)
    return len(chosen)


def _run(options: argparse.Namespace, make: Callable[..., str]) -> None:
    """Calls `make` with the options of the stage, and prints the number of shards."""
    files, target = source_files(options.source), options.target
    # In a stage run by hand another source is more likely a wrong --target than a new text, so its
    # shards are refused; `prepare` replaces them.
    contents = _contents([open_records(path)[1] for path in files])
    for folder in (target, *target.glob("[0-9]*")):  # including those of bins
        check_target(folder, files, contents)
    make(**vars(options))
    print(f"{target}: {len(list(target.rglob('part_*.hdf5')))} shards", file=sys.stderr)


def shuffle_main(options: argparse.Namespace) -> None:
    """Shuffles all sequences of a folder of record files into shards, seeded, in bounded memory."""
    _run(options, shuffle_records)


def pack_main(options: argparse.Namespace) -> None:
    """Packs the sequences of a folder of record files into rows, and the rows, in random order,
    into shards.

    Each row has at most --max-sequences-per-row sequences, and at most as many tokens as the
    maximal sequence length.
    """
    _run(options, pack_records)


def bins_main(options: argparse.Namespace) -> None:
    """Splits the sequences of a folder of record files by length, and shuffles each bin into
    separate shards.

    Bins of 128, 256, 384 and 512 tokens (quarters of the maximal sequence length): TARGET/128 has
    the sequences of at most 128 tokens, TARGET/256 those of 129 to 256, and so on, each as
    part_XXXXX_of_XXXXX.hdf5. Batches with a fixed number from each bin have about the same number
    of tokens on every rank.
    """
    _run(options, bin_records)


def evalset_main(options: argparse.Namespace) -> None:
    """Picks the evaluation samples: --num-samples of a record file's n sequences, at int(i * (n /
    num_samples)).
    """
    check_not_source(options.target, options.source)
    pick_samples(options.source, options.target, options.num_samples)
