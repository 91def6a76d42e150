"""One optimizer step: forward, backward, reduce, clip, update."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bert.data.batch import Batch
from bert.dist import World
from bert.model.bert import BertForPreTraining
from bert.optim import Config as OptimizerConfig
from bert.optim.lamb import Lamb
from bert.precision import LossScaler


class StepResult(NamedTuple):
    """Mean losses of this rank's micro-batches (0-d, on the device) and whether the weights were updated."""

    mlm_loss: Tensor
    nsp_loss: Tensor
    updated: bool


def gradient_norm(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """L2 norm over all gradients (0-d, fp32)."""
    return torch.stack(torch._foreach_norm([p.grad.float() for p in parameters])).norm()  # type: ignore[union-attr]


def clip_coefficient(norm: Tensor, max_norm: float, loss_scale: float) -> Tensor:
    """min(1, max_norm / norm of the unscaled gradient), divided by the loss scale: what gradients are multiplied by."""
    return (max_norm / (norm / loss_scale + 1e-6)).clamp(max=1.0) / loss_scale


class Step:
    """Callable training step over micro-batches.

    CLIP=after: gradients are averaged over the ranks while the backward pass runs (DDP's buckets), then clipped by
    their global norm. CLIP=before: each rank clips its own gradient, then they are averaged; the rule of the
    published 8-GPU submissions. Each rank counts equally, whatever its number of tokens.
    """

    def __init__(
        self, model: BertForPreTraining, optimizer: Lamb, config: OptimizerConfig, scaler: LossScaler, world: World
    ) -> None:
        self.optimizer, self.scaler, self.world = optimizer, scaler, world
        self.clip, self.max_grad_norm = config.clip, config.max_grad_norm
        self.overlap = world.size > 1 and config.clip == "after"
        self.forward: torch.nn.Module = model
        if self.overlap:
            devices = [world.device] if world.device.type == "cuda" else None
            self.forward = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    def __call__(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """Trains on the micro-batches; their gradients are averaged."""
        self.optimizer.zero_grad()
        totals = [torch.zeros((), device=self.world.device) for _ in range(2)]
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            with contextlib.nullcontext() if last or not self.overlap else self.forward.no_sync():  # type: ignore[operator]
                losses = self.forward(batch)
                ((losses.mlm + losses.nsp) * (self.scaler.scale / len(batches))).backward()
            for total, loss in zip(totals, losses, strict=True):
                total.add_(loss.detach(), alpha=1 / len(batches))
        updated = self._update(lr)
        return StepResult(totals[0], totals[1], updated)

    def _update(self, lr: float) -> bool:
        parameters, scale = self.optimizer.parameters, self.scaler.scale
        norm = gradient_norm(parameters)
        coefficient = clip_coefficient(norm, self.max_grad_norm, scale)
        if self.clip == "before" and self.world.size > 1:
            # A rank that overflowed poisons the sum with inf or nan, so that all ranks see it and skip together.
            self._average_clipped(coefficient)
            norm = gradient_norm(parameters) if self.scaler.enabled else norm
            coefficient = torch.ones_like(norm)
        if self.scaler.enabled:
            overflow = not bool(torch.isfinite(norm))
            self.scaler.update(overflow)
            if overflow:
                return False
        self.optimizer.step(lr, coefficient)
        return True

    def _average_clipped(self, coefficient: Tensor) -> None:
        gradients = [p.grad for p in self.optimizer.parameters if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
        flat.mul_(coefficient / self.world.size)
        distributed.all_reduce(flat)
        begin = 0
        for gradient in gradients:
            gradient.copy_(flat[begin : begin + gradient.numel()].view_as(gradient))
            begin += gradient.numel()
