"""Activation recomputation (Chen et al. 2016, arXiv 1604.06174): a segment of layers keeps its input,
and the backward pass runs it again before it goes through it.

The second time must be the first one bit for bit. The fused kernels number their dropout by its place in the forward
pass, so the count is set back to where the segment began; PyTorch's own dropout draws from the random state, which is
set back too, but for CUDA graphs, where no such state can be read: in them all dropout must be the kernels'. Largest
magnitudes that fp8 notes twice are the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bert.core.env import env
from bert.kernels.dropout import DropoutSites

Tensors = TypeVar("Tensors", bound="tuple[Tensor | None, ...]")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Whether activations are kept."""

    layers: int = env(
        "RECOMPUTE_LAYERS",
        0,
        at_least=0,
        doc="layers of a segment that keeps its input alone and is computed again in the backward pass: less memory "
        "for about a third more work; 0: none",
    )


@dataclass(frozen=True)
class Recomputation:
    """layers: in a segment; random_state: whether PyTorch's is set back for the second time."""

    layers: int
    random_state: bool

    def run(self, segment: Callable[..., Tensors], inputs: Sequence[Tensor | None], sites: DropoutSites) -> Tensors:
        """``segment(*inputs)``, of which only the inputs are kept. sites: of the forward pass that it is a part of."""
        begin = sites.num_sites, sites.seed

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            end = sites.num_sites, sites.seed
            sites.num_sites, sites.seed = begin  # where there was no seed yet, it is drawn again, from the same state
            try:
                yield
            finally:
                sites.num_sites, sites.seed = end

        found: Tensors = checkpoint(
            segment,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=self.random_state,
            context_fn=lambda: (contextlib.nullcontext(), again()),
        )
        return found
