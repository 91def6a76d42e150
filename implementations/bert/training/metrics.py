"""The figures of a run (losses, learning rate, gradient norm, speed, time left) and where they go.

To stderr; to the sinks: metrics_<TRIAL>.jsonl, TensorBoard, Weights & Biases. Only at reports, when
the host has to wait for the device.
"""

import contextlib
import importlib
import importlib.util
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from bert.core.dist import World
from bert.core.rundir import RunConfig
from bert.data.batch import Batch
from bert.model.flops import peak_flops
from bert.training.step import StepResult
from bert.training.stop import Ending, TrainingError
from common.durations import duration
from common.env import ConfigError, env
from common.files import object_of, write_text
from common.process import one_line, say

WIDTH = 100  # columns of a report
PROCESS_STARTED = time.monotonic()  # but for the first imports


# A sink takes (kind, figures). Kinds: "train" (a report), "evaluation", "summary" (the last; its
# "end" is the reason). The first two hold numbers alone, among them "step".
MetricSink = Callable[[str, Mapping[str, Any]], object]


def metrics_file(path: Path, first_step: int) -> MetricSink:
    """One JSON object per line, with its kind. A resumed run appends; each step occurs once in the
    file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        path.read_text(encoding="utf-8").splitlines(True)
        if first_step and path.is_file()
        else []
    )
    # Lines of steps that are taken again go, and the cut-off last line of a killed run.
    lines_before = (
        line
        for line in lines
        if line.endswith("}\n") and json.loads(line).get("step", 0) <= first_step
    )
    write_text(path, "".join(lines_before))
    # Line by line, so that a killed run loses one at most.
    file = path.open("a", encoding="utf-8", buffering=1)
    return lambda kind, values: file.write(json.dumps({"kind": kind, **values}) + "\n")


def tensorboard(run: RunConfig, first_step: int) -> MetricSink:
    """Scalars train/loss, evaluation/accuracy and so on by step, in an event file."""
    from torch.utils.tensorboard import SummaryWriter

    # Hides the events of steps that a resumed run takes again.
    purged = first_step + 1 if first_step else None
    writer = SummaryWriter(str(run.file("tensorboard_{}")), purge_step=purged)

    def write(kind: str, values: Mapping[str, Any]) -> None:
        if kind == "summary":
            writer.add_text("summary", json.dumps(values), values["step"])
            writer.close()
            return
        for name, value in values.items():
            if name != "step":
                writer.add_scalar(f"{kind}/{name}", value, values["step"])
        writer.flush()

    return write


def weights_and_biases(run: RunConfig, first_step: int) -> MetricSink:
    """Names as in TensorBoard, and the settings. The package itself reads WANDB_MODE (offline),
    WANDB_PROJECT and the like.
    """
    import wandb

    folder, where = run.file("wandb_{}"), Path(run.owner["run_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "run_id"
    # A resumed run continues its page; a number of its own for each other one.
    if not (first_step and kept.is_file()):
        write_text(kept, secrets.token_hex(4))
    page = wandb.init(
        dir=str(folder),
        name=f"{where.parent.name}/{where.name} {run.trial}",
        id=kept.read_text(encoding="utf-8"),
        config=object_of(folder.parent / "config.json"),
        resume="allow",
    )

    def write(kind: str, values: Mapping[str, Any]) -> None:
        if kind == "summary":
            page.summary.update(dict(values))
            page.finish()
            return
        named = {f"{kind}/{key}": value for key, value in values.items()}
        page.log(named, step=values["step"])

    return write


class Sink(NamedTuple):
    """A choice of METRICS. make: of a run, and the step from which it resumes, else 0; package: what
    must be installed.
    """

    make: Callable[[RunConfig, int], MetricSink]
    package: str = ""


SINKS = {
    "": Sink(lambda run, first_step: lambda kind, values: None),
    "tensorboard": Sink(tensorboard, "tensorboard"),
    "wandb": Sink(weights_and_biases, "wandb"),
}


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """A sink beside metrics_<TRIAL>.jsonl."""

    metrics: str = env(
        "METRICS", "", "further sink of a run's figures; needs RUN_DIR", choices=SINKS
    )

    def check(self, run: RunConfig) -> None:
        """Raises ConfigError if its package is not installed, and without RUN_DIR."""
        if not self.metrics:
            return
        package = SINKS[self.metrics].package
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"METRICS={self.metrics}: it is not installed: pip install -r requirements/metrics.txt"
            )
        if run.run_dir is None:
            raise ConfigError(
                f"METRICS={self.metrics} writes to RUN_DIR, which is not set: give the folder"
            )

    def load(self) -> None:
        """Imports the package, which takes seconds: before the clock."""
        names = {"tensorboard": "torch.utils.tensorboard"}
        # An error is the sink's own, which the run survives.
        with contextlib.suppress(Exception):
            importlib.import_module(names.get(self.metrics, self.metrics))


def guarded(name: str, make: Callable[[], MetricSink]) -> MetricSink:
    """A sink that may fail: at its first error the run prints a warning and continues without
    it.
    """
    working: list[MetricSink] = []  # empty once it has failed

    def attempt(act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            working.clear()
            reason = one_line(f"{type(error).__name__}: {error}")
            say(f"bert: warning: {name} gets no more figures: {reason}")

    attempt(lambda: working.append(make()))
    return lambda kind, values: attempt(
        lambda: [sink(kind, values) for sink in working]
    )


def on_thread(make: Callable[[], MetricSink]) -> MetricSink:
    """A sink that is made, and takes its figures, on a thread: one may ask a server first, for which
    a run on the clock must not wait. After the summary all of it is done.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="metrics")
    made = executor.submit(make)

    def write(kind: str, values: Mapping[str, Any]) -> None:
        executor.submit(lambda: made.result()(kind, values))
        if kind == "summary":
            executor.shutdown()

    return write


def metric_sinks(
    config: MetricsConfig, run: RunConfig, first_step: int
) -> Sequence[MetricSink]:
    """The sinks of rank 0. first_step: step from which it resumes, else 0."""
    if run.run_dir is None:
        return []
    path = run.file("metrics_{}.jsonl")
    sinks = [guarded(path.name, lambda: metrics_file(path, first_step))]
    if config.metrics:
        make = partial(SINKS[config.metrics].make, run, first_step)
        sinks.append(on_thread(partial(guarded, config.metrics, make)))
    return sinks


def _shown(device: Mapping[str, float]) -> str:
    """Figures of a GPU on the report line."""
    mfu = f"  MFU {device['mfu']:.0%}" if "mfu" in device else ""
    if "memory_gb" not in device:
        return mfu
    return f"{mfu}  {device['memory_gb']:.0f}/{device['reserved_gb']:.0f} GB"


class Progress:
    """Counts samples and losses; rare reports, as each waits for the device."""

    def __init__(
        self,
        world: World,
        *,
        last: int,
        rate: Callable[[int], float],
        epochs: Callable[[int, int], float],
        skips_overflows: bool,
        sinks: Sequence[MetricSink] = (),
        done: int = 0,
        samples: int = 0,
        operations: Callable[[Any], float] = lambda batch: 0.0,
        span: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """last: step at which the run ends; rate: learning rate of a step; epochs: of (batches,
        samples) trained on; skips_overflows: loss scaling may skip steps; done, samples: steps and
        samples before this process; operations: of a batch, for MFU; span: see ``span``.
        """
        self.world, self.sinks = world, sinks
        self.last, self.rate, self.epochs = last, rate, epochs
        self.skips_overflows = skips_overflows
        self.first_step, self.resumed_samples = done, samples
        self.local_samples = torch.zeros((), dtype=torch.int64, device=world.device)
        self.started, self.paused_seconds = time.monotonic(), 0.0
        self.names: tuple[str, ...] = ()
        # Losses by name, then gradient norms.
        self.totals = torch.zeros(0, device=world.device)
        self.overflows = torch.zeros((), dtype=torch.int64, device=world.device)
        self.last_loss: float | None = None  # of the last report
        self.operations = operations
        self.peak = peak_flops(world.device) if world.device.type == "cuda" else 0.0
        self._begin_span(done, samples, self.started)
        if span:
            self.names, self.span_steps = tuple(span["names"]), span["steps"]
            self.totals = torch.tensor(span["totals"], device=world.device)
            self.overflows += span["overflows"]

    def add(self, result: StepResult, batches: Sequence[Batch]) -> None:
        """Adds a step; one whose gradient overflowed counts no samples. Does not wait for the
        device.
        """
        # The task's names come with its first result.
        if not self.names:
            self.names = result.losses._fields  # type: ignore[attr-defined]
            self.totals = torch.zeros(len(self.names) + 1, device=self.world.device)
        # One inf would make the whole sum inf; report() leaves such steps out of the mean.
        norm = torch.where(result.finite, result.norm, 0).to(self.totals.dtype)
        # Added up on the device; only a report reads them.
        self.totals += torch.stack([*result.losses, norm])
        self.span_steps += 1
        if self.peak:
            self.span_operations += sum(map(self.operations, batches))
        self.local_samples += result.finite * sum(
            batch.num_sequences for batch in batches
        )
        self.overflows += ~result.finite

    def samples(self) -> int:
        """Sequences trained on by all ranks. A collective."""
        # A clone, as sum() works in place; int() waits for the device.
        return self.resumed_samples + int(self.world.sum(self.local_samples.clone()))

    def span(self) -> dict[str, Any]:
        """What the next report averages, so far, for a checkpoint. A collective."""
        # Of each rank the mean over ranks: a resumed run may have others.
        totals = self.world.sum(self.totals / self.world.size).tolist()
        return {
            "names": list(self.names),
            "totals": totals,
            "steps": self.span_steps,
            "overflows": int(self.overflows),
        }

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes what is done inside, such as an evaluation, from the speed and the time left."""
        begin = time.monotonic()
        yield
        seconds = time.monotonic() - begin
        self.paused_seconds += seconds
        self.span_paused_seconds += seconds

    def report(self, step: int, batches: int) -> None:
        """Prints means over the ranks and over the steps since the last report, and writes them to
        the sinks.

        A collective. batches: number so far, including those that overflowed. Raises TrainingError
        if training has broken down.
        """
        span_steps = max(self.span_steps, 1)
        # Here the host waits for the device.
        mine = torch.tensor([self.span_operations], device=self.totals.device)
        size = self.world.size
        sums = torch.cat([self.totals / (span_steps * size), mine / size])
        *means, operations = self.world.sum(sums).tolist()
        # All ranks skip the same steps, so the sum counts each once per rank.
        overflows = int(self.world.sum(self.overflows.clone())) // self.world.size
        samples, now = self.samples(), time.monotonic()
        seconds = now - self.span_started - self.span_paused_seconds
        speed = (samples - self.span_samples) / max(seconds, 1e-9)
        losses = dict(zip(self.names, means[:-1], strict=True))
        loss, lr = sum(losses.values()), self.rate(step)
        # Steps that overflowed count as 0.
        num_norms = max(self.span_steps - overflows, 1)
        norm = means[-1] * self.span_steps / num_norms
        device = self._device_figures(operations / max(seconds, 1e-9))
        if self.world.is_main:
            # Over all steps of this process, which varies less than a single span.
            per_step = (now - self.started - self.paused_seconds) / max(
                step - self.first_step, 1
            )
            parts = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
            left = duration(per_step * (self.last - step))
            start = f"step {step:>6}/{self.last}  loss {loss:.4f}"
            end = f"  lr {lr:.2e}  norm {norm:.3g}  {speed:,.1f}/s{_shown(device)}  ETA {left}"
            whole = f"{start} ({parts}){end}"
            # The losses by name are in the metrics, too.
            line = whole if len(whole) <= WIDTH else start + end
            say(line)
        # A mean over all ranks, so that all of them raise, and none waits for another.
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} at step {step}, batch {batches}: lower LR, or look at the data"
            )
        # Only loss scaling may skip steps (StepCounter.resolve ends a run that skips all).
        if overflows and not self.skips_overflows:
            raise TrainingError(
                f"gradients were not finite in {overflows} of the {self.span_steps} steps up to step {step}: "
                "lower LR, or look at the data"
            )
        values = {
            "step": step,
            "epoch": self.epochs(batches, samples),
            "samples": samples,
            "loss": loss,
            **{f"{name}_loss": value for name, value in losses.items()},
            "lr": lr,
            "grad_norm": norm,
            "ms_per_step": 1000 * seconds / max(step - self.span_first_step, 1),
            "sequences_per_second": speed,
            "per_gpu": speed / self.world.size,
            **device,
        }
        self.last_loss = loss
        self._begin_span(step, samples, now)
        for sink in self.sinks:
            sink("train", values)

    def _device_figures(self, rate: float) -> dict[str, float]:
        """On a GPU: GB allocated at most and reserved, and where its peak is known the share of
        that. rate: operations a second.
        """
        if self.world.device.type != "cuda":
            return {}
        memory = {
            "memory_gb": torch.cuda.max_memory_allocated(self.world.device) / 1e9,
            "reserved_gb": torch.cuda.memory_reserved(self.world.device) / 1e9,
        }
        return memory | ({"mfu": rate / self.peak} if self.peak and rate else {})

    def _begin_span(self, step: int, samples: int, now: float) -> None:
        self.span_started, self.span_samples = now, samples
        self.span_first_step, self.span_steps, self.span_paused_seconds = step, 0, 0.0
        self.span_operations = 0.0
        self.totals.zero_()
        self.overflows.zero_()

    def summary(self, ending: Ending) -> None:
        """Writes the figures of the whole run to the sinks.

        raw_train_time: the loop with its evaluations and checkpoints; e2e_train_time: since the
        process began.
        """
        now = time.monotonic()
        seconds, samples = now - self.started, ending.samples - self.resumed_samples
        values: dict[str, Any] = {
            "end": ending.reason,
            "step": ending.step,
            "samples": ending.samples,
            "e2e_train_time": now - PROCESS_STARTED,
            "raw_train_time": seconds,
            "evaluation_time": self.paused_seconds,
            "training_sequences_per_second": samples / max(seconds, 1e-9),
        }
        if self.last_loss is not None:
            values["final_loss"] = self.last_loss
        for sink in self.sinks:
            sink("summary", values)
