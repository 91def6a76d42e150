"""Estimates the time to train BERT-large from the training rate, and its rank among the published
results.

The time is samples to the target (2.3 to 6.3 million in published results) divided by the rate. The
samples depend mostly on batch size, samples until the learning rate has decayed, and the learning
rate: their logarithm is interpolated between the published results by universal kriging over the
logarithms of the three (Cressie, Statistics for Spatial Data, 1993, 3.4), which weights neighbours
by distance and widens the interval where none is near; its mean is linear in them and in the round,
as recipes converge faster from round to round. Without a recipe only the batch size is used, and
the interval is wider. `bench/league_estimate.py` predicts every published result from the others.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from review.league.entries import Entry, published
from review.league.ranking import League
from review.logs.output import counted
from review.rulebook.compliance import evaluation_interval

DEVIATIONS = 1.645  # standard deviations, for a 90% interval
# Slope of the variogram over the logarithms, and standard deviation of results of one recipe
# (nugget): the values with the highest leave-one-out likelihood.
BY_RECIPE, BY_BATCH = (0.10, 0.035), (0.03, 0.10)
# Cost of an evaluation in multiples of training on its 10,000 sequences, and its spread in
# published logs.
EVALUATION, EVALUATION_SPREAD = 1.0, 0.3
# Above so many accelerators communication grows in ways that the rate of one node does not show:
# published results with more, each predicted from the others, took 4 to 15% longer, and 75% of them
# lay within the interval.
MANY, MANY_SPREAD = 16, 0.10
# Median error of the time of published results, predicted without those of their batch size.
UNSEEN_BATCH = 0.039
# Learning rate and steps that certify.sh sets without a config.
PLACEHOLDERS = 1e-4, 1000
_LARGEST = 1e9  # sequences of a batch: above any, and small enough to compute with
_STEPS, _RATE = "opt_learning_rate_training_steps", "opt_base_learning_rate"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Minutes to train with a 90% interval. ``recipe``: whether learning rate and decay were known.

    ``ranks``: of the interval's ends among the ``results`` published in the closed division from
    round 1.0 on with the same number of accelerators. ``faster``, ``slower``: the neighbouring
    results. ``doubts``: why it may be wrong beyond its interval, which is wider for each.
    """

    minutes: float
    low: float
    high: float
    batch_size: float
    accelerators: int
    recipe: bool
    ranks: tuple[int, int]
    results: int
    doubts: tuple[str, ...] = ()
    faster: Entry | None = None
    slower: Entry | None = None

    def __str__(self) -> str:
        interval = f"{_minutes(self.low)} to {_minutes(self.high)}"
        time = f"about {_minutes(self.minutes)} min ({interval}) to train BERT-large"
        time += f" to 0.720 at batch {self.batch_size:g}"
        time += "" if self.recipe else " with usual hyper-parameters"
        own = counted(self.accelerators, "accelerator")
        message = f"no published result has {own}"
        if self.results == 1:
            message = f"only one published result has {own}: no ranking"
        elif self.results:
            # Behind all of them is no place among them.
            first, last = self.ranks[0], min(self.ranks[1], self.results)
            to = f" to {last}" if last > first else ""
            message = f"place {first}{to} among the" if first <= last else "behind all"
            message += f" {self.results} published results "
            message += f"with {own}, "
            message += " and ".join(
                f"{word} {one.submitter} {one.system} ({_minutes(one.minutes)} min, round {one.round})"
                for word, one in (("behind", self.faster), ("before", self.slower))
                if one
            )
        doubts = "".join(f"; doubtful: {doubt}" for doubt in self.doubts)
        return f"{time}, {message}{doubts}; estimate, unverified"

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "text": str(self)}


def estimate(
    rate: float,
    error: float,
    batch_size: float,
    accelerators: int,
    learning_rate: float = 0.0,
    steps: float = 0.0,
) -> Estimate | str:
    """Estimate from the training rate without evaluations, sequences per second, and its relative
    standard error.

    ``batch_size``: sequences per step over all accelerators. ``learning_rate``, and ``steps`` until
    it has decayed: ignored if one is a placeholder, or fewer samples than in any published result.
    A str says why there is none.
    """
    if not (
        0 < rate < math.inf and 0 <= error < math.inf and 0 < batch_size < _LARGEST
    ):
        return "nothing to compare: the training rate was not measured"
    _, points, _ = _data()
    # All but the last column, the round.
    points = points[:, :-1]
    meant = not {learning_rate, steps} & {*PLACEHOLDERS}
    meant &= 0 < learning_rate < math.inf and steps < math.inf
    # Fewer samples than any published run: the steps of a short test, not of a recipe.
    recipe = meant and steps * batch_size >= math.exp(points[:, 1].min())
    point = np.log(
        [batch_size, steps * batch_size, learning_rate] if recipe else [batch_size]
    )
    doubts = {**dict(_outside(point, points)), **dict(_beyond(rate, accelerators))}
    doubts |= _alone(batch_size)
    minutes, spread = time_to_train(*_samples(point), rate, batch_size)
    # Independent errors add in squares.
    spread = math.hypot(spread, error, *doubts.values())
    low = minutes * math.exp(-DEVIATIONS * spread)
    high = minutes * math.exp(DEVIATIONS * spread)
    # The league has resubmissions in one row, so that no result counts twice.
    ranked = League((), published()).ranked
    peers = [
        entry
        for entry in ranked
        if entry.minutes
        and _trained_alike(entry)
        and entry.accelerators == accelerators
    ]
    first, middle, last = (
        sum((entry.minutes or 0) < end for entry in peers)
        for end in (low, minutes, high)
    )
    return Estimate(
        minutes=minutes,
        low=low,
        high=high,
        batch_size=batch_size,
        accelerators=accelerators,
        recipe=recipe,
        ranks=(1 + first, 1 + last),
        results=len(peers),
        doubts=tuple(doubts),
        faster=peers[middle - 1] if middle else None,
        slower=peers[middle] if middle < len(peers) else None,
    )


def _outside(point: np.ndarray, points: np.ndarray) -> Iterator[tuple[str, float]]:
    """What lies outside the published range, and how far in logarithms."""
    names = (
        "batch size",
        "samples until the learning rate has decayed",
        "learning rate",
    )
    # Without a recipe, only the batch size has a range to be outside of.
    for name, value, column in zip(names, point, points.T, strict=False):
        low, high = column.min(), column.max()
        # Slack for the rounding of logarithms.
        if (distance := max(low - value, value - high)) > 1e-9:
            ends = f"{math.exp(low):.3g} to {math.exp(high):.3g}"
            yield (
                f"{name} {math.exp(value):.3g} is outside the published {ends}",
                float(distance),
            )


def _beyond(rate: float, accelerators: int) -> Iterator[tuple[str, float]]:
    """Sizes and rates that published results do not vouch for, and what that adds to the
    logarithm's deviation.
    """
    if accelerators > MANY:
        yield (
            f"above {MANY} accelerators such estimates were up to 15% too fast",
            MANY_SPREAD,
        )
    fastest = max(entry.per_accelerator or 0.0 for entry in published())
    if rate / accelerators > fastest:
        each = f"{rate / accelerators:,.0f} sequences/s of each accelerator"
        message = f"{each} is beyond the fastest published, {fastest:,.0f}"
        yield message, math.log(rate / accelerators / fastest)


def _alone(batch_size: float) -> dict[str, float]:
    """That no published result has the batch size; the interval is as wide as it should be."""
    entries, _, _ = _data()
    if any(entry.batch_size == batch_size for entry in entries):
        return {}
    return {
        f"no published result has batch {batch_size:g}: such estimates are off by "
        f"{UNSEEN_BATCH:.1%} in the median": 0.0
    }


def _minutes(minutes: float | None) -> str:
    return (
        f"{minutes:.3g}" if minutes is not None and minutes < 100 else f"{minutes:,.0f}"
    )


def time_to_train(
    samples: float, spread: float, rate: float, batch_size: float
) -> tuple[float, float]:
    """Minutes including evaluations, and the spread of their logarithm. ``samples``, ``spread``:
    also logarithms.
    """
    share = 10_000 / evaluation_interval(batch_size)
    return math.exp(samples) / rate / 60 * (1 + EVALUATION * share), math.hypot(
        spread, EVALUATION_SPREAD * share
    )


def _trained_alike(entry: Entry) -> bool:
    """Whether a result is closed and trained to 0.720; round 0.7 had 0.712."""
    return entry.division == "closed" and entry.round != "0.7"


@functools.cache
def _data() -> tuple[list[Entry], np.ndarray, np.ndarray]:
    """Closed results trained to 0.720 without resubmissions, logarithms of (batch, samples until
    the learning rate has decayed, learning rate) and the number of rounds to the last one
    [results, 4], and logarithms of minutes times sequences per minute, with the RCP factor
    [results].
    """
    entries, points, rounds, samples = [], [], [], []
    for entry in League((), published()).ranked:
        # Runs without a schedule in their logs cannot be placed.
        steps, rate = (entry.hyperparameters.get(key, 0.0) for key in (_STEPS, _RATE))
        if (
            _trained_alike(entry)
            and entry.minutes
            and entry.logs
            and steps
            and entry.batch_size
        ):
            entries.append(entry)
            points.append([entry.batch_size, entry.batch_size * steps, rate])
            rounds.append(entry.round)
            samples.append(60 * entry.minutes * (entry.sequences_per_second or 0.0))
    held = sorted(set(rounds))
    since = [[held.index(name) - len(held) + 1.0] for name in rounds]
    return entries, np.hstack([np.log(points), since]), np.log(samples)


def _equations(points: np.ndarray) -> np.ndarray:
    """Kriging equations of results at these places [results + terms, results + terms]; the last rows
    make the weights exact for a mean that is linear in the places.
    """
    places = points[:, :-1]
    slope, nugget = BY_RECIPE if places.shape[1] > 1 else BY_BATCH
    # Distances in logarithms [results, results]; the round is no distance.
    distances = np.sqrt(((places[:, None] - places[None]) ** 2).sum(axis=-1))
    terms = np.hstack([np.ones((len(points), 1)), points])
    covariances = nugget**2 * np.eye(len(points)) - slope * distances
    corner = np.zeros((terms.shape[1], terms.shape[1]))
    return np.block([[covariances, terms], [terms.T, corner]])


def _used(points: np.ndarray, recipe: bool) -> np.ndarray:
    """The columns of places that count: all, or batch size and round."""
    return points if recipe else points[:, [0, -1]]


def _samples(point: np.ndarray) -> tuple[float, float]:
    """Logarithm of the samples predicted at a place in the last round, and its standard deviation."""
    _, points, samples = _data()
    known = _used(points, len(point) > 1)
    # Row 0 is the place asked for, the others are the published results.
    every = _equations(np.vstack([np.append(point, 0.0), known]))
    weights = np.linalg.solve(every[1:, 1:], every[1:, 0])
    variance = every[0, 0] - float(weights @ every[1:, 0])
    return float(weights[: len(samples)] @ samples), math.sqrt(variance)


def predicted(
    recipe: bool, without: str = ""
) -> tuple[list[Entry], np.ndarray, np.ndarray]:
    """Results with the logarithms of their samples as predicted from the others, and standard
    deviations [results]. ``without``: an attribute, whose equals are left out with a result.

    By blocks of the inverse (Dubrule, Cross validation of kriging in a unique neighborhood, 1983).
    """
    entries, points, samples = _data()
    inverse = np.linalg.inv(_equations(_used(points, recipe)))
    count = len(samples)
    residuals = inverse[:count, :count] @ samples
    keys = [
        getattr(one, without) if without else index for index, one in enumerate(entries)
    ]
    means, deviations = np.empty(count), np.empty(count)
    for key in set(keys):
        group = [index for index in range(count) if keys[index] == key]
        covariance = np.linalg.inv(inverse[np.ix_(group, group)])
        means[group] = samples[group] - covariance @ residuals[group]
        deviations[group] = np.sqrt(np.diag(covariance))
    return entries, means, deviations
