"""The rows of a step, and by BATCHING the sequences of its micro-batches.

A pure function of (seed, step) and the lengths in the files, the same on every rank: resuming needs
no state, and nothing is communicated. Where other systems all-gather padded batches, ranks here
choose what to read. Semantics of the 4-bin data and of exchange padding: Samsung's MLPerf Training
v1.1 submission; exchange padding also NVIDIA's of v3.0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bert.data.records import DataError, Records, offsets_of, ragged_indices
from bert.data.shards import Shards
from bert.data.synthetic import SyntheticShards

RowSource = Shards | SyntheticShards
FileRows = list[tuple[int, np.ndarray]]  # (file, rows in it), in order


class Sampler:
    """Distributes all rows once per epoch, without replacement.

    An epoch shuffles the files and, within each, the rows. That order is cut into as many equal
    stretches as there are ranks, and each rank reads through its own, so that it reads few files.
    Rows that do not fill a last step of all ranks are left out of the epoch.
    """

    def __init__(
        self,
        row_counts: np.ndarray,
        rows_per_step: int,
        seed: int,
        rank: int,
        world_size: int,
        shard_order: tuple[int, int] | None = None,
    ) -> None:
        """row_counts: rows of every file; rows_per_step: rows a rank takes in one optimizer step.

        shard_order: (ranks, rows of each in a step) of the run that this one resumes with another
        number of ranks: the stretches stay those, so that each step has the rows it would have had
        there.
        """
        self.row_counts, self.rows_per_step = row_counts, rows_per_step
        self.seed, self.rank, self.world_size = seed, rank, world_size
        num_stretches, of_stretch = shard_order or (world_size, rows_per_step)
        same_rows = num_stretches * of_stretch == world_size * rows_per_step
        assert same_rows, "steps must have the same number of rows"
        num_rows = int(row_counts.sum())
        self.stretch_rows = num_rows // num_stretches
        self.stretch_rows_per_step = of_stretch
        self.steps_per_epoch = self.stretch_rows // of_stretch
        if self.steps_per_epoch == 0:
            step = f"one step of {num_stretches} ranks x {of_stretch} rows"
            raise DataError(
                f"{num_rows} rows of training data do not fill {step}: "
                "prepare more data, or lower BATCHSIZE or GRADIENT_STEPS"
            )
        # Successive steps take rows of the same files.
        self._order = lru_cache(maxsize=2)(self._file_order)
        self._permutation = lru_cache(maxsize=4)(self._row_order)

    def epoch(self, step: int) -> int:
        """Epoch of optimizer step ``step``, from 0."""
        return (step - 1) // self.steps_per_epoch

    def rows(self, step: int, rank: int | None = None) -> FileRows:
        """Rows of optimizer step ``step`` (1 is the first) on this rank or another.

        A step takes the next rows of every stretch. Laid end to end, these are cut into equal blocks,
        one for each rank.
        """
        epoch, step_in_epoch = divmod(step - 1, self.steps_per_epoch)
        taken = self.stretch_rows_per_step
        rank = self.rank if rank is None else rank
        number, end = rank * self.rows_per_step, (rank + 1) * self.rows_per_step
        rows: FileRows = []
        while number < end:
            stretch, place = divmod(number, taken)
            # All of the rank's, unless the run has moved to other ranks than the stretches have.
            count = min(taken - place, end - number)
            begin = stretch * self.stretch_rows + step_in_epoch * taken + place
            rows += self._file_rows(epoch, begin, begin + count)
            number += count
        return rows

    def _file_rows(
        self, epoch: int, begin: int, end: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Rows [begin, end) of the epoch's order."""
        order, starts = self._order(epoch)
        # Which file of the order, from the right: past files without rows, which begin where the
        # next one does.
        number = int(np.searchsorted(starts, begin, side="right")) - 1
        while begin < end:
            start = int(starts[number])
            stop = min(end, int(starts[number + 1]))
            if stop > begin:
                file = int(order[number])
                yield file, self._permutation(epoch, file)[begin - start : stop - start]
            begin, number = stop, number + 1

    def _file_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        # Seeded by (seed, epoch), not drawn one after the other: any rank finds any epoch without
        # those before it.
        order = np.random.default_rng([self.seed, epoch]).permutation(
            len(self.row_counts)
        )
        return order, offsets_of(self.row_counts[order])

    def _row_order(self, epoch: int, file: int) -> np.ndarray:
        generator = np.random.default_rng([self.seed, epoch, file])
        return generator.permutation(int(self.row_counts[file]))


@dataclass(frozen=True)
class Chosen:
    """Sequences of a micro-batch: file, index in the file and epoch of each; int64 (S,)."""

    files: np.ndarray
    sequences: np.ndarray
    epochs: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Chosen]) -> Chosen:
        """The sequences of all parts, one part after the other."""
        arrays = zip(
            *((part.files, part.sequences, part.epochs) for part in parts), strict=True
        )
        return cls(*map(np.concatenate, arrays))

    def take(self, where: slice | np.ndarray) -> Chosen:
        """The sequences at these indices."""
        return Chosen(self.files[where], self.sequences[where], self.epochs[where])

    def cut(self, ends: np.ndarray) -> list[Chosen]:
        """Micro-batches [ends[i], ends[i + 1])."""
        return [
            self.take(slice(*bounds)) for bounds in itertools.pairwise(ends.tolist())
        ]


class Batching:
    """BATCHING=rows and BATCHING=bins; ``step(n)`` gives this rank's micro-batches of step n (1 is
    the first).

    rows: a micro-batch is the next rows, packed or a sequence each. bins: a fixed number from each
    bin of lengths; bins are shuffled separately, and an epoch ends with the bin that runs out
    first.

    EXCHANGE_GROUP: the sequences of all micro-batches of a group of ranks are sorted, longest
    first, and distributed back and forth, so that all micro-batches get equally many sequences and
    nearly equally many tokens.
    """

    def __init__(
        self,
        source: RowSource,
        sampler: Sampler,
        batch_size: int,
        counts: Sequence[int] = (),
        group: int = 1,
    ) -> None:
        """counts: rows of a micro-batch from each bin, batch_size in all; empty: from all files as
        one bin.

        Ranks k * group to (k + 1) * group - 1 exchange sequences.
        """
        self.source, self.rank, self.group = source, sampler.rank, group
        self.bins = (
            []
            if counts
            else [(np.arange(len(sampler.row_counts)), sampler, batch_size)]
        )
        bins = zip(source.bins, counts, strict=True) if counts else ()
        for number, (files, count) in enumerate(bins):
            if count:
                # Bins are shuffled separately, as in Samsung's data.
                seed = int(
                    np.random.SeedSequence([sampler.seed, number]).generate_state(1)[0]
                )
                rows = count * (sampler.rows_per_step // batch_size)
                row_counts = sampler.row_counts[files]
                of_bin = Sampler(
                    row_counts, rows, seed, sampler.rank, sampler.world_size
                )
                self.bins.append((files, of_bin, count))
        # All bins change epoch at the same step: a micro-batch has one epoch for all its sequences.
        shortest = min(of_bin.steps_per_epoch for _, of_bin, _ in self.bins)
        for _, of_bin, _ in self.bins:
            of_bin.steps_per_epoch = shortest

    def step(self, step: int) -> list[Chosen]:
        first = self.rank - self.rank % self.group
        batches = [
            chosen
            for rank in range(first, first + self.group)
            for chosen in self._of_rank(step, rank)
        ]
        if self.group == 1:
            return batches
        pool = Chosen.joined(batches)
        lengths = np.empty(len(pool.files), dtype=np.int64)
        for file in np.unique(pool.files).tolist():
            where = pool.files == file
            begins, offsets = pool.sequences[where], self.source[file].sequence_offsets
            lengths[where] = offsets[begins + 1] - offsets[begins]
        # A line: the next longest sequences, one for each micro-batch of the group; every other
        # line backwards.
        order = np.argsort(-lengths, kind="stable").reshape(-1, len(batches))
        # Back and forth: dealt in one direction, the first micro-batch would get the longer one of
        # every line.
        order[1::2] = order[1::2, ::-1]
        mine = order[:, self.rank - first :: self.group]
        return [pool.take(column) for column in mine.T]

    def _of_rank(self, step: int, rank: int) -> list[Chosen]:
        """Micro-batches of a rank of the group, before the exchange."""
        epoch, bins = self.bins[0][1].epoch(step), []
        for files_of_bin, sampler, count in self.bins:
            file_rows = [
                (int(files_of_bin[file]), rows)
                for file, rows in sampler.rows(step, rank)
            ]
            expanded = [
                row_sequences(self.source[file], rows) for file, rows in file_rows
            ]
            sequences, per_row = (
                np.concatenate(parts) for parts in zip(*expanded, strict=True)
            )
            lengths = [len(numbers) for numbers, _ in expanded]
            files = np.repeat([file for file, _ in file_rows], lengths)
            chosen = Chosen(files, sequences, np.full(len(files), epoch))
            bins.append(chosen.cut(offsets_of(per_row)[::count]))
        return [Chosen.joined(parts) for parts in zip(*bins, strict=True)]


def bin_counts(source: RowSource, wanted: str, batch_size: int) -> list[int]:
    """Sequences of a micro-batch from each bin: BIN_COUNTS, as 6:3:2:5.

    Raises DataError if they do not fit the data or BATCHSIZE.
    """
    counts = [int(count) for count in wanted.split(":")]
    if len(counts) != len(source.bins) or sum(counts) != batch_size:
        raise DataError(
            f"BIN_COUNTS={wanted}: expected {len(source.bins)} numbers, one per bin of the data, "
            f"with the sum BATCHSIZE={batch_size}"
        )
    return counts


def row_sequences(records: Records, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the sequences in the given rows, in order, and the number in each row.

    An empty row, as NVIDIA's packer sometimes leaves, is replaced by the file's next one that is
    not empty.
    """
    if records.row_offsets is None:
        return rows, np.ones(len(rows), dtype=np.int64)
    begins = records.row_offsets[rows]
    counts = records.row_offsets[rows + 1] - begins
    if not counts.all():
        # The end of the file is followed by its beginning.
        filled = np.flatnonzero(np.diff(records.row_offsets))
        return row_sequences(
            records, filled[np.searchsorted(filled, rows) % len(filled)]
        )
    return ragged_indices(begins, counts), counts
