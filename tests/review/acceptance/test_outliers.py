"""Which ranks are named, depending on noise of rounds, rounds with lost time, and number of comparisons."""

import numpy as np
import pytest

from review.acceptance import comparisons, outliers
from review.acceptance.outliers import Levels, find_slow, find_stalls

from . import sweep
from .made_up import make

RANKS, ROUNDS, TESTS, COMPARISONS = 4, 6, 80, 74
NAN = float("nan")


def slow(values, comparisons=COMPARISONS, **levels) -> list[str]:
    """Names of those that are found slow."""
    found = Levels.of(values, **levels)
    named = find_slow(found, comparisons, min_excess=0.03, spread=0.01)
    return [one.name for one in named]


def named(factor: float, noise: float) -> list[list[str]]:
    """Names found in each of many tests in which rank 1 is slower by a factor and every round has ``noise``."""
    generator, found = np.random.default_rng(1), []
    for _ in range(TESTS):
        speed = 1 + 0.01 * generator.standard_normal(RANKS)
        speed[1] *= factor
        shared = 1 + 0.3 * np.abs(generator.standard_normal(ROUNDS))
        errors = 1 + noise * generator.standard_normal((RANKS, ROUNDS))
        times = speed[:, None] * shared * errors
        found.append(slow({str(rank): own for rank, own in enumerate(times.tolist())}))
    return found


def test_ten_percent_is_mostly_found_at_two_percent_noise():
    assert named(1.1, 0.02).count(["1"]) > 0.5 * TESTS
    assert named(1.1, 0.005).count(["1"]) > 0.85 * TESTS


def test_no_equal_rank_is_named_however_noisy_the_rounds():
    for noise in (0.005, 0.02, 0.08):
        assert not any(named(1.0, noise))


def test_a_single_round_names_nobody():
    values = {str(rank): [1.0] * 6 for rank in range(8)}
    assert slow(values | {"3": [1.5] + [float("nan")] * 5}, 1) == []
    assert slow(values | {"3": [1.5] * 6}, 1) == ["3"]


def resembling(generator, shape: tuple[int, int], correlation: float) -> np.ndarray:
    """Autocorrelated noise with standard deviation 1."""
    found = generator.standard_normal(shape)
    for number in range(1, shape[1]):
        found[:, number] *= (1 - correlation**2) ** 0.5
        found[:, number] += correlation * found[:, number - 1]
    return found


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("rounds", [6, 24])
def test_autocorrelation_is_estimated_from_short_series_too(correlation, rounds):
    noise = resembling(np.random.default_rng(5), (2000, rounds), correlation)
    found = outliers.autocorrelation(noise - np.median(noise, axis=1)[:, None])
    assert found == pytest.approx(correlation, abs=0.1)


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_with_autocorrelated_rounds_false_alarms_are_at_most_one_in_a_hundred(ranks):
    generator, alarms = np.random.default_rng(1), 0
    for _ in range(300):
        times = 1 + 0.05 * resembling(generator, (ranks, 4 * ROUNDS), 0.8)
        stages = np.split(times, 4, axis=1)
        shared = outliers.autocorrelation_of_all(stages)
        alarms += any(
            slow(dict(enumerate(rounds)), 10 * ranks, correlation=shared)
            for rounds in [*stages, times]
        )
    assert alarms <= 7  # 3, and what chance adds


@pytest.mark.parametrize("rounds", [6, 16, 64])
def test_few_rounds_rarely_look_less_correlated_than_they_are(rounds):
    """A guess of less than 0.5, where it is 0.8, names healthy ranks."""
    generator, low = np.random.default_rng(3), 0
    for _ in range(200):
        noise = [resembling(generator, (4, rounds), 0.8) for _ in range(3)]
        low += outliers.autocorrelation_of_all([1 + 0.01 * own for own in noise]) < 0.5
    assert low <= 10


def test_a_burn_in_is_as_correlated_as_the_stages():
    """Its six repeats alone look independent."""
    repeats = 1 + 0.01 * np.random.default_rng(0).standard_normal((4, 6))
    compared = comparisons.all_comparisons(
        make(1, 4), dict(enumerate(repeats.tolist()))
    )
    alike = [one for one in compared if one.what == "slow" and one.share != "overall"]
    assert "burn-in" in {one.stages[0] for one in alike}
    (bound,) = {one.correlation for one in alike}
    assert bound > 0


@pytest.mark.parametrize(("ranks", "noise", "least", "correlation"), [
    (4, 0.01, 0.8, 0.8),
    (4, 0.02, 0.4, 0.8),
    (8, 0.01, 0.95, 0.0),
    pytest.param(4, 0.01, 0.8, 0.0, marks=pytest.mark.slow),
    pytest.param(8, 0.01, 0.9, 0.8, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_rank_five_percent_slow_is_named_as_often_as_documented(
    ranks, noise, least, correlation
):
    case = {"ranks": ranks, "noise": noise, "correlation": correlation}
    generator, tests = np.random.default_rng(0), range(40)
    found = [sweep.slow_rank_is_named(generator, excess=0.05, **case) for _ in tests]
    assert sum(found) >= len(tests) * least - 2
    healthy = [sweep.certified(generator, 1, **case).findings for _ in tests[:12]]
    assert sum(map(bool, healthy)) <= 1


def test_of_a_round_its_known_steps_count():
    whole, part, none = [1.0, 9.0, 2.0, 3.0], [NAN, 4.0, NAN, NAN], [NAN] * 4
    found = comparisons._of_steps(comparisons._typical, np.array([[whole, part, none]]))
    assert found[0] == pytest.approx([2.5, 4.0, NAN], nan_ok=True)
    lost = (9 / 2.5 - comparisons.STALL) / 4
    for rounds in ([whole], [whole, part]):
        found = comparisons._of_steps(comparisons._lost, np.array([rounds]))
        assert found[0] == pytest.approx([lost, 0.0][: len(rounds)])


def test_two_groups_are_cut_where_both_vary_least():
    squares = [
        outliers._sum_of_squares(np.array(own)) for own in ([6.0, 1.0, 2.0], [3.0])
    ]
    assert squares == [14.0, 0.0]


def stalls(times, min_excess=0.03, others=(0.0,)) -> list[tuple[str, str, float]]:
    """Who is found to stall, of whose seconds lost in 24 rounds these are rank 2's."""
    own = {str(rank): [*others] * (24 // len(others)) for rank in range(RANKS)}
    found = find_stalls(own | {"2": times}, COMPARISONS, min_excess=min_excess)
    return [(one.name, one.measure, round(one.excess, 3)) for one in found]


def test_pauses_that_affect_all_equally_name_nobody():
    generator, shape = np.random.default_rng(2), (RANKS, 24)
    for disturbed in (0.05, 0.3, 0.8):
        alarms = 0
        for _ in range(200):
            times = generator.pareto(1.0, shape) * (generator.random(shape) < disturbed)
            lost = {str(rank): own.tolist() for rank, own in enumerate(times)}
            alarms += bool(find_stalls(lost, RANKS, min_excess=0.03))
        assert alarms <= 6


def test_a_rank_that_pauses_in_a_third_of_its_rounds_is_named_with_frequency_and_loss():
    assert stalls([0.3, 0.0, 0.0] * 8) == [("2", "in 8 of 24 rounds", 0.1)]
    # A single pause is nobody's habit, and small losses are none however frequent.
    assert stalls([0.3] + [0.0] * 23, min_excess=0.0) == []
    assert stalls([0.04, 0.0] * 12) == []


def test_time_lost_by_all_in_the_same_round_names_nobody():
    assert stalls([0.5, 0.0] * 12, others=(0.5, 0.0)) == []
    alone = stalls([0.5, 0.3] * 12, others=(0.5, 0.0))
    assert alone == [("2", "in 12 of 24 rounds", 0.15)]
