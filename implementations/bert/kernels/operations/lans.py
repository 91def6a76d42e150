"""LANS over flat buffers, in three passes: 44 bytes per parameter with a gradient in bf16, where one tensor at a time
takes over three times that.

The first pass computes the squared norm of each tensor's gradient, by which it is normalized; the second updates the
moments and computes the squared norms of each tensor and of both of its directions; the third recomputes the directions
and applies them. After the first two, ranks that share the buffers add up the norms. Buffers, layout, order of sums and
``scalars`` are those of lamb.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
from torch import Tensor

from bert.kernels.operations.lamb import Layout, by_tensor, chunk_of, launch
from bert.kernels.support import launches
from bert.kernels.support.triton_support import constexpr, jit, tl


@jit
def _squares(begins, lengths, flat, partials, block: constexpr):
    chunk = tl.program_id(0)
    # Not by chunk_of: these norms decide whether the step is skipped.
    begin = tl.multiple_of(tl.load(begins + chunk), 64)
    length = tl.multiple_of(tl.load(lengths + chunk), 64)
    total = tl.zeros([block], tl.float32)
    for step in range(0, length, block):
        within = step + tl.arange(0, block)
        x = tl.load(flat + begin + within, mask=within < length, other=0.0).to(tl.float32)
        total += x * x
    tl.store(partials + chunk, tl.sum(total, axis=0))


@jit
def _moments(
    begins, lengths, tensors, decays, factors, gradient, master, first, second, scalars, partials, rate_1, rate_2, eps,
    block: constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    begin, length = chunk_of(begins, lengths, scalars)
    correction_1, correction_2 = tl.load(scalars + 2), tl.load(scalars + 3)
    tensor = tl.load(tensors + chunk)
    decay, factor = tl.load(decays + tensor), tl.load(factors + tensor)
    master_sum = tl.zeros([block], tl.float32)
    momentum_sum = tl.zeros([block], tl.float32)
    current_sum = tl.zeros([block], tl.float32)
    for step in range(0, length, block):
        within = step + tl.arange(0, block)
        inside = within < length
        element = begin + within
        n = tl.load(gradient + element, mask=inside, other=0.0).to(tl.float32) * factor
        p = tl.load(master + element, mask=inside, other=0.0)
        m = tl.load(first + element, mask=inside, other=0.0)
        v = tl.load(second + element, mask=inside, other=0.0)
        m += rate_1 * (n - m)
        v += rate_2 * (n * n - v)
        denominator = tl.sqrt(v * correction_2) + eps
        momentum = (m * correction_1) / denominator + decay * p
        current = n / denominator + decay * p
        tl.store(first + element, m, mask=inside)
        tl.store(second + element, v, mask=inside)
        master_sum += p * p
        momentum_sum += momentum * momentum
        current_sum += current * current
    tl.store(partials + 3 * chunk, tl.sum(master_sum, axis=0))
    tl.store(partials + 3 * chunk + 1, tl.sum(momentum_sum, axis=0))
    tl.store(partials + 3 * chunk + 2, tl.sum(current_sum, axis=0))


@jit
def _update(
    begins, lengths, tensors, decays, factors, gradient, master, first, second, parameters, sums, scalars, rate_1, eps,
    block: constexpr,
):  # fmt: skip
    begin, length = chunk_of(begins, lengths, scalars)
    correction_1, correction_2 = tl.load(scalars + 2), tl.load(scalars + 3)
    tensor = tl.load(tensors + tl.program_id(0))
    decay, factor, rate = tl.load(decays + tensor), tl.load(factors + tensor), tl.load(scalars)
    master_norm = tl.load(sums + 3 * tensor)
    momentum_norm, current_norm = tl.load(sums + 3 * tensor + 1), tl.load(sums + 3 * tensor + 2)
    scaled = (master_norm > 0.0) & (momentum_norm > 0.0)
    momentum_rate = rate * (1.0 - rate_1)
    momentum_rate *= tl.where(
        scaled, tl.sqrt(master_norm / tl.where(scaled, momentum_norm, 1.0)), 1.0
    )
    scaled = (master_norm > 0.0) & (current_norm > 0.0)
    current_rate = rate * rate_1
    current_rate *= tl.where(
        scaled, tl.sqrt(master_norm / tl.where(scaled, current_norm, 1.0)), 1.0
    )
    # Everything constant is multiplied out of the loop; r and c share denominator and decay.
    decay *= momentum_rate + current_rate
    momentum_rate *= correction_1
    current_rate *= factor
    for step in range(0, length, block):
        within = step + tl.arange(0, block)
        inside = within < length
        element = begin + within
        g = tl.load(gradient + element, mask=inside, other=0.0).to(tl.float32)
        p = tl.load(master + element, mask=inside, other=0.0)
        m = tl.load(first + element, mask=inside, other=0.0)
        v = tl.load(second + element, mask=inside, other=0.0)
        p -= (momentum_rate * m + current_rate * g) / (tl.sqrt(v * correction_2) + eps) + decay * p
        tl.store(master + element, p, mask=inside)
        tl.store(parameters + element, p.to(parameters.dtype.element_ty), mask=inside)


def squared_norms(layout: Layout, flat: Tensor) -> Tensor:
    """This shard's part of each tensor's squared norm, fp32 [tensors]. flat: of any floating type."""
    num_chunks = layout.begin.numel()
    partials = torch.empty(num_chunks, 1, dtype=torch.float32, device=flat.device)
    if num_chunks:
        # The same buffers and chunks as LAMB's, and so its settings.
        take = launches.blocks("lamb", flat.device)
        _squares[(num_chunks,)](
            layout.begin, layout.length, flat, partials, take.columns, **take.options
        )
    return by_tensor(layout, partials).reshape(-1)


def moments(
    layout: Layout, factors: Tensor, gradient: Tensor, master: Tensor, first: Tensor, second: Tensor,
    scalars: Tensor, beta1: float, beta2: float, eps: float,
) -> Tensor:  # fmt: skip
    """This shard's part of the squared norms of each tensor p and of its r and c (see LansRule), fp32 [tensors, 3].

    factors, fp32 [tensors]: turn the gradient into the normalized one, n. Updates the moments in place, unless
    ``scalars[1]`` is nan.
    """
    partials = torch.empty(layout.begin.numel(), 3, dtype=torch.float32, device=master.device)
    rates = 1 - beta1, 1 - beta2
    launch(
        _moments, layout, factors, gradient, master, first, second, scalars, partials, *rates, eps
    )
    return by_tensor(layout, partials)


def update(
    layout: Layout, factors: Tensor, gradient: Tensor, master: Tensor, first: Tensor, second: Tensor,
    parameters: Tensor, sums: Tensor, scalars: Tensor, beta1: float, eps: float,
) -> None:  # fmt: skip
    """Applies r and c to ``master`` in place; ``parameters`` (low precision) receives the rounded result.

    sums: of ``moments``, over all ranks.
    """
    buffers = master, first, second, parameters
    launch(_update, layout, factors, gradient, *buffers, sums, scalars, 1 - beta1, eps)
