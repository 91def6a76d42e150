"""Which rows a rank trains on in a step: a pure function of (seed, step), so that a resumed run needs no state."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from bert.data.records import DataError

Pieces = list[tuple[int, np.ndarray]]  # (file, rows in it), in order


class Sampler:
    """Deals all rows once an epoch, without replacement.

    An epoch shuffles the files and, within each, the rows; rank r takes the r-th of ``world_size`` equal runs of that
    order, so that it reads few files. What does not fill a last step of all ranks is left out until the next epoch.
    """

    def __init__(
        self,
        row_counts: np.ndarray,
        rows_per_step: int,
        seed: int,
        rank: int,
        world_size: int,
        dealt: tuple[int, int] | None = None,
    ) -> None:
        """row_counts: rows of every file; rows_per_step: rows a rank takes in one optimizer step.

        dealt: (ranks, rows of each in a step) of the run that this one continues with other ranks: each step has the
        rows that it would have had there, of as many ranks together.
        """
        self.row_counts, self.rows_per_step = row_counts, rows_per_step
        self.seed, self.rank, self.world_size = seed, rank, world_size
        num_runs, self._rows_dealt = dealt or (world_size, rows_per_step)
        assert num_runs * self._rows_dealt == world_size * rows_per_step, "as many rows in a step"
        self.rows_per_rank = int(row_counts.sum()) // num_runs
        self.steps_per_epoch = self.rows_per_rank // self._rows_dealt
        if self.steps_per_epoch == 0:
            raise DataError(
                f"{int(row_counts.sum())} rows of training data do not fill one step of {num_runs} ranks x "
                f"{self._rows_dealt} rows: prepare more data, or lower BATCHSIZE or GRADIENT_STEPS"
            )
        self._order = lru_cache(maxsize=2)(self._file_order)
        self._permutation = lru_cache(maxsize=4)(self._row_permutation)

    def epoch(self, step: int) -> int:
        """Times through the data before that of optimizer step ``step``."""
        return (step - 1) // self.steps_per_epoch

    def rows(self, step: int, rank: int | None = None) -> Pieces:
        """Rows of optimizer step ``step`` (1 is the first) on this rank or another."""
        epoch, step_in_epoch = self.epoch(step), (step - 1) % self.steps_per_epoch
        first, size = (self.rank if rank is None else rank) * self.rows_per_step, self._rows_dealt
        end = first + self.rows_per_step
        found: Pieces = []
        for run in range(first // size, -(-end // size)):
            begin = run * self.rows_per_rank + step_in_epoch * size
            low, high = max(first - run * size, 0), min(end - run * size, size)
            found += self._pieces(epoch, begin + low, begin + high)
        return found

    def stream(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """This rank's (epoch, file, rows in it) without end and without steps: here each epoch leaves nothing out."""
        total, epoch = int(self.row_counts.sum()), 0
        while True:
            begin, end = (total * rank // self.world_size for rank in (self.rank, self.rank + 1))
            yield from ((epoch, file, rows) for file, rows in self._pieces(epoch, begin, end))
            epoch += 1

    def _pieces(self, epoch: int, begin: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        """Rows [begin, end) of the epoch's order."""
        order, starts = self._order(epoch)
        place = int(np.searchsorted(starts, begin, side="right")) - 1
        while begin < end:
            stop = min(end, int(starts[place + 1]))
            if stop > begin:
                file = int(order[place])
                local = slice(begin - int(starts[place]), stop - int(starts[place]))
                yield file, self._permutation(epoch, file)[local]
            begin, place = stop, place + 1

    def _file_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.row_counts))
        starts = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(self.row_counts[order], out=starts[1:])
        return order, starts

    def _row_permutation(self, epoch: int, file: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch, file]).permutation(int(self.row_counts[file]))
