"""One optimizer step: forward, backward, reduce, clip, update. Nothing in it waits for the device."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bert import optim
from bert.core.dist import World
from bert.data.batch import Batch
from bert.kernels.fp8 import Scaling
from bert.kernels.precision import LossScaler, Precision, cast_with_masters
from bert.model.init import Chunk
from bert.model.trainable import Trainable
from bert.optim import Config as OptimizerConfig
from bert.optim.gradients import Clipping
from bert.optim.sharded import Sharded
from bert.training.stop import TrainingError


class StepResult(NamedTuple):
    """What a step found; 0-d, on the device.

    losses: the task's NamedTuple, means of this rank's micro-batches. norm: that of the average gradient before it is
    clipped; with CLIP=before, the mean of those of this rank's micro-batches, in fp16 on several ranks that of the
    clipped average. finite (bool): whether the gradient was; in fp8 all that was cast must have been finite too: inf,
    cut off to the largest number, would not show in it. With loss scaling (fp16) a step whose gradient is not finite
    leaves the weights as they were; else it spoils them.
    """

    losses: tuple[Tensor, ...]
    norm: Tensor
    finite: Tensor


# An optimizer step over micro-batches, whose gradients are averaged, at a learning rate: Step, graph.GraphedStep, ...
TrainingStep = Callable[[Sequence[Batch], float | Tensor], StepResult]


def build_step(
    model: Trainable,
    precision: Precision,
    optimizer: OptimizerConfig,
    world: World,
    *,
    accumulate: bool,
    fused_update: bool,
    first_weights: Iterable[Chunk] | None = None,
) -> Step:
    """What trains ``model``, which has its first weights in fp32 on the device: casts it and makes the optimizer.

    accumulate: of several micro-batches; fused_update: by the Triton kernels; first_weights: of a model of placeholders
    (model/init.py), which a sharded optimizer fills.
    """
    precision.apply()
    masters = cast_with_masters(model, precision.dtype) if first_weights is None else None
    fp8 = model.use_fp8(precision.fp8, world.device) if precision.fp8 is not None else None
    updater = optim.build(
        optimizer, model, model.stages(), masters, world,
        accumulate=accumulate, fused=fused_update, first_weights=first_weights,
    )  # fmt: skip
    return Step(model, updater, optimizer.clipping, LossScaler(precision, world.device), fp8, world)


@contextlib.contextmanager
def preserved(tensors: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Afterwards the tensors and the random states are bit for bit what they were, in the same memory."""
    before = [tensor.detach().clone() for tensor in tensors]
    random_state = torch.get_rng_state()
    device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    yield
    with torch.no_grad():
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
    torch.set_rng_state(random_state)
    if device_state is not None:
        torch.cuda.set_rng_state(device_state, device)


def is_finite(state: Iterable[Tensor], world: World) -> bool:
    """Whether no rank has inf or nan in its ``state``. A collective, which waits for the device."""
    tensors = [tensor for tensor in state if tensor.is_floating_point() and tensor.numel()]
    extremes = torch.stack([torch.stack(tensor.aminmax()).to(world.device, torch.float64) for tensor in tensors])
    return not world.any(not extremes.isfinite().all())  # aminmax keeps nan, and makes no copy


def check_finite(state: Iterable[Tensor], world: World, step: int) -> None:
    """Before a checkpoint: raises TrainingError, on all ranks, where a state is not finite after ``step``."""
    if not is_finite(state, world):
        raise TrainingError(
            f"weights or moments are not finite at step {step}, and are not saved: lower LR, or look at the data; "
            "checkpoints of earlier steps are kept"
        )


class Step:
    """Callable training step over micro-batches. How gradients become one and are clipped: optim/gradients.py."""

    def __init__(
        self,
        model: Trainable,
        optimizer: Sharded,
        clipping: Clipping,
        scaler: LossScaler,
        fp8: Scaling | None,
        world: World,
    ) -> None:
        self.model, self.optimizer, self.scaler, self.fp8, self.world = model, optimizer, scaler, fp8, world
        self.lr = torch.zeros((), dtype=torch.float32, device=world.device)
        self.gradients = optimizer.gradients(model, clipping, world, scaler.enabled)
        self.mark: Callable[[str], None] = lambda part: None  # timing hook, called where a part of the step ends

    def __call__(self, batches: Sequence[Batch], lr: float | Tensor) -> StepResult:
        """Trains on the micro-batches; their gradients are averaged."""
        self.lr.fill_(lr)
        return self.run([batch.to(self.world.device) for batch in batches])

    def run(self, batches: Sequence[Batch]) -> StepResult:
        """The step on batches that are on the device, at the rate that is in ``lr``: what a CUDA graph captures."""
        self.model.zero_grad()
        totals: list[Tensor] = []
        for number, batch in enumerate(batches, start=1):
            factor = self.scaler.scale / len(batches)
            with self.gradients.micro_batch(number == 1, number == len(batches), factor):
                losses = self.gradients.forward(batch)
                (functools.reduce(operator.add, losses) * factor).backward()
            totals = totals or [torch.zeros((), device=loss.device) for loss in losses]
            for total, loss in zip(totals, losses, strict=True):
                total.add_(loss.detach(), alpha=1 / len(batches))
        norm, grad_scale = self.gradients.finish(self.scaler.scale)
        self.mark("reduced")
        unscaled = norm / self.scaler.scale
        finite = torch.isfinite(norm)
        self.optimizer.step(self.lr, grad_scale, finite if self.scaler.enabled else None)
        self.scaler.update(finite)
        if self.fp8 is not None:
            finite = finite & self.fp8.update(self.world)
        self.mark("updated")
        return StepResult(losses._make(totals), unscaled, finite)

    @property
    def measures(self) -> bool:
        """Whether the next step measures its fp8 scales first: other kernels than those of all later steps."""
        return self.fp8 is not None and not self.fp8.calibrated

    def mark_replayed(self) -> None:
        """Notes what a step notes on the host, which a replayed graph does not run."""
        self.optimizer.mark_stale()
        if self.fp8 is not None:
            self.fp8.mark_calibrated()

    @contextlib.contextmanager
    def rollback(self) -> Iterator[None]:
        """Steps taken inside leave no trace: all state is afterwards bit for bit what it was. A collective."""
        self.optimizer.gather()
        calibrated = self.fp8 is not None and self.fp8.calibrated
        with preserved(self.state_tensors(), self.world.device):
            yield
            self.optimizer.gather()
        if self.fp8 is not None:
            self.fp8.calibrated = calibrated

    @contextlib.contextmanager
    def gathered(self) -> Iterator[Any]:
        self.optimizer.gather()
        yield self.model

    def state_tensors(self) -> list[Tensor]:
        """Every tensor on the device that a step changes."""
        scales = self.fp8.state_tensors() if self.fp8 is not None else []
        return [*self.optimizer.state_tensors(), *self.scaler.state_tensors(), *scales]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, by part. A collective."""
        return {"optimizer": self.optimizer.state_dict(), **self._scales()}

    def shard_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's part of the sharded optimizer's state, and what all ranks have in common."""
        return self.optimizer.shard_state(), {"optimizer": self.optimizer.index(), **self._scales()}

    def _scales(self) -> dict[str, Any]:
        scales = {"scaler": self.scaler.state_dict()}
        return scales if self.fp8 is None else {**scales, "fp8": self.fp8.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()``; fp8 scales that are not in it are measured by the next step."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.fp8 is not None and "fp8" in state:
            self.fp8.load_state_dict(state["fp8"])
