"""Cross-entropy of the masked-LM head over a vocabulary padded for speed.

Fused, the forward pass reads the logits once, and the backward pass overwrites them by their
gradient: a hundred megabytes less, and no softmax is stored. A second backward pass is an error, as
the logits are gone.

Kept beside libraries: Liger's moves as many bytes, but reads the number of labels and the incoming
gradient on the host, which a CUDA graph does not allow, and is in no NGC image; TransformerEngine's
writes the gradient in fp32; apex's writes it beside the logits, which it keeps.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bert.kernels.support import launches
from bert.kernels.support.arithmetic import empty_fp32, load_fp32
from bert.kernels.support.triton_support import constexpr, jit, tl

# ignore_index of PyTorch's cross_entropy.
IGNORE = -100


def reference(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """Loss of each row: logits [M, V], labels int [M] (-100 = no label) -> float [M], 0 where there
    is no label.

    Columns from ``vocab_size`` on are padding and excluded from the softmax. At least fp32
    throughout.
    """
    logits = logits[:, :vocab_size]
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")


@jit
def _forward(
    logits,
    labels,
    losses,
    log_sums,
    width,
    vocab_size,
    ignore: constexpr,
    depth: constexpr,
    block: constexpr,
):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * width
    within = tl.arange(0, depth)[:, None] * block + tl.arange(0, block)[None, :]
    maximum = tl.full([block], float("-inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    # An online softmax in each of ``block`` lanes, over ``depth`` logits at a time: 1 + 1/depth
    # exps per logit.
    for begin in range(0, width, depth * block):
        column = begin + within
        # Loads are bounded by the padded width, a multiple of 8, so that they are 16 bytes wide.
        x = load_fp32(line + column, column < width)
        x = tl.where(column < vocab_size, x, float("-inf"))
        larger = tl.maximum(maximum, tl.max(x, axis=0))
        # A lane that has seen padding alone: -inf minus -inf would be nan.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(maximum - shift) + tl.sum(
            tl.exp(x - shift[None, :]), axis=0
        )
        maximum = larger
    row_maximum = tl.max(maximum, axis=0)
    log_sum = row_maximum + tl.log(
        tl.sum(total * tl.exp(maximum - row_maximum), axis=0)
    )
    label = tl.load(labels + row)
    counts = label != ignore
    chosen = load_fp32(line + label, counts)
    tl.store(losses + row, tl.where(counts, log_sum - chosen, 0.0))
    tl.store(log_sums + row, log_sum)


@jit
def _backward(
    gradient,
    logits,
    labels,
    log_sums,
    width,
    vocab_size,
    ignore: constexpr,
    block: constexpr,
):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * width
    column = tl.program_id(1) * block + tl.arange(0, block)
    label = tl.load(labels + row)
    log_sum = tl.load(log_sums + row)
    # The loss of a row without a label is always 0, whatever gradient arrives.
    upstream = tl.where(label != ignore, tl.load(gradient + row), 0.0)
    x = load_fp32(line + column, column < width)
    # 0 for padded columns, so that the decoder's padded rows stay 0.
    dx = tl.where(column < vocab_size, tl.exp(x - log_sum), 0.0)
    dx = tl.where(column == label, dx - 1.0, dx) * upstream
    tl.store(line + column, dx.to(logits.dtype.element_ty), mask=column < width)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
        assert logits.is_contiguous(), "the gradient is written over the logits"
        num_rows, width = logits.shape
        losses, log_sums = empty_fp32(logits.device, 2, num_rows)
        if num_rows:
            take = launches.blocks("cross_entropy forward", logits.device)
            sizes = take.rows, take.columns
            _forward[(num_rows,)](
                logits,
                labels,
                losses,
                log_sums,
                width,
                vocab_size,
                IGNORE,
                *sizes,
                **take.options,
            )
        ctx.save_for_backward(logits, labels, log_sums)
        ctx.vocab_size = vocab_size
        ctx.consumed = False
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.consumed:
            raise RuntimeError(
                "the logits of the fused cross-entropy hold their gradient already: one backward pass"
            )
        # Before the launch: from then on the logits may be half overwritten.
        ctx.consumed = True
        logits, labels, log_sums = ctx.saved_tensors
        num_rows, width = logits.shape
        if num_rows:
            take = launches.blocks("cross_entropy backward", logits.device)
            _backward[(num_rows, -(-width // take.columns))](
                gradient.float().contiguous(),
                logits,
                labels,
                log_sums,
                width,
                ctx.vocab_size,
                IGNORE,
                take.columns,
                **take.options,
            )
        # The same memory, which now holds the gradient.
        return logits.detach(), None, None


def fused(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """``reference`` for contiguous logits, which the backward pass overwrites by their gradient.

    Nothing else may read the logits after the backward pass.
    """
    return _CrossEntropy.apply(logits, labels, vocab_size)
