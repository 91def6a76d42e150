"""The accuracy of published runs on the way to the target, and whether a run lies among them.

``bands.json`` holds, for each batch size and recipe with ten published runs or more, the smallest and the largest
accuracy at each evaluation, and the results they are of. ``python -m review.results.bands FOLDER ...`` makes it from
result folders of rounds (published at github.com/mlcommons/training_results_v5.0 and so on).
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from review.logs.mllog import number
from review.results.run import Evaluation, Run
from review.rulebook.intervals import evaluation_interval

RECIPE = (
    "opt_base_learning_rate",
    "opt_learning_rate_training_steps",
    "opt_lamb_beta_1",
    "opt_lamb_beta_2",
    "opt_lamb_weight_decay_rate",
    "start_warmup_step",
)
_LEAST_RUNS = 10
_LEAST_AT_POINT = 5  # runs still under way
_ROUNDING = 3e-4  # accuracy, on either side
_LATE = 1_400_000  # samples from which runs differ by little, and precision shows
_TABLE = Path(__file__).with_name("bands.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Published runs of one batch size and recipe. ``points``: (samples, smallest, largest accuracy)."""

    batch_size: int
    recipe: dict[str, float]
    runs: int
    results: tuple[str, ...]
    points: tuple[tuple[int, float, float], ...]

    def at(self, samples: float) -> tuple[float, float] | None:
        """Bounds of an evaluation, None between the points. Of few runs wider than these: a new run may be the lowest.

        Widened by 10 / runs of the width on either side. Left out in turn, one result of batch 768 after the other,
        5 of 488 published runs lie outside of all the others' band somewhere.
        """
        for point, low, high in self.points:
            if abs(samples - point) <= max(2 * self.batch_size, 0.01 * point):
                room = (high - low) * _LEAST_RUNS / self.runs + _ROUNDING
                return low - room, high + room
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Miss:
    """An evaluation outside the published runs. ``causes``: likely ones, the likeliest first."""

    evaluation: Evaluation
    low: float
    high: float
    runs: int
    same_recipe: bool
    causes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def describe(self) -> str:
        """In one line."""
        at = f"{self.evaluation.accuracy:.4f} at {self.evaluation.samples:,.0f} samples"
        return f"outside the published runs: {at}, of {self.runs} runs {self.low:.4f} to {self.high:.4f}"


@functools.cache
def bands() -> tuple[Band, ...]:
    """Every published band."""
    return tuple(
        Band(
            batch_size=entry["batch_size"],
            recipe=entry["recipe"],
            runs=entry["runs"],
            results=tuple(entry["results"]),
            points=tuple((samples, low, high) for samples, low, high in entry["points"]),
        )
        for entry in json.loads(_TABLE.read_text(encoding="utf-8"))
    )


def recipe(run: Run) -> dict[str, float]:
    """The logged hyper-parameters that decide how the accuracy rises, 0 for one that is missing."""
    return {key: number(run.log.value(key)) or 0.0 for key in RECIPE}


def first_miss(run: Run) -> Miss | None:
    """The first evaluation outside the published runs of its batch size; None where there is none, or no band.

    Runs of the same recipe where ten are published, else the recipe of the batch size that most published runs have.
    """
    found = sorted((band for band in bands() if band.batch_size == run.batch_size), key=lambda band: -band.runs)
    if not found or not run.counts_samples:
        return None
    own = recipe(run)
    band = next((band for band in found if band.recipe == own), found[0])
    for evaluation in run.evaluations:
        bounds = band.at(evaluation.samples) if evaluation.samples else None
        if bounds is not None and not bounds[0] <= evaluation.accuracy <= bounds[1]:
            return Miss(
                evaluation=evaluation,
                low=bounds[0],
                high=bounds[1],
                runs=band.runs,
                same_recipe=band.recipe == own,
                causes=_causes(evaluation, bounds, band, own),
            )
    return None


def _causes(evaluation: Evaluation, bounds: tuple[float, float], band: Band, own: dict[str, float]) -> tuple[str, ...]:
    differing = [
        f"{key} is {own[key]:g}, published {band.recipe[key]:g}" for key in RECIPE if own[key] != band.recipe[key]
    ]
    if evaluation.accuracy > bounds[1]:
        others = ["another evaluation set, or one that is part of the training data", "a larger batch than is logged"]
    elif (evaluation.samples or 0) >= _LATE:
        others = ["LayerNorm and biases in bf16: keep them in fp32", "evaluation logits in low precision", "data order"]
    else:
        others = [
            "another checkpoint or evaluation set: EVAL_INITIAL=1 gives 0.340 before the first step",
            "the wrong form of GELU, or no dropout",
            "gradients that are not reduced over all ranks, or clipped twice",
            "training data of another vocabulary or preparation: launch/doctor.sh verify",
        ]
    return (*differing, *others)


def build(runs: Iterable[tuple[str, Run]]) -> list[dict[str, Any]]:
    """The table, of (result, run) pairs: closed runs that reached the target, each once."""
    series: dict[tuple[float, ...], dict[tuple[float, ...], tuple[str, Run]]] = {}
    for name, run in runs:
        accuracies = tuple(evaluation.accuracy for evaluation in run.evaluations)
        if run.converged and run.counts_samples and run.batch_size and len(accuracies) > 3:
            series.setdefault((run.batch_size, *recipe(run).values()), {}).setdefault(accuracies, (name, run))
    entries = []
    for (batch_size, *values), kept in sorted(series.items()):
        points = _points(int(batch_size), [run for _, run in kept.values()])
        if len(kept) >= _LEAST_RUNS and points:
            entries.append(
                {
                    "batch_size": int(batch_size),
                    "recipe": dict(zip(RECIPE, values, strict=True)),
                    "runs": len(kept),
                    "results": sorted({name for name, _ in kept.values()}),
                    "points": points,
                }
            )
    return entries


def _points(batch_size: int, runs: Sequence[Run]) -> list[list[float]]:
    interval = evaluation_interval(batch_size)
    values: dict[int, list[float]] = {}
    for run in runs:
        for evaluation in run.evaluations:
            count = round((evaluation.samples or 0) / interval)
            if count and abs((evaluation.samples or 0) - count * interval) <= max(2 * batch_size, 0.01 * interval):
                values.setdefault(count, []).append(evaluation.accuracy)
    return [
        [count * interval, round(min(found), 5), round(max(found), 5)]
        for count, found in sorted(values.items())
        if len(found) >= _LEAST_AT_POINT
    ]


def main(folders: Sequence[str]) -> None:
    """Prints the table of the results below the folders, each named round/organisation/system."""
    from review.results.score import load_results

    runs = []
    for result in (result for folder in folders for result in load_results(Path(folder))):
        name = "/".join(result.folder.resolve().parts[-5:-4] + result.folder.resolve().parts[-4:-3] + (result.name,))
        runs += [(name, run) for run in result.runs if run.log.value("submission_division") == "closed"]
    lines = [json.dumps(entry) for entry in build(runs)]
    print("[\n" + ",\n".join(lines) + "\n]")


if __name__ == "__main__":
    main(sys.argv[1:])
