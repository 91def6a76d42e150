"""Micro-batches: packed and unpacked rows, steps that cross a file's end."""

from __future__ import annotations

import itertools

import pytest

from bert.data.loader import LoaderConfig, TrainingData
from bert.data.records import DataError
from bert.data.sampler import Sampler

from .sources import Files


def _tokens(batch):
    ends = batch.cu_seqlens.tolist()
    return [tuple(batch.input_ids[a:b].tolist()) for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("packed", [True, False])
def test_an_epoch_of_batches_is_every_sequence_once(make_records, packed):
    # Steps of 4 rows cross the ends of 7.
    files = Files([make_records(7, packed, seed) for seed in range(3)])
    total = int(files.row_counts().sum())
    config = LoaderConfig(
        batch_size=2, gradient_steps=2, packed=packed, max_seq_length=48
    )
    sampler = Sampler(
        files.row_counts(), config.rows_per_step, seed=3, rank=0, world_size=1
    )
    data = TrainingData(
        files,
        sampler,
        config,
        vocab_size=211,
        first_step=1,
        pad_and_pin=lambda batch: batch,
    )
    seen = []
    rows = 0
    for _ in range(sampler.steps_per_epoch):
        batches = data.next_step()
        assert len(batches) == 2
        rows += 4
        seen += [tokens for batch in batches for tokens in _tokens(batch)]
    data.close()
    everything = []
    for records in files.files:
        o = records.sequence_offsets
        everything += [
            tuple(records.input_ids[o[i] : o[i + 1]].tolist())
            for i in range(records.num_sequences)
        ]
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(everything)
    assert total - rows < 4
    if not packed:
        assert len(seen) == rows


def test_rows_of_no_sequence_are_passed_over_and_no_micro_batch_is_empty(make_records):
    records = make_records(12, False, 1)
    files = Files(
        [records.with_rows([0, 0, 0, 4, 8, 8, 12, 12]), make_records(5, True, 2)]
    )
    config = LoaderConfig(
        batch_size=1, gradient_steps=1, packed=True, max_seq_length=512
    )
    sampler = Sampler(
        files.row_counts(), config.rows_per_step, seed=3, rank=0, world_size=1
    )
    data = TrainingData(
        files,
        sampler,
        config,
        vocab_size=211,
        first_step=1,
        pad_and_pin=lambda batch: batch,
    )
    seen = {
        tuple(_tokens(batch))
        for _ in range(sampler.steps_per_epoch)
        for batch in data.next_step()
    }
    data.close()
    o = records.sequence_offsets
    flat = [tuple(records.input_ids[o[i] : o[i + 1]].tolist()) for i in range(12)]
    for begin in (0, 4, 8):
        assert tuple(flat[begin : begin + 4]) in seen
    assert all(seen)


@pytest.mark.parametrize("bad", [1, 2, 4, 9])
def test_a_step_that_cannot_be_made_is_reported_at_its_turn(make_records, bad):
    def finish(batch):
        made.append(batch)
        if len(made) == bad:
            raise DataError("a damaged file")
        return batch

    made: list = []
    files = Files([make_records(40, False, 1)])
    config = LoaderConfig(
        batch_size=2, gradient_steps=1, packed=False, max_seq_length=48
    )
    sampler = Sampler(
        files.row_counts(), config.rows_per_step, seed=3, rank=0, world_size=1
    )
    data = TrainingData(
        files, sampler, config, vocab_size=211, first_step=1, pad_and_pin=finish
    )
    steps = [data.next_step()[0] for _ in range(bad - 1)]
    with pytest.raises(DataError, match="damaged"):
        data.next_step()
    data.close()
    assert [id(batch) for batch in steps] == [id(batch) for batch in made[: bad - 1]]
