"""Error of certify.sh's time to train: every published result predicted from all others.

On the closed results from round 1.0 on, every log once. `by batch` and `by recipe`: as in
review/league/estimate.py, with the result's own rate. `from training alone`: by recipe, with the rate
between evaluations; evaluations are estimated as for a certified machine; only results whose logs
time them. `without its batch size`: the same, predicted from results of other batch sizes. bias: the
median error with its sign. covered: fraction of the results within the 90% interval. Prints one JSON line.

usage: python bench/league_estimate.py
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from lib import Parser, emit

from review.league import estimate


def table() -> dict[str, dict[str, Any]]:
    _, unseen, unseen_spread = estimate.predicted(recipe=True, without="batch_size")
    results, by_recipe, recipe_spread = estimate.predicted(recipe=True)
    _, by_batch, batch_spread = estimate.predicted(recipe=False)
    minutes = np.array([result.minutes for result in results])
    # Samples to the target: the result's own minutes at its own rate.
    true = np.log(
        60 * minutes * np.array([result.sequences_per_second for result in results])
    )

    def alone(samples: np.ndarray, spreads: np.ndarray) -> dict[str, Any]:
        errors, widths = [], []
        for result, known, spread in zip(results, samples, spreads, strict=True):
            if result.training_rate:
                about = (known, spread, result.training_rate, result.batch_size)
                time, width = estimate.time_to_train(*about)
                errors.append(math.log(time / result.minutes))
                widths.append(width)
        return _row(errors, widths)

    return {
        "by batch": _row(by_batch - true, batch_spread),
        "by recipe": _row(by_recipe - true, recipe_spread),
        "from training alone": alone(by_recipe, recipe_spread),
        "without its batch size": alone(unseen, unseen_spread),
    }


def _row(errors: Iterable[float], spreads: Iterable[float]) -> dict[str, Any]:
    """errors, spreads: of logarithms."""
    wrong = np.array(errors)
    within = np.abs(wrong) < estimate.DEVIATIONS * np.array(spreads)
    # expm1 turns a difference of logarithms into a relative error.
    median, ninth, worst = (
        np.quantile(np.abs(np.expm1(wrong)), (0.5, 0.9, 1.0)).round(4).tolist()
    )
    return {
        "results": len(wrong),
        "median": median,
        "ninth_decile": ninth,
        "worst": worst,
        "bias": round(float(np.expm1(np.median(wrong))), 4),
        "covered": round(float(within.mean()), 3),
    }


def main() -> None:
    Parser(__doc__).parse_args()
    emit("league_estimate", table())


if __name__ == "__main__":
    main()
