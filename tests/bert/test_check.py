"""python -m bert --check: what it says of convergence is what the official checker holds a submission to."""

from __future__ import annotations

import pytest

from bert import check
from review import rcp


@pytest.mark.parametrize("batch_size", [64, 256, 448, 449, 768, 1536, 3072, 4608, 6144, 8192, 13888, 16384])
def test_the_reference_convergence_is_the_one_that_results_are_judged_by(batch_size):
    point, _ = rcp.find(batch_size)
    said = check.convergence(batch_size, check.reference_runs())
    assert said.startswith(f"{point.mean:,.0f} samples to the target by the RCP")
    assert said.endswith(f"at least {point.minimum:,.0f}")
    for size in point.interpolated_from or ():
        assert f"{size:,}" in said


def test_a_batch_size_above_every_reference_needs_one_of_its_own():
    assert check.convergence(16385, check.reference_runs()).startswith("no RCP above batch size 16,384")


def test_a_reference_without_spread_is_its_own_least():
    assert check.fewest_samples(1000.0, 0.0, 18) == 1000.0


@pytest.mark.parametrize(
    ("batch_size", "interval"),
    [(448, 150_000), (768, 150_000), (3072, 175_000), (4608, 200_000), (8192, 225_000), (16384, 325_000)],
)
def test_the_evaluation_interval_is_the_rules(batch_size, interval):
    assert check.rule_interval(batch_size) == interval
