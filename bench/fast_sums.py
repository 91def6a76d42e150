"""Fast accumulation of fp8 products, for a machine without tensor cores: bench/convergence.py trains with it.

Hopper's tensor cores keep some 14 bits of a sum of fp8 products (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2); an
instruction adds 32 products. Exact sums move what they have to fp32 registers at short intervals, fast ones never do.
Here the sum is cut off to 14 bits after every 32 products. What a GPU does within an instruction is not imitated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bert.kernels import fp8, fp8_feed_forward, fp8_linear

BITS, DEPTH = 14, 32
MODULES = (fp8_feed_forward, fp8_linear)


def cut_off(x: Tensor) -> Tensor:
    """fp32 numbers without what lies below their first BITS bits."""
    return (x.view(torch.int32) & -(1 << (24 - BITS))).view(torch.float32)


def product(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """fp8.product, with sums that are cut off where they may be ``fast``."""
    if not fast or a.is_cuda:
        return fp8.product(a, b, a_inverse, b_inverse, bias, dtype, fast, out)
    total = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for rows, columns in zip(a.float().split(DEPTH, dim=1), b.float().split(DEPTH, dim=0), strict=True):
        total = cut_off(total.addmm(rows, columns))
    y = total * (a_inverse * b_inverse)
    y = (y if bias is None else y + bias).to(dtype)
    return y if out is None else out.copy_(y)


@contextmanager
def emulated() -> Iterator[None]:
    """Inside, products that may be fast are, on a CPU too."""
    for module in MODULES:
        module.product = product
    try:
        yield
    finally:
        for module in MODULES:
            module.product = fp8.product
