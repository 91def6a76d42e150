"""How the gradients of micro-batches and ranks become one, and where they are clipped on the way.

CLIP=after: the average over micro-batches and ranks is clipped by its norm. CLIP=before: the gradient of every
micro-batch is clipped by its own norm, then they are averaged: the rule of the published 8-GPU submissions, and the
same update however the micro-batches are dealt out to ranks. CLIP=bucket: each of the K buckets of a micro-batch is
clipped to a norm of max_norm / sqrt(K), as soon as it is full, so that the whole has at most max_norm; as Samsung's
1,024-GPU submission. Each micro-batch counts equally, whatever its number of tokens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bert.core.dist import World
from bert.kernels.precision import LOW_PRECISION
from bert.optim.buckets import GradientBuckets, GradientShard
from bert.optim.rule import squared_norms


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """What is clipped (see above; "before", "after", "bucket"), and the norm above which it is scaled down."""

    when: str = "after"
    max_norm: float = 1.0

    def coefficient(self, norm: Tensor) -> Tensor:
        """min(1, max_norm / norm): what a gradient of this norm is multiplied by."""
        return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)


def at_least_fp32(tensor: Tensor) -> Tensor:
    """The tensor, in fp32 if it is of lower precision."""
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


class Gradients(Protocol):
    """How the gradients of the ranks become one. Every optimizer brings its own."""

    forward: nn.Module

    def micro_batch(self, first: bool, last: bool, factor: Tensor) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward of one micro-batch, whose loss is multiplied by ``factor``."""
        ...

    def finish(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Averages and clips. Returns a norm that is finite unless a rank overflowed, and the update's grad_scale.

        scale: the sum of the factors. The norm is that of the average before it is clipped; with CLIP=before, the mean
        of this rank's micro-batches, with loss scaling that of the clipped average, as with CLIP=bucket; all times
        ``scale``.
        """
        ...


class ReplicatedGradients:
    """Whole gradients on every rank: averaged by DDP during the backward pass (CLIP=after), or after it (before)."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        clipping: Clipping,
        world: World,
        find_overflow: bool,
    ) -> None:
        self.parameters, self.clipping, self.world, self.find_overflow = parameters, clipping, world, find_overflow
        self.overlap = world.size > 1 and clipping.when == "after"
        self.clips_each = clipping.when == "before"
        self.sums: list[Tensor] = []  # of clipped micro-batches
        self.norm = self.coefficient = torch.ones(())  # of the micro-batches so far; of the last one
        self.forward: nn.Module = model
        if self.overlap:
            devices = [world.device] if world.device.type == "cuda" else None
            self.forward = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    @contextlib.contextmanager
    def micro_batch(self, first: bool, last: bool, factor: Tensor) -> Iterator[None]:
        """DDP averages in the backward pass of the last one only."""
        with contextlib.nullcontext() if last or not self.overlap else self.forward.no_sync():  # type: ignore[operator]
            yield
        if self.clips_each:
            self._clip(first, last, factor)

    @torch.no_grad()
    def _clip(self, first: bool, last: bool, factor: Tensor) -> None:
        """Adds the clipped gradient of a micro-batch to the sum, which is the parameters' gradient after the last.

        A single one is clipped on the way to the update.
        """
        norm = self._norm()
        self.norm = norm if first else self.norm + norm
        self.coefficient = self.clipping.coefficient(norm / factor)
        if first and last:
            return
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_mul_(gradients, self.coefficient.to(gradients[0].dtype))
        if first:
            self.sums = gradients
        else:
            torch._foreach_add_(self.sums, gradients)
        for parameter, total in zip(self.parameters, self.sums, strict=True):
            parameter.grad = total if last else None
        self.coefficient = torch.ones_like(norm)

    @torch.no_grad()
    def finish(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """See Gradients."""
        self.sums = []
        if not self.clips_each:
            norm = self._norm()
            return norm, self.clipping.coefficient(norm / scale) / scale
        if self.world.size == 1:
            return self.norm, self.coefficient / scale
        # A rank that overflowed poisons the sum with inf or nan, so that all ranks see it and skip together.
        self._average(self.coefficient)
        norm = self._norm() if self.find_overflow else self.norm
        return norm, torch.ones_like(norm) / scale

    def _norm(self) -> Tensor:
        gradients = [at_least_fp32(p.grad) for p in self.parameters if p.grad is not None]
        return torch.stack(torch._foreach_norm(gradients)).norm()

    def _average(self, coefficient: Tensor) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        flat = torch.cat([at_least_fp32(gradient.reshape(-1)) for gradient in gradients])
        flat.mul_(coefficient / self.world.size)
        distributed.all_reduce(flat)
        views = [v.view_as(g) for v, g in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)]
        torch._foreach_copy_(gradients, views)


class ShardedOptimizer(Protocol):
    """What ShardedGradients needs of the optimizer whose gradients they are."""

    buckets: GradientBuckets | GradientShard

    def forward_pass(self, first: bool) -> contextlib.AbstractContextManager[None]:
        """Around a forward pass, which waits for the weights of other ranks."""
        ...

    def squared_norm(self, flat: Tensor) -> Tensor:
        """Of a flat buffer (0-d, fp32 at least)."""
        ...

    def measure(self) -> Tensor:
        """L2 norm of the averaged gradient (0-d), the same on every rank. A collective."""
        ...


class ShardedGradients:
    """Each rank ends up with its shard of the average: reduced during the backward pass (CLIP=after), or after it."""

    def __init__(
        self, model: nn.Module, optimizer: ShardedOptimizer, clipping: Clipping, world: World, find_overflow: bool
    ) -> None:
        self.forward: nn.Module = model
        self.world = world
        self.optimizer, self.clipping, self.find_overflow = optimizer, clipping, find_overflow
        self.clips_each = clipping.when == "before"
        self.norm = self.coefficient = torch.ones(())  # of the micro-batches so far; of the last one
        self.factor = torch.ones(())  # of the micro-batch that is under way
        if clipping.when == "bucket":
            buckets = optimizer.buckets
            self.bucket_clipping = Clipping(max_norm=clipping.max_norm / math.sqrt(len(buckets.layout.buckets)))
            buckets.factor_of = self._bucket_coefficient

    def _bucket_coefficient(self, gradients: list[Tensor]) -> Tensor:
        return self.bucket_clipping.coefficient(squared_norms(gradients).sum().sqrt() / self.factor)

    @contextlib.contextmanager
    def micro_batch(self, first: bool, last: bool, factor: Tensor) -> Iterator[None]:
        """The buckets' hooks collect the gradients, and reduce them in the backward pass of the last one."""
        buckets, reduce, self.factor = self.optimizer.buckets, last and not self.clips_each, factor
        with self.optimizer.forward_pass(first), buckets.backward_pass(first=first, reduce=reduce):
            yield
        if self.clips_each:
            self._clip(first, last, factor)

    @torch.no_grad()
    def _clip(self, first: bool, last: bool, factor: Tensor) -> None:
        """Adds the clipped gradient of a micro-batch to the sum. A single one is clipped on the way to the update."""
        buckets = self.optimizer.buckets
        assert isinstance(buckets, GradientBuckets)
        norm = self.optimizer.squared_norm(buckets.received).sqrt()
        self.norm = norm if first else self.norm + norm
        self.coefficient = self.clipping.coefficient(norm / factor)
        if first and last and self.world.size == 1 and buckets.received is buckets.whole:
            return
        buckets.add_received(self.coefficient, first)
        self.coefficient = torch.ones_like(norm)

    @torch.no_grad()
    def finish(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """See Gradients."""
        self.optimizer.buckets.finish()
        if self.clips_each:
            several = self.world.size > 1
            return self.optimizer.measure() if several and self.find_overflow else self.norm, self.coefficient / scale
        norm = self.optimizer.measure()
        if self.clipping.when == "bucket":
            return norm, 1 / scale
        return norm, self.clipping.coefficient(norm / scale) / scale
