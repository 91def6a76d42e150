"""Casts to fp8, and what the products want of the result: both orders, since Hopper's matrix
instructions take the summed dimension innermost in either operand, and a tensor is summed over one
dimension forward, the other backward.

Elementwise kernels work on square tiles and write both orders at once. A kernel that works on whole
rows writes the row order alone, and ``transpose`` makes the other one in the backward pass, from
one byte an element to one.

A tile's largest magnitude goes to memory by one atomic maximum of its bits as an integer, whose
order is that of the magnitudes, inf and NaN above them. Saturation lets NaN through.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bert.kernels.fp8 import ROW_MULTIPLE, Target
from bert.kernels.support import arithmetic, launches, triton_support
from bert.kernels.support.arithmetic import empty_fp32, load_fp32, program_tile, tile_at
from bert.kernels.support.triton_support import constexpr, jit, tl


@jit
def by_eights(offset, inside):
    """Offsets of a tile [R, C] of fp8 numbers in rows of a multiple of 16, with less alignment than
    Triton could infer.

    It would give each thread 16 of a row, the widest store, and would lay out the whole kernel for
    that: loads of bf16 that skip every other 16 bytes, and in kernels on whole rows sums across
    warps and twice the registers. Here it learns of eight in line, as many as a thread loads of
    bf16 at once; the select makes it forget the others.
    """
    return tl.max_contiguous(
        tl.multiple_of(tl.where(inside, offset, 0), [1, 8]), [1, 8]
    )


@jit
def magnitude_bits(value):
    """The magnitudes of fp32 numbers as integers of the same order; inf is above all numbers, NaN
    above inf.
    """
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def to_fp8(value, scale, maximum: constexpr, dtype: constexpr):
    """fp32 -> fp8: scaled, rounded to nearest, beyond the largest number cut off to it; NaN stays
    NaN.
    """
    return tl.clamp(
        value * scale, -maximum, maximum, propagate_nan=tl.PropagateNan.ALL
    ).to(dtype)


@jit
def store_both_orders(
    value,
    cast,
    transposed,
    scale,
    largest,
    row,
    column,
    num_rows,
    num_columns,
    maximum: constexpr,
):
    """Writes a tile (fp32, 0 outside of the tensor) as fp8 in both orders, and raises the largest
    magnitude; the transposed order and the magnitude only where there is room for them.
    """
    # Before scaling: the next step's scale follows from the true magnitude.
    if largest is not None:
        tl.atomic_max(largest, tl.max(magnitude_bits(value)), sem="relaxed")
    value = to_fp8(value, tl.load(scale), maximum, cast.dtype.element_ty)
    offset, inside = tile_at(row, column, num_rows, num_columns)
    tl.store(cast + by_eights(offset, inside), value, mask=inside)
    if transposed is not None:
        across, inside_t = tile_at(column, row, num_columns, num_rows)
        # Through tl.trans, so that both stores write along their rows.
        tl.store(transposed + across, tl.trans(value), mask=inside_t)


@jit
def _cast_transpose(
    x,
    cast,
    transposed,
    partials,
    scale,
    largest,
    num_rows,
    num_columns,
    maximum: constexpr,
    block_rows: constexpr,
    block: constexpr,
):
    tile, row, column = program_tile(num_columns, block_rows, block)
    offset, inside = tile_at(row, column, num_rows, num_columns)
    value = load_fp32(x + offset, inside)
    # A bias gradient costs no pass of its own: the tile is in registers.
    if partials is not None:
        line = partials + tile.to(tl.int64) * num_columns + column
        tl.store(line, tl.sum(value, axis=0), mask=column < num_columns)
    store_both_orders(
        value,
        cast,
        transposed,
        scale,
        largest,
        row,
        column,
        num_rows,
        num_columns,
        maximum,
    )


@jit
def _transpose(x, output, num_rows, num_words, block: constexpr):
    # Words of four bytes: four rows of them become four columns, byte by byte, in the registers of
    # a thread.
    _, quad, word = program_tile(num_words, block, block)
    num_quads = num_rows // 4
    pointers = x + quad.to(tl.int64)[:, None] * (4 * num_words) + word[None, :]
    inside = (quad < num_quads)[:, None] & (word < num_words)[None, :]
    row_0 = tl.load(pointers, mask=inside, other=0)
    row_1 = tl.load(pointers + num_words, mask=inside, other=0)
    row_2 = tl.load(pointers + 2 * num_words, mask=inside, other=0)
    row_3 = tl.load(pointers + 3 * num_words, mask=inside, other=0)
    inside_t = (word < num_words)[:, None] & (quad < num_quads)[None, :]
    across = output + word.to(tl.int64)[:, None] * num_rows + quad[None, :]
    for byte in tl.static_range(4):
        low = ((row_0 >> (8 * byte)) & 0xFF) | (((row_1 >> (8 * byte)) & 0xFF) << 8)
        high = ((row_2 >> (8 * byte)) & 0xFF) | (((row_3 >> (8 * byte)) & 0xFF) << 8)
        tl.store(across + byte * num_quads, tl.trans(low | (high << 16)), mask=inside_t)


def new_both_orders(
    num_rows: int, num_columns: int, target: Target
) -> tuple[Tensor, Tensor]:
    """Room for a tensor in fp8 [R, C] and transposed [C, R]."""
    cast = torch.empty(
        num_rows, num_columns, dtype=target.dtype, device=target.scale.device
    )
    return cast, cast.new_empty(num_columns, num_rows)


def bits(largest: Tensor | None) -> Tensor | None:
    """The same memory as integers, for an atomic maximum that knows NaN."""
    return None if largest is None else largest.view(torch.int32)


def cast_arguments(target: Target | None) -> dict[str, Any]:
    """Keyword arguments of a kernel that may cast its result; without a target it does not."""
    if target is None:
        return {"cast_scale": None, "largest": None, "maximum": 0.0}
    return {
        "cast_scale": target.scale,
        "largest": bits(target.largest),
        "maximum": target.maximum,
    }


def cast_transpose(
    x: Tensor, target: Target, column_sums: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [R, C] in fp8 [R, C], transposed [C, R], and if wanted its sums over rows [C] in its own
    type.

    R and C must be multiples of 16, as for the product.
    Reads 2 bytes an element (bf16) and writes 1 + 1; raises ``target.largest`` to max |x|.
    """
    # The same numbers in plain PyTorch, for CPUs.
    if not triton_support.supported(x.device):
        if target.largest is not None:
            torch.maximum(target.largest, x.abs().amax().float(), out=target.largest)
        cast = _plain(x, target)
        return cast, cast.t().contiguous(), x.sum(0) if column_sums else None
    cast, transposed = new_both_orders(x.shape[0], x.shape[1], target)
    shape = launches.blocks("cast", x.device).tiles(*x.shape)[0], x.shape[1]
    partials = empty_fp32(x.device, *shape) if column_sums else None
    _start_cast(
        x,
        cast,
        transposed,
        partials,
        target.scale,
        bits(target.largest),
        target.maximum,
    )
    return (
        cast,
        transposed,
        None if partials is None else arithmetic.column_sums(partials, x.dtype),
    )


def cast_rows(x: Tensor, target: Target, out: Tensor | None = None) -> Tensor:
    """x [R, C] in fp8 [R, C] alone, for a product without a backward pass; in ``out``, where given.

    R and C as of ``cast_transpose``. Reads 2 bytes an element (bf16) and writes 1; raises nothing.
    """
    cast = (
        torch.empty(x.shape, dtype=target.dtype, device=x.device)
        if out is None
        else out
    )
    if not triton_support.supported(x.device):
        return cast.copy_(_plain(x, target))
    _start_cast(x, cast, None, None, target.scale, None, target.maximum)
    return cast


def _start_cast(x: Tensor, cast: Tensor, *arguments: Any) -> None:
    *tensors, maximum = arguments
    num_rows, num_columns = x.shape
    assert num_rows % ROW_MULTIPLE == num_columns % ROW_MULTIPLE == 0, x.shape
    take = launches.blocks("cast", x.device)
    _cast_transpose[(take.tiles(num_rows, num_columns)[1],)](
        x.contiguous(),
        cast,
        *tensors,
        num_rows,
        num_columns,
        maximum,
        take.rows,
        take.columns,
        **take.options,
    )


def _plain(x: Tensor, target: Target) -> Tensor:
    return (
        (x.float() * target.scale)
        .clamp(-target.maximum, target.maximum)
        .to(target.dtype)
    )


def transpose(x: Tensor) -> Tensor:
    """fp8 [R, C] -> [C, R], R and C multiples of 16: reads one byte an element and writes one."""
    if not triton_support.supported(x.device):
        return x.t().contiguous()
    num_rows, num_columns = x.shape
    output = torch.empty(num_columns, num_rows, dtype=x.dtype, device=x.device)
    take = launches.blocks("transpose", x.device)
    # Four fp8 numbers a word: whole words are loaded and stored.
    words, block = num_columns // 4, take.columns // 4
    grid = (-(-words // block) * -(-num_rows // take.rows),)
    _transpose[grid](
        x.view(torch.int32),
        output.view(torch.int32),
        num_rows,
        words,
        block,
        **take.options,
    )
    return output
