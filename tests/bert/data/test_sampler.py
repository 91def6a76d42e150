"""Every row once per epoch, for any number of ranks; a pure function of seed and step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert.data.records import DataError
from bert.data.sampler import Sampler


def _rows(counts, rows_per_step, seed, world, steps):
    numbers, size = np.array(counts), (rows_per_step, seed)
    ranks = [Sampler(numbers, *size, rank, world) for rank in range(world)]
    return [
        [(f, int(r)) for f, rows in s.rows(step) for r in rows]
        for step in steps
        for s in ranks
    ]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=7),
    st.integers(1, 5),
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
)
def test_an_epoch_deals_each_row_at_most_once_and_leaves_out_less_than_a_step(
    counts, rows_per_step, seed, world
):
    if sum(counts) // world < rows_per_step:
        return
    sampler = Sampler(np.array(counts), rows_per_step, seed, 0, world)
    steps = range(1, sampler.steps_per_epoch + 1)
    dealt = _rows(counts, rows_per_step, seed, world, steps)
    flat = [row for rows in dealt for row in rows]
    assert all(len(rows) == rows_per_step for rows in dealt)
    assert len(set(flat)) == len(flat)
    assert all(0 <= row < counts[file] for file, row in flat)
    assert sum(counts) - len(flat) < world * rows_per_step + world


def test_epochs_and_seeds_differ_and_repeat():
    counts = [50, 50]
    one = _rows(counts, 10, 1, 1, range(1, 11))
    everything = [(f, r) for f in (0, 1) for r in range(50)]
    assert sorted(itertools.chain(*one)) == everything
    assert _rows(counts, 10, 1, 1, range(1, 11)) == one
    assert _rows(counts, 10, 2, 1, range(1, 11)) != one
    second = _rows(counts, 10, 1, 1, range(11, 21))
    assert second != one
    assert sorted(itertools.chain(*second)) == everything


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
def test_other_ranks_that_continue_a_run_take_the_rows_that_each_step_would_have_had(
    world,
):
    counts, steps = [17, 40, 23, 31], range(1, 12)  # more than an epoch
    before = _rows(counts, 3, 7, 4, steps)  # of four ranks
    share, order = 12 // world, {"shard_order": (4, 3)}
    ranks = [
        Sampler(np.array(counts), share, 7, rank, world, **order)
        for rank in range(world)
    ]
    after = [
        [(f, int(r)) for s in ranks for f, rows in s.rows(step) for r in rows]
        for step in steps
    ]
    for s in ranks:
        assert sum(len(rows) for _, rows in s.rows(1)) == share
    assert after == [
        list(itertools.chain(*before[4 * n : 4 * n + 4])) for n in range(len(steps))
    ]
    assert {s.epoch(step) for s in ranks for step in steps} == {0, 1}


def test_a_step_that_cannot_be_filled_is_an_error():
    with pytest.raises(DataError, match="do not fill one step"):
        Sampler(np.array([3, 4]), 4, 0, 0, 2)
