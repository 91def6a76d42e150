"""Self-attention over a packed batch in Triton, with dropout: the backend where no library has both.

Flash attention (Dao et al. 2022, arXiv 2205.14135): a program takes a block of queries of one head of one sequence and
walks over the keys; only the context and, for each row, the logarithm of its softmax's sum are stored. The backward
pass is two kernels, one a block of queries (their gradient), one a block of keys (gradients of keys and values), which
recompute the probabilities: two products more than atomic additions would need, and the same bits every time.

Dropout drops probabilities after the softmax. Row (token, head) has two random keys, which the forward kernel leaves to
the backward ones; the column is the key's place in the sequence, so a mask does not depend on block sizes.

The grid covers the longest sequence that is allowed, so it does not depend on the batch and can be part of a CUDA
graph; programs without work end at once.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bert.kernels import jit as jit_module
from bert.kernels.jit import Dropout, constexpr, jit, keep_mask, load_keys, next_power_of_2, row_keys, store_keys, tl

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Block of queries, block of keys, warps and pipeline stages of a kernel."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# For heads of 64 on Hopper: no spills, wgmma in every product, two or three programs a multiprocessor.
FORWARD = Tiles(queries=64, keys=64, num_warps=4, num_stages=2)
QUERY_GRADIENT = Tiles(queries=64, keys=64, num_warps=4, num_stages=2)
KEY_GRADIENT = Tiles(queries=32, keys=64, num_warps=4, num_stages=2)


@jit
def _load_tile(pointer, row, length, stride, width: constexpr, block: constexpr):
    """Rows of a head, [rows, block]: zeros past ``length`` rows or ``width`` columns."""
    column = tl.arange(0, block)
    pointers = pointer + row.to(tl.int64)[:, None] * stride + column[None, :]
    if width == block:
        return tl.load(pointers, mask=(row < length)[:, None], other=0.0)
    return tl.load(pointers, mask=(row < length)[:, None] & (column < width)[None, :], other=0.0)


@jit
def _store_tile(pointer, row, length, stride, values, width: constexpr, block: constexpr):
    column = tl.arange(0, block)
    pointers = pointer + row.to(tl.int64)[:, None] * stride + column[None, :]
    inside = (row < length)[:, None] & (column < width)[None, :]
    tl.store(pointers, values.to(pointer.dtype.element_ty), mask=inside)


@jit
def _clear_padding(output, stride, begin, end, rows: constexpr, width: constexpr, block: constexpr):
    """Zeros at the tokens that belong to no sequence; the programs of the grid's first dimension share them."""
    for first in range(begin + tl.program_id(0) * rows, end, tl.num_programs(0) * rows):
        row = first + tl.arange(0, rows)
        _store_tile(output, row, end, stride, tl.zeros([rows, block], tl.float32), width, block)


@jit
def _attend(
    query, key, value, accumulator, maximum, total, start, length, stride, log2_scale, key_0, key_1,
    masked: constexpr, threshold: constexpr, width: constexpr, block: constexpr, block_keys: constexpr,
):  # fmt: skip
    """One block of keys of the forward pass. Probabilities are powers of two of scores times log2(e)."""
    place = start + tl.arange(0, block_keys)
    k = _load_tile(key, place, length, stride, width, block)
    scores = tl.dot(query, tl.trans(k), input_precision="ieee") * log2_scale
    if masked:
        scores = tl.where((place < length)[None, :], scores, float("-inf"))
    larger = tl.maximum(maximum, tl.max(scores, axis=1))
    shrink = tl.exp2(maximum - larger)
    p = tl.exp2(scores - larger[:, None])
    total = total * shrink + tl.sum(p, axis=1)
    if threshold > 0:
        p = tl.where(keep_mask(key_0[:, None], key_1[:, None], place.to(tl.uint32)[None, :], threshold), p, 0.0)
    v = _load_tile(value, place, length, stride, width, block)
    accumulator = accumulator * shrink[:, None]
    accumulator = tl.dot(p.to(v.dtype), v, accumulator, input_precision="ieee")
    return accumulator, larger, total


@jit
def _forward(
    qkv, cu_seqlens, context, log_sums, keys_out, seed, site, drop_scale, log2_scale, num_sequences, num_tokens,
    num_heads, threshold: constexpr, width: constexpr, block: constexpr, block_queries: constexpr,
    block_keys: constexpr,
):  # fmt: skip
    """Grid: blocks of queries, heads, sequences and one more for the padding."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    hidden = num_heads * width
    begin = tl.load(cu_seqlens + sequence)
    if sequence == num_sequences:
        _clear_padding(context + head * width, hidden, begin, num_tokens, block_queries, width, block)
    else:
        length = tl.load(cu_seqlens + sequence + 1) - begin
        row = tl.program_id(0) * block_queries + tl.arange(0, block_queries)
        if tl.program_id(0) * block_queries < length:
            stride = 3 * hidden
            query = qkv + begin.to(tl.int64) * stride + head * width
            q = _load_tile(query, row, length, stride, width, block)
            flat = (begin + row) * num_heads + head
            key_0, key_1 = row.to(tl.uint32), row.to(tl.uint32)
            if threshold > 0:
                key_0, key_1 = row_keys(tl.load(seed), site, begin + row, head)
                store_keys(keys_out, flat, key_0, key_1, row < length)
            accumulator = tl.zeros([block_queries, block], tl.float32)
            maximum = tl.full([block_queries], float("-inf"), tl.float32)
            total = tl.zeros([block_queries], tl.float32)
            full = length // block_keys * block_keys
            for start in range(0, full, block_keys):
                accumulator, maximum, total = _attend(
                    q, query + hidden, query + 2 * hidden, accumulator, maximum, total, start, length, stride,
                    log2_scale, key_0, key_1, False, threshold, width, block, block_keys,
                )  # fmt: skip
            if full < length:
                accumulator, maximum, total = _attend(
                    q, query + hidden, query + 2 * hidden, accumulator, maximum, total, full, length, stride,
                    log2_scale, key_0, key_1, True, threshold, width, block, block_keys,
                )  # fmt: skip
            target = context + begin.to(tl.int64) * hidden + head * width
            _store_tile(target, row, length, hidden, accumulator * (drop_scale / total)[:, None], width, block)
            tl.store(log_sums + flat, maximum + tl.log2(total), mask=row < length)


@jit
def _query_gradient_step(
    q, gradient, key, value, accumulator, start, length, stride, log2_scale, drop_scale, log_sum, delta, key_0, key_1,
    masked: constexpr, threshold: constexpr, width: constexpr, block: constexpr, block_keys: constexpr,
):  # fmt: skip
    """One block of keys of the gradient of the queries."""
    place = start + tl.arange(0, block_keys)
    k = _load_tile(key, place, length, stride, width, block)
    v = _load_tile(value, place, length, stride, width, block)
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale - log_sum[:, None])
    if masked:
        p = tl.where((place < length)[None, :], p, 0.0)
    dp = tl.dot(gradient, tl.trans(v), input_precision="ieee")
    if threshold > 0:
        keep = keep_mask(key_0[:, None], key_1[:, None], place.to(tl.uint32)[None, :], threshold)
        dp = tl.where(keep, dp * drop_scale, 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, accumulator, input_precision="ieee")


@jit
def _query_gradient(
    qkv, cu_seqlens, context, gradient, log_sums, deltas, keys, qkv_gradient, drop_scale, scale, log2_scale,
    num_sequences, num_tokens, num_heads, threshold: constexpr, width: constexpr, block: constexpr,
    block_queries: constexpr, block_keys: constexpr,
):  # fmt: skip
    """Grid as forward. Also leaves delta, each row's sum of gradient times context, to the other kernel."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    hidden = num_heads * width
    stride = 3 * hidden
    begin = tl.load(cu_seqlens + sequence)
    if sequence == num_sequences:
        for part in tl.static_range(3):
            target = qkv_gradient + part * hidden + head * width
            _clear_padding(target, stride, begin, num_tokens, block_queries, width, block)
    else:
        length = tl.load(cu_seqlens + sequence + 1) - begin
        row = tl.program_id(0) * block_queries + tl.arange(0, block_queries)
        if tl.program_id(0) * block_queries < length:
            query = qkv + begin.to(tl.int64) * stride + head * width
            own = begin.to(tl.int64) * hidden + head * width
            q = _load_tile(query, row, length, stride, width, block)
            do = _load_tile(gradient + own, row, length, hidden, width, block)
            o = _load_tile(context + own, row, length, hidden, width, block)
            delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), axis=1)
            flat = (begin + row) * num_heads + head
            tl.store(deltas + flat, delta, mask=row < length)
            log_sum = tl.load(log_sums + flat, mask=row < length, other=0.0)
            key_0, key_1 = row.to(tl.uint32), row.to(tl.uint32)
            if threshold > 0:
                key_0, key_1 = load_keys(keys, flat, row < length)
            accumulator = tl.zeros([block_queries, block], tl.float32)
            full = length // block_keys * block_keys
            for start in range(0, full, block_keys):
                accumulator = _query_gradient_step(
                    q, do, query + hidden, query + 2 * hidden, accumulator, start, length, stride, log2_scale,
                    drop_scale, log_sum, delta, key_0, key_1, False, threshold, width, block, block_keys,
                )  # fmt: skip
            if full < length:
                accumulator = _query_gradient_step(
                    q, do, query + hidden, query + 2 * hidden, accumulator, full, length, stride, log2_scale,
                    drop_scale, log_sum, delta, key_0, key_1, True, threshold, width, block, block_keys,
                )  # fmt: skip
            target = qkv_gradient + begin.to(tl.int64) * stride + head * width
            _store_tile(target, row, length, stride, accumulator * scale, width, block)


@jit
def _key_gradient(
    qkv, cu_seqlens, gradient, log_sums, deltas, keys, qkv_gradient, drop_scale, scale, log2_scale, num_heads,
    threshold: constexpr, width: constexpr, block: constexpr, block_queries: constexpr, block_keys: constexpr,
):  # fmt: skip
    """Grid: blocks of keys, heads, sequences. Everything is transposed: keys down, queries across."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    hidden = num_heads * width
    stride = 3 * hidden
    begin = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - begin
    place = tl.program_id(0) * block_keys + tl.arange(0, block_keys)
    if tl.program_id(0) * block_keys < length:
        query = qkv + begin.to(tl.int64) * stride + head * width
        do_pointer = gradient + begin.to(tl.int64) * hidden + head * width
        k = _load_tile(query + hidden, place, length, stride, width, block)
        v = _load_tile(query + 2 * hidden, place, length, stride, width, block)
        k_gradient = tl.zeros([block_keys, block], tl.float32)
        v_gradient = tl.zeros([block_keys, block], tl.float32)
        column = place.to(tl.uint32)[:, None]
        for start in range(0, length, block_queries):
            row = start + tl.arange(0, block_queries)
            q = _load_tile(query, row, length, stride, width, block)
            do = _load_tile(do_pointer, row, length, hidden, width, block)
            flat = (begin + row) * num_heads + head
            # Rows past the end get probability 0; keys past the end only reach rows that are not stored.
            log_sum = tl.load(log_sums + flat, mask=row < length, other=float("inf"))
            delta = tl.load(deltas + flat, mask=row < length, other=0.0)
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * log2_scale - log_sum[None, :])
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            kept = p
            if threshold > 0:
                key_0, key_1 = load_keys(keys, flat, row < length)
                keep = keep_mask(key_0[None, :], key_1[None, :], column, threshold)
                kept = tl.where(keep, p * drop_scale, 0.0)
                dp = tl.where(keep, dp * drop_scale, 0.0)
            v_gradient = tl.dot(kept.to(do.dtype), do, v_gradient, input_precision="ieee")
            ds = p * (dp - delta[None, :])
            k_gradient = tl.dot(ds.to(q.dtype), q, k_gradient, input_precision="ieee")
        target = qkv_gradient + begin.to(tl.int64) * stride + head * width
        _store_tile(target + hidden, place, length, stride, k_gradient * scale, width, block)
        _store_tile(target + 2 * hidden, place, length, stride, v_gradient, width, block)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, drop: Dropout) -> Tensor:
        qkv = qkv.contiguous()
        num_tokens, _, num_heads, width = qkv.shape
        num_sequences = cu_seqlens.numel() - 1
        context = torch.empty(num_tokens, num_heads, width, dtype=qkv.dtype, device=qkv.device)
        log_sums = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=qkv.device)
        keys = drop.new_keys(num_tokens, num_heads)
        tiles, block = FORWARD, max(16, next_power_of_2(width))
        _forward[(-(-max_seqlen // tiles.queries), num_heads, num_sequences + 1)](
            qkv, cu_seqlens, context, log_sums, keys, drop.seed, drop.site, drop.scale, LOG2_E / math.sqrt(width),
            num_sequences, num_tokens, num_heads, drop.threshold, width, block, tiles.queries, tiles.keys,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        ctx.save_for_backward(qkv, cu_seqlens, context, log_sums, keys)
        ctx.max_seqlen, ctx.drop = max_seqlen, drop
        return context

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cu_seqlens, context, log_sums, keys = ctx.saved_tensors
        gradient = gradient.contiguous()
        num_tokens, _, num_heads, width = qkv.shape
        num_sequences = cu_seqlens.numel() - 1
        deltas, qkv_gradient = torch.empty_like(log_sums), torch.empty_like(qkv)
        scale, block, drop = 1 / math.sqrt(width), max(16, next_power_of_2(width)), ctx.drop
        tiles = QUERY_GRADIENT
        _query_gradient[(-(-ctx.max_seqlen // tiles.queries), num_heads, num_sequences + 1)](
            qkv, cu_seqlens, context, gradient, log_sums, deltas, keys, qkv_gradient, drop.scale, scale,
            scale * LOG2_E, num_sequences, num_tokens, num_heads, drop.threshold, width, block, tiles.queries,
            tiles.keys, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        tiles = KEY_GRADIENT
        _key_gradient[(-(-ctx.max_seqlen // tiles.keys), num_heads, num_sequences)](
            qkv, cu_seqlens, gradient, log_sums, deltas, keys, qkv_gradient, drop.scale, scale, scale * LOG2_E,
            num_heads, drop.threshold, width, block, tiles.queries, tiles.keys,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        return qkv_gradient, None, None, None


def attention(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: float) -> Tensor:
    """qkv [T, 3, N, H], cu_seqlens int32 [S+1], no sequence longer than max_seqlen -> context [T, N, H].

    Zero (context and gradient) at tokens past cu_seqlens[-1]. bf16 and fp16 use the tensor cores, fp32 does not.
    """
    return _Attention.apply(qkv, cu_seqlens, max_seqlen, jit_module.dropout_site(qkv.device, dropout))


def missing(device: torch.device) -> str | None:
    """Why these kernels cannot run on a device, in a few words; None where they can."""
    return jit_module.missing(device)
