"""Arithmetic that several kernels share: rounding, LayerNorm of rows in registers, and sums over
rows.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
from torch import Tensor

from bert.kernels.support.triton_support import constexpr, jit, tl


@jit
def program_tile(num_columns, block_rows: constexpr, block: constexpr):
    """This program's tile of a matrix: its number downwards, its rows and its columns."""
    # One dimension of programs, columns fastest: the second dimension of a grid is limited to
    # 65,535.
    across = tl.cdiv(num_columns, block)
    column = tl.program_id(0) % across * block + tl.arange(0, block)
    down = tl.program_id(0) // across
    return down, down * block_rows + tl.arange(0, block_rows), column


@jit
def tile_at(row, column, num_rows, num_columns):
    """Offsets of a tile of a matrix, and which of them are inside."""
    # In 64 bits: a batch of more than 2^31 elements would wrap around.
    offset = row.to(tl.int64)[:, None] * num_columns + column[None, :]
    return offset, (row < num_rows)[:, None] & (column < num_columns)[None, :]


@jit
def load_fp32(pointers, inside):
    """Numbers of any type in fp32; 0 where they are not ``inside``."""
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


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


def empty_fp32(device: torch.device, *shape: int) -> Tensor:
    """Memory in fp32, for what a kernel sums."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def column_sums(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """The programs' partial results, fp32 [P, ...], summed over the first dimension: [...] of
    ``dtype``. PyTorch adds them up in the same order every time.
    """
    return partials.sum(0).to(dtype)
