"""PROFILE_STEPS: a trace of PyTorch's profiler of some steps."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bert.core import rundir
from bert.core.env import ConfigError, env
from bert.core.files import whole_file
from bert.data.batch import Batch
from bert.training.step import StepResult, TrainingStep


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which steps are profiled."""

    steps: str = env(
        "PROFILE_STEPS", "", doc="first,last step of this process whose torch.profiler trace rank 0 writes to RUN_DIR"
    )

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last, counted from 1; None without any."""
        found = re.fullmatch(r"(\d+),(\d+)", self.steps)
        return (int(found[1]), int(found[2])) if found else None

    def check(self, run: rundir.Config, num_steps: int) -> None:
        """Raises ConfigError for what is not a span of the ``num_steps`` of this process, and without RUN_DIR."""
        if not self.steps:
            return
        if self.span is None or not 1 <= self.span[0] <= self.span[1]:
            raise ConfigError(f"PROFILE_STEPS={self.steps!r}: expected the first and the last step, such as 2,3")
        if self.span[1] > num_steps:
            raise ConfigError(f"PROFILE_STEPS={self.steps}: this process takes {num_steps} steps: choose some of these")
        if run.run_dir is None:
            raise ConfigError("PROFILE_STEPS writes to RUN_DIR, which is not set: give the folder")


class ProfiledStep:
    """A training step that is profiled from the ``first`` call to the ``last``; the trace is Chrome's JSON."""

    def __init__(self, span: tuple[int, int], path: Path, take_step: TrainingStep) -> None:
        self.first, self.last = span
        self.path, self.take_step, self.count = path, take_step, 0
        self.profile: profile | None = None

    def __call__(self, batches: Sequence[Batch], lr: float | Tensor) -> StepResult:
        self.count += 1
        if self.count == self.first:
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self.profile.start()
        result = self.take_step(batches, lr)
        if self.count == self.last:
            self._export()
        return result

    def _export(self) -> None:
        assert self.profile is not None
        self.profile.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(self.path) as partial:
            self.profile.export_chrome_trace(str(partial))
        self.profile = None


def unprofiled(take_step: TrainingStep) -> TrainingStep:
    """The step without its profile, which ends: of what comes after the training nothing belongs into the trace.

    Writes a profile that is still open, and says in one line which of its steps never came.
    """
    if not isinstance(take_step, ProfiledStep):
        return take_step
    step = take_step
    if step.count < step.last:
        outcome = "no trace is written" if step.profile is None else f"{step.path} ends there"
        if step.profile is not None:
            step._export()
        said = f"PROFILE_STEPS={step.first},{step.last}: this process ended after its step {step.count}"
        print(f"{said}: {outcome}", file=sys.stderr, flush=True)
    return step.take_step
