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
