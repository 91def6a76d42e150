"""Deals the sequences of many record files to groups of shards, and writes the shards of a group.

The shuffle and the packing both work group by group, so that a worker holds about a million sequences and no more.
Each sequence goes to a random group. The sequences of each source file must already be in random order, as `instances`
leaves them: then a group takes one contiguous run of each file, and a random order within the group makes the whole a
uniformly random permutation. All random numbers are CPython's Mersenne Twister, the same for any version and jobs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bert.data.compiled import compiled
from bert.data.digests import add_multiset_digests
from bert.data.format import open_records, write_records
from bert.data.records import DataError, Metadata, Records, concatenate
from bert.data.shards import INDEX, write_index
from input_preprocessing.instances.mersenne import initial_state, next_below, shuffle
from input_preprocessing.stage.parallel import run_tasks

SEQUENCES_PER_GROUP = 1_000_000  # at most; 0.7 GB at the mean length of Wikipedia
SEQUENCES_PER_SHARD = 500  # fewer make no shard of their own, unless the user says how many shards
SEQUENCES_OF_SMALLEST_SHARD = 16
MOST_SHARDS = 4320
_SOURCE = " files of instances"  # what shards are made of, after their number

Integers = npt.NDArray[np.int64]
Arrange = Callable[[Records, int], tuple[Integers, "Integers | None"]]


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Which run of each source file goes to which group, and which shards a group makes."""

    sources: tuple[Path, ...]
    target: Path  # folder of the shards
    num_shards: int
    metadata: Metadata  # of the shards, digests apart
    shard_offsets: tuple[int, ...]  # (groups + 1,): group g makes shards [o[g], o[g + 1])
    run_offsets: Integers  # (files, groups + 1): group g takes sequences [o[f, g], o[f, g + 1]) of file f
    lengths: tuple[int, int] | None = None  # sequences of more than [0] and at most [1] tokens only, counted among them

    def shard_path(self, shard: int) -> Path:
        return self.target / f"part_{shard:05d}_of_{self.num_shards:05d}.hdf5"


def plan_deal(
    sources: list[Path], target: Path, *, stage: str, shards: int | None, seed: int,
    group_size: int = SEQUENCES_PER_GROUP, lengths: tuple[int, int] | None = None,
) -> tuple[Deal, str]:  # fmt: skip
    """The deal of the sequences of `sources`, and the multiset digest of all their sequences.

    Args:
        sources: record files, of the same vocabulary and options.
        target: folder to write to.
        stage: what is done and with which options; part of what is recorded as the shards' source.
        shards: number of shards; None: as many as the sequences are worth, at most 4,320.
        seed: of the deal and all that follows.
        group_size: most sequences of a group, about.
        lengths: take the sequences of more than [0] and at most [1] tokens only; None: all.

    Raises:
        DataError: no sources, no sequences, or files that do not belong together.
    """
    opened = [open_records(path) for path in sources]
    sizes = []
    for records, _ in opened:
        sizes.append(len(_chosen(records, lengths)) if lengths else records.num_sequences)
        if lengths:
            records.release()
    if not sum(sizes):
        what = f"sequences of {lengths[0] + 1} to {lengths[1]} tokens" if lengths else "sequences to work on"
        raise DataError(f"no {what} in {sources[0].parent if sources else 'the source folder'}")
    first = opened[0][1]
    for path, (_, metadata) in zip(sources, opened, strict=True):
        for name in ("vocab_md5", "max_seq_length"):
            if getattr(metadata, name) != getattr(first, name):
                raise DataError(f"{path} and {sources[0]} differ in {name}; prepare both with the same options")
    shards = num_shards(sum(sizes), shards)
    groups = min(shards, -(-sum(sizes) // group_size))
    shard_offsets = tuple(shards * g // groups for g in range(groups + 1))
    contents = hashlib.md5("".join(metadata.content_digest for _, metadata in opened).encode()).hexdigest()
    recipe = hashlib.md5(f"{stage} shards={shards} seed={seed} group_size={group_size}".encode()).hexdigest()
    origin = ((f"{len(sources)}{_SOURCE}", contents), (stage, recipe))
    # Every sequence draws a shard; the shard's group takes it.
    state, group_of_shard = initial_state(seed), np.repeat(np.arange(groups), np.diff(shard_offsets))
    counts = np.zeros((len(sizes), groups + 1), dtype=np.int64)
    for row, size in zip(counts, sizes, strict=True):
        _draw_groups(state, size, group_of_shard, row[1:])
    return Deal(
        sources=tuple(sources), target=target, num_shards=shards, shard_offsets=shard_offsets, lengths=lengths,
        metadata=dataclasses.replace(first, source=origin, content_digest="", multiset_digest=""),
        run_offsets=np.cumsum(counts, axis=1),
    ), add_multiset_digests([metadata.multiset_digest for _, metadata in opened])  # fmt: skip


def _chosen(records: Records, lengths: tuple[int, int]) -> Integers:
    """Indices of the sequences of more than lengths[0] and at most lengths[1] tokens."""
    sizes = records.sequence_lengths
    return np.flatnonzero((sizes > lengths[0]) & (sizes <= lengths[1]))


def num_shards(num_sequences: int, wanted: int | None) -> int:
    """The number of shards wanted, or as many as the sequences are worth.

    Raises:
        DataError: more are wanted than there could be rows for.
    """
    if wanted is None:
        return min(MOST_SHARDS, max(1, num_sequences // SEQUENCES_PER_SHARD))
    if wanted > 1 and wanted * SEQUENCES_OF_SMALLEST_SHARD > num_sequences:
        most = max(1, num_sequences // SEQUENCES_OF_SMALLEST_SHARD)
        raise DataError(f"{num_sequences:,} sequences are too few for {wanted} shards; use --shards {most} or fewer")
    return wanted


@compiled
def _draw_groups(state, size, group_of_shard, counts):  # type: ignore[no-untyped-def]
    for _ in range(size):
        counts[group_of_shard[next_below(state, group_of_shard.size)]] += 1


def random_order(count: int, seed: int, group: int, use: int) -> Integers:
    """A random permutation of range(count), for one use of the numbers in one group."""
    order = np.arange(count)
    shuffle(initial_state((seed << 64) + (group << 8) + use), order)
    return order


@functools.lru_cache(maxsize=1)
def _open_all(sources: tuple[Path, ...], contents: str) -> list[Records]:
    """The source files, opened once a process; `contents` tells them from earlier ones of the same names."""
    return [open_records(path)[0] for path in sources]


def _run(records: Records, start: int, end: int) -> Records:
    """Sequences [start, end), as views."""
    tokens = slice(int(records.sequence_offsets[start]), int(records.sequence_offsets[end]))
    masked = slice(int(records.masked_lm_offsets[start]), int(records.masked_lm_offsets[end]))
    return Records(
        input_ids=records.input_ids[tokens],
        sequence_offsets=records.sequence_offsets[start : end + 1] - tokens.start,
        segment_b_start=records.segment_b_start[start:end],
        masked_lm_positions=records.masked_lm_positions[masked], masked_lm_ids=records.masked_lm_ids[masked],
        masked_lm_offsets=records.masked_lm_offsets[start : end + 1] - masked.start,
        next_sentence_labels=records.next_sentence_labels[start:end],
    )  # fmt: skip


def _make_group(task: tuple[Deal, int, Arrange]) -> list[str]:
    """Writes the shards of a group that are not there yet; multiset digests of all its shards."""
    deal, group, arrange = task
    shards = range(deal.shard_offsets[group], deal.shard_offsets[group + 1])
    found: list[str | None] = [None] * len(shards)
    for i, shard in enumerate(shards):  # made before from the same sources with the same options
        with suppress(DataError):
            metadata = open_records(deal.shard_path(shard))[1]
            found[i] = metadata.multiset_digest if metadata.source == deal.metadata.source else None
    if all(found):
        return [digest for digest in found if digest]
    sources = _open_all(deal.sources, deal.metadata.source[0][1])
    runs = zip(sources, deal.run_offsets[:, group], deal.run_offsets[:, group + 1], strict=True)
    if deal.lengths is None:
        parts = [_run(records, int(start), int(end)) for records, start, end in runs]
    else:
        parts = [records.select(_chosen(records, deal.lengths)[start:end]) for records, start, end in runs]
    records = concatenate(parts, lambda number: sources[number].release())  # else a worker would come to hold all
    order, row_offsets = arrange(records, group)
    num_rows = len(order) if row_offsets is None else len(row_offsets) - 1
    for i, shard in enumerate(shards):
        if found[i] is None:
            rows = slice(num_rows * i // len(shards), num_rows * (i + 1) // len(shards) + 1)
            offsets = np.arange(num_rows + 1)[rows] if row_offsets is None else row_offsets[rows]
            chosen = records.select(order[offsets[0] : offsets[-1]])
            if row_offsets is not None:
                chosen = chosen.with_rows(offsets - offsets[0])
            found[i] = write_records(deal.shard_path(shard), chosen, deal.metadata).multiset_digest
    return [digest for digest in found if digest]


def check_target(target: Path, sources: Sequence[Path] = ()) -> None:
    """Checks that shards may be written to the folder, and the shards there be replaced.

    Raises:
        DataError: it is the sources' own, or holds shards that were not made here, such as NVIDIA's.
    """
    if target.resolve() in {path.resolve().parent for path in sources}:
        raise DataError(f"{target} holds the source; give another folder for the shards")
    for path in sorted(target.glob("part_*.hdf5")):
        try:
            source = open_records(path)[1].source
        except DataError:  # damaged: made again, or removed
            continue
        if len(source) != 2 or not source[0][0].endswith(_SOURCE):
            raise DataError(f"{path} was not made by this preparation; move it away, or give another folder")


def make_shards(
    deal: Deal, arrange: Arrange, *, label: str, jobs: int, multiset: str | None, part: tuple[int, int] = (0, 1)
) -> str:
    """Writes all shards and returns the multiset digest of their sequences.

    Shards of an earlier, interrupted run are kept; others made by this preparation are removed from the target folder.
    Leaves an index beside them.

    Args:
        deal: what goes where.
        arrange: arrange(records, group) gives the order of a group's sequences, and its rows when packed.
        label: of the progress line.
        jobs: worker processes.
        multiset: digest that the sequences of all shards must have; None: not checked here.
        part: (i, n) makes every n-th group from the i-th on only, without the last check and the tidying.

    Raises:
        DataError: a shard cannot be written, the target holds others' files or the source, or the shards are not
            exactly the source's sequences.
    """
    check_target(deal.target, deal.sources)
    deal.target.mkdir(parents=True, exist_ok=True)
    (deal.target / INDEX).unlink(missing_ok=True)
    groups = range(part[0], len(deal.shard_offsets) - 1, part[1])
    tasks = [(deal, group, arrange) for group in groups]
    weights = [float(deal.shard_offsets[group + 1] - deal.shard_offsets[group]) for group in groups]
    digests = run_tasks(label, _make_group, tasks, jobs=jobs, weights=weights)
    made = add_multiset_digests([digest for group in digests for digest in group])
    if part[1] > 1:
        return made
    if multiset is not None and made != multiset:
        raise DataError(f"{deal.target} does not hold exactly the sequences of its source; remove it and run again")
    wanted = {deal.shard_path(shard) for shard in range(deal.num_shards)}
    for path in deal.target.iterdir():
        if path not in wanted and path.name.lstrip(".").startswith("part_"):
            path.unlink()
    write_index(deal.target, sorted(wanted))
    return made
