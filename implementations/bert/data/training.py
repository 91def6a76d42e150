"""Training data of one rank: the micro-batches of each step, prepared one step ahead on a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from bert.data.batch import Batch, make_batch
from bert.data.format import DataError, Records, concatenate
from bert.data.sampler import Sampler
from bert.data.shards import Shards, list_shards
from bert.data.synthetic import SyntheticShards
from bert.env import ConfigError, env


@dataclass(frozen=True, kw_only=True)
class Config:
    """Where the rows come from and how many a rank takes."""

    packed: bool = env("PACKED", False, doc="1 trains on DATADIR_PHASE2_PACKED, 0 on DATADIR_PHASE2")
    datadir: Path | None = env("DATADIR_PHASE2", None, doc="folder of unpacked record files")
    datadir_packed: Path | None = env("DATADIR_PHASE2_PACKED", None, doc="folder of packed record files")
    synthetic: bool = env("SYNTH_DATA", False, doc="1 trains on made-up sequences of Wikipedia's lengths, no files")
    batch_size: int = env("BATCHSIZE", at_least=1, doc="rows of a GPU in one micro-batch")
    gradient_steps: int = env("GRADIENT_STEPS", 1, at_least=1, doc="micro-batches accumulated into one step")
    packing_factor: int = env("PACKING_FACTOR", 1, at_least=1, doc="sequences a row counts for: 2 for packed Wikipedia")
    max_seq_length: int = env("MAX_SEQ_LENGTH", 512, at_least=8, doc="tokens of a row at most")

    @property
    def rows_per_step(self) -> int:
        """Rows of one rank in one optimizer step."""
        return self.batch_size * self.gradient_steps

    @property
    def source(self) -> tuple[Path, str]:
        """The folder trained on and the variable that names it. Raises ConfigError where that is unset."""
        variable = "DATADIR_PHASE2_PACKED" if self.packed else "DATADIR_PHASE2"
        folder = self.datadir_packed if self.packed else self.datadir
        if folder is None:
            raise ConfigError(f"{variable} is not set (PACKED={int(self.packed)}): give the folder of record files")
        return folder, variable


class RowSource(Protocol):
    """Files of rows: real ones, or made up."""

    vocab_md5: str

    def row_counts(self) -> np.ndarray:
        """Rows of every file, int64."""
        ...

    def __getitem__(self, number: int) -> Records:
        """The records of one file."""
        ...


def open_source(config: Config, vocab_size: int) -> RowSource:
    """The rows to train on. Raises DataError where there are none."""
    if config.synthetic:
        return SyntheticShards(config.max_seq_length, vocab_size, config.packed)
    return Shards(list_shards(*config.source), config.max_seq_length)


def row_sequences(records: Records, rows: np.ndarray) -> np.ndarray:
    """Indices of the sequences in the given rows, in order."""
    if records.row_offsets is None:
        return rows
    begins, ends = records.row_offsets[rows], records.row_offsets[rows + 1]
    counts = ends - begins
    return np.arange(counts.sum()) + np.repeat(begins - np.cumsum(counts) + counts, counts)


class TrainingData:
    """``next_step()`` gives the micro-batches of step after step, from ``first_step`` on."""

    def __init__(
        self,
        source: RowSource,
        sampler: Sampler,
        config: Config,
        vocab_size: int,
        first_step: int,
        finish: Callable[[Batch], Batch],
    ) -> None:
        """``finish`` is applied to each batch on the thread: pad to a capacity, pin memory."""
        self.source, self.sampler, self.config = source, sampler, config
        self.vocab_size, self.finish = vocab_size, finish
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._step = first_step
        self._pending: Future[list[Batch]] = self._executor.submit(self.batches, first_step)

    def next_step(self) -> list[Batch]:
        """Micro-batches of the next step, on the CPU. Raises DataError for records that cannot be used."""
        batches = self._pending.result()
        self._step += 1
        self._pending = self._executor.submit(self.batches, self._step)
        return batches

    def close(self) -> None:
        """Stops the thread."""
        self._executor.shutdown(cancel_futures=True)

    def batches(self, step: int) -> list[Batch]:
        """Micro-batches of any step."""
        pieces = self.sampler.rows(step)
        size = self.config.batch_size
        if len(pieces) == 1:
            records, rows = self.source[pieces[0][0]], pieces[0][1]
        else:  # a step across a file's end
            selected = [self._select(file, rows) for file, rows in pieces]
            records = concatenate(selected)
            rows = np.arange(records.num_rows)
        return [
            self.finish(self._make(records, rows[begin : begin + size]))
            for begin in range(0, self.config.rows_per_step, size)
        ]

    def _select(self, file: int, rows: np.ndarray) -> Records:
        records = self.source[file]
        selected = records.select(row_sequences(records, rows))
        if records.row_offsets is None:
            return selected
        counts = np.diff(records.row_offsets)[rows]
        return selected.with_rows(np.concatenate([[0], np.cumsum(counts)]))

    def _make(self, records: Records, rows: np.ndarray) -> Batch:
        batch = make_batch(records, row_sequences(records, rows), self.config.max_seq_length)
        largest = max(int(batch.input_ids.max()), int(batch.masked_labels.max()) if batch.num_masked else 0)
        if largest >= self.vocab_size or int(batch.input_ids.min()) < 0:
            raise DataError(
                f"token id {largest} in the training data, and bert_config.json has vocab_size {self.vocab_size}: "
                "the data and BERT_CONFIG are of different vocabularies"
            )
        return batch
