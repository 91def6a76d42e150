"""Whether a run lies among the published ones of its batch size, and the table of these.

``python -m review.results.gate FOLDER ...`` makes rulebook/published_curves.json from the result folders of rounds
(published at github.com/mlcommons/training_results_v5.0 and so on).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from review.logs.mllog import number
from review.results.run import Evaluation, Run
from review.rulebook.bands import Band, published
from review.rulebook.compliance import evaluation_interval

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
_LATE = 1_400_000  # samples from which runs differ by little, and precision shows


@dataclass(frozen=True, slots=True)
class Miss:
    """An evaluation outside the published runs. ``causes``: likely ones, the likeliest first."""

    evaluation: Evaluation
    low: float
    high: float
    runs: int
    same_recipe: bool
    causes: tuple[str, ...]

    def describe(self) -> str:
        """In one line."""
        at = f"{self.evaluation.accuracy:.4f} at {self.evaluation.samples:,.0f} samples"
        return f"outside the published runs: {at}, of {self.runs} runs {self.low:.4f} to {self.high:.4f}"


def recipe(run: Run) -> dict[str, float]:
    """The logged hyper-parameters that decide how the accuracy rises, 0 for one that is missing."""
    return {key: number(run.log.value(key)) or 0.0 for key in RECIPE}


def band_of(run: Run) -> Band | None:
    """The published runs of its batch size and recipe where ten are, else the recipe that most of that size have."""
    found = [band for band in published() if band.batch_size == run.batch_size]
    own = recipe(run)
    return next((band for band in found if band.recipe == own), found[0] if found else None)


def first_miss(run: Run) -> Miss | None:
    """The first evaluation outside the published runs of its batch size; None where there is none, or no band.

    Left out in turn, one result of batch 768 after the other, 5 of 488 published runs lie outside the others' bounds.
    """
    band = band_of(run)
    for evaluation in run.evaluations if band is not None and run.counts_samples else ():
        assert band is not None
        samples, accuracy = evaluation.samples or 0, evaluation.accuracy
        for point, low, high in band.points:
            if samples and abs(samples - point) <= max(2 * band.batch_size, 0.01 * point):
                low, high = low - band.room(low, high), high + band.room(low, high)
                if low <= accuracy <= high:
                    break
                causes = likely_causes(samples, accuracy > high, band, run)
                return Miss(evaluation, low, high, band.runs, band.recipe == recipe(run), causes)
    return None


def likely_causes(samples: float, high: bool, band: Band, run: Run, sound_start: bool = False) -> tuple[str, ...]:
    """Why an accuracy may lie outside of a band after so many samples, the likeliest cause first.

    Args: high: above it; sound_start: the accuracy before the first step is known to be the checkpoint's.
    """
    own = recipe(run)
    differing = [
        f"{key} is {own[key]:g}, published {value:g}" for key, value in band.recipe.items() if own[key] != value
    ]
    if high:
        others = ["another evaluation set, or one that is part of the training data", "a larger batch than is logged"]
    elif samples >= _LATE:
        others = ["LayerNorm and biases in bf16: keep them in fp32", "evaluation logits in low precision", "data order"]
    else:
        others = [
            *([] if sound_start else ["another checkpoint or evaluation set: REHEARSAL=1 has 0.340 before step 1"]),
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
    for (size, *values), kept in sorted(series.items()):
        batch_size, interval = int(size), evaluation_interval(int(size))
        reached: dict[int, list[float]] = {}
        for _, run in kept.values():
            for samples, accuracy in ((evaluation.samples or 0, evaluation.accuracy) for evaluation in run.evaluations):
                count = round(samples / interval)
                if count and abs(samples - count * interval) <= max(2 * batch_size, 0.01 * interval):
                    reached.setdefault(count, []).append(accuracy)
        points = [
            [count * interval, round(min(found), 5), round(max(found), 5)]
            for count, found in sorted(reached.items())
            if len(found) >= _LEAST_AT_POINT
        ]
        results = sorted({name for name, _ in kept.values()})
        rounds = " ".join(sorted({name.split("/")[0] for name in results}))
        if len(kept) >= _LEAST_RUNS and points:
            entries.append(
                {
                    "batch_size": batch_size,
                    "recipe": dict(zip(RECIPE, values, strict=True)),
                    "runs": len(kept),
                    "source": f"mlcommons/training_results, {len(results)} results of {rounds}",
                    "results": results,
                    "points": points,
                }
            )
    return entries


def main(folders: Sequence[str]) -> None:
    """Prints the table of the results below the folders, each named round/organisation/system."""
    from review.results.score import load_results

    runs = []
    for result in (result for folder in folders for result in load_results(Path(folder))):
        name = "/".join(result.folder.resolve().parts[-5:-4] + result.folder.resolve().parts[-4:-3] + (result.name,))
        runs += [(name, run) for run in result.runs if run.log.value("submission_division") == "closed"]
    about = "Smallest and largest masked-LM accuracy of published runs after so many training samples."
    lines = ",\n".join(json.dumps(entry) for entry in build(runs))
    print(f'{{"about": "{about}", "bands": [\n{lines}\n]}}')


if __name__ == "__main__":
    main(sys.argv[1:])
