"""The dropout masks of the kernels, written independently of Triton: Philox4x32-10 and the hash, in numpy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bert.kernels.dropout import Dropout

MASK = np.uint64(0xFFFFFFFF)


def philox(seed: int, counter: list[np.ndarray]) -> list[np.ndarray]:
    """Philox4x32-10 (Salmon et al. 2011) of 64-bit ``seed`` at counters of four 32-bit words, held in uint64."""
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) & MASK for c in counter)
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)
    for _ in range(10):
        product_0, product_1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (product_1 >> np.uint64(32)) ^ c1 ^ k0,
            product_1 & MASK,
            (product_0 >> np.uint64(32)) ^ c3 ^ k1,
            product_0 & MASK,
        )
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & MASK, (k1 + np.uint64(0xBB67AE85)) & MASK
    return [c0, c1, c2, c3]


def keep(drop: Dropout, rows: np.ndarray, num_columns: int, head: int = 0) -> Tensor:
    """Which elements of the given rows survive: bool [rows, columns]."""
    assert drop.seed is not None
    zero = np.zeros_like(rows)
    key_0, key_1, _, _ = philox(int(drop.seed.item()), [rows, zero + drop.site, zero + head, zero])
    column = np.arange(num_columns, dtype=np.uint64)[None, :]
    bits = (column * np.uint64(0x9E3779B1) + key_0[:, None]) & MASK
    bits = ((bits ^ (bits >> np.uint64(16)) ^ key_1[:, None]) * np.uint64(0x85EBCA77)) & MASK
    bits = ((bits ^ (bits >> np.uint64(15))) * np.uint64(0xC2B2AE3D)) & MASK
    return torch.from_numpy(bits >= np.uint64(drop.threshold))
