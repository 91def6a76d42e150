"""Power of the acceptance test: how often it finds slow ranks, and false alarms, simulated.

A test has four stages and the matrix product, of 16 rounds each (as many as CERTIFY_SECONDS / 1.25,
up to 64), compared separately and all together, as certify does. The noise of a round is
independent between ranks (common noise cancels) and between rounds, or has an autocorrelation of
0.8. Healthy ranks differ by 0.3%. One rank, or half of them (by a tenth), is slow. Prints one JSON
line, with a row per number of ranks and noise.

usage: python bench/certify_power.py [--tests 1000] [--ranks 4,8,64,512] [--rounds 16] [--seed 0]
"""

import itertools
from functools import partial

import numpy as np
from lib import Parser, emit, integer, integers, natural

from review.acceptance.comparisons import SHARES, Comparison
from review.acceptance.outliers import autocorrelation_of_all, members

STAGES, ROUNDS, BETWEEN = 5, 16, 0.003
SLOW, HALF_SLOW = 0.05, 0.10


def named(
    generator: np.random.Generator,
    ranks: int,
    deviation: float,
    correlation: float,
    excess: float,
    num_slow: int = 1,
    num_rounds: int = ROUNDS,
) -> set[str]:
    """Ranks that one test names; the first ``num_slow`` are slower by ``excess``."""
    # [ranks, 1]: a rank's own level, [ranks, rounds]: its noise.
    level = 1 + BETWEEN * generator.standard_normal((ranks, 1))
    level[:num_slow] *= 1 + excess
    # First-order autoregressive process.
    noise = deviation * generator.standard_normal((ranks, STAGES * num_rounds))
    for number in range(1, STAGES * num_rounds):
        noise[:, number] = (
            # The root keeps the deviation the same for any correlation.
            correlation * noise[:, number - 1]
            + (1 - correlation**2) ** 0.5 * noise[:, number]
        )
    table = level * (1 + noise)
    stages = np.split(table, STAGES, axis=1)
    shared = autocorrelation_of_all(stages[:-1])  # not of the matrix product
    names: set[str] = set()
    for rounds in [*stages, table]:
        values = {
            str(rank): values_of_rank for rank, values_of_rank in enumerate(rounds)
        }
        comparison = Comparison(
            "slow", "rank", values, ("",) * rounds.shape[1], correlation=shared
        )
        # The ranks of one node, and the node; elsewhere pauses are compared as well.
        compared = ranks + 1 if rounds is table else (ranks + 1) * 2 * STAGES
        comparisons = compared / SHARES["overall" if rounds is table else "stage"]
        for outlier in comparison.outliers(comparisons):
            names.update(members(outlier.name))
    return names


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--tests", type=integer, default=1000)
    parser.add_argument("--rounds", type=integer, default=ROUNDS)
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument(
        "--ranks",
        type=integers,
        default=[4, 8, 64, 512],
    )
    options = parser.parse_args()
    generator, rows = np.random.default_rng(options.seed), []
    for ranks, deviation, correlation in itertools.product(
        options.ranks, (0.005, 0.01, 0.02, 0.05), (0.0, 0.8)
    ):
        slow_ones = partial(
            named, generator, ranks, deviation, correlation, num_rounds=options.rounds
        )
        counts = dict.fromkeys(
            ("false_alarms", "slow_rank_named", "slow_half_named"), 0
        )
        for _ in range(options.tests):
            # Exactly the slow half must be named, and none of the others.
            half = {str(rank) for rank in range(ranks // 2)}
            counts["false_alarms"] += bool(slow_ones(0.0))
            counts["slow_rank_named"] += "0" in slow_ones(SLOW)
            counts["slow_half_named"] += slow_ones(HALF_SLOW, len(half)) == half
        row = {"ranks": ranks, "noise": deviation, "autocorrelation": correlation}
        rows.append(
            row | {name: count / options.tests for name, count in counts.items()}
        )
    emit("certify_power", vars(options) | {"rows": rows})


if __name__ == "__main__":
    main()
