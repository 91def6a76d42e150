"""Embeddings: word + position + segment, LayerNorm, dropout.

Fused, the sum is never stored: the backward pass gathers it again. The tables' gradients are summed
in a fixed order (``scatter``); PyTorch's own may use atomics.

Kept beside libraries: none sums three tables with LayerNorm and dropout in one pass; it is 0.2% of
a modelled step, and there for the fixed order.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bert.kernels.operations.scatter import sum_by_index
from bert.kernels.support import launches, triton_support
from bert.kernels.support.arithmetic import centered_rows, column_sums, gradient_of_rows
from bert.kernels.support.cases import Case, Draw, each_dtype, extreme, large
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


def _case(
    tokens: int,
    vocab_size: int,
    positions: int,
    width: int,
    frequent: float,
    spread: float = 1.0,
) -> Callable[[Draw], Any]:
    """``frequent``: share of tokens that are one word, such as [MASK]; its run is longer than a
    chunk. spread: of the tables.
    """

    def build(draw: Draw) -> tuple[Any, ...]:
        ids = draw.integers(vocab_size, tokens)
        ids[draw.integers(1000, tokens) < 1000 * frequent] = vocab_size // 2
        position = (
            torch.arange(tokens, dtype=torch.int32, device=ids.device) % positions
        )
        tables = (
            draw.normal(vocab_size, width) * spread,
            draw.normal(positions, width) * spread,
            draw.normal(2, width) * spread,
        )
        sites = DropoutSites(draw.device)
        return (
            ids,
            draw.integers(2, tokens),
            position,
            *tables,
            draw.normal(width),
            draw.normal(width),
            1e-12,
            0.0,
            sites,
        )

    return build


_REASON = (
    "the gradient of a row of the sum is rounded, and so are the sums of them by word"
)
CASES: list[Case] = [
    *each_dtype("primes", _case(37, 23, 17, 97, frequent=0.6), _REASON, factor=2),
    *each_dtype("one_token", _case(1, 3, 2, 24, frequent=0.0), _REASON, factor=2),
    extreme("extreme", _case(13, 7, 5, 97, frequent=0.3, spread=2.0**58)),
    large(
        "48_rows_of_bert_large",
        _case(24_576, 30_528, 512, 1024, frequent=0.12),
        _REASON,
        factor=2,
    ),
]


@jit
def _rows(table, ids, row, in_row, column, inside, width):
    """The rows of a table that belong to some tokens, fp32."""
    index = tl.load(ids + row, mask=in_row, other=0).to(tl.int64)
    pointers = table + index[:, None] * width + column[None, :]
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


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
    inside = in_row[:, None] & in_column[None, :]
    x = _rows(word, input_ids, row, in_row, column, inside, width)
    x += _rows(position, position_ids, row, in_row, column, inside, width)
    x += _rows(segment, segment_ids, row, in_row, column, inside, width)
    centered, mean, rstd = centered_rows(x, inside, width, eps)
    w = tl.load(weight + column, mask=in_column, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=in_column, other=0.0).to(tl.float32)
    y = centered * rstd[:, None] * w[None, :] + b[None, :]
    # Dropout comes after LayerNorm here, before it in the layers, as in Google's BERT.
    if threshold > 0:
        y = tl.where(keep_rows(seed, site, row, column, threshold), y * scale, 0.0)
    offset = row.to(tl.int64)[:, None] * width + column[None, :]
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
    w = tl.load(weight + column, mask=in_column, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([block], tl.float32)
    bias_sum = tl.zeros([block], tl.float32)
    side_0_sum = tl.zeros([block], tl.float32)
    side_1_sum = tl.zeros([block], tl.float32)
    for tile in range(
        tl.program_id(0), tl.cdiv(num_rows, block_rows), tl.num_programs(0)
    ):
        row = tile * block_rows + tl.arange(0, block_rows)
        in_row = row < num_rows
        inside = in_row[:, None] & in_column[None, :]
        offset = row.to(tl.int64)[:, None] * width + column[None, :]
        dy = tl.load(gradient + offset, mask=inside, other=0.0).to(tl.float32)
        if threshold > 0:
            dy = tl.where(
                keep_rows(seed, site, row, column, threshold), dy * scale, 0.0
            )
        x = _rows(word, input_ids, row, in_row, column, inside, width)
        x += _rows(position, position_ids, row, in_row, column, inside, width)
        x += _rows(segment, segment_ids, row, in_row, column, inside, width)
        mean = tl.load(mean_in + row, mask=in_row, other=0.0)
        rstd = tl.load(rstd_in + row, mask=in_row, other=0.0)
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


class _Embeddings(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: float, drop: Dropout, *tensors: Tensor) -> Tensor:
        input_ids, _, _, word, *_ = tensors
        num_rows, width = input_ids.numel(), word.shape[1]
        output = torch.empty(num_rows, width, dtype=word.dtype, device=word.device)
        mean, rstd = torch.empty(2, num_rows, dtype=torch.float32, device=word.device)
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
        partials = torch.empty(
            num_programs, 4, width, dtype=torch.float32, device=word.device
        )
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


def fused(
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
    """``reference`` in one kernel forward; dropout of the next of ``sites``."""
    tokens, tables = (input_ids, segment_ids, position_ids), (word, position, segment)
    return _Embeddings.apply(eps, sites.next(dropout), *tokens, *tables, weight, bias)
