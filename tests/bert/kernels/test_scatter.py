"""Sums of rows by index, whatever the lengths of the runs."""

from __future__ import annotations

import pytest
import torch

from bert.kernels.operations.scatter import CHUNK, GROUP, sum_by_index

LONG = CHUNK * (GROUP + 2)  # a run over more chunks than are joined at a time

RUNS = {
    "one_run_in_all": [LONG + 5],
    "runs_that_end_with_their_chunk": [CHUNK, 2 * CHUNK, CHUNK],
    "long_run_between_short_ones": [3, LONG, 1, 1, 20],
    "all_different": [1] * (2 * CHUNK + 1),
    "long_run_to_the_end": [7, 3 * CHUNK - 7],
}


def test_no_rows_are_a_table_of_zeros(device):
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    assert not sum_by_index(torch.empty(0, 5, device=device), nothing, 3).any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of these values
@pytest.mark.parametrize("value", [float("inf"), float("nan"), torch.finfo().max])
@pytest.mark.parametrize("lengths", RUNS.values(), ids=RUNS)
def test_a_sum_that_is_not_finite_is_never_lost(value, lengths, device):
    indices = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for run in range(len(lengths)):
        rows = torch.ones(len(indices), 5)
        rows[indices == run, 2] = value  # the last one overflows by its sum alone
        found = sum_by_index(rows.to(device), indices.int().to(device), len(lengths))
        finite = found.cpu().isfinite()
        assert finite[run, 2] == (value == torch.finfo().max and lengths[run] == 1)
        assert finite[:, [0, 1, 3, 4]].all(), "other columns"


@pytest.mark.parametrize("lengths", RUNS.values(), ids=RUNS)
def test_sums_equal_index_add(device, lengths):
    generator = torch.Generator().manual_seed(0)
    indices = torch.repeat_interleave(
        torch.arange(len(lengths)) * 2 + 1, torch.tensor(lengths)
    )
    indices = indices[torch.randperm(len(indices), generator=generator)].int()
    rows = torch.randn(len(indices), 5, generator=generator)
    # Every other row of the table, and the last ones, stay zero.
    num_indices = 2 * len(lengths) + 3
    expected = torch.zeros(num_indices, 5, dtype=torch.float64).index_add_(
        0, indices, rows.double()
    )
    result = sum_by_index(rows.to(device), indices.to(device), num_indices)
    # Up to 300 fp32 terms.
    torch.testing.assert_close(result.cpu().double(), expected, atol=2e-5, rtol=0)
