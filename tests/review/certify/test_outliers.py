"""How much slower one must be to be named: by how well the rounds of all repeat, and by how many are compared."""

from __future__ import annotations

import numpy as np

from review.certify.outliers import slow

RANKS, ROUNDS, TESTS, COMPARISONS = 4, 6, 80, 74


def named(factor: float, noise: float) -> list[list[str]]:
    """Who is named in each of many tests, where rank 1 is slower by a factor and every round is off by ``noise``."""
    generator = np.random.default_rng(1)
    found = []
    for _ in range(TESTS):
        speed = 1 + 0.01 * generator.standard_normal(RANKS)
        speed[1] *= factor
        shared = 1 + 0.3 * np.abs(generator.standard_normal(ROUNDS))
        times = speed[:, None] * shared * (1 + noise * generator.standard_normal((RANKS, ROUNDS)))
        values = {str(rank): rounds.tolist() for rank, rounds in enumerate(times)}
        found.append([one.name for one in slow(values, COMPARISONS, least_excess=0.03)])
    return found


def test_a_tenth_is_mostly_found_where_rounds_are_off_by_two_percent():
    assert named(1.1, 0.02).count(["1"]) > 0.5 * TESTS
    assert named(1.1, 0.005).count(["1"]) > 0.85 * TESTS


def test_of_equals_nobody_is_named_however_badly_rounds_repeat():
    for noise in (0.005, 0.02, 0.08):
        assert not any(named(1.0, noise))
