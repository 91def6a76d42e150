"""Error of the time to train that certify.sh estimates: every published result predicted from all others.

Of the closed results from round 1.0 on, every log once. `naive`: the mean samples of the others with the same batch
size over the result's own rate. `by batch` and `by recipe` are those of review/league/estimate.py, from the same rate.
`from training alone`: by recipe from the rate between evaluations, which are estimated as for a machine that was only
certified; of the results whose logs time them. covered: share of the results in the interval of 90%.
Prints one JSON line.

usage: python bench/league_estimate.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from lib import Parser, emit

from review.league import estimate


def table() -> dict[str, dict[str, Any]]:
    results, by_recipe, recipe_spread = estimate.predicted(recipe=True)
    _, by_batch, batch_spread = estimate.predicted(recipe=False)
    minutes = np.array([one.minutes for one in results])
    rate = np.array([one.sequences_per_second for one in results])
    true = np.log(60 * minutes * rate)
    naive = [
        np.mean(same)
        if (same := [o.samples for o in results if o is not one and o.batch_size == one.batch_size])
        else 0
        for one in results
    ]
    peers = np.array(naive) > 0
    alone = [
        (*estimate.time_to_train(samples, spread, one.training_rate, one.batch_size), one.minutes)
        for one, samples, spread in zip(results, by_recipe, recipe_spread, strict=True)
        if one.training_rate
    ]
    return {
        "naive": _row(np.log(np.array(naive)[peers]) - true[peers]),
        "by batch": _row(by_batch - true, batch_spread),
        "by recipe": _row(by_recipe - true, recipe_spread),
        "from training alone": _row([math.log(a / b) for a, _, b in alone], [spread for _, spread, _ in alone]),
    }


def _row(errors: Iterable[float], spreads: Iterable[float] | None = None) -> dict[str, Any]:
    """errors, spreads: of logarithms."""
    wrong, known = np.array(errors), spreads is not None
    median, ninth, worst = np.quantile(np.abs(np.expm1(wrong)), (0.5, 0.9, 1.0)).round(4).tolist()
    row = {"results": len(wrong), "median": median, "ninth_decile": ninth, "worst": worst}
    inside = np.abs(wrong) < estimate.DEVIATIONS * np.array(spreads) if known else np.array([])
    return row | ({"covered": round(float(inside.mean()), 3)} if known else {})


def main() -> None:
    Parser(__doc__).parse_args()
    emit("league_estimate", table())


if __name__ == "__main__":
    main()
