"""Counter-based dropout of the fused kernels: which elements survive, and where each mask's randomness comes from.

Dropout is recomputed in the backward pass, so no mask is stored. Whether element (row, column) is kept depends on a
64-bit seed that lives on the device, the number of the call within the forward pass (site) and its coordinates alone,
so masks do not depend on tile sizes, and a replayed CUDA graph that draws a new seed drops other elements. Each row
takes two 32-bit keys from Philox4x32-10 (Salmon et al. 2011), which the forward kernel leaves to the backward one; a
multiply-xorshift hash of keys and column then gives 32 bits an element, for half the instructions that Philox takes
an element. The probability is exact to 2^-32 and survivors are scaled by its exact inverse.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bert.kernels.triton_support import constexpr, jit, tl


@dataclass(frozen=True)
class Dropout:
    """One application of dropout: what forward and backward both need to find the same mask.

    seed: int64 [1] on the device (None: no dropout); site: number of the call in this forward pass;
    threshold: an element is dropped where its 32 random bits are below it; scale: of the survivors.
    """

    seed: Tensor | None
    site: int
    threshold: int
    scale: float

    def new_keys(self, *shape: int) -> Tensor | None:
        """Room for the two keys of each row, which the forward kernel leaves to the backward one: int32 [..., 2]."""
        return None if self.seed is None else torch.empty(*shape, 2, dtype=torch.int32, device=self.seed.device)


class DropoutSites:
    """The applications of dropout in one forward pass, numbered in the order in which they come.

    The first one draws the seed of all from the device's generator: torch.manual_seed before a step fixes every mask of
    that step. To run a part of the pass a second time with the masks of the first (activation recomputation), set
    ``num_sites`` back to what it was where that part began.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seed: Tensor | None = None
        self.num_sites = 0

    def next(self, probability: float) -> Dropout:
        """The next site. Probability 0 uses none, and no random numbers."""
        if not probability:
            return Dropout(None, 0, 0, 1.0)
        if self.seed is None:
            self.seed = torch.empty(1, dtype=torch.int64, device=self.device).random_()
        site = self.num_sites
        self.num_sites += 1
        threshold = round(probability * 2**32)
        return Dropout(self.seed, site, threshold, 1 / (1 - threshold / 2**32))


@jit
def row_keys(seed, site, row, head):
    """Two 32-bit keys for each row (int32). Rows are tokens; ``head`` tells rows of the same token apart."""
    key_0, key_1, _, _ = tl.philox(seed, row, row * 0 + site, row * 0 + head, row * 0)
    return key_0, key_1


@jit
def store_keys(keys, row, key_0, key_1, mask):
    """Writes the keys of rows into int32 [..., 2]; ``row`` is the flat index."""
    tl.store(keys + 2 * row, key_0.to(tl.int32, bitcast=True), mask=mask)
    tl.store(keys + 2 * row + 1, key_1.to(tl.int32, bitcast=True), mask=mask)


@jit
def load_keys(keys, row, mask):
    """Reads what ``store_keys`` wrote."""
    key_0 = tl.load(keys + 2 * row, mask=mask, other=0).to(tl.uint32, bitcast=True)
    key_1 = tl.load(keys + 2 * row + 1, mask=mask, other=0).to(tl.uint32, bitcast=True)
    return key_0, key_1


@jit
def keep_mask(key_0, key_1, column, threshold: constexpr):
    """True where an element survives; keys and column (uint32) broadcast against each other."""
    bits = column * 0x9E3779B1 + key_0
    bits = (bits ^ (bits >> 16) ^ key_1) * 0x85EBCA77
    bits = (bits ^ (bits >> 15)) * 0xC2B2AE3D
    return bits >= threshold
