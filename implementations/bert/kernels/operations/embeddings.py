"""Embeddings: word + position + segment, LayerNorm, dropout.

Fused, the sum is never stored: the backward pass gathers it again. The tables' gradients are
PyTorch's, which sorts the indices and adds up rows in a fixed order, in fp32 and without waiting
for the device (ATen's EmbeddingBackwardKernel.cu).

Kept beside libraries: none sums three tables with LayerNorm and dropout in one pass; it is 0.2% of
a modelled step.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bert.kernels.support import launches, triton_support
from bert.kernels.support.arithmetic import (
    centered_rows,
    column_sums,
    empty_fp32,
    gradient_of_rows,
    load_fp32,
    tile_at,
)
from bert.kernels.support.dropout import Dropout, DropoutSites, keep_rows
from bert.kernels.support.triton_support import (
    constexpr,
    jit,
    next_power_of_2,
    row_warps,
    tl,
)


def reference(
    input_ids: Tensor,
    segment_ids: Tensor,
    position_ids: Tensor,
    word: Tensor,
    position: Tensor,
    segment: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout: float,
    sites: DropoutSites,
) -> Tensor:
    """Embedded tokens.

    input_ids, segment_ids (0 or 1), position_ids: int [T]; word [V, D], position [P, D], segment [2
    or more, D]; weight, bias [D]. Returns [T, D]. Dropout is PyTorch's own; only the fused kernel
    takes a site.
    """
    x = (
        F.embedding(input_ids, word)
        + F.embedding(position_ids, position)
        + F.embedding(segment_ids, segment)
    )
    x = F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return F.dropout(x, dropout) if dropout else x


@jit
def _rows(table, ids, row, in_row, column, inside, width):
    """The rows of a table that belong to some tokens, fp32."""
    index = tl.load(ids + row, mask=in_row, other=0).to(tl.int64)
    pointers = table + index[:, None] * width + column[None, :]
    return load_fp32(pointers, inside)


@jit
def _forward(
    input_ids,
    segment_ids,
    position_ids,
    word,
    position,
    segment,
    weight,
    bias,
    output,
    mean_out,
    rstd_out,
    seed,
    site,
    scale,
    num_rows,
    width,
    eps,
    threshold: constexpr,
    block_rows: constexpr,
    block: constexpr,
):
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    in_row = row < num_rows
    column = tl.arange(0, block)
    in_column = column < width
    offset, inside = tile_at(row, column, num_rows, width)
    x = _rows(word, input_ids, row, in_row, column, inside, width)
    x += _rows(position, position_ids, row, in_row, column, inside, width)
    x += _rows(segment, segment_ids, row, in_row, column, inside, width)
    centered, mean, rstd = centered_rows(x, inside, width, eps)
    w = load_fp32(weight + column, in_column)
    b = load_fp32(bias + column, in_column)
    y = centered * rstd[:, None] * w[None, :] + b[None, :]
    # Dropout comes after LayerNorm here, before it in the layers, as in Google's BERT.
    if threshold > 0:
        y = tl.where(keep_rows(seed, site, row, column, threshold), y * scale, 0.0)
    tl.store(output + offset, y.to(output.dtype.element_ty), mask=inside)
    tl.store(mean_out + row, mean, mask=in_row)
    tl.store(rstd_out + row, rstd, mask=in_row)


@jit
def _backward(
    gradient,
    input_ids,
    segment_ids,
    position_ids,
    word,
    position,
    segment,
    weight,
    mean_in,
    rstd_in,
    seed,
    site,
    x_gradient,
    partials,
    scale,
    num_rows,
    width,
    threshold: constexpr,
    block_rows: constexpr,
    block: constexpr,
):
    column = tl.arange(0, block)
    in_column = column < width
    w = load_fp32(weight + column, in_column)
    weight_sum = tl.zeros([block], tl.float32)
    bias_sum = tl.zeros([block], tl.float32)
    side_0_sum = tl.zeros([block], tl.float32)
    side_1_sum = tl.zeros([block], tl.float32)
    for tile in range(
        tl.program_id(0), tl.cdiv(num_rows, block_rows), tl.num_programs(0)
    ):
        row = tile * block_rows + tl.arange(0, block_rows)
        in_row = row < num_rows
        offset, inside = tile_at(row, column, num_rows, width)
        dy = load_fp32(gradient + offset, inside)
        if threshold > 0:
            dy = tl.where(
                keep_rows(seed, site, row, column, threshold), dy * scale, 0.0
            )
        x = _rows(word, input_ids, row, in_row, column, inside, width)
        x += _rows(position, position_ids, row, in_row, column, inside, width)
        x += _rows(segment, segment_ids, row, in_row, column, inside, width)
        mean = load_fp32(mean_in + row, in_row)
        rstd = load_fp32(rstd_in + row, in_row)
        normalized = tl.where(inside, (x - mean[:, None]) * rstd[:, None], 0.0)
        dx = gradient_of_rows(dy, w, normalized, rstd, width)
        tl.store(x_gradient + offset, dx.to(x_gradient.dtype.element_ty), mask=inside)
        weight_sum += tl.sum(dy * normalized, axis=0)
        bias_sum += tl.sum(dy, axis=0)
        # Segments are 0 or 1: what is not the first one's is the second one's.
        side = tl.load(segment_ids + row, mask=in_row, other=0)
        dx_0 = tl.where(side[:, None] == 0, dx, 0.0)
        side_0_sum += tl.sum(dx_0, axis=0)
        side_1_sum += tl.sum(dx - dx_0, axis=0)
    # weight, bias and the two segments: (programs, 4, D).
    line = partials + tl.program_id(0).to(tl.int64) * 4 * width + column
    tl.store(line, weight_sum, mask=in_column)
    tl.store(line + width, bias_sum, mask=in_column)
    tl.store(line + 2 * width, side_0_sum, mask=in_column)
    tl.store(line + 3 * width, side_1_sum, mask=in_column)


def sum_by_index(rows: Tensor, indices: Tensor, count: int) -> Tensor:
    """Table [count, D] whose row i is the sum of the rows [T, D] with index i, in fp32; 0 if none."""
    # On a CPU it adds in the type of the rows.
    exact = rows if rows.is_cuda else rows.float()
    backward = torch.ops.aten.embedding_dense_backward
    return backward(exact, indices, count, -1, False).to(rows.dtype)


class _Embeddings(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: float, drop: Dropout, *tensors: Tensor) -> Tensor:
        input_ids, _, _, word, *_ = tensors
        num_rows, width = input_ids.numel(), word.shape[1]
        output = torch.empty(num_rows, width, dtype=word.dtype, device=word.device)
        mean, rstd = empty_fp32(word.device, 2, num_rows)
        take = launches.blocks("embeddings", word.device)
        _forward[(-(-num_rows // take.rows),)](
            *tensors,
            output,
            mean,
            rstd,
            drop.seed,
            drop.site,
            drop.scale,
            num_rows,
            width,
            eps,
            drop.threshold,
            take.rows,
            next_power_of_2(width),
            num_warps=row_warps(take.num_warps, width),
        )
        ctx.save_for_backward(*tensors[:-1], mean, rstd)  # not the bias
        ctx.drop = drop
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input_ids, _, position_ids, word, position, segment, weight, *_ = (
            ctx.saved_tensors
        )
        num_rows, width = gradient.shape
        take = launches.blocks("embeddings", word.device)
        num_programs = triton_support.num_programs(
            word.device, take.programs, -(-num_rows // take.rows)
        )
        partials = empty_fp32(word.device, num_programs, 4, width)
        x_gradient = torch.empty(num_rows, width, dtype=word.dtype, device=word.device)
        _backward[(num_programs,)](
            gradient.contiguous(),
            *ctx.saved_tensors,
            ctx.drop.seed,
            ctx.drop.site,
            x_gradient,
            partials,
            ctx.drop.scale,
            num_rows,
            width,
            ctx.drop.threshold,
            take.rows,
            next_power_of_2(width),
            num_warps=row_warps(take.num_warps, width),
        )
        sums = column_sums(partials, weight.dtype)
        # A table of more than two rows has no gradient in the others.
        segment_gradient = torch.zeros_like(segment)
        segment_gradient[:2] = sums[2:]
        word_gradient = sum_by_index(x_gradient, input_ids, word.shape[0])
        position_gradient = sum_by_index(x_gradient, position_ids, position.shape[0])
        tables = (word_gradient, position_gradient, segment_gradient)
        return None, None, None, None, None, *tables, sums[0], sums[1]


def fused(*arguments: Any) -> Tensor:
    """``reference`` in one kernel forward; dropout of the next of ``sites``."""
    *tensors, eps, dropout, sites = arguments
    return _Embeddings.apply(eps, sites.next(dropout), *tensors)
