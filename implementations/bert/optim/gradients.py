"""How the gradients of micro-batches and ranks become one, and where they are clipped on the way.

CLIP=after: the average over micro-batches and ranks is clipped by its norm. CLIP=before: the gradient of every
micro-batch is clipped by its own norm, then they are averaged: the rule of the published 8-GPU submissions, and the
same update however the micro-batches are dealt out to ranks. CLIP=bucket: each of the K buckets of a micro-batch is
clipped to a norm of max_norm / sqrt(K), as soon as it is full, so that the whole has at most max_norm; as Samsung's
1,024-GPU submission. Each micro-batch counts equally, whatever its number of tokens.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bert.core.dist import World


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """What is clipped (see above; "before", "after", "bucket"), and the norm above which it is scaled down."""

    when: str = "after"
    max_norm: float = 1.0

    def coefficient(self, norm: Tensor) -> Tensor:
        """min(1, max_norm / norm): what a gradient of this norm is multiplied by."""
        return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)


class Gradients:
    """How the gradients of the ranks become one. Every optimizer brings its own.

    forward: the model to call; norm: of the micro-batches so far, added up; coefficient: of the last one.
    """

    def __init__(self, model: nn.Module, clipping: Clipping, world: World, find_overflow: bool) -> None:
        self.forward, self.clipping, self.world, self.find_overflow = model, clipping, world, find_overflow
        self.clips_each = clipping.when == "before"
        self.norm = self.coefficient = torch.ones(())

    def micro_batch(self, first: bool, last: bool, factor: Tensor) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward of one micro-batch, whose loss is multiplied by ``factor``."""
        raise NotImplementedError

    def finish(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Averages and clips. Returns a norm that is finite unless a rank overflowed, and the update's grad_scale.

        scale: the sum of the factors. The norm is that of the average before it is clipped; with CLIP=before, the mean
        of this rank's micro-batches, with loss scaling that of the clipped average, as with CLIP=bucket; all times
        ``scale``.
        """
        raise NotImplementedError

    def take_norm(self, norm: Tensor, first: bool, factor: Tensor) -> None:
        """Notes the norm of a micro-batch's gradient, and what clips it."""
        self.norm = norm if first else self.norm + norm
        self.coefficient = self.clipping.coefficient(norm / factor)
