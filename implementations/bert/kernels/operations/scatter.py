"""Sums of rows by index, the gradient of an embedding table: always in the same order, without
atomics.

The indices are sorted (stably), and a program takes CHUNK sorted places: a small matrix product
computes the sum of each run of equal indices. The sum of a run within the chunk is written to the
table at once. A longer run has a partial sum in every chunk it touches, which a second kernel adds
up in order, in the program of the chunk where the run begins. A row that is not finite also makes
sums beside its own NaN, as 0 x inf is: the step is skipped or lost in any case.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
from torch import Tensor

from bert.kernels.support import launches
from bert.kernels.support.triton_support import constexpr, jit, tl

# A CHUNK of at least 16: tl.dot takes no smaller matrices.
CHUNK, GROUP = 16, 16


@jit
def _sum_runs(
    rows,
    indices,
    order,
    table,
    partials,
    num_rows,
    width,
    chunk: constexpr,
    block: constexpr,
):
    begin = tl.program_id(0) * chunk
    row = begin + tl.arange(0, chunk)
    inside = row < num_rows
    column = tl.program_id(1) * block + tl.arange(0, block)
    in_column = column < width
    # -1 beyond the end and -2 before the begin match no index, nor each other.
    index = tl.load(indices + row, mask=inside, other=-1)
    following = tl.load(indices + row + 1, mask=row + 1 < num_rows, other=-1)
    across = tl.load(indices + begin + tl.arange(0, chunk), mask=inside, other=-1)
    source = tl.load(order + row, mask=inside, other=0)
    in_tile = inside[:, None] & in_column[None, :]
    tile = tl.load(
        rows + source[:, None] * width + column[None, :], mask=in_tile, other=0.0
    )
    # 1 where two places have one index: each row of the product is the sum of a run.
    same = (index[:, None] == across[None, :]).to(tl.float32).to(tile.dtype)
    # ieee, since fp32 rows would otherwise be rounded to tf32.
    total = tl.dot(same, tile, input_precision="ieee")
    before = tl.load(indices + begin - 1, mask=begin > 0, other=-2)
    earlier = index == before  # the run began in an earlier chunk
    # Each place of a run has its sum within the chunk; the last one writes it.
    ends = inside & (following != index)
    last = tl.arange(0, chunk) == chunk - 1
    target = table + index.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(
        target,
        total.to(table.dtype.element_ty),
        mask=(ends & (index != before))[:, None] & in_column[None, :],
    )
    # All places point to the chunk's one partial row; the masks leave one of them at most.
    partial = (
        partials
        + tl.program_id(0).to(tl.int64) * 2 * width
        + column[None, :]
        + tl.zeros([chunk, 1], tl.int32)
    )
    tl.store(
        partial,
        total,
        mask=(earlier & inside & (ends | last))[:, None] & in_column[None, :],
    )
    begins_here = inside & last & (following == index) & (index != before)
    tl.store(partial + width, total, mask=begins_here[:, None] & in_column[None, :])


@jit
def _join_runs(
    indices,
    table,
    partials,
    num_rows,
    num_chunks,
    width,
    chunk: constexpr,
    group: constexpr,
    block: constexpr,
):
    program = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    in_column = column < width
    end = (program + 1) * chunk
    index = tl.load(indices + end - 1, mask=end <= num_rows, other=-1)
    following = tl.load(indices + end, mask=end < num_rows, other=-2)
    before = tl.load(indices + program * chunk - 1, mask=program > 0, other=-2)
    # Only where a run begins that goes on: its program adds up the chunks after it.
    if (index == following) & (index != before):
        total = tl.load(
            partials + (2 * program + 1).to(tl.int64) * width + column,
            mask=in_column,
            other=0.0,
        )
        base = program + 1
        more = 1
        while more > 0:
            number = base + tl.arange(0, group)
            first = tl.load(
                indices + number * chunk, mask=number < num_chunks, other=-1
            )
            member = first == index
            heads = (
                partials + (2 * number).to(tl.int64)[:, None] * width + column[None, :]
            )
            total += tl.sum(
                tl.load(heads, mask=member[:, None] & in_column[None, :], other=0.0),
                axis=0,
            )
            # Until a chunk begins with another index.
            more = tl.min(member.to(tl.int32), axis=0)
            base += group
        tl.store(
            table + index.to(tl.int64) * width + column,
            total.to(table.dtype.element_ty),
            mask=in_column,
        )


def sum_by_index(rows: Tensor, indices: Tensor, num_indices: int) -> Tensor:
    """Table [num_indices, D] whose row i is the sum of the rows [T, D] with index i, computed in
    fp32; 0 if none.

    indices: int [T] in [0, num_indices).
    """
    num_rows, width = rows.shape
    # Most words of the vocabulary are in no batch, and no program writes their rows.
    table = torch.zeros(num_indices, width, dtype=rows.dtype, device=rows.device)
    if not num_rows:
        return table
    # Stable: rows of one index keep their order, and their sum its bits.
    sorted_indices, order = torch.sort(indices, stable=True)
    num_chunks = -(-num_rows // CHUNK)
    partials = torch.empty(
        num_chunks, 2, width, dtype=torch.float32, device=rows.device
    )
    take = launches.blocks("scatter", rows.device)
    grid, block = (num_chunks, -(-width // take.columns)), take.columns
    _sum_runs[grid](
        rows,
        sorted_indices,
        order,
        table,
        partials,
        num_rows,
        width,
        CHUNK,
        block,
        **take.options,
    )
    _join_runs[grid](
        sorted_indices,
        table,
        partials,
        num_rows,
        num_chunks,
        width,
        CHUNK,
        GROUP,
        block,
        **take.options,
    )
    return table
