"""The dropout masks of the kernels, written independently of Triton: Philox4x32 and Philox2x32 in numpy."""

import numpy as np
import torch
from torch import Tensor

from bert.kernels.support.dropout import Dropout

MASK = np.uint64(0xFFFFFFFF)


def philox(seed: int, counter: list[np.ndarray], rounds: int = 7) -> list[np.ndarray]:
    """Philox4x32 (Salmon et al. 2011) of 64-bit ``seed`` at counters of four 32-bit words, held in uint64."""
    words = (np.asarray(c, np.uint64) & MASK for c in np.broadcast_arrays(*counter))
    c0, c1, c2, c3 = words
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)
    for _ in range(rounds):
        product_0, product_1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        high_0, high_1 = product_0 >> np.uint64(32), product_1 >> np.uint64(32)
        c0, c1 = high_1 ^ c1 ^ k0, product_1 & MASK
        c2, c3 = high_0 ^ c3 ^ k1, product_0 & MASK
        k0 = (k0 + np.uint64(0x9E3779B9)) & MASK
        k1 = (k1 + np.uint64(0xBB67AE85)) & MASK
    return [c0, c1, c2, c3]


def philox2(key: np.ndarray, counter: list[np.ndarray], rounds: int = 7) -> list[np.ndarray]:  # fmt: skip
    """Philox2x32 of the same paper, of a 32-bit key."""
    words = (np.asarray(c, np.uint64) & MASK for c in np.broadcast_arrays(*counter))
    c0, c1 = words
    for _ in range(rounds):
        product = np.uint64(0xD256D193) * c0
        c0, c1 = (product >> np.uint64(32)) ^ c1 ^ key, product & MASK
        key = (key + np.uint64(0x9E3779B9)) & MASK
    return [c0, c1]


def _halves(words: list[np.ndarray]) -> np.ndarray:
    """[..., 2 n]: high and low 16 bits of the first word, of the second one, and so on."""
    both = [(word >> np.uint64(16), word & np.uint64(0xFFFF)) for word in words]
    return np.stack([half for halves in both for half in halves], axis=-1)


def keep_rows(drop: Dropout, num_rows: int, num_columns: int) -> Tensor:
    """Which elements survive where 8 neighbours in a row share a call: bool [rows, columns]."""
    assert drop.seed is not None
    groups, rows = np.arange(-(-num_columns // 8)), np.arange(num_rows)[:, None]
    counter = [groups, rows, np.array(0), np.array(drop.site << 16)]
    bits = _halves(philox(int(drop.seed.item()), counter))
    kept = bits.reshape(num_rows, -1)[:, :num_columns] >> np.uint64(1)
    return torch.from_numpy(kept >= drop.threshold)


def keep_pairs(drop: Dropout, begin: int, length: int, head: int) -> Tensor:
    """Which attention probabilities of a sequence survive: bool [queries, keys]."""
    assert drop.seed is not None
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    of_head = [begin, drop.site * 2**16 + head, 0, 0]
    philox_key, offset, _, _ = philox(int(drop.seed.item()), of_head)
    first = (query - query // 8 % 2 * 8).astype(np.uint64) ^ offset
    bits = _halves(philox2(philox_key, [key - key // 8 % 2 * 8, first]))
    number = key // 8 % 2 * 2 + query // 8 % 2  # word by word, the high half first
    halves = np.take_along_axis(bits, number[..., None], axis=-1)[..., 0]
    kept = halves & np.uint64(0x7FFF)
    return torch.from_numpy(kept >= drop.threshold)
