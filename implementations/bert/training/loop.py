"""The task-independent training loop: take a step, do what is due after it, until the target or the
end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bert.kernels.precision import LossScaler
from bert.training.metrics import Progress
from bert.training.step import TrainingStep
from bert.training.stop import LAST_STEP, TARGET, Ending, Stop, TrainingError

MAX_CONSECUTIVE_OVERFLOWS = 50  # so many halvings bring any sensible loss scale to 1


def train(
    *,
    next_step: Callable[[], Sequence[Any]],
    take_step: TrainingStep,
    steps: StepCounter,
    schedule: StepSchedule,
    progress: Progress,
    stop: Stop,
    seed: Callable[[int], int],
    evaluate: Callable[[int, int], bool],
    save: Callable[[int, int, int], None],
    look: Callable[[], None] = lambda: None,
    ended: bool = False,
    left_out: Callable[[int], bool] = lambda batch: False,
) -> Ending:
    """Runs to the end; every rank calls it with the same settings. The caller writes the last
    checkpoint.

    next_step: micro-batches of the next step, on the CPU or the device; seed: batch number ->
    random seed; evaluate: (steps, samples) -> whether the target is reached; save: writes a
    checkpoint of (steps, batches, samples); look: at each report. The last three are collectives.
    ended: by the checkpoint that the run continues from. left_out: whether a batch is not trained
    on.

    Raises TrainingError if training has broken down, and what it calls raises.
    """

    def reaches_target() -> bool:
        samples = progress.samples()
        with progress.paused():  # evaluation is not training time
            return evaluate(steps.done, samples)

    # A resumed run has been evaluated here before, but what came of it is lost if it had ended.
    is_known = steps.batches > 0 and not ended
    reached = not is_known and schedule.after(steps.done).evaluate and reaches_target()
    stopped = None

    while not reached and not stopped and steps.done < schedule.last:
        while left_out(steps.batches + 1):
            next_step()
            steps.leave_out()
        batches, rate = next_step(), steps.begin()
        # Makes dropout depend on the batch alone, not on what ran before.
        torch.manual_seed(seed(steps.batches))
        progress.add(take_step(batches, rate), batches)

        due = schedule.after(steps.done)
        stopped = stop.agreed(steps.batches, steps.done)
        if not any(due) and not stopped:
            continue
        # From here on the host waits for the device.
        if not steps.resolve():
            due = Due()  # postponed by overflows
        if due.report:
            progress.report(steps.done, steps.batches)
            look()
        if due.evaluate:
            reached = reaches_target()
        if due.checkpoint and not due.end and not reached and not stopped:
            save(steps.done, steps.batches, progress.samples())

    # A target that was reached counts, even if a signal came in the same step.
    reason = TARGET if reached else stopped or LAST_STEP
    return Ending(reason, steps.done, steps.batches, progress.samples())


def step_seed(seed: int, step: int, rank: int) -> int:
    """Dropout seed of one step on one rank: independent streams, with no state to save in
    checkpoints.
    """
    (state,) = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)
    return int(state >> np.uint64(1))  # positive as an int64


class Due(NamedTuple):
    """What is due after a step, in this order."""

    report: bool = False
    evaluate: bool = False
    checkpoint: bool = False
    end: bool = False


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """What is due after which steps; only there does the host synchronize with the device.

    last: step at which the run ends; report_every: steps between reports; evaluations: steps (0:
    before the first); checkpoint: whether one is due after a step.
    """

    last: int
    report_every: int
    evaluations: Collection[int] = ()
    checkpoint: Callable[[int], bool] = lambda step: False

    def after(self, step: int) -> Due:
        """What is due after ``step`` (1 is the first). An evaluation and the end are preceded by a
        report.
        """
        evaluate, end = step in self.evaluations, step >= self.last
        report = evaluate or end or step % self.report_every == 0
        return Due(report, evaluate, self.checkpoint(step), end)


class StepCounter:
    """Counts optimizer steps and provides their learning rates.

    With loss scaling, a batch whose gradient overflows is skipped. Only the device knows, so the
    rate is computed there, and ``done`` may be too high until something is due, when the host waits
    for the device anyway.
    """

    def __init__(
        self,
        rate: Callable[[int], float],
        last: int,
        scaler: LossScaler,
        done: int = 0,
        batches: int = 0,
    ) -> None:
        """rate: learning rate of a step, 1 first; last: step at which the run ends; done, batches:
        before this run.
        """
        self.rate, self.scaler, self.done, self.batches = rate, scaler, done, batches
        self.resolved, self.resolved_batches = done, batches
        # Batches that were neither a step nor an overflow.
        self.left_out = batches - done
        self.rates: Tensor | None = None
        if scaler.enabled:
            self.left_out -= int(scaler.num_skipped_steps)
            # All of them in advance, for the device to choose from.
            rates = [rate(step) for step in range(1, last + 1)]
            self.rates = torch.tensor(
                rates, dtype=torch.float32, device=scaler.scale.device
            )

    def begin(self) -> float | Tensor:
        """Begins a step; returns its learning rate."""
        self.done += 1
        self.batches += 1
        if self.rates is None:
            return self.rate(self.done)
        # The step's index, which only the device knows: a gather there, where the host would have
        # to wait.
        index = self.batches - 1 - self.left_out - self.scaler.num_skipped_steps
        return torch.take(self.rates, index)

    def leave_out(self) -> None:
        """Counts a batch that is not trained on."""
        self.batches += 1
        self.left_out += 1
        self.resolved_batches += 1

    def resolve(self) -> bool:
        """Corrects ``done``; False if overflows have postponed what is due. Waits for the device.

        Raises TrainingError if gradients are no longer finite.
        """
        if not self.scaler.enabled:
            return True
        expected = self.done
        # int() waits for the device.
        skipped = int(self.scaler.num_skipped_steps)
        self.done = self.batches - self.left_out - skipped
        if self.done > self.resolved:
            self.resolved, self.resolved_batches = self.done, self.batches
        elif (
            count := self.batches - self.resolved_batches
        ) > MAX_CONSECUTIVE_OVERFLOWS:
            raise TrainingError(
                f"gradients were not finite in {count} steps in a row after step {self.done}: "
                "lower LR or the loss scale, or look at the data"
            )
        return self.done == expected
