"""Where the figures of a run go beside stderr: metrics_<TRIAL>.jsonl, TensorBoard and Weights & Biases.

They are given figures at reports only, where the host has waited for the device anyway.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bert.core import rundir
from bert.core.env import ConfigError, env

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}  # METRICS: package


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which observers a run has."""

    metrics: str = env(
        "METRICS", "", doc="further places for a run's figures, between commas: tensorboard, wandb; both need RUN_DIR"
    )

    @property
    def names(self) -> list[str]:
        """The chosen ones."""
        return [name.strip() for name in self.metrics.split(",") if name.strip()]

    def check(self, run: rundir.Config) -> None:
        """Raises ConfigError for an unknown name, a package that is not installed, and without RUN_DIR."""
        for name in self.names:
            if name not in PACKAGES:
                raise ConfigError(f"METRICS={self.metrics}: expected {' or '.join(PACKAGES)}, or both between commas")
            if importlib.util.find_spec(PACKAGES[name]) is None:
                raise ConfigError(f"METRICS={name}: it is not installed: pip install -r requirements/metrics.txt")
            if run.run_dir is None:
                raise ConfigError(f"METRICS={name} writes to RUN_DIR, which is not set: give the folder")


class Observer(Protocol):
    """Something that is given the figures of a run."""

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """kind: "train" (a report), "evaluation" or "summary" (the last one, with "end", the reason of the end).

        The first two have "step", and their figures are numbers.
        """
        ...


class MetricsFile:
    """One JSON object a line, with its kind. A run that resumes appends, so that its file tells the whole story."""

    def __init__(self, path: Path, append: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a" if append else "w", encoding="utf-8", buffering=1)

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """See Observer."""
        self.file.write(json.dumps({"kind": kind, **values}) + "\n")


class TensorBoard:
    """Scalars train/loss, evaluation/accuracy and so on by step, in an event file."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """See Observer."""
        if kind == "summary":
            self.writer.add_text("summary", json.dumps(values), values["step"])
            self.writer.close()
            return
        for name, value in values.items():
            if name != "step":
                self.writer.add_scalar(f"{kind}/{name}", value, values["step"])
        self.writer.flush()


class WeightsAndBiases:
    """The same names as in TensorBoard; WANDB_MODE, WANDB_PROJECT and the like are read by the package itself."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(dir=str(folder), name=name, config=dict(settings))

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """See Observer."""
        if kind == "summary":
            self.run.summary.update(dict(values))
            self.run.finish()
            return
        self.run.log({f"{kind}/{name}": value for name, value in values.items()}, step=values["step"])


class Guarded:
    """An observer that may fail: the first error is a warning on stderr, and the run continues without it."""

    def __init__(self, name: str, make: Callable[[], Observer]) -> None:
        self.name = name
        self.observer: Observer | None = None
        self._attempt(lambda: setattr(self, "observer", make()))

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """See Observer."""
        if (observer := self.observer) is not None:
            self._attempt(lambda: observer.write(kind, values))

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self.observer = None
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"bert: warning: {self.name} gets no more figures: {reason}", file=sys.stderr, flush=True)


def build(config: Config, run: rundir.Config, settings: Mapping[str, Any], first_step: int) -> Sequence[Observer]:
    """The observers of rank 0. settings: what describes the run; first_step: step from which it resumes, else 0."""
    folder, trial = run.run_dir, run.trial
    if folder is None:
        return []
    makers: dict[str, Callable[[], Observer]] = {
        "tensorboard": lambda: TensorBoard(folder / f"tensorboard_{trial}", first_step),
        "wandb": lambda: WeightsAndBiases(folder, f"{folder.resolve().name}_{trial}", settings),
    }
    path = folder / f"metrics_{trial}.jsonl"
    chosen = [Guarded(path.name, lambda: MetricsFile(path, append=first_step > 0))]
    return chosen + [Guarded(name, makers[name]) for name in config.names]
