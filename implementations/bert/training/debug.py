"""Steps that leave files: CAPTURE, tensors of the first steps to compare; PROFILE_STEPS, a trace of
PyTorch's profiler.

RUN_DIR/capture_<TRIAL>/step_<step>_rank_<rank>.safetensors holds the outputs of every module, in the
order of the forward pass, and their gradients. If a module runs twice (RECOMPUTE_LAYERS) its first
run is kept.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bert.core.rundir import RunConfig
from bert.data.batch import Batch
from bert.data.records import DataError
from bert.training.step import StepResult, TrainingStep
from common.env import ConfigError, env
from common.files import whole_file

ORDER = "order"  # metadata key: names in the order of the step


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    capture: bool = env(
        "CAPTURE",
        False,
        "1: write inputs, activations and gradients of the first steps to RUN_DIR",
    )
    steps: int = env(
        "CAPTURE_STEPS",
        1,
        "CAPTURE: number of steps, from the first of this process on",
        at_least=1,
    )

    def check(self, run: RunConfig, uses_graph: bool) -> None:
        """Raises ConfigError without RUN_DIR, and in a CUDA graph."""
        if not self.capture:
            if self.steps > 1:
                raise ConfigError(
                    f"CAPTURE_STEPS={self.steps} and CAPTURE is not set: set CAPTURE=1"
                )
            return
        if run.run_dir is None:
            raise ConfigError(
                "CAPTURE writes to RUN_DIR, which is not set: give the folder"
            )
        if uses_graph:
            raise ConfigError(
                "CAPTURE needs steps outside of CUDA graphs: set CUDA_GRAPH=0"
            )


class RecordedStep:
    """A training step whose first ``num_steps`` calls are captured.

    Two runs that agree in the first agree in weights, data and kernels; in the second, in the
    update, too.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        model: nn.Module,
        take_step: TrainingStep,
        num_steps: int = 1,
    ) -> None:
        self.folder, self.rank = folder, rank
        self.model, self.take_step = model, take_step
        self.num_steps, self.done, self.micro_batch = num_steps, 0, 0
        self.tensors: dict[str, Tensor] = {}  # in the order of the step

    def __call__(self, batches: Sequence[Batch], lr: float | Tensor) -> StepResult:
        if self.done == self.num_steps:
            return self.take_step(batches, lr)
        self.done, self.micro_batch = self.done + 1, 0
        for number, batch in enumerate(batches, start=1):
            for name, tensor in batch.tensors().items():
                self._keep(f"{number}.inputs.{name}", tensor)

        def next_micro_batch(*_: object) -> None:
            self.micro_batch += 1

        # Hooks live for these steps: they copy every activation to the host, and are slow.
        handles = [self.model.register_forward_pre_hook(next_micro_batch)]
        for name, module in self.model.named_modules():
            # named_modules() begins with the model, without a name; a ModuleList is never called.
            if name and not isinstance(module, nn.ModuleList):
                handles.append(module.register_forward_hook(self._hook(name)))
        try:
            result = self.take_step(batches, lr)
        finally:
            for handle in handles:
                handle.remove()
        self.folder.mkdir(parents=True, exist_ok=True)
        # Gradients in the order of the backward pass: the first difference is where two runs part.
        order = [name for name in self.tensors if not name.endswith(".gradient")]
        order += [name for name in reversed(self.tensors) if name.endswith(".gradient")]
        with whole_file(
            self.folder / f"step_{self.done}_rank_{self.rank}.safetensors"
        ) as partial:
            safetensors.torch.save_file(
                self.tensors, partial, metadata={ORDER: json.dumps(order)}
            )
        self.tensors = {}
        return result

    def _hook(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: Any, result: Any) -> None:
            for number, output in enumerate(
                result if isinstance(result, tuple) else (result,)
            ):
                prefix = f"{self.micro_batch}.{name}" + (f".{number}" if number else "")
                activation, gradient = f"{prefix}.activation", f"{prefix}.gradient"
                is_second_run = activation in self.tensors
                if not isinstance(output, Tensor) or is_second_run:
                    continue
                self._keep(activation, output)
                if output.requires_grad:
                    # Keeps its position in the order.
                    self.tensors[gradient] = torch.empty(0)
                    output.register_hook(
                        lambda tensor, name=gradient: self._keep(name, tensor)
                    )

        return keep

    def _keep(self, name: str, tensor: Tensor) -> None:
        # A copy, since kernels write over tensors, such as the logits' gradient over the logits.
        self.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()


def differences(reference: Path, other: Path) -> Iterator[tuple[str, float, float]]:
    """(name, largest absolute difference, that relative to the reference's largest number) in the
    order of the step.

    Infinite if a tensor is missing in either or has another shape; tensors of ``other`` alone come
    last. Raises DataError for a damaged file, or one not written by CAPTURE.
    """

    def largest(tensor: Tensor) -> float:
        maximum = float(tensor.abs().max()) if tensor.numel() else 0.0
        # Comparisons with nan are False.
        return float("inf") if math.isnan(maximum) else maximum

    with _opened(reference) as a, _opened(other) as b:
        order = [name for file in (a, b) for name in json.loads(file.metadata()[ORDER])]
        names_of = [(file, set(file.keys())) for file in (a, b)]
        for name in dict.fromkeys(order):
            # In fp64, so that the difference itself is not rounded.
            pair = [
                file.get_tensor(name).double()
                for file, names in names_of
                if name in names
            ]
            # An empty gradient was never computed, and is 0.
            if len(pair) == 2 and name.endswith(".gradient"):
                pair = [
                    x if x.numel() else torch.zeros_like(y)
                    for x, y in (pair, pair[::-1])
                ]
            if len(pair) < 2 or pair[0].shape != pair[1].shape:
                yield name, float("inf"), float("inf")
                continue
            worst, scale = largest(pair[0] - pair[1]), largest(pair[0])
            yield name, worst, worst / scale if scale else worst


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A capture file, whose metadata lists its tensors in the order of the step."""
    try:
        file = safetensors.safe_open(path, framework="pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"{path}: cannot be read ({error}): capture it again") from None
    with file:
        try:
            json.loads(file.metadata()[ORDER])
        except (KeyError, TypeError, ValueError):
            raise DataError(
                f"{path}: tensors, but not written by CAPTURE: name a capture_<TRIAL> or a file in it"
            ) from None
        yield file


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    steps: str = env(
        "PROFILE_STEPS",
        "",
        "first,last step of this process to profile; rank 0 writes a trace to RUN_DIR",
    )

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last step, counted from 1; None if none are profiled."""
        numbers = re.fullmatch(r"(\d+),(\d+)", self.steps)
        return (int(numbers[1]), int(numbers[2])) if numbers else None

    def check(self, run: RunConfig, num_steps: int) -> None:
        """Raises ConfigError for an invalid span of the ``num_steps`` of this process, and without
        RUN_DIR.
        """
        if not self.steps:
            return
        if self.span is None or not 1 <= self.span[0] <= self.span[1]:
            raise ConfigError(
                f"PROFILE_STEPS={self.steps!r}: expected the first and the last step, such as 2,3"
            )
        if self.span[1] > num_steps:
            raise ConfigError(
                f"PROFILE_STEPS={self.steps}: this process takes {num_steps} steps: choose among these"
            )
        if run.run_dir is None:
            raise ConfigError(
                "PROFILE_STEPS writes to RUN_DIR, which is not set: give the folder"
            )


class ProfiledStep:
    """A training step profiled from the ``first`` call to the ``last``; the trace is in Chrome's
    JSON format.
    """

    def __init__(
        self, span: tuple[int, int], path: Path, take_step: TrainingStep
    ) -> None:
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
        if self.profile is not None and self.count == self.last:
            self.profile.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as partial:
                self.profile.export_chrome_trace(str(partial))
            self.profile = None
        return result
