"""Activation recomputation (Chen et al. 2016, arXiv 1604.06174): a segment of layers keeps only its
input, and the backward pass runs it again.

The second run must equal the first bit for bit. The fused kernels number their dropout by its place
in the forward pass, so the count is reset to where the segment began; PyTorch's own dropout draws
from the random state, which is reset too, except in CUDA graphs, where it cannot be read: there all
dropout must be the kernels'. fp8 records the same largest magnitudes twice.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bert.kernels.support.dropout import DropoutSites
from common.env import env

Tensors = TypeVar("Tensors", bound="tuple[Tensor | None, ...]")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    layers: int = env(
        "RECOMPUTE_LAYERS",
        0,
        "layers per recomputed segment: less memory, about a third more work; 0: none",
        at_least=0,
    )


@dataclass(frozen=True)
class Recomputation:
    """layers: per segment; random_state: whether PyTorch's is reset for the second run."""

    layers: int
    random_state: bool

    def run(
        self,
        segment: Callable[..., Tensors],
        inputs: Sequence[Tensor | None],
        sites: DropoutSites,
    ) -> Tensors:
        """``segment(*inputs)``, of which only the inputs are kept. sites: those of the forward
        pass.
        """
        begin = sites.num_sites, sites.seed

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            end = sites.num_sites, sites.seed
            sites.num_sites = begin[0]
            # If there was no seed yet, it is drawn again from the same random state, or kept.
            if self.random_state:
                sites.seed = begin[1]
            try:
                yield
            finally:
                sites.num_sites, sites.seed = end

        return checkpoint(
            segment,
            *inputs,
            # Only this form of checkpoint takes a context_fn, which sets the dropout count back.
            use_reentrant=False,
            preserve_rng_state=self.random_state,
            context_fn=lambda: (contextlib.nullcontext(), again()),
        )
