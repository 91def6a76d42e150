"""One optimizer step: forward, backward, reduce, clip, update. Nothing in it waits for the device."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bert import optim
from bert.data.batch import Batch
from bert.dist import World
from bert.kernels.fp8 import Scaling
from bert.model.trainable import Trainable
from bert.optim import Config as OptimizerConfig
from bert.optim import Optimizer
from bert.optim.apex_distributed import DistributedLamb
from bert.optim.replicated import Replicated
from bert.optim.sharded import Sharded
from bert.precision import LossScaler, Precision, cast_with_masters


class StepResult(NamedTuple):
    """What a step found; 0-d, on the device.

    losses: the task's NamedTuple, means of this rank's micro-batches. norm: that of the ranks' average gradient before
    it is clipped; with CLIP=before on several ranks, of this rank's own gradient, in fp16 of the clipped average.
    finite (bool): whether the gradient was; in fp8 all that was cast must have been finite too: inf, cut off to the
    largest number, would not show in it. With loss scaling (fp16) a step whose gradient is not finite leaves the
    weights as they were; else it spoils them.
    """

    losses: tuple[Tensor, ...]
    norm: Tensor
    finite: Tensor


class TrainingStep(Protocol):
    """An optimizer step over micro-batches, run eagerly (Step) or from a CUDA graph (graph.GraphedStep)."""

    def __call__(self, batches: Sequence[Batch], lr: float | Tensor) -> StepResult:
        """Trains on the micro-batches; their gradients are averaged."""
        ...


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / norm): what a gradient of this norm is multiplied by."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class Gradients(Protocol):
    """How the gradients of the ranks become one."""

    forward: torch.nn.Module

    def micro_batch(self, first: bool, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward of one micro-batch."""
        ...

    def finish(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Averages and clips. Returns a norm that is finite unless a rank overflowed, and the update's grad_scale."""
        ...


class ReplicatedGradients:
    """Whole gradients on every rank: averaged by DDP during the backward pass (CLIP=after), or after it (before)."""

    def __init__(
        self,
        model: Trainable,
        optimizer: Replicated,
        config: OptimizerConfig,
        world: World,
        find_overflow: bool,
    ) -> None:
        self.optimizer, self.world, self.find_overflow = optimizer, world, find_overflow
        self.clip, self.max_grad_norm = config.clip, config.max_grad_norm
        self.overlap = world.size > 1 and config.clip == "after"
        self.forward: torch.nn.Module = model
        if self.overlap:
            devices = [world.device] if world.device.type == "cuda" else None
            self.forward = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    @contextlib.contextmanager
    def micro_batch(self, first: bool, last: bool) -> Iterator[None]:
        """DDP averages in the backward pass of the last one only."""
        with contextlib.nullcontext() if last or not self.overlap else self.forward.no_sync():  # type: ignore[operator]
            yield

    @torch.no_grad()
    def finish(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """See Gradients."""
        norm = self._norm()
        coefficient = clip_coefficient(norm / scale, self.max_grad_norm)
        if self.clip == "before" and self.world.size > 1:
            # A rank that overflowed poisons the sum with inf or nan, so that all ranks see it and skip together.
            self._average(coefficient)
            norm = self._norm() if self.find_overflow else norm
            coefficient = torch.ones_like(norm)
        return norm, coefficient / scale

    def _norm(self) -> Tensor:
        gradients = [p.grad.float() for p in self.optimizer.parameters]  # type: ignore[union-attr]
        return torch.stack(torch._foreach_norm(gradients)).norm()

    def _average(self, coefficient: Tensor) -> None:
        gradients = [p.grad for p in self.optimizer.parameters if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
        flat.mul_(coefficient / self.world.size)
        distributed.all_reduce(flat)
        views = [v.view_as(g) for v, g in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)]
        torch._foreach_copy_(gradients, views)


class ShardedGradients:
    """Each rank ends up with its shard of the average: reduced during the backward pass (CLIP=after), or after it."""

    def __init__(self, model: Trainable, optimizer: Sharded, config: OptimizerConfig, find_overflow: bool) -> None:
        self.forward: torch.nn.Module = model
        self.optimizer, self.find_overflow = optimizer, find_overflow
        self.clip, self.max_grad_norm = config.clip, config.max_grad_norm

    def micro_batch(self, first: bool, last: bool) -> contextlib.AbstractContextManager[None]:
        """The optimizer's hooks do the work."""
        return self.optimizer.micro_batch(first, last)

    @torch.no_grad()
    def finish(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """See Gradients."""
        optimizer = self.optimizer
        if self.clip == "before" and optimizer.world.size > 1:
            norm = optimizer.local_norm()
            optimizer.scale_gradients(clip_coefficient(norm / scale, self.max_grad_norm))
            optimizer.finish_reduction()
            norm = optimizer.global_norm() if self.find_overflow else norm
            return norm, 1 / scale
        optimizer.finish_reduction()
        norm = optimizer.global_norm()
        return norm, clip_coefficient(norm / scale, self.max_grad_norm) / scale


def build_step(
    model: Trainable,
    precision: Precision,
    optimizer: OptimizerConfig,
    world: World,
    *,
    accumulate: bool,
    fused_update: bool,
) -> Step:
    """What trains ``model``, which has its first weights in fp32 on the device: casts it and makes the optimizer.

    accumulate: of several micro-batches; fused_update: by the Triton kernels.
    """
    masters = cast_with_masters(model, precision.dtype)
    fp8 = model.use_fp8(precision.fp8_recipe, world.device) if precision.fp8_recipe is not None else None
    updater = optim.build(optimizer, model, model.stages(), masters, world, accumulate=accumulate, fused=fused_update)
    return Step(model, updater, optimizer, LossScaler(precision, world.device), fp8, world)


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


class Step:
    """Callable training step over micro-batches.

    CLIP=after: gradients are averaged over the ranks while the backward pass runs, then clipped by their global norm.
    CLIP=before: each rank clips its own gradient, then they are averaged; the rule of the published 8-GPU submissions.
    Each rank counts equally, whatever its number of tokens.
    """

    def __init__(
        self,
        model: Trainable,
        optimizer: Optimizer,
        config: OptimizerConfig,
        scaler: LossScaler,
        fp8: Scaling | None,
        world: World,
    ) -> None:
        self.optimizer, self.scaler, self.fp8, self.world = optimizer, scaler, fp8, world
        self.lr = torch.zeros((), dtype=torch.float32, device=world.device)
        self.gradients: Gradients
        if isinstance(optimizer, DistributedLamb):
            self.gradients = optimizer
        elif isinstance(optimizer, Sharded):
            self.gradients = ShardedGradients(model, optimizer, config, scaler.enabled)
        else:
            self.gradients = ReplicatedGradients(model, optimizer, config, world, scaler.enabled)

    def __call__(self, batches: Sequence[Batch], lr: float | Tensor) -> StepResult:
        """Trains on the micro-batches; their gradients are averaged."""
        self.lr.fill_(lr)
        return self.run([batch.to(self.world.device) for batch in batches])

    def run(self, batches: Sequence[Batch]) -> StepResult:
        """The step on batches that are on the device, at the rate that is in ``lr``: what a CUDA graph captures."""
        self.optimizer.zero_grad()
        totals: list[Tensor] = []
        for number, batch in enumerate(batches, start=1):
            with self.gradients.micro_batch(number == 1, number == len(batches)):
                losses = self.gradients.forward(batch)
                (functools.reduce(operator.add, losses) * (self.scaler.scale / len(batches))).backward()
            totals = totals or [torch.zeros((), device=self.world.device) for _ in losses]
            for total, loss in zip(totals, losses, strict=True):
                total.add_(loss.detach(), alpha=1 / len(batches))
        norm, grad_scale = self.gradients.finish(self.scaler.scale)
        unscaled = norm / self.scaler.scale
        finite = torch.isfinite(norm)
        self.optimizer.step(self.lr, grad_scale, finite if self.scaler.enabled else None)
        self.scaler.update(finite)
        if self.fp8 is not None:
            finite = finite & self.fp8.update(self.world)
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
    def undone(self) -> Iterator[None]:
        """Steps taken inside leave no trace: all state is afterwards bit for bit what it was. A collective."""
        self.optimizer.gather()
        calibrated = self.fp8 is not None and self.fp8.calibrated
        with preserved(self.state_tensors(), self.world.device):
            yield
            self.optimizer.gather()
        if self.fp8 is not None:
            self.fp8.calibrated = calibrated

    def state_tensors(self) -> list[Tensor]:
        """Every tensor on the device that a step changes."""
        scales = self.fp8.state_tensors() if self.fp8 is not None else []
        return [*self.optimizer.state_tensors(), *self.scaler.state_tensors(), *scales]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, by part. A collective."""
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}
        if self.fp8 is not None:
            state["fp8"] = self.fp8.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()``; fp8 scales that are not in it are measured by the next step."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.fp8 is not None and "fp8" in state:
            self.fp8.load_state_dict(state["fp8"])
