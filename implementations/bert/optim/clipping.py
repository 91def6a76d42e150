"""Gradients of micro-batches and ranks combined, and clipped on the way."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bert.core.dist import World
from bert.optim.rules import squared_norms
from bert.optim.sharded import FlatOptimizer


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """Where gradients are clipped ("before", "after", "bucket"; see Gradients), and to which
    norm.
    """

    when: str = "after"
    max_norm: float = 1.0

    def coefficient(self, norm: Tensor) -> Tensor:
        """min(1, max_norm / norm): the factor for a gradient of this norm, as clip_grad_norm_ of
        PyTorch.
        """
        return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)


class Gradients:
    """Combines the gradients of micro-batches and ranks, and clips them on the way.

    CLIP=after: the average over micro-batches and ranks is clipped by its norm. CLIP=before: the
    gradient of each micro-batch is clipped by its own norm, then averaged: the rule of the
    published 8-GPU submissions; the update does not depend on how micro-batches are distributed
    over ranks. CLIP=bucket: each of the K buckets of a micro-batch is clipped to a norm of max_norm
    / sqrt(K), as soon as it is full, so that the whole has at most max_norm: the rule of Samsung's
    1,024-GPU submission. Micro-batches count equally, whatever their number of tokens.

    Each rank ends up with its shard of the average: reduced during the backward pass (CLIP=after),
    or after it. forward: the model to call; norm: sum over the micro-batches so far; coefficient:
    of the last one. find_overflow: the norm must show an overflow on any rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: FlatOptimizer,
        clipping: Clipping,
        world: World,
        find_overflow: bool,
    ) -> None:
        self.forward, self.clipping, self.world = model, clipping, world
        self.find_overflow = find_overflow
        self.clips_each = clipping.when == "before"
        self.norm = self.coefficient = torch.ones(())
        self.optimizer, self.buckets = optimizer, optimizer.buckets
        self.loss_factor = torch.ones(())  # of the current micro-batch
        if clipping.when == "bucket":
            max_norm = clipping.max_norm / math.sqrt(len(optimizer.layout.buckets))
            of_bucket = Clipping(max_norm=max_norm)
            # Gradients carry the loss scale and 1 / micro-batches; the bound is on them without.
            self.buckets.bucket_clip_factor = lambda gradients: of_bucket.coefficient(
                squared_norms(gradients).sum().sqrt() / self.loss_factor
            )

    @contextlib.contextmanager
    def micro_batch(self, first: bool, last: bool, factor: Tensor) -> Iterator[None]:
        """Around forward and backward of one micro-batch, whose loss is multiplied by ``factor``.

        New weights are gathered during the first one; buckets are reduced in the backward pass of
        the last one.
        """
        self.loss_factor = factor
        if first:
            self.optimizer.weights.start_gather()
        # With CLIP=before the norm of the whole gradient must be known before any of it is sent.
        with self.buckets.backward_pass(
            first=first, reduce=last and not self.clips_each
        ):
            yield
        self.optimizer.weights.wait()  # for what no stage of the forward pass has used
        if self.clips_each:
            self._clip(first, last, factor)

    @torch.no_grad()
    def _clip(self, first: bool, last: bool, factor: Tensor) -> None:
        """Adds the clipped gradient of a micro-batch to the sum. A single one is clipped in the
        update instead.
        """
        buckets, norm = self.buckets, self.optimizer.norm_received()
        self.norm = norm if first else self.norm + norm
        # The norm includes the factor of the loss, the bound does not.
        self.coefficient = self.clipping.coefficient(norm / factor)
        if (
            first
            and last
            and self.world.size == 1
            and buckets.received is buckets.whole
        ):
            return  # the update multiplies by the coefficient anyway: one pass over the gradient less
        buckets.add_received(self.coefficient, first)
        # Applied now: the update must not do it again.
        self.coefficient = torch.ones_like(self.coefficient)

    @torch.no_grad()
    def finish(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Averages and clips. Returns a norm that is finite unless a rank overflowed, and the
        update's grad_scale.

        scale: the sum of the factors. The norm is that of the average before clipping; with
        CLIP=before, the mean over this rank's micro-batches, with loss scaling that of the clipped
        average, as with CLIP=bucket; all times ``scale``.
        """
        self.buckets.reducer.finish()
        if self.clips_each:
            self.optimizer.round_average()
            # A rank's own norm does not show the overflow of another rank.
            needs_all_ranks = self.world.size > 1 and self.find_overflow
            norm = self.optimizer.measure() if needs_all_ranks else self.norm
            return norm, self.coefficient / scale
        norm = self.optimizer.measure()
        # Its buckets are clipped already, so only the loss scale is undone.
        if self.clipping.when == "bucket":
            return norm, 1 / scale
        return norm, self.clipping.coefficient(norm / scale) / scale
