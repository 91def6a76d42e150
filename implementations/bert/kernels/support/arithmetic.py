"""Arithmetic that several kernels share: rounding, LayerNorm of rows in registers, and sums over
rows.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
from torch import Tensor

from bert.kernels.support.triton_support import constexpr, jit, tl


@jit
def rounded(x, dtype: constexpr):
    """fp32 -> ``dtype`` -> fp32, as if written to memory and read."""
    return x.to(dtype).to(tl.float32)


@jit
def centered_rows(z, inside, width, eps):
    """LayerNorm of rows z, fp32: the rows less their means, 0 outside; their means, and 1 / their
    deviations.
    """
    # Mean, then squares around it: E[z^2] - E[z]^2 would cancel.
    mean = tl.sum(tl.where(inside, z, 0.0), axis=1) / width
    centered = tl.where(inside, z - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centered * centered, axis=1) / width + eps)
    return centered, mean, rstd


@jit
def gradient_of_rows(dy, weight, normalized, rstd, width):
    """dz = (w dy - mean(w dy) - n mean(w dy n)) / deviation, n the normalized row."""
    weighted = dy * weight[None, :]
    mean_1 = tl.sum(weighted, axis=1) / width
    mean_2 = tl.sum(weighted * normalized, axis=1) / width
    return (weighted - mean_1[:, None] - normalized * mean_2[:, None]) * rstd[:, None]


@jit
def _column_sums(
    partials,
    output,
    num_rows,
    num_columns,
    block_rows: constexpr,
    block_columns: constexpr,
):
    # One program for all rows of its columns: the order of additions is that of the loop.
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    row = tl.arange(0, block_rows)
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for begin in range(0, num_rows, block_rows):
        inside = (begin + row < num_rows)[:, None] & (column < num_columns)[None, :]
        pointers = (
            partials
            + (begin + row).to(tl.int64)[:, None] * num_columns
            + column[None, :]
        )
        total += tl.load(pointers, mask=inside, other=0.0)
    tl.store(
        output + column,
        tl.sum(total, axis=0).to(output.dtype.element_ty),
        mask=column < num_columns,
    )


def column_sums(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums the programs' partial results, fp32 [P, ...], over the first dimension, in one launch:
    [...] of ``dtype``.

    Always in the same order, so that results are reproducible bit for bit.
    """
    num_rows, num_columns = partials.shape[0], partials[0].numel()
    output = torch.empty(partials.shape[1:], dtype=dtype, device=partials.device)
    block_rows, block_columns = 32, 32
    grid = (-(-num_columns // block_columns),)
    _column_sums[grid](
        partials, output, num_rows, num_columns, block_rows, block_columns
    )
    return output
