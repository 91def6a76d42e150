"""CAPTURE: what every module computes in the first steps, and the gradients of it, in files to compare.

RUN_DIR/capture_<TRIAL>/step_<step>_rank_<rank>.safetensors holds tensors by module, in the order of the forward pass. A
module's gradient is that of its result. Where a module runs twice (RECOMPUTE_LAYERS) the first time counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from bert.core import rundir
from bert.core.env import ConfigError, env
from bert.core.files import whole_file
from bert.data.batch import Batch
from bert.data.records import DataError
from bert.training.step import StepResult, TrainingStep

KINDS = ("inputs", "activations", "gradients")
ORDER = "order"  # of the names, in a file's metadata


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is captured."""

    capture: str = env(
        "CAPTURE", "", doc="tensors of the first steps into RUN_DIR, joined by commas: inputs, activations, gradients"
    )
    steps: int = env("CAPTURE_STEPS", 1, at_least=1, doc="CAPTURE: steps of which tensors are written")

    @property
    def kinds(self) -> set[str]:
        """The chosen ones."""
        return {kind.strip() for kind in self.capture.split(",") if kind.strip()}

    def check(self, run: rundir.Config, uses_graph: bool) -> None:
        """Raises ConfigError for an unknown kind, without RUN_DIR, and in a CUDA graph."""
        if not self.kinds:
            if self.capture or self.steps != 1:
                wrong = f"CAPTURE={self.capture!r}" if self.capture else f"CAPTURE_STEPS={self.steps} and no CAPTURE"
                raise ConfigError(f"{wrong}: say in CAPTURE what to write: {', '.join(KINDS)}, joined by commas")
            return
        if unknown := sorted(self.kinds - set(KINDS)):
            raise ConfigError(f"CAPTURE names {', '.join(unknown)}: expected {', '.join(KINDS)}, joined by commas")
        if run.run_dir is None:
            raise ConfigError("CAPTURE writes to RUN_DIR, which is not set: give the folder")
        if uses_graph:
            raise ConfigError("CAPTURE needs steps outside of CUDA graphs: set CUDA_GRAPH=0")


class CapturedStep:
    """A training step whose first calls leave files."""

    def __init__(self, config: Config, folder: Path, rank: int, model: nn.Module, take_step: TrainingStep) -> None:
        self.config, self.folder, self.rank, self.take_step = config, folder, rank, take_step
        self.model = model
        self.count = self.micro_batch = 0
        self.found: dict[str, Tensor] = {}

    def __call__(self, batches: Sequence[Batch], lr: float | Tensor) -> StepResult:
        """Trains on the micro-batches."""
        if self.count >= self.config.steps:
            return self.take_step(batches, lr)
        self.count += 1
        self.micro_batch, self.found = 0, {}
        if "inputs" in self.config.kinds:
            for number, batch in enumerate(batches, start=1):
                for name, tensor in batch.tensors().items():
                    self._keep(f"{number}.inputs.{name}", tensor)
        handles = [self.model.register_forward_pre_hook(self._next_micro_batch)]
        for name, module in self.model.named_modules():
            if name and not isinstance(module, nn.ModuleList):
                handles.append(module.register_forward_hook(self._hook(name)))
        try:
            result = self.take_step(batches, lr)
        finally:
            for handle in handles:
                handle.remove()
        self._write()
        return result

    def _next_micro_batch(self, *_: object) -> None:
        self.micro_batch += 1

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, result: Any) -> None:
            outputs = result if isinstance(result, tuple) else (result,)
            for number, output in enumerate(outputs):
                if isinstance(output, Tensor):
                    self._take(f"{self.micro_batch}.{name}" + (f".{number}" if number else ""), output)

        return hook

    def _take(self, name: str, output: Tensor) -> None:
        known = f"{name}.activation" in self.found or f"{name}.gradient" in self.found
        if known:
            return
        if "activations" in self.config.kinds:
            self._keep(f"{name}.activation", output)
        if "gradients" in self.config.kinds and output.requires_grad:
            self.found[f"{name}.gradient"] = torch.empty(0)  # keeps its place in the order
            output.register_hook(lambda gradient: self._keep(f"{name}.gradient", gradient))

    def _keep(self, name: str, tensor: Tensor) -> None:
        self.found[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        order = [name for name in self.found if not name.endswith(".gradient")]
        order += [name for name in reversed(self.found) if name.endswith(".gradient")]
        path = self.folder / f"step_{self.count}_rank_{self.rank}.safetensors"
        with whole_file(path) as partial:
            safetensors.torch.save_file(self.found, partial, metadata={ORDER: json.dumps(order)})


def differences(one: Path, other: Path) -> Iterator[tuple[str, float, float]]:
    """(name, largest absolute difference, that relative to the largest number of ``one``) in the order of the step.

    Infinite where one has not the tensor or another shape; what ``other`` alone has comes last. Raises DataError for
    a file that is damaged, or none of a capture.
    """
    with _opened(one) as a, _opened(other) as b:
        names, others = _order(one, a), _order(other, b)
        in_other, in_one = set(others), set(names)
        for name in names:
            mine = a.get_tensor(name).double()
            theirs = b.get_tensor(name).double() if name in in_other else None
            if theirs is not None and name.endswith(".gradient"):  # one that never came is 0
                mine, theirs = (x if x.numel() else torch.zeros_like(y) for x, y in ((mine, theirs), (theirs, mine)))
            if theirs is None or theirs.shape != mine.shape:
                yield name, float("inf"), float("inf")
                continue
            worst = (mine - theirs).abs().max().item() if mine.numel() else 0.0
            worst = worst if worst == worst else float("inf")  # nan
            largest = mine.abs().max().item() if mine.numel() else 0.0
            yield name, worst, worst / largest if largest else worst
        for name in others:
            if name not in in_one:
                yield name, float("inf"), float("inf")


def _opened(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"{path}: cannot be read ({error}): capture it again") from None


def _order(path: Path, file: Any) -> list[str]:
    """Names of the tensors, as the step computed them."""
    try:
        order = json.loads((file.metadata() or {})[ORDER])
        if sorted(order) == sorted(file.keys()):
            return list(order)
    except (KeyError, TypeError, ValueError):
        pass
    raise DataError(f"{path}: a file of tensors, but none that CAPTURE wrote: name a capture_<TRIAL> or a file of it")
