"""Records in memory as a source of training data."""

from __future__ import annotations

import numpy as np

from bert.data.loader import LoaderConfig, TrainingData
from bert.data.records import DataError, Records
from bert.data.sampler import Sampler


class Files:
    """Stand-in for ``Shards``, with a bin per file."""

    vocab_md5 = ""

    def __init__(self, files: list[Records]) -> None:
        self.files = files
        self.bins = [np.array([number]) for number in range(len(files))]

    def row_counts(self) -> np.ndarray:
        return np.array([records.num_rows for records in self.files])

    def __getitem__(self, number: int) -> Records:
        return self.files[number]


def sampler_of(source, config, seed=3, rank=0, world=1) -> Sampler:
    return Sampler(source.row_counts(), config.rows_per_step, seed, rank, world)


def loader_of(
    source, finish=lambda batch: batch, sampler=None, first_step=1, masks=None, **config
):
    """Training data of the tiny vocabulary, by a LoaderConfig of 48 tokens."""
    settings = LoaderConfig(**{"max_seq_length": 48, "gradient_steps": 1} | config)
    sampler = sampler or sampler_of(source, settings)
    return TrainingData(source, sampler, settings, 211, first_step, finish, masks)


def fails_at(number, made):
    """A last step of the loader that keeps its batches, and fails at that one."""

    def finish(batch):
        made.append(batch)
        if len(made) == number:
            raise DataError("a damaged file")
        return batch

    return finish
