"""Which ranks are named, depending on noise of rounds, rounds with lost time, and number of
comparisons.
"""

from __future__ import annotations

import numpy as np
import pytest

from review.acceptance.comparisons import all_comparisons
from review.acceptance.outliers import (
    Levels,
    autocorrelation,
    autocorrelation_of_all,
    find_slow,
    find_stalls,
)

from . import sweep
from .made_up import make

RANKS, ROUNDS, TESTS, COMPARISONS = 4, 6, 80, 74


def named(factor: float, noise: float) -> list[list[str]]:
    """Names found in each of many tests in which rank 1 is slower by a factor and every round has
    ``noise``.
    """
    generator = np.random.default_rng(1)
    found = []
    for _ in range(TESTS):
        speed = 1 + 0.01 * generator.standard_normal(RANKS)
        speed[1] *= factor
        shared = 1 + 0.3 * np.abs(generator.standard_normal(ROUNDS))
        times = (
            speed[:, None]
            * shared
            * (1 + noise * generator.standard_normal((RANKS, ROUNDS)))
        )
        values = {str(rank): rounds.tolist() for rank, rounds in enumerate(times)}
        found.append(
            [
                one.name
                for one in find_slow(
                    Levels.of(values), COMPARISONS, min_excess=0.03, spread=0.01
                )
            ]
        )
    return found


def test_ten_percent_is_mostly_found_at_two_percent_noise():
    assert named(1.1, 0.02).count(["1"]) > 0.5 * TESTS
    assert named(1.1, 0.005).count(["1"]) > 0.85 * TESTS


def test_no_equal_rank_is_named_however_noisy_the_rounds():
    for noise in (0.005, 0.02, 0.08):
        assert not any(named(1.0, noise))


def test_a_single_round_names_nobody():
    values = {str(rank): [1.0] * 6 for rank in range(8)}
    values["3"] = [1.5] + [float("nan")] * 5
    assert find_slow(Levels.of(values), 1, min_excess=0.03, spread=0.01) == []
    values["3"] = [1.5] * 6
    (outlier,) = find_slow(Levels.of(values), 1, min_excess=0.03, spread=0.01)
    assert outlier.name == "3"


def resembling(generator, shape: tuple[int, int], correlation: float) -> np.ndarray:
    """Autocorrelated noise with standard deviation 1."""
    found = generator.standard_normal(shape)
    for number in range(1, shape[1]):
        found[:, number] = (
            correlation * found[:, number - 1]
            + (1 - correlation**2) ** 0.5 * found[:, number]
        )
    return found


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("rounds", [6, 24])
def test_autocorrelation_is_estimated_from_short_series_too(correlation, rounds):
    noise = resembling(np.random.default_rng(5), (2000, rounds), correlation)
    assert autocorrelation(noise - np.median(noise, axis=1)[:, None]) == pytest.approx(
        correlation, abs=0.1
    )


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_with_autocorrelated_rounds_false_alarms_are_at_most_one_in_a_hundred(ranks):
    generator, alarms = np.random.default_rng(1), 0
    for _ in range(300):
        times = 1 + 0.05 * resembling(generator, (ranks, 4 * ROUNDS), 0.8)
        stages = np.split(times, 4, axis=1)
        shared = autocorrelation_of_all(stages)
        alarms += any(
            find_slow(
                Levels.of(dict(enumerate(rounds)), correlation=shared),
                10 * ranks,
                min_excess=0.03,
                spread=0.01,
            )
            for rounds in [*stages, times]
        )
    assert alarms <= 7  # 3, and what chance adds


@pytest.mark.parametrize("rounds", [6, 16, 64])
def test_few_rounds_rarely_look_less_correlated_than_they_are(rounds):
    """A guess of less than 0.5, where it is 0.8, names healthy ranks."""
    generator = np.random.default_rng(3)
    low = sum(
        autocorrelation_of_all(
            [1 + 0.01 * resembling(generator, (4, rounds), 0.8) for _ in range(3)]
        )
        < 0.5
        for _ in range(200)
    )
    assert low <= 10


def test_a_burn_in_is_as_correlated_as_the_stages():
    """Its six repeats alone look independent."""
    repeats = 1 + 0.01 * np.random.default_rng(0).standard_normal((4, 6))
    compared = all_comparisons(make(1, 4), dict(enumerate(repeats.tolist())))
    slow = [one for one in compared if one.what == "slow" and one.share != "overall"]
    bounds = {one.correlation for one in slow}
    assert "burn-in" in {one.stages[0] for one in slow}
    assert len(bounds) == 1
    assert min(bounds) > 0


@pytest.mark.parametrize(
    ("ranks", "noise", "least", "correlation"),
    [
        (4, 0.01, 0.8, 0.8),
        (4, 0.02, 0.4, 0.8),
        (8, 0.01, 0.95, 0.0),
        pytest.param(4, 0.01, 0.8, 0.0, marks=pytest.mark.slow),
        pytest.param(8, 0.01, 0.9, 0.8, marks=pytest.mark.slow),
    ],
)
def test_a_rank_five_percent_slow_is_named_as_often_as_documented(
    ranks, noise, least, correlation
):
    case = {"ranks": ranks, "noise": noise, "correlation": correlation}
    generator = np.random.default_rng(0)
    found = [
        sweep.slow_rank_is_named(generator, excess=0.05, **case) for _ in range(40)
    ]
    assert sum(found) >= 40 * least - 2
    healthy = [sweep.certified(generator, 1, **case).findings for _ in range(40)]
    assert sum(map(bool, healthy)) <= 2


def lost(generator, disturbed: float, rounds: int = 24) -> dict[str, list[float]]:
    """Time lost per round if pauses of any length disturb a fraction of all rounds."""
    shape = (RANKS, rounds)
    times = generator.pareto(1.0, shape) * (generator.random(shape) < disturbed)
    return {str(rank): own.tolist() for rank, own in enumerate(times)}


def test_pauses_that_affect_all_equally_name_nobody():
    generator = np.random.default_rng(2)
    for disturbed in (0.05, 0.3, 0.8):
        assert (
            sum(
                bool(find_stalls(lost(generator, disturbed), RANKS, min_excess=0.03))
                for _ in range(200)
            )
            <= 6
        )


def test_a_rank_that_pauses_in_a_third_of_its_rounds_is_named_with_frequency_and_loss():
    table = {str(rank): [0.0] * 24 for rank in range(RANKS)}
    table["2"][::3] = [0.3] * 8
    (found,) = find_stalls(table, COMPARISONS, min_excess=0.03)
    assert (found.name, found.measure, round(found.excess, 3)) == (
        "2",
        "in 8 of 24 rounds",
        0.1,
    )
    table["2"][3:] = [0.0] * 21
    assert find_stalls(table, COMPARISONS, min_excess=0.0) == [], (
        "a single pause is nobody's habit"
    )


def test_time_lost_by_all_in_the_same_round_names_nobody():
    table = {str(rank): [0.5, 0.0] * 12 for rank in range(RANKS)}
    assert find_stalls(table, COMPARISONS, min_excess=0.03) == []
    table["2"] = [0.5, 0.3] * 12
    (found,) = find_stalls(table, COMPARISONS, min_excess=0.03)
    assert (found.name, round(found.excess, 3), found.measure) == (
        "2",
        0.15,
        "in 12 of 24 rounds",
    )


def test_small_losses_name_nobody_however_frequent():
    table = {str(rank): [0.0] * 24 for rank in range(RANKS)}
    table["2"][::2] = [0.04] * 12
    assert find_stalls(table, COMPARISONS, min_excess=0.03) == []
