"""Every row once per epoch, for any number of ranks; a pure function of seed and step."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert.data.records import DataError
from bert.data.sampler import Sampler


def _ranks(counts, rows_per_step, seed, world, **order):
    size = np.array(counts), rows_per_step, seed
    return [Sampler(*size, rank, world, **order) for rank in range(world)]


def _dealt(sampler, step):
    return [(file, int(row)) for file, rows in sampler.rows(step) for row in rows]


def _rows(*size, steps):
    ranks = _ranks(*size)
    return [_dealt(sampler, step) for step in steps for sampler in ranks]


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
    size = counts, rows_per_step, seed, world
    dealt = _rows(*size, steps=range(1, _ranks(*size)[0].steps_per_epoch + 1))
    flat = [row for rows in dealt for row in rows]
    assert all(len(rows) == rows_per_step for rows in dealt)
    assert len(set(flat)) == len(flat)
    assert all(0 <= row < counts[file] for file, row in flat)
    assert sum(counts) - len(flat) < world * rows_per_step + world


def test_epochs_and_seeds_differ_and_repeat():
    counts = [50, 50]
    one, again = (_rows(counts, 10, 1, 1, steps=range(1, 11)) for _ in range(2))
    everything = [(f, r) for f in (0, 1) for r in range(50)]
    assert sorted(itertools.chain(*one)) == everything
    assert again == one
    assert _rows(counts, 10, 2, 1, steps=range(1, 11)) != one
    second = _rows(counts, 10, 1, 1, steps=range(11, 21))
    assert second != one
    assert sorted(itertools.chain(*second)) == everything


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
def test_other_ranks_that_continue_a_run_take_the_rows_of_each_step(world):
    counts, steps = [17, 40, 23, 31], range(1, 12)  # more than an epoch
    ranks = _ranks(counts, 12 // world, 7, world, shard_order=(4, 3))
    assert {len(_dealt(sampler, 1)) for sampler in ranks} == {12 // world}
    before = _rows(counts, 3, 7, 4, steps=steps)  # of four ranks
    for number, step in enumerate(steps):
        whole = itertools.chain(*before[4 * number : 4 * number + 4])
        assert [row for sampler in ranks for row in _dealt(sampler, step)] == [*whole]
    assert {sampler.epoch(step) for sampler in ranks for step in steps} == {0, 1}


def test_a_step_that_cannot_be_filled_is_an_error():
    with pytest.raises(DataError, match="do not fill one step"):
        Sampler(np.array([3, 4]), 4, 0, 0, 2)
