"""Estimated times to train are as far from published ones as the docs say, and have their place."""

from __future__ import annotations

import math

import numpy as np
import pytest

from review.league.entries import published
from review.league.estimate import LONGER, estimate
from review.league.ranking import League
from review.logs.output import ReviewError
from review.rulebook import rcp
from review.rulebook.compliance import evaluation_interval


def errors(alone):
    """Relative errors over the closed results to 0.720, each at its own rate and batch size.

    alone: at the rate between evaluations, as a certified machine measures it."""
    found = []
    for one in League((), published()).ranked:
        rate = one.training_rate if alone else one.sequences_per_second
        if rate and one.minutes and one.division == "closed" and one.round != "0.7":
            said = estimate(rate, one.batch_size, one.accelerators or 8)
            # Evaluations are part of the rate of a whole run.
            share = 0 if alone else 10_000 / evaluation_interval(one.batch_size)
            found.append(said.minutes / (1 + share) / one.minutes - 1)
    return np.array(found)


@pytest.mark.parametrize(
    ("row", "alone", "results"),
    [("whole runs", False, 266), ("between evaluations", True, 87)],
)
def test_published_results_are_as_far_off_as_the_docs_say(
    repository, row, alone, results
):
    off = errors(alone)
    wrong = abs(off)
    figures = (np.median(wrong), np.quantile(wrong, 0.9), wrong.max())
    cells = [f"{len(off)}", *(f"{figure:.1%}" for figure in figures)]
    cells.append(f"{np.median(off):+.1%}")
    docs = (repository / "docs/evidence.md").read_text()
    assert len(off) == results
    assert f"| {row} | {' | '.join(cells)} |" in docs
    assert np.mean(1 / (1 + off) <= LONGER) >= 0.9


def test_the_time_is_the_reference_samples_at_the_rate_with_evaluations():
    samples, share = rcp.find(768)[0].mean, 10_000 / 150_000
    for rate in (1e3, 1e4):
        found = estimate(rate, 768, 8)
        assert found.minutes == pytest.approx(samples / rate / 60 * (1 + share))
        assert found.longest == found.minutes * LONGER


def test_the_place_and_its_neighbours_are_those_of_the_minutes():
    found = estimate(11_500, 768, 8)
    assert found.faster.minutes < found.minutes <= found.slower.minutes
    assert (found.results, found.ranks[0] <= found.ranks[1]) == (125, True)
    assert found.as_dict()["text"] == str(found)
    assert str(found).endswith("; estimate, unverified")


@pytest.mark.parametrize(
    ("rate", "batch", "accelerators", "words"),
    [
        (11_500, 768, 8, " among the 125 published results with 8 accelerators, behind "),
        (1e6, 768, 8, ", place 1 among the 125 published results with 8 accelerators, before "),
        (10, 768, 8, ", behind all 125 published results with 8 accelerators, behind "),
        (11_500, 768, 5, ", no published result has 5 accelerators; "),
        (1e5, 3072, 48, ", only one published result has 48 accelerators; "),
        (1e4, 1e9, 8, "not estimated: no reference point for batch 1e+09"),
        *((rate, 768, 8, "nothing to compare: the training rate was not measured")
          for rate in (0.0, -1.0, math.nan, math.inf)),
    ],
)  # fmt: skip
def test_an_estimate_says_where_it_stands_or_why_there_is_none(
    rate, batch, accelerators, words
):
    assert words in str(estimate(rate, batch, accelerators))


def test_without_mlperf_logging_there_is_a_reason_and_no_estimate(monkeypatch):
    def missing(*_):
        raise ReviewError("mlperf_logging is not installed")

    monkeypatch.setattr(rcp, "find", missing)
    said = "not estimated: mlperf_logging is not installed"
    assert estimate(1e4, 768, 8) == said
