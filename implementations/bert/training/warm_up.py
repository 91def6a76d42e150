"""What runs before the clock, on made-up batches, and is undone: steps that compile kernels, and graphs' recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bert.data.batch import Batch
from bert.training.graph import GraphedStep
from bert.training.step import Step, TrainingStep


def ready(step: Step, examples: Callable[[], Sequence[Batch]], *, graph: bool, rehearse: bool) -> TrainingStep:
    """The step as the loop will call it: recorded as a CUDA graph, or itself, with ``rehearse`` after a trial.

    Kernels, allocator and communicators are then ready. Weights, moments, step count, scales and random states are
    bit for bit what they were. examples: micro-batches of one step, as the data source gives them.
    """
    if graph:
        return GraphedStep(step, examples())
    if rehearse:
        with step.undone():
            for _ in range(2 if step.measures else 1):
                step(examples(), 0.0)
        step.optimizer.zero_grad()
    return step
