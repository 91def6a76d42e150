"""The figures of a run: losses, learning rate, gradient norm, speed, time left."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bert.core.dist import World
from bert.core.start import PROCESS_STARTED
from bert.data.batch import Batch
from bert.model.trainable import loss_names
from bert.training.observers import Observer
from bert.training.step import StepResult
from bert.training.stop import Ending, TrainingError

MEAN_STEPS = 100  # a single step's loss is noise: the summary also has the mean of at least so many


@dataclass(frozen=True, kw_only=True)
class Report:
    """Means over the ranks and over the steps since the last report; speeds leave evaluation out."""

    step: int
    samples: int
    epoch: float
    losses: dict[str, float]
    lr: float
    grad_norm: float
    ms_per_step: float
    sequences_per_second: float
    per_gpu: float

    @property
    def loss(self) -> float:
        """The sum of the losses."""
        return sum(self.losses.values())

    def values(self) -> dict[str, Any]:
        """What observers are given."""
        losses = {"loss": self.loss} | {f"{name}_loss": loss for name, loss in self.losses.items()}
        speeds = {"sequences_per_second": self.sequences_per_second, "per_gpu": self.per_gpu}
        return {
            "step": self.step, "epoch": self.epoch, "samples": self.samples, **losses,
            "lr": self.lr, "grad_norm": self.grad_norm, "ms_per_step": self.ms_per_step, **speeds,
        }  # fmt: skip


class Progress:
    """Counts samples and losses and reports them at a low rate, so that the device is rarely waited for."""

    def __init__(
        self,
        world: World,
        *,
        last: int,
        rate: Callable[[int], float],
        epochs: Callable[[int, int], float],
        skips_overflows: bool,
        observers: Sequence[Observer] = (),
        done: int = 0,
        samples: int = 0,
    ) -> None:
        """last: step at which the run ends; rate: learning rate of a step; epochs: of (batches, samples) trained on;
        skips_overflows: loss scaling may skip steps; done, samples: steps and samples before this process began.
        """
        self.world, self.last, self.rate, self.epochs, self.observers = world, last, rate, epochs, observers
        self.skips_overflows = skips_overflows
        self.first_step, self.resumed_samples = done, samples
        self.local_samples = torch.zeros((), dtype=torch.int64, device=world.device)
        self.started = self.span_started = time.monotonic()
        self.paused_seconds = self.span_paused_seconds = 0.0
        self.span_samples, self.span_first_step, self.span_steps = samples, done, 0
        self.names: tuple[str, ...] = ()
        self.totals = torch.zeros(0, device=world.device)  # losses by name, then gradient norms
        self.overflows = torch.zeros((), dtype=torch.int64, device=world.device)
        self.recent: deque[tuple[int, float]] = deque()  # (steps, mean loss) of the last reports

    def add(self, result: StepResult, batches: Sequence[Batch]) -> None:
        """Adds a step; one whose gradient overflowed trained on nothing. Does not wait for the device."""
        if not self.names:
            self.names = loss_names(result.losses)
            self.totals = torch.zeros(len(self.names) + 1, device=self.world.device)
        norm = torch.where(result.finite, result.norm, 0).to(self.totals.dtype)
        self.totals += torch.stack([*result.losses, norm])
        self.span_steps += 1
        self.local_samples += result.finite * sum(batch.num_sequences for batch in batches)
        self.overflows += ~result.finite

    def samples(self) -> int:
        """Sequences trained on by all ranks. A collective."""
        return self.resumed_samples + int(self.world.sum(self.local_samples.clone()).item())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside, such as an evaluation, counts neither for the speed nor for the time left."""
        begin = time.monotonic()
        yield
        seconds = time.monotonic() - begin
        self.paused_seconds += seconds
        self.span_paused_seconds += seconds

    def report(self, step: int, batches: int) -> None:
        """Prints the figures of the steps since the last report and hands them to the observers. A collective.

        batches: how many there were so far, with those that overflowed. Raises TrainingError where training has broken
        down.
        """
        totals = self.world.sum(self.totals / (max(self.span_steps, 1) * self.world.size)).tolist()
        samples, now = self.samples(), time.monotonic()
        overflows = int(self.world.sum(self.overflows.clone()).item()) // self.world.size
        seconds = now - self.span_started - self.span_paused_seconds
        speed = (samples - self.span_samples) / max(seconds, 1e-9)
        report = Report(
            step=step,
            samples=samples,
            epoch=self.epochs(batches, samples),
            losses=dict(zip(self.names, totals[:-1], strict=True)),
            lr=self.rate(step),
            grad_norm=totals[-1] * self.span_steps / max(self.span_steps - overflows, 1),
            ms_per_step=1000 * seconds / max(step - self.span_first_step, 1),
            sequences_per_second=speed,
            per_gpu=speed / self.world.size,
        )
        if self.world.is_main:
            print(self._line(report, now), file=sys.stderr, flush=True)
        self._check_finite(report, overflows)
        self._remember(report)
        self.span_started, self.span_samples = now, samples
        self.span_first_step, self.span_steps, self.span_paused_seconds = step, 0, 0.0
        self.totals.zero_()
        self.overflows.zero_()
        for observer in self.observers:
            observer.write("train", report.values())

    def _line(self, report: Report, now: float) -> str:
        per_step = (now - self.started - self.paused_seconds) / max(report.step - self.first_step, 1)
        parts = ", ".join(f"{name} {loss:.4f}" for name, loss in report.losses.items())
        return (
            f"step {report.step:>6}/{self.last}  loss {report.loss:.4f} ({parts})  lr {report.lr:.3e}  "
            f"{report.sequences_per_second:,.1f} sequences/s  ETA {clock(per_step * (self.last - report.step))}"
        )

    def _check_finite(self, report: Report, overflows: int) -> None:
        if not math.isfinite(report.loss):
            raise TrainingError(f"the loss is {report.loss} at step {report.step}: lower LR, or look at the data")
        # Loss scaling skips steps (Steps.settle ends a run that takes none any more); nothing else may.
        if overflows and not self.skips_overflows:
            raise TrainingError(
                f"gradients were not finite in {overflows} of the {self.span_steps} steps up to step {report.step}: "
                "lower LR, or look at the data"
            )

    def _remember(self, report: Report) -> None:
        """Keeps the reports of the last MEAN_STEPS steps."""
        self.recent.append((report.step - self.span_first_step, report.loss))
        while sum(steps for steps, _ in self.recent) - self.recent[0][0] >= MEAN_STEPS:
            self.recent.popleft()

    def summary(self, ending: Ending) -> None:
        """Hands the figures of the whole run to the observers.

        raw_train_time: of the loop, with its evaluations and checkpoints; e2e_train_time: with all that came before.
        """
        now, samples = time.monotonic(), ending.samples
        seconds, num_steps = now - self.started, sum(steps for steps, _ in self.recent)
        values: dict[str, Any] = {
            "end": ending.reason,
            "step": ending.step,
            "samples": samples,
            "e2e_train_time": now - PROCESS_STARTED,
            "raw_train_time": seconds,
            "evaluation_time": self.paused_seconds,
            "training_sequences_per_second": (samples - self.resumed_samples) / max(seconds, 1e-9),
        }
        if self.recent:
            values["final_loss"] = self.recent[-1][1]
            values["mean_loss"] = sum(steps * loss for steps, loss in self.recent) / num_steps
            values["mean_loss_steps"] = num_steps
        for observer in self.observers:
            observer.write("summary", values)


def clock(seconds: float) -> str:
    """3725 -> 1:02:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
