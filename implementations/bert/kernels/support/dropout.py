"""Counter-based dropout of the fused kernels, and the forward pass whose layers share its seed.

Dropout is recomputed in the backward pass, so no mask is stored. Whether an element is kept depends
only on a 64-bit seed on the device, the number of the call within the forward pass (site) and the
element's coordinates, so that masks do not depend on tile sizes, and a replayed CUDA graph that
draws a new seed drops other elements.

The random numbers are Philox's (Salmon et al. 2011, who found no statistical weakness from 7 rounds
on). A call yields 16 bits per element, of which 15 are used. Elements that share a call are held by
one thread, so that the compiler merges their calls: for Philox4x32-7 with the seed as key 8
neighbors in a row, where threads hold whole rows (``keep_rows``); for Philox2x32-7 with a key by
sequence and head two keys 8 apart of two queries 8 apart, which a thread holds of a product and of
its transpose (``pair_words``). The probability is exact to 2^-15 and survivors are scaled by the
exact inverse of the rounded one.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from bert.kernels.support.triton_support import constexpr, jit, tl

BITS = 15  # random bits of an element


@dataclass(frozen=True)
class Dropout:
    """One application of dropout, from which forward and backward compute the same mask.

    seed: int64 [1] on the device (None: no dropout); site: number of the call in this forward pass;
    threshold: elements with random bits below it are dropped; scale: of the survivors.
    """

    seed: Tensor | None
    site: int
    threshold: int
    scale: float


class DropoutSites:
    """The applications of dropout in one forward pass, numbered in order.

    The first one draws the seed of all from the device's generator: torch.manual_seed before a step
    fixes every mask of that step. To run part of the pass again with the same masks (activation
    recomputation), reset ``num_sites`` to its value at the begin of that part.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seed: Tensor | None = None
        self.num_sites = 0

    def next(self, probability: float) -> Dropout:
        """The next site. Probability 0 uses neither a site nor random numbers."""
        if not probability:
            return Dropout(None, 0, 0, 1.0)
        # Drawn on the device: a replayed graph draws anew, and the host does not wait.
        if self.seed is None:
            self.seed = torch.empty(1, dtype=torch.int64, device=self.device).random_()
        site = self.num_sites
        self.num_sites += 1
        # At 2^15 nothing would survive, and the scale would be infinite.
        threshold = min(round(probability * 2**BITS), 2**BITS - 1)
        return Dropout(self.seed, site, threshold, 1 / (1 - threshold / 2**BITS))


class ForwardPass:
    """State shared by the layers in one forward pass over a varlen batch.

    cu_seqlens: int32 [S+1], offsets of the sequences, on the device; they must not change during
    the pass. max_seqlen: upper bound of the sequences' lengths.
    """

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self.cu_seqlens, self.max_seqlen = cu_seqlens, max_seqlen
        self.sites = DropoutSites(cu_seqlens.device)
        self._made: dict[Hashable, Tensor] = {}

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The result of ``make()``, computed once per pass for each ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


@jit
def _product(constant: constexpr, word):
    """High and low word of a product of 32-bit numbers."""
    product = word.to(tl.uint64) * constant
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@jit
def philox(seed, c0, c1, c2, c3):
    """The four words (uint32) of Philox4x32-7: key ``seed`` (int64), counters c0 to c3, integers of
    32 bits.
    """
    key_0, key_1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = c0.to(tl.uint32), c1.to(tl.uint32)
    c2, c3 = c2.to(tl.uint32), c3.to(tl.uint32)
    for _ in tl.static_range(7):
        high_0, low_0 = _product(0xD2511F53, c0)
        high_1, low_1 = _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0 += 0x9E3779B9
        key_1 += 0xBB67AE85
    return c0, c1, c2, c3


@jit
def keep_rows(seed, site, row, column, threshold: constexpr):
    """Mask [rows, columns] of elements that survive; row, column: int32. 8 neighbors in a row share
    a call: each takes half of one of its four words.
    """
    column, row = column[None, :], row[:, None]
    # All four words in every element; the compiler keeps one call for those that share it.
    word_0, word_1, word_2, word_3 = philox(
        tl.load(seed), column >> 3, row, row * 0, site << 16
    )
    right = (column & 2) != 0
    lower, upper = tl.where(right, word_1, word_0), tl.where(right, word_3, word_2)
    word = tl.where((column & 4) != 0, upper, lower)
    shift = ((column & 1) << 4).to(tl.uint32)
    return (word << shift) >= (threshold << 17)  # lower bits do not matter


@jit
def pair_key(seed, site, head, begin):
    """Philox's key, and the offset of its second counters, for a head of a sequence.

    seed: the number, not a pointer; head: below 2^16; begin: first token of the sequence.
    """
    # A key by head and sequence leaves both counters of pair_words to query and key.
    key, offset, _, _ = philox(seed, begin, (site << 16) | head, 0 * head, 0 * head)
    return key, offset


@jit
def pair_words(philox_key, offset, first_query, query, first_key, key):
    """Words whose bits 16 to 30 decide on the attention probabilities of a block of queries and one
    of keys.

    philox_key, offset: ``pair_key``; first_query, first_key: places in the sequence where the
    blocks begin, multiples of 16; query, key: int32 places in the blocks, which broadcast. They are
    separate from the firsts so that the compiler knows their bits.
    """
    c0 = (first_key + (key & ~8)).to(tl.uint32)
    c1 = (first_query + (query & ~8)).to(tl.uint32) ^ offset
    for _ in tl.static_range(7):
        high, low = _product(0xD256D193, c0)
        c0, c1 = high ^ c1 ^ philox_key, low
        philox_key += 0x9E3779B9
    # The query's bit chooses the high or low half of a word, the key's the word.
    return tl.where((key & 8) != 0, c1, c0) << ((query & 8) << 1).to(tl.uint32)


@jit
def survives(word, threshold: constexpr):
    """True where bits 16 to 30 of a word of ``pair_words`` are at least ``threshold``."""
    return (word & 0x7FFFFFFF) >= (threshold << 16)


@jit
def kept(word, threshold: constexpr):
    """``survives`` as 1.0 and 0.0: of fp32 a product takes fewer instructions than a selection."""
    return tl.where(survives(word, threshold), 1.0, 0.0)
