"""The training loop: it steps, and does what is due, until the target or the end. It knows no task by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from bert.training.agenda import Agenda, Due
from bert.training.progress import Progress
from bert.training.step import TrainingStep
from bert.training.steps import Steps
from bert.training.stop import LAST_STEP, TARGET, Ending, Stop


class DataSource(Protocol):
    """Where the batches come from."""

    def next_step(self) -> Sequence[Any]:
        """Micro-batches of the next step, on the CPU or on the device."""
        ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loop drives.

    seed: of a batch's random numbers (number of the batch -> seed); evaluate: whether the target is reached, after
    (steps, samples); save: writes a checkpoint of (steps, batches, samples). Both are collectives.
    """

    data: DataSource
    take_step: TrainingStep
    steps: Steps
    agenda: Agenda
    progress: Progress
    stop: Stop
    seed: Callable[[int], int]
    evaluate: Callable[[int, int], bool]
    save: Callable[[int, int, int], None]


def train(parts: Parts) -> Ending:
    """Runs to the end; every rank calls it with parts of the same settings. The last checkpoint is the caller's.

    Raises TrainingError where training has broken down, and what the parts raise.
    """
    data, steps, agenda, progress = parts.data, parts.steps, parts.agenda, parts.progress
    reached = steps.batches == 0 and agenda.after(0).evaluate and evaluate(parts)
    stopped = None

    while not reached and not stopped and steps.done < agenda.last:
        batches, rate = data.next_step(), steps.begin()
        # Dropout depends on the batch, not on what ran before.
        torch.manual_seed(parts.seed(steps.batches))
        progress.add(parts.take_step(batches, rate), batches)

        due, stopped = agenda.after(steps.done), parts.stop.agreed(steps.batches)
        if not due and not stopped:
            continue
        if not steps.settle():
            due = Due()  # overflows have put it off
        if due.report:
            progress.report(steps.done, steps.batches)
        if due.evaluate:
            reached = evaluate(parts)
        if due.checkpoint and not due.end and not reached and not stopped:
            parts.save(steps.done, steps.batches, progress.samples())

    reason = TARGET if reached else stopped or LAST_STEP
    return Ending(reason, steps.done, steps.batches, progress.samples())


def evaluate(parts: Parts) -> bool:
    """Whether the target is reached; the time that it takes is not training time."""
    samples = parts.progress.samples()
    with parts.progress.paused():
        return parts.evaluate(parts.steps.done, samples)


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of the dropout of one step on one rank: independent streams, and nothing to save in a checkpoint."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))
