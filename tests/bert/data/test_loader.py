"""Micro-batches: packed and unpacked rows, steps that cross a file's end."""

from __future__ import annotations

import itertools

import pytest

from bert.data.records import DataError

from .sources import Files, fails_at, loader_of


def _tokens(batch):
    ends = batch.cu_seqlens.tolist()
    return [tuple(batch.input_ids[a:b].tolist()) for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("packed", [True, False])
def test_an_epoch_of_batches_is_every_sequence_once(make_records, packed):
    # Steps of 4 rows cross the ends of 7.
    files = Files([make_records(7, packed, seed) for seed in range(3)])
    data = loader_of(files, batch_size=2, gradient_steps=2, packed=packed)
    steps = [data.next_step() for _ in range(int(files.row_counts().sum()) // 4)]
    data.close()
    assert {len(batches) for batches in steps} == {2}
    seen = [tokens for batches in steps for one in batches for tokens in _tokens(one)]
    everything = {tokens for records in files.files for tokens in _sequences(records)}
    assert len(set(seen)) == len(seen)
    assert set(seen) <= everything
    if not packed:
        assert len(seen) == 4 * len(steps)


def _sequences(records):
    ends = records.sequence_offsets.tolist()
    return [tuple(records.input_ids[a:b].tolist()) for a, b in itertools.pairwise(ends)]


def test_rows_of_no_sequence_are_passed_over_and_no_micro_batch_is_empty(make_records):
    records = make_records(12, False, 1)
    rows = records.with_rows([0, 0, 0, 4, 8, 8, 12, 12])
    files = Files([rows, make_records(5, True, 2)])
    data = loader_of(files, batch_size=1, packed=True, max_seq_length=512)
    steps = [data.next_step() for _ in range(int(files.row_counts().sum()))]
    data.close()
    seen = {tuple(_tokens(batch)) for batches in steps for batch in batches}
    flat = _sequences(records)
    assert {tuple(flat[begin : begin + 4]) for begin in (0, 4, 8)} <= seen
    assert all(seen)


@pytest.mark.parametrize("bad", [1, 2, 4, 9])
def test_a_step_that_cannot_be_made_is_reported_at_its_turn(make_records, bad):
    made: list = []
    files = Files([make_records(40, False, 1)])
    data = loader_of(files, fails_at(bad, made), batch_size=2)
    steps = [data.next_step()[0] for _ in range(bad - 1)]
    with pytest.raises(DataError, match="damaged"):
        data.next_step()
    data.close()
    assert [id(batch) for batch in steps] == [id(batch) for batch in made[: bad - 1]]
