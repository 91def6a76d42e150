"""Estimated times to train agree with published results within the stated interval."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections import Counter

import numpy as np
import pytest

from review.league import estimate as module
from review.league.entries import published
from review.league.estimate import (
    PLACEHOLDERS,
    estimate,
    evaluation_interval,
    predicted,
)

RECIPE = {"learning_rate": 0.00096, "steps": 3680}


def test_published_results_lie_within_the_errors_and_intervals_that_the_docs_say(
    repository, monkeypatch
):
    monkeypatch.syspath_prepend(str(repository / "bench"))
    table = importlib.import_module("league_estimate").table()
    assert {name: row["results"] for name, row in table.items()} == {
        "by batch": 262, "by recipe": 262, "from training alone": 87, "without its batch size": 87
    }  # fmt: skip
    unseen = table["without its batch size"]
    assert unseen["median"] == pytest.approx(module.UNSEEN_BATCH, abs=5e-4)
    assert abs(unseen["bias"]) < 0.035
    for name in ("by recipe", "from training alone"):
        assert table[name]["median"] <= 0.02 < table["by batch"]["median"]
        assert table[name]["ninth_decile"] <= 0.10 < table["by batch"]["ninth_decile"]
    assert all(row["covered"] >= 0.9 for row in table.values())
    docs = (repository / "docs/evidence.md").read_text()
    for name, row in table.items():
        cells = (
            f"{row['results']}",
            *(f"{row[key]:.1%}" for key in ("median", "ninth_decile", "worst")),
            f"{row['bias']:+.1%}",
        )
        assert f"| {name} | {' | '.join(cells)} |" in docs


def test_over_batch_sizes_that_nobody_published_estimates_have_no_bias():
    """Each batch size once, predicted from the others: not its many results of one recipe."""
    entries, found, _ = predicted(recipe=True, without="batch_size")
    _, _, samples = module._data()
    errors = {}
    for one, error in zip(entries, found - samples, strict=True):
        errors.setdefault(one.batch_size, []).append(error)
    assert abs(np.median([np.median(of_size) for of_size in errors.values()])) < 0.01


def test_a_batch_size_that_no_result_has_says_how_far_off_it_may_be():
    said = str(estimate(1e4, 0.0, 1000, 8, learning_rate=0.001, steps=3000))
    assert "; doubtful: no published result has batch 1000: " in said
    assert "off by 3.9% in the median" in said
    assert isinstance(estimate(1e4, 0.0, 1e308, 8), str)


def test_a_result_is_predicted_without_itself(monkeypatch):
    found, before, _ = predicted(recipe=True)
    entries, places, samples = module._data()
    wrong = samples.copy()
    wrong[17] += 3.0
    monkeypatch.setattr(module, "_data", lambda: (entries, places, wrong))
    _, after, _ = predicted(recipe=True)
    assert after[17] == pytest.approx(before[17], abs=1e-6), (
        f"{found[17].system} is predicted by the others"
    )
    assert not np.allclose(np.delete(after, 17), np.delete(before, 17), atol=1e-3)


def test_a_result_with_its_own_recipe_and_rate_comes_out_near_its_own_minutes():
    (one,) = [
        one
        for one in published()
        if (one.round, one.system) == ("5.0", "nyx_n1_ngc25.04_pytorch")
    ]
    found = estimate(one.training_rate, 0.0, one.batch_size, 8, **RECIPE)
    assert found.recipe
    assert found.minutes == pytest.approx(one.minutes, rel=0.03)
    assert found.low < one.minutes < found.high
    assert found.faster.minutes < found.minutes < found.slower.minutes
    rounds = [
        one.round
        for one in published()
        if one.accelerators == 8 and one.division == "closed" and one.minutes
    ]
    assert (
        1
        <= found.ranks[0]
        < found.ranks[1]
        < found.results
        <= len(rounds) - rounds.count("0.7")
    )


def test_the_interval_is_wider_without_a_recipe_far_from_results_and_for_a_noisy_step():
    near = estimate(1e4, 0.0, 768, 8, **RECIPE)

    def width(found):
        return found.high / found.low

    assert width(estimate(1e4, 0.0, 768, 8)) > 1.2 * width(near)
    assert width(
        estimate(1e4, 0.0, 768, 8, learning_rate=0.01, steps=20_000)
    ) > 1.2 * width(near)
    assert width(estimate(1e4, 0.05, 768, 8, **RECIPE)) > 1.05 * width(near)
    assert not estimate(1e4, 0.0, 128, 8, learning_rate=1e-4, steps=1000).recipe, (
        "what certify.sh sets is no recipe"
    )


def test_twice_the_rate_is_half_the_time_and_evaluations_come_on_top():
    slow, fast = (estimate(rate, 0.0, 768, 8, **RECIPE) for rate in (1e4, 2e4))
    assert slow.minutes == pytest.approx(2 * fast.minutes)
    assert evaluation_interval(768) == evaluation_interval(448) == 150_000
    assert evaluation_interval(3072) == 175_000
    training, _ = module.time_to_train(np.log(2.4e6), 0.0, 1e4, 768)
    assert training == pytest.approx(4.0 * (1 + 10_000 / 150_000))


def test_the_sentence_names_place_neighbours_and_that_it_is_unverified():
    said = str(estimate(11_500, 0.01, 768, 8, **RECIPE))
    assert said.startswith("about 3.78 min")
    assert "published results with 8 accelerators, behind " in said
    assert said.endswith("; estimate, unverified")
    assert "no published result has 5 accelerators" in str(
        estimate(11_500, 0.01, 768, 5)
    )
    fastest, slowest = (
        str(estimate(rate, 0.01, 768, 8, **RECIPE)) for rate in (1e6, 10)
    )
    assert "behind" not in fastest
    assert "before" not in slowest
    assert dataclasses.asdict(estimate(1e4, 0.0, 768, 8))["results"] > 100


def test_no_place_is_behind_the_last_of_the_published_results():
    slowest = str(estimate(10, 0.01, 768, 8, **RECIPE))
    assert ", behind all 125 published results with 8 accelerators, behind " in slowest
    assert ", place 1 to 125 among the 125 " in str(estimate(100, 0.0, 1, 8))


@pytest.mark.parametrize(
    ("learning_rate", "steps"), [(math.inf, 8000), (math.nan, 8000), (4e-4, math.inf), (4e-4, math.nan)]
)  # fmt: skip
def test_what_is_no_number_is_no_recipe(learning_rate, steps):
    found = estimate(8000, 0.01, 448, 8, learning_rate, steps)
    assert str(found) == str(estimate(8000, 0.01, 448, 8))
    assert isinstance(estimate(8000, 0.01, math.inf, 8), str)


def test_placeholders_are_no_recipe_on_however_many_accelerators(repository):
    rate, steps = PLACEHOLDERS
    found = estimate(1e6, 0.0, 16 * 1024, 1024, learning_rate=rate, steps=steps)
    assert not found.recipe
    assert found.minutes == estimate(1e6, 0.0, 16 * 1024, 1024).minutes
    for half in ((rate, 3680), (0.00096, steps)):
        given = dict(zip(("learning_rate", "steps"), half, strict=True))
        assert not estimate(1e6, 0.0, 16 * 1024, 1024, **given).recipe, "set in part"
    defaults = (repository / "launch/run/certify.sh").read_text()
    assert f"variables::default LR {rate:.4f}\n" in defaults
    assert f"variables::default MAX_STEPS {steps}\n" in defaults


@pytest.mark.parametrize(("rate", "batch", "accelerators", "said"), [
    (1e4, 1, 8, "batch size 1 is outside the published"),
    (1e4, 1_000_000, 8, "batch size 1e+06 is outside the published"),
    (1e6, 768, 8, "125,000 sequences/s of each accelerator is beyond the fastest published"),
    (1e5, 3072, 64, "above 16 accelerators such estimates were up to 15% too fast"),
])  # fmt: skip
def test_beyond_what_was_published_an_estimate_doubts_itself_and_widens(
    monkeypatch, rate, batch, accelerators, said
):
    found = estimate(rate, 0.01, batch, accelerators)
    assert any(doubt.startswith(said) for doubt in found.doubts)
    assert f"; doubtful: {said}" in str(found)
    for name in ("_outside", "_beyond", "_alone"):
        monkeypatch.setattr(module, name, lambda *_: {})
    sure = estimate(rate, 0.01, batch, accelerators)
    assert sure.doubts == ()
    assert found.high / found.low > 1.1 * sure.high / sure.low


def test_within_what_was_published_there_is_no_doubt():
    assert estimate(11_500, 0.01, 768, 8, **RECIPE).doubts == ()


@pytest.mark.parametrize(
    ("rate", "error"),
    [(0.0, 0.0), (float("nan"), 0.0), (1e4, float("nan")), (float("inf"), 0.0)],
)
def test_without_a_measured_rate_there_is_no_estimate(rate, error):
    assert (
        estimate(rate, error, 768, 8)
        == "nothing to compare: the training rate was not measured"
    )


def test_one_published_result_is_no_ranking():
    counts = Counter(
        one.accelerators
        for one in published()
        if one.division == "closed" and one.round != "0.7" and one.minutes
    )
    (alone, *_) = [size for size, count in counts.items() if count == 1]
    said = str(estimate(1e3 * alone, 0.01, 16 * alone, int(alone)))
    assert (
        f"only one published result has {int(alone)} accelerators: no ranking" in said
    )
    assert "place" not in said
