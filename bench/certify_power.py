"""Statistical power of the acceptance test: how often it finds a rank that is 5% slow, and its false alarms, simulated.

A test has four stages of six rounds, compared separately and all together, as certify does. The noise of a round is
independent between ranks (common noise cancels) and between rounds, or has an autocorrelation of 0.8. Healthy ranks
differ by 0.3%. Prints one JSON line, with a row per number of ranks and noise.

usage: python bench/certify_power.py [--tests 1000] [--ranks 4,8,64,512]
"""

from __future__ import annotations

import itertools

import numpy as np
from lib import Parser, emit, integer

from review.acceptance.comparison import of_all, slow

STAGES, ROUNDS, SLOW, BETWEEN = 4, 6, 0.05, 0.003


def named(
    generator: np.random.Generator, ranks: int, deviation: float, correlation: float, excess: float
) -> set[str]:
    """Ranks that one test names; rank 0 is slowed by ``excess``."""
    level = 1 + BETWEEN * generator.standard_normal((ranks, 1))
    level[0] *= 1 + excess
    noise = deviation * generator.standard_normal(
        (ranks, STAGES * ROUNDS)
    )  # first-order autoregressive process
    for number in range(1, STAGES * ROUNDS):
        noise[:, number] = (
            correlation * noise[:, number - 1] + (1 - correlation**2) ** 0.5 * noise[:, number]
        )
    table = level * (1 + noise)
    stages = [*np.split(table, STAGES, axis=1), table]
    known = {"min_excess": 0.03, "correlation": of_all(stages[:-1])}
    comparisons = 2 * ranks * len(stages)  # nodes and pauses are compared as well
    tables = [{str(rank): own for rank, own in enumerate(rounds)} for rounds in stages]
    return {one.name for values in tables for one in slow(values, comparisons, **known)}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--tests", type=integer, default=1000)
    parser.add_argument(
        "--ranks", type=lambda text: [int(one) for one in text.split(",")], default=[4, 8, 64, 512]
    )
    options = parser.parse_args()
    generator, rows = np.random.default_rng(0), []
    for ranks, deviation, correlation in itertools.product(
        options.ranks, (0.005, 0.02, 0.05), (0.0, 0.8)
    ):
        case = (generator, ranks, deviation, correlation)
        alarms = sum(bool(named(*case, 0.0)) for _ in range(options.tests)) / options.tests
        found = sum("0" in named(*case, SLOW) for _ in range(options.tests)) / options.tests
        row = {"ranks": ranks, "noise": deviation, "autocorrelation": correlation}
        rows.append(row | {"false_alarms": alarms, "slow_rank_named": found})
    emit("certify_power", {"tests": options.tests, "rows": rows})


if __name__ == "__main__":
    main()
