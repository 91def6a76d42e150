"""One optimizer step: forward, backward, reduce, clip, update. Nothing in it waits for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bert import optim
from bert.data.batch import Batch
from bert.dist import World
from bert.model.bert import BertForPreTraining
from bert.optim import Config as OptimizerConfig
from bert.optim import Optimizer
from bert.optim.apex_distributed import DistributedLamb
from bert.optim.replicated import Replicated
from bert.optim.sharded import Sharded
from bert.precision import Config as PrecisionConfig
from bert.precision import LossScaler, cast_with_masters


class StepResult(NamedTuple):
    """Mean losses of this rank's micro-batches, whether the gradient was finite (bool), its norm; 0-d, on the device.

    The norm is that of the ranks' average before it is clipped; with CLIP=before on several ranks, of this rank's own
    gradient, in fp16 of the clipped average. In fp8 all that was cast must have been finite too: inf, cut off to the
    largest number, would not show in it.
    With loss scaling (fp16) a step whose gradient is not finite leaves the weights as they were; else it spoils them.
    """

    mlm_loss: Tensor
    nsp_loss: Tensor
    finite: Tensor
    norm: Tensor


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
        model: BertForPreTraining,
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

    def __init__(
        self, model: BertForPreTraining, optimizer: Sharded, config: OptimizerConfig, find_overflow: bool
    ) -> None:
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
    model: BertForPreTraining,
    precision: PrecisionConfig,
    optimizer: OptimizerConfig,
    world: World,
    *,
    accumulate: bool,
    fused_update: bool,
) -> Step:
    """What trains ``model``, which has its first weights in fp32 on the device: casts it and makes the optimizer.

    accumulate: of several micro-batches; fused_update: by the Triton kernels.
    """
    dtype = precision.dtype(world.device)
    masters = cast_with_masters(model, dtype)
    if precision.precision == "fp8":
        model.bert.encoder.use_fp8(precision.fp8_recipe, world.device)
    updater = optim.build(optimizer, model, model.stages(), masters, world, accumulate=accumulate, fused=fused_update)
    return Step(model, updater, optimizer, LossScaler(precision, dtype, world.device), world)


class Step:
    """Callable training step over micro-batches.

    CLIP=after: gradients are averaged over the ranks while the backward pass runs, then clipped by their global norm.
    CLIP=before: each rank clips its own gradient, then they are averaged; the rule of the published 8-GPU submissions.
    Each rank counts equally, whatever its number of tokens.
    """

    def __init__(
        self,
        model: BertForPreTraining,
        optimizer: Optimizer,
        config: OptimizerConfig,
        scaler: LossScaler,
        world: World,
    ) -> None:
        self.optimizer, self.scaler, self.world = optimizer, scaler, world
        self.fp8 = model.bert.encoder.fp8_scaling
        self.calibrated = self.fp8 is None or self.fp8.calibrated
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
        result = self.run([batch.to(self.world.device) for batch in batches])
        self.calibrated = True
        return result

    def run(self, batches: Sequence[Batch]) -> StepResult:
        """The step on batches that are on the device, at the rate that is in ``lr``: what a CUDA graph captures."""
        self.optimizer.zero_grad()
        if self.fp8 is not None:
            self.fp8.calibrated = self.calibrated
        totals = [torch.zeros((), device=self.world.device) for _ in range(2)]
        for number, batch in enumerate(batches, start=1):
            with self.gradients.micro_batch(number == 1, number == len(batches)):
                losses = self.gradients.forward(batch)
                ((losses.mlm + losses.nsp) * (self.scaler.scale / len(batches))).backward()
            for total, loss in zip(totals, losses, strict=True):
                total.add_(loss.detach(), alpha=1 / len(batches))
        norm, grad_scale = self.gradients.finish(self.scaler.scale)
        unscaled = norm / self.scaler.scale
        finite = torch.isfinite(norm)
        self.optimizer.step(self.lr, grad_scale, finite if self.scaler.enabled else None)
        self.scaler.update(finite)
        if self.fp8 is not None:
            finite = finite & self.fp8.update(self.world)
        return StepResult(totals[0], totals[1], finite, unscaled)

    def state_tensors(self) -> list[Tensor]:
        """Every tensor on the device that a step changes."""
        scales = self.fp8.state_tensors() if self.fp8 is not None else []
        return [*self.optimizer.state_tensors(), *self.scaler.state_tensors(), *scales]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, by part. A collective."""
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}
        if self.fp8 is not None:
            state["fp8"] = {**self.fp8.state_dict(), "calibrated": self.calibrated}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()``; fp8 scales that are not in it are measured by the next step."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.fp8 is not None and "fp8" in state:
            self.fp8.load_state_dict(state["fp8"])
            self.calibrated = self.fp8.calibrated
