"""Whether a run lies among the published ones of its batch size, and what is likely wrong where it does not."""

from __future__ import annotations

from dataclasses import dataclass

from review.logs.mllog import number
from review.results.run import Evaluation, Run
from review.rulebook.bands import Band, published

RECIPE = (
    "opt_base_learning_rate",
    "opt_learning_rate_training_steps",
    "opt_lamb_beta_1",
    "opt_lamb_beta_2",
    "opt_lamb_weight_decay_rate",
    "start_warmup_step",
)
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
    if band is None or not run.counts_samples:
        return None
    for one in run.evaluations:
        samples = one.samples or 0
        near = any(abs(samples - point) <= max(2 * band.batch_size, 0.01 * point) for point, _, _ in band.points)
        held = band.hold(samples, one.accuracy) if samples and near else None
        if held is not None and not held.sound:
            causes = likely_causes(samples, held.verdict == "high", band, run)
            low, high = held.low - held.room, held.high + held.room
            return Miss(one, low, high, band.runs, band.recipe == recipe(run), causes)
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
