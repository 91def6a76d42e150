"""LAMB over flat buffers, in two passes: 40 bytes per parameter, where one tensor at a time takes
over twice that.

All parameters lie end to end in one buffer, aligned to ALIGNMENT and padded with zeros; so do the
gradients, moments and low-precision copies. The first pass updates the moments and computes the
squared norms of each tensor and of its update; the second recomputes the update and applies it.
Between the two, ranks that share the buffers add up the norms. Sums are taken in chunks, then over
chunks, always in the same order: results are reproducible bit for bit, and all ranks compute the
same norms.

Everything that changes from step to step is on the device, for replayed CUDA graphs: ``scalars``,
fp32 [4], holds the learning rate, the factor of the gradients (clipping and unscaling), 1 / (1 -
beta1^t) and 1 / (1 - beta2^t). A factor of nan skips the step: nothing changes.

Kept beside libraries: apex's FusedLAMB takes no bf16 and keeps learning rate and step number on the
host, where a graph freezes them; its FusedMixedPrecisionLamb updates whole parameters on every
rank, not its shard; its DistributedFusedLAMB takes gradients in fp16 only.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bert.kernels.support import launches
from bert.kernels.support.arithmetic import empty_fp32, load_fp32
from bert.kernels.support.triton_support import constexpr, jit, tl

ALIGNMENT = 64  # elements: 128 bytes in bf16, so that every access is whole cache lines
CHUNK = 16384  # elements a program works on; a multiple of its block


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the tensors of a model lie in a flat buffer, or in one shard of it.

    Chunk c is elements [begin[c], begin[c] + length[c]) of the shard and belongs to tensor
    ``tensor[c]``; tensor i has chunks [offsets[i], offsets[i+1]), none if the shard has nothing of
    it. ``decay`` fp32 [tensors]: weight decay; tensors with 0 have no trust ratio either.
    """

    size: int
    begin: Tensor  # int64 [C]
    length: Tensor  # int32 [C]
    tensor: Tensor  # int32 [C]
    offsets: Tensor  # int32 [tensors + 1]
    decay: Tensor  # fp32 [tensors]
    # Of each tensor, of each of its parts in the shard: begin, end.
    spans: Sequence[Sequence[tuple[int, int]]]


def spans_layout(
    size: int,
    spans: Sequence[Sequence[tuple[int, int]]],
    decays: Sequence[float],
    device: torch.device,
) -> Layout:
    """Layout of a shard of ``size`` elements, which holds parts of each tensor at its spans."""
    # No chunk holds two tensors, so that its sums are of one.
    chunks = [
        (first, min(CHUNK, stop - first), number)
        for number, parts in enumerate(spans)
        for start, stop in parts
        for first in range(start, stop, CHUNK)
    ]
    begins, lengths, tensors = zip(*chunks, strict=True) if chunks else ((), (), ())
    counts = [
        sum(-(-(stop - start) // CHUNK) for start, stop in parts) for parts in spans
    ]
    return Layout(
        size=size,
        begin=torch.tensor(begins, dtype=torch.int64, device=device),
        length=torch.tensor(lengths, dtype=torch.int32, device=device),
        tensor=torch.tensor(tensors, dtype=torch.int32, device=device),
        offsets=torch.tensor(
            [0, *itertools.accumulate(counts)], dtype=torch.int32, device=device
        ),
        decay=torch.tensor(decays, dtype=torch.float32, device=device),
        spans=spans,
    )


@jit
def _chunk_of(begins, lengths, scalars):
    """First element and length of this program's chunk; length 0 if the step is skipped."""
    chunk = tl.program_id(0)
    factor = tl.load(scalars + 1)
    # The compiler reads 16 bytes at a time only if it knows that tensors are aligned.
    begin = tl.multiple_of(tl.load(begins + chunk), 64)
    # nan differs from itself: the chunks of a skipped step are empty.
    return begin, tl.multiple_of(
        tl.where(factor == factor, tl.load(lengths + chunk), 0), 64
    )


@jit
def _moments(
    begins,
    lengths,
    tensors,
    decays,
    gradient,
    master,
    first,
    second,
    scalars,
    partials,
    rate_1,
    rate_2,
    eps,
    block: constexpr,
):
    chunk = tl.program_id(0)
    begin, length = _chunk_of(begins, lengths, scalars)
    factor = tl.load(scalars + 1)
    correction_1 = tl.load(scalars + 2)
    correction_2 = tl.load(scalars + 3)
    decay = tl.load(decays + tl.load(tensors + chunk))
    # By lane, to be added up once after the loop.
    master_sum = tl.zeros([block], tl.float32)
    update_sum = tl.zeros([block], tl.float32)
    for step in range(0, length, block):
        within = step + tl.arange(0, block)
        inside = within < length
        element = begin + within
        g = load_fp32(gradient + element, inside) * factor
        p = load_fp32(master + element, inside)
        m = load_fp32(first + element, inside)
        v = load_fp32(second + element, inside)
        m += rate_1 * (g - m)
        v += rate_2 * (g * g - v)
        u = (m * correction_1) / (tl.sqrt(v * correction_2) + eps) + decay * p
        # Moments are stored, u is not: the second pass computes it again from what it reads anyway.
        tl.store(first + element, m, mask=inside)
        tl.store(second + element, v, mask=inside)
        master_sum += p * p
        update_sum += u * u
    tl.store(partials + 2 * chunk, tl.sum(master_sum, axis=0))
    tl.store(partials + 2 * chunk + 1, tl.sum(update_sum, axis=0))


@jit
def _by_tensor(offsets, partials, sums, block: constexpr):
    tensor, column = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(offsets + tensor), tl.load(offsets + tensor + 1)
    total = tl.zeros([block], tl.float32)
    # One program for each tensor, in the order of its chunks.
    for first in range(begin, end, block):
        chunk = first + tl.arange(0, block)
        total += load_fp32(partials + 2 * chunk + column, chunk < end)
    tl.store(sums + 2 * tensor + column, tl.sum(total, axis=0))


@jit
def _update(
    begins,
    lengths,
    tensors,
    decays,
    master,
    first,
    second,
    parameters,
    norms,
    scalars,
    eps,
    block: constexpr,
):
    begin, length = _chunk_of(begins, lengths, scalars)
    tensor = tl.load(tensors + tl.program_id(0))
    decay = tl.load(decays + tensor)
    rate = tl.load(scalars)
    correction_1 = tl.load(scalars + 2)
    correction_2 = tl.load(scalars + 3)
    master_norm = tl.load(norms + 2 * tensor)
    update_norm = tl.load(norms + 2 * tensor + 1)
    scaled = (decay > 0.0) & (master_norm > 0.0) & (update_norm > 0.0)
    # Both branches are computed, so the divisor must not be 0 in either.
    rate *= tl.where(
        scaled, tl.sqrt(master_norm / tl.where(scaled, update_norm, 1.0)), 1.0
    )
    for step in range(0, length, block):
        within = step + tl.arange(0, block)
        inside = within < length
        element = begin + within
        p = load_fp32(master + element, inside)
        m = load_fp32(first + element, inside)
        v = load_fp32(second + element, inside)
        p -= rate * ((m * correction_1) / (tl.sqrt(v * correction_2) + eps) + decay * p)
        tl.store(master + element, p, mask=inside)
        if parameters is not None:
            tl.store(
                parameters + element, p.to(parameters.dtype.element_ty), mask=inside
            )


def _launch(kernel: Any, layout: Layout, *arguments: Any) -> None:
    """Launches a kernel, whose first arguments are begins, lengths, tensors and decays, with a
    program per chunk.
    """
    # A shard of padding alone has no chunks.
    if layout.begin.numel():
        chunks = layout.begin, layout.length, layout.tensor, layout.decay
        take = launches.blocks("lamb", layout.begin.device)
        kernel[(layout.begin.numel(),)](
            *chunks, *arguments, take.columns, **take.options
        )


def moments(
    layout: Layout,
    gradient: Tensor,
    master: Tensor,
    first: Tensor,
    second: Tensor,
    scalars: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> Tensor:
    """Updates the moments in place from g = factor * gradient, m = b1 m + (1-b1) g, v = b2 v +
    (1-b2) g^2.

    Returns fp32 [tensors, 2]: this shard's part of the squared norms of each tensor and of its
    update u = (m c1) / (sqrt(v c2) + eps) + decay p. All buffers have ``layout.size`` elements;
    master and moments fp32, the gradient of any floating type. Formula: You et al. 2020, arXiv
    1904.00962, algorithm 2 (optim/rules.py, LambRule).
    """
    partials = empty_fp32(master.device, layout.begin.numel(), 2)
    rates = 1 - beta1, 1 - beta2
    _launch(
        _moments,
        layout,
        gradient,
        master,
        first,
        second,
        scalars,
        partials,
        *rates,
        eps,
    )
    num_tensors = len(layout.spans)
    sums = empty_fp32(master.device, num_tensors, 2)
    _by_tensor[(num_tensors, 2)](layout.offsets, partials, sums, 128, num_warps=4)
    return sums


def update(
    layout: Layout,
    master: Tensor,
    first: Tensor,
    second: Tensor,
    parameters: Tensor | None,
    norms: Tensor,
    scalars: Tensor,
    eps: float,
) -> None:
    """p -= lr r u in place; r: root of the ratio of the norms where decay applies and both are
    positive, else 1.

    ``parameters`` (of any floating type, or None) receives the rounded result; norms: of
    ``moments``, over all ranks.
    """
    _launch(_update, layout, master, first, second, parameters, norms, scalars, eps)
