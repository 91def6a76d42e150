"""Self-attention over a packed batch in Triton, with dropout: the backend where no library has
both.

Flash attention (Dao et al. 2022, arXiv 2205.14135): a program takes a block of queries of one head
of one sequence and loops over the keys; only the context and, for each row, the logarithm of its
softmax's sum are stored. The backward pass is two kernels, one by blocks of queries (their
gradient), one by blocks of keys (gradients of keys and values), which recompute the probabilities:
two products more than with atomic additions, but reproducible bit for bit.

Dropout drops probabilities after the softmax. The mask depends on the places of query and key in
their sequence, not on block sizes.

Programs get their work from a list of tiles, made on the device once per forward pass and shared by
all layers. Its length depends on the capacities alone, so the grid can be part of a CUDA graph; the
few surplus programs end at once.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bert.kernels.support import launches
from bert.kernels.support.dropout import (
    Dropout,
    ForwardPass,
    kept,
    pair_key,
    pair_words,
    survives,
)
from bert.kernels.support.launches import Blocks
from bert.kernels.support.triton_support import constexpr, jit, next_power_of_2, tl

# exp(x) = exp2(x log2(e)): the hardware has only powers of two.
LOG2_E = 1.4426950408889634


def _blocks(kernel: str, qkv: Tensor) -> Blocks:
    wide = (
        ", fp32"
        if qkv.dtype == torch.float32
        else ", wide"
        if qkv.shape[-1] > 64
        else ""
    )
    return launches.blocks(f"attention {kernel}{wide}", qkv.device)


@jit
def _load_tile(
    pointer,
    row,
    length,
    stride,
    width: constexpr,
    block: constexpr,
    partial: constexpr = True,
):
    """Rows of a head, [rows, block]: zeros past ``width`` columns and, of a ``partial`` tile, past
    ``length`` rows.
    """
    column = tl.arange(0, block)
    pointers = pointer + row.to(tl.int64)[:, None] * stride + column[None, :]
    if width == block and not partial:
        return tl.load(pointers)
    if width == block:
        return tl.load(pointers, mask=(row < length)[:, None], other=0.0)
    return tl.load(
        pointers, mask=(row < length)[:, None] & (column < width)[None, :], other=0.0
    )


@jit
def _store_tile(
    pointer, row, length, stride, values, width: constexpr, block: constexpr
):
    column = tl.arange(0, block)
    pointers = pointer + row.to(tl.int64)[:, None] * stride + column[None, :]
    inside = (row < length)[:, None] & (column < width)[None, :]
    tl.store(pointers, values.to(pointer.dtype.element_ty), mask=inside)


@jit
def _list_tiles(
    cu_seqlens,
    tiles,
    num_sequences,
    num_tokens,
    num_tiles,
    rows: constexpr,
    sequences: constexpr,
):
    """One program. A tile: begin and length of its sequence, its first row in it, and 1 for
    padding.
    """
    sequence = tl.arange(0, sequences)
    begin = tl.load(cu_seqlens + sequence, mask=sequence <= num_sequences, other=0)
    end = tl.load(cu_seqlens + sequence + 1, mask=sequence < num_sequences, other=0)
    # Tokens beyond the last sequence form another.
    end = tl.where(sequence == num_sequences, num_tokens, end)
    length = tl.where(sequence <= num_sequences, end - begin, 0)
    count = tl.cdiv(length, rows)
    # Where each sequence's tiles begin in the list: the sum of the counts before it.
    first = tl.cumsum(count, axis=0) - count
    for number in range(tl.max(count, axis=0)):
        slot = tiles + 4 * (first + number)
        tl.store(slot, begin, mask=number < count)
        tl.store(slot + 1, length, mask=number < count)
        tl.store(slot + 2, sequence * 0 + number * rows, mask=number < count)
        tl.store(
            slot + 3, (sequence == num_sequences).to(tl.int32), mask=number < count
        )
    # Surplus tiles have length 0, at which a program ends.
    for start in range(tl.sum(count, axis=0), num_tiles, sequences):
        tl.store(
            tiles + 4 * (start + sequence) + 1,
            sequence * 0,
            mask=start + sequence < num_tiles,
        )


@jit
def _tile(tiles):
    """This program's tile: begin and length of its sequence, its first row in it, whether it is
    padding.
    """
    slot = tiles + 4 * tl.program_id(0)
    return tl.load(slot), tl.load(slot + 1), tl.load(slot + 2), tl.load(slot + 3)


@jit
def _attend(
    query,
    key,
    accumulator,
    maximum,
    total,
    start,
    length,
    hidden,
    log2_scale,
    philox_key,
    offset,
    first,
    partial: constexpr,
    threshold: constexpr,
    width: constexpr,
    block_keys: constexpr,
):
    """One block of keys of the forward pass. Probabilities are powers of two of scores times
    log2(e).
    """
    block: constexpr = query.shape[1]
    key_row = start + tl.arange(0, block_keys)
    k = _load_tile(key, key_row, length, 3 * hidden, width, block, partial)
    scores = tl.dot(query, tl.trans(k), input_precision="ieee")
    # Keys beyond the sequence were read as 0, whose score of 0 would count.
    if partial:
        scores = tl.where((key_row < length)[None, :], scores, float("-inf"))
    larger = tl.maximum(maximum, tl.max(scores, axis=1) * log2_scale)
    # In the first block exp2(-inf) = 0 drops what is not there yet.
    shrink = tl.exp2(maximum - larger)
    p = tl.exp2(scores * log2_scale - larger[:, None])
    # Of all probabilities: dropout comes after the softmax and must not change its sum.
    total = total * shrink + tl.sum(p, axis=1)
    weights = p.to(query.dtype)
    if threshold > 0:
        row = tl.arange(0, query.shape[0])[:, None]
        column = tl.arange(0, block_keys)[None, :]
        words = pair_words(philox_key, offset, first, row, start, column)
        weights = tl.where(survives(words, threshold), weights, 0.0)
    v = _load_tile(key + hidden, key_row, length, 3 * hidden, width, block, partial)
    accumulator = accumulator * shrink[:, None]
    accumulator = tl.dot(weights, v, accumulator, input_precision="ieee")
    return accumulator, larger, total


@jit
def _forward(
    qkv,
    tiles,
    context,
    sums,
    seed,
    site,
    drop_scale,
    log2_scale,
    num_tokens,
    num_heads: constexpr,
    threshold: constexpr,
    width: constexpr,
    block: constexpr,
    block_queries: constexpr,
    block_keys: constexpr,
):
    """Grid: tiles of queries, heads."""
    head = tl.program_id(1)
    hidden = num_heads * width
    begin, length, first, padding = _tile(tiles)
    row = first + tl.arange(0, block_queries)
    if length > 0:
        target = context + begin.to(tl.int64) * hidden + head * width
        # Tokens beyond all sequences: written, as the memory is not zeroed before.
        if padding == 1:
            _store_tile(
                target,
                row,
                length,
                hidden,
                tl.zeros([block_queries, block], tl.float32),
                width,
                block,
            )
        else:
            # From token to token: 3 N H elements of qkv, N H of the context.
            stride = 3 * hidden
            query = qkv + begin.to(tl.int64) * stride + head * width
            q = _load_tile(query, row, length, stride, width, block)
            flat = head * num_tokens + begin + row
            philox_key, offset = (
                pair_key(tl.load(seed), site, head, begin) if threshold > 0 else (0, 0)
            )
            accumulator = tl.zeros([block_queries, block], tl.float32)
            maximum = tl.full([block_queries], float("-inf"), tl.float32)
            total = tl.zeros([block_queries], tl.float32)
            # Whole blocks without masks, then at most one with.
            full = length // block_keys * block_keys
            for start in range(0, full, block_keys):
                accumulator, maximum, total = _attend(
                    q,
                    query + hidden,
                    accumulator,
                    maximum,
                    total,
                    start,
                    length,
                    hidden,
                    log2_scale,
                    philox_key,
                    offset,
                    first,
                    False,
                    threshold,
                    width,
                    block_keys,
                )
            if full < length:
                accumulator, maximum, total = _attend(
                    q,
                    query + hidden,
                    accumulator,
                    maximum,
                    total,
                    full,
                    length,
                    hidden,
                    log2_scale,
                    philox_key,
                    offset,
                    first,
                    True,
                    threshold,
                    width,
                    block_keys,
                )
            _store_tile(
                target,
                row,
                length,
                hidden,
                accumulator * (drop_scale / total)[:, None],
                width,
                block,
            )
            # To base 2, as the backward pass takes exp2 of scores minus it.
            tl.store(sums + 2 * flat, maximum + tl.log2(total), mask=row < length)


@jit
def _query_gradient_step(
    q,
    gradient,
    key,
    accumulator,
    start,
    length,
    hidden,
    log2_scale,
    log_sum,
    delta,
    philox_key,
    offset,
    first,
    partial: constexpr,
    threshold: constexpr,
    width: constexpr,
    block_keys: constexpr,
):
    """One block of keys of the gradient of the queries, divided by the dropout's scale."""
    block: constexpr = q.shape[1]
    key_row = start + tl.arange(0, block_keys)
    k = _load_tile(key, key_row, length, 3 * hidden, width, block, partial)
    v = _load_tile(key + hidden, key_row, length, 3 * hidden, width, block, partial)
    p = tl.exp2(
        tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale - log_sum[:, None]
    )
    if partial:
        # A score of 0 for a key that is not there would be a probability.
        p = tl.where((key_row < length)[None, :], p, 0.0)
    dp = tl.dot(gradient, tl.trans(v), input_precision="ieee")
    if threshold > 0:
        row = tl.arange(0, q.shape[0])[:, None]
        column = tl.arange(0, block_keys)[None, :]
        words = pair_words(philox_key, offset, first, row, start, column)
        dp *= kept(words, threshold)
    # The softmax's derivative; delta is the row's sum of p dp.
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, accumulator, input_precision="ieee")


@jit
def _query_gradient(
    qkv,
    tiles,
    context,
    gradient,
    sums,
    qkv_gradient,
    seed,
    site,
    drop_scale,
    scale,
    log2_scale,
    num_tokens,
    num_heads: constexpr,
    threshold: constexpr,
    width: constexpr,
    block: constexpr,
    block_queries: constexpr,
    block_keys: constexpr,
):
    """Grid as forward. Also stores delta, each row's sum of gradient times context, for the other
    kernel.

    Within the loops everything, delta too, is divided by the dropout's scale; the results are
    multiplied by it.
    """
    head = tl.program_id(1)
    hidden = num_heads * width
    stride = 3 * hidden
    begin, length, first, padding = _tile(tiles)
    row = first + tl.arange(0, block_queries)
    if length > 0:
        target = qkv_gradient + begin.to(tl.int64) * stride + head * width
        if padding == 1:
            zeros = tl.zeros([block_queries, block], tl.float32)
            for part in tl.static_range(3):
                _store_tile(
                    target + part * hidden, row, length, stride, zeros, width, block
                )
        else:
            query = qkv + begin.to(tl.int64) * stride + head * width
            of_head = begin.to(tl.int64) * hidden + head * width
            q = _load_tile(query, row, length, stride, width, block)
            do = _load_tile(gradient + of_head, row, length, hidden, width, block)
            o = _load_tile(context + of_head, row, length, hidden, width, block)
            delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), axis=1) / drop_scale
            flat = head * num_tokens + begin + row
            # Before the key gradient's kernel, which is launched after this one on the same stream.
            tl.store(sums + 2 * flat + 1, delta, mask=row < length)
            log_sum = tl.load(sums + 2 * flat, mask=row < length, other=0.0)
            philox_key, offset = (
                pair_key(tl.load(seed), site, head, begin) if threshold > 0 else (0, 0)
            )
            accumulator = tl.zeros([block_queries, block], tl.float32)
            full = length // block_keys * block_keys
            for start in range(0, full, block_keys):
                accumulator = _query_gradient_step(
                    q,
                    do,
                    query + hidden,
                    accumulator,
                    start,
                    length,
                    hidden,
                    log2_scale,
                    log_sum,
                    delta,
                    philox_key,
                    offset,
                    first,
                    False,
                    threshold,
                    width,
                    block_keys,
                )
            if full < length:
                accumulator = _query_gradient_step(
                    q,
                    do,
                    query + hidden,
                    accumulator,
                    full,
                    length,
                    hidden,
                    log2_scale,
                    log_sum,
                    delta,
                    philox_key,
                    offset,
                    first,
                    True,
                    threshold,
                    width,
                    block_keys,
                )
            _store_tile(
                target,
                row,
                length,
                stride,
                accumulator * (scale * drop_scale),
                width,
                block,
            )


@jit
def _key_gradient(
    qkv,
    tiles,
    gradient,
    sums,
    qkv_gradient,
    seed,
    site,
    drop_scale,
    scale,
    log2_scale,
    num_tokens,
    num_heads: constexpr,
    threshold: constexpr,
    width: constexpr,
    block: constexpr,
    block_queries: constexpr,
    block_keys: constexpr,
):
    """Grid: tiles of keys, heads. Everything is transposed: keys down, queries across."""
    head = tl.program_id(1)
    hidden = num_heads * width
    stride = 3 * hidden
    begin, length, first, padding = _tile(tiles)
    key_row = first + tl.arange(0, block_keys)
    # The query gradient's kernel has zeroed all three parts at padding tokens.
    if (length > 0) & (padding == 0):
        query = qkv + begin.to(tl.int64) * stride + head * width
        do_pointer = gradient + begin.to(tl.int64) * hidden + head * width
        k = _load_tile(query + hidden, key_row, length, stride, width, block)
        v = _load_tile(query + 2 * hidden, key_row, length, stride, width, block)
        k_gradient = tl.zeros([block_keys, block], tl.float32)
        v_gradient = tl.zeros([block_keys, block], tl.float32)
        philox_key, offset = (
            pair_key(tl.load(seed), site, head, begin) if threshold > 0 else (0, 0)
        )
        down = tl.arange(0, block_keys)[:, None]
        across = tl.arange(0, block_queries)[None, :]
        # Keys stay in registers, queries pass by: no additions to memory, and so a fixed order.
        for start in range(0, length, block_queries):
            row = start + tl.arange(0, block_queries)
            q = _load_tile(query, row, length, stride, width, block)
            do = _load_tile(do_pointer, row, length, hidden, width, block)
            flat = head * num_tokens + begin + row
            # Both of a row at once: separately, Triton 3.6 copies four bytes at a time, 200 more
            # instructions.
            both = sums + 2 * flat[:, None] + tl.arange(0, 2)[None, :]
            log_sum, delta = tl.split(
                tl.load(both, mask=(row < length)[:, None], other=0.0)
            )
            # Beyond the end query and gradient are 0, and so add nothing; keys beyond it are not
            # stored.
            p = tl.exp2(
                tl.dot(k, tl.trans(q), input_precision="ieee") * log2_scale
                - log_sum[None, :]
            )
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            weights = p
            if threshold > 0:
                words = pair_words(philox_key, offset, start, across, first, down)
                keep = kept(words, threshold)
                weights, dp = p * keep, dp * keep
            v_gradient = tl.dot(
                weights.to(do.dtype), do, v_gradient, input_precision="ieee"
            )
            ds = p * (dp - delta[None, :])
            k_gradient = tl.dot(ds.to(q.dtype), q, k_gradient, input_precision="ieee")
        target = qkv_gradient + begin.to(tl.int64) * stride + head * width
        _store_tile(
            target + hidden,
            key_row,
            length,
            stride,
            k_gradient * (scale * drop_scale),
            width,
            block,
        )
        _store_tile(
            target + 2 * hidden,
            key_row,
            length,
            stride,
            v_gradient * drop_scale,
            width,
            block,
        )


def _tiles(forward_pass: ForwardPass, num_tokens: int, rows: int) -> Tensor:
    """List of tiles of ``rows`` rows, int32 [capacity, 4]; computed once per forward pass."""
    cu_seqlens = forward_pass.cu_seqlens

    def make() -> Tensor:
        num_sequences = cu_seqlens.numel() - 1
        # At most one partial tile per sequence and for the padding.
        num_tiles = num_tokens // rows + num_sequences + 1
        tiles = torch.empty(num_tiles, 4, dtype=torch.int32, device=cu_seqlens.device)
        lanes = next_power_of_2(num_sequences + 1)
        _list_tiles[(1,)](
            cu_seqlens, tiles, num_sequences, num_tokens, num_tiles, rows, lanes
        )
        return tiles

    return forward_pass.once(("attention tiles", num_tokens, rows), make)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, forward_pass: ForwardPass, drop: Dropout
    ) -> Tensor:
        qkv = qkv.contiguous()
        num_tokens, _, num_heads, width = qkv.shape
        context = torch.empty(
            num_tokens, num_heads, width, dtype=qkv.dtype, device=qkv.device
        )
        # For each row the logarithm of its softmax's sum and, set in the backward pass, delta (see
        # _query_gradient).
        sums = torch.empty(
            num_heads, num_tokens, 2, dtype=torch.float32, device=qkv.device
        )
        blocks = _blocks("forward", qkv)
        # Each of the three lists is made by the first layer and read by all others.
        tiles = _tiles(forward_pass, num_tokens, blocks.rows)
        # Heads are padded to a power of two, and to 16, the least that tl.dot takes.
        _forward[(len(tiles), num_heads)](
            qkv,
            tiles,
            context,
            sums,
            drop.seed,
            drop.site,
            drop.scale,
            LOG2_E / math.sqrt(width),
            num_tokens,
            num_heads,
            drop.threshold,
            width,
            max(16, next_power_of_2(width)),
            blocks.rows,
            blocks.columns,
            **blocks.options,
        )
        query_tiles = _tiles(
            forward_pass, num_tokens, _blocks("query gradient", qkv).rows
        )
        key_tiles = _tiles(
            forward_pass, num_tokens, _blocks("key gradient", qkv).columns
        )
        ctx.save_for_backward(qkv, query_tiles, key_tiles, context, sums)
        ctx.drop = drop
        return context

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        qkv, query_tiles, key_tiles, context, sums = ctx.saved_tensors
        gradient = gradient.contiguous()
        num_tokens, _, num_heads, width = qkv.shape
        # Not zeroed: the two kernels write every token, padding too.
        qkv_gradient = torch.empty_like(qkv)
        scale, drop = 1 / math.sqrt(width), ctx.drop
        block = max(16, next_power_of_2(width))
        dropped = drop.seed, drop.site, drop.scale
        sizes = num_tokens, num_heads, drop.threshold, width, block
        settings = *dropped, scale, scale * LOG2_E, *sizes
        # First, as it stores the delta that the keys' kernel reads.
        blocks = _blocks("query gradient", qkv)
        _query_gradient[(len(query_tiles), num_heads)](
            qkv,
            query_tiles,
            context,
            gradient,
            sums,
            qkv_gradient,
            *settings,
            blocks.rows,
            blocks.columns,
            **blocks.options,
        )
        blocks = _blocks("key gradient", qkv)
        _key_gradient[(len(key_tiles), num_heads)](
            qkv,
            key_tiles,
            gradient,
            sums,
            qkv_gradient,
            *settings,
            blocks.rows,
            blocks.columns,
            **blocks.options,
        )
        return qkv_gradient, None, None


def attention(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """qkv [T, 3, N, H] -> context [T, N, H]. Sequences may be longer than max_seqlen.

    Zero (context and gradient) at tokens beyond cu_seqlens[-1]. bf16 and fp16 use the tensor cores,
    fp32 does not.
    """
    return _Attention.apply(qkv, forward_pass, forward_pass.sites.next(dropout))
