"""How the gradients of micro-batches and ranks become one, and where they are clipped on the way.

CLIP=after: the average over micro-batches and ranks is clipped by its norm. CLIP=before: the gradient of every
micro-batch is clipped by its own norm, then they are averaged: the rule of the published 8-GPU submissions, and the
same update however the micro-batches are dealt out to ranks. CLIP=bucket: each of the K buckets of a micro-batch is
clipped to a norm of max_norm / sqrt(K), as soon as it is full, so that the whole has at most max_norm; as Samsung's
1,024-GPU submission. Each micro-batch counts equally, whatever its number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """What is clipped (see above; "before", "after", "bucket"), and the norm above which it is scaled down."""

    when: str = "after"
    max_norm: float = 1.0

    def coefficient(self, norm: Tensor) -> Tensor:
        """min(1, max_norm / norm): what a gradient of this norm is multiplied by."""
        return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
