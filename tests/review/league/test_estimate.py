"""Estimated times to train are as far from published ones as the docs say, and have their place."""

import math

import numpy as np
import pytest

from review.league.entries import published
from review.league.estimate import LONGER, estimate
from review.league.ranking import League
from review.logs.output import ReviewError
from review.rulebook import rcp
from review.rulebook.compliance import evaluation_interval


@pytest.mark.parametrize(("row", "results"), [("whole runs", 266), ("between evaluations", 87)])  # fmt: skip
def test_published_results_are_as_far_off_as_docs_say(repository, row, results):
    """Of the closed results to 0.720, each at its own rate and batch size."""
    # As a certified machine measures it; evaluations are part of the rate of a whole run.
    alone, off = row == "between evaluations", []
    for one in League((), published()).ranked:
        rate = one.training_rate if alone else one.sequences_per_second
        if rate and one.minutes and one.division == "closed" and one.round != "0.7":
            said = estimate(rate, one.batch_size, one.accelerators or 8)
            share = 0 if alone else 10_000 / evaluation_interval(one.batch_size)
            off.append(said.minutes / (1 + share) / one.minutes - 1)
    off, wrong = np.array(off), np.abs(off)
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


@pytest.mark.parametrize(("rate", "batch", "accelerators", "words"), [
    (11_500, 768, 8, " among the 125 published results with 8 accelerators, behind "),
    (1e6, 768, 8, ", place 1 among the 125 published results with 8 accelerators, before "),
    (10, 768, 8, ", behind all 125 published results with 8 accelerators, behind "),
    (11_500, 768, 5, ", no published result has 5 accelerators; "),
    (1e5, 3072, 48, ", only one published result has 48 accelerators; "),
    (1e4, 1e9, 8, "not estimated: no reference point for batch 1e+09"),
    *((rate, 768, 8, "nothing to compare: the training rate was not measured")
      for rate in (0.0, -1.0, math.nan, math.inf)),
])  # fmt: skip
def test_an_estimate_says_its_place_or_why_none(rate, batch, accelerators, words):
    assert words in str(estimate(rate, batch, accelerators))


def test_without_mlperf_logging_there_is_a_reason_and_no_estimate(monkeypatch):
    def missing(*_):
        raise ReviewError("mlperf_logging is not installed")

    monkeypatch.setattr(rcp, "find", missing)
    said = "not estimated: mlperf_logging is not installed"
    assert estimate(1e4, 768, 8) == said
