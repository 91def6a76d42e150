"""A linear layer in fp8: x W^T forward, dy W and dy^T x backward, each operand with one scale a
tensor.

Its input comes in fp8 from the kernel that computed it, or is cast here, in both orders in one
pass, as the weight and the gradient are. Where there is no such hardware the product is done in
fp32 on the same fp8 numbers.

In an evaluation weights do not change: each is cast once, before its first batch, and nothing is
kept for a backward pass.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bert.kernels.fp8 import (
    GRADIENT,
    INPUT,
    ROW_MULTIPLE,
    WEIGHT,
    Scaling,
    Target,
    product,
)
from bert.kernels.fp8.cast import cast_rows, cast_transpose, transpose
from bert.kernels.support.weight_gradient import GradientTarget


class Operand(NamedTuple):
    """A matrix in fp8, and what undoes its scale (fp32, 0-d)."""

    numbers: Tensor
    inverse: Tensor


class Fp8Linear:
    """F.linear in fp8: product number ``number`` of those that share ``scaling``."""

    def __init__(self, scaling: Scaling, number: int) -> None:
        self.scaling, self.number = scaling, number
        # The weight [N, K] during an evaluation.
        self.held: Operand | None = None

    def runs(self, training: bool) -> bool:
        """Whether the product is done in fp8: in training, and in evaluations once there are
        scales.
        """
        return training or self.scaling.evaluates

    def takes_cast(self, num_rows: int) -> bool:
        """Whether the kernel that computes an input of ``num_rows`` rows can cast it, too."""
        return self.scaling.calibrated and num_rows % ROW_MULTIPLE == 0

    def target(self, which: int) -> Target:
        """Cast target of one of its tensors; only where ``takes_cast``."""
        return self.scaling.target(self.number, which)

    @torch.no_grad()
    def hold(self, weight: Tensor) -> None:
        """Casts the weight [N, K] for the evaluation that begins; each time into the memory where a
        graph reads it.
        """
        target = self.scaling.target_for(weight, self.number, WEIGHT)
        # Allocated once, as a captured evaluation reads the same memory every time.
        if self.held is None:
            self.held = Operand(
                torch.empty_like(weight, dtype=target.dtype),
                torch.empty_like(target.inverse),
            )
        cast_rows(weight, target, out=self.held.numbers)
        self.held.inverse.copy_(target.inverse)

    def held_product(
        self, x8: Tensor, x_inverse: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """x8 [T, K] times the weight that is held, plus bias [N] -> [T, N] of ``dtype``, without
        gradients.
        """
        assert self.held is not None
        return product(
            x8,
            self.held.numbers.t(),
            x_inverse,
            self.held.inverse,
            bias,
            dtype,
            fast=True,
        )

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, x8: Tensor | None = None
    ) -> Tensor:
        """x [T, K], weight [N, K], bias [N] -> [T, N] in x's type. N and K are multiples of 16.

        x8: x in fp8, as ``target(INPUT)`` says, where it is there already. In an evaluation the
        weight held counts.
        """
        num_rows = x.shape[0]
        missing = -num_rows % ROW_MULTIPLE
        # The hardware's product takes multiples of 16; rows of zeros change no sum.
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        if self.scaling.evaluates:
            target = self.target(INPUT)
            if x8 is None:
                target = self.scaling.target_for(x, self.number, INPUT)
                x8 = cast_rows(x, target)
            y = self.held_product(x8, target.inverse, bias, x.dtype)
        else:
            y = _Fp8Product.apply(x, x8, weight, bias, self.scaling, self.number)
        return y[:num_rows] if missing else y


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x8: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        scaling: Scaling,
        number: int,
    ) -> Tensor:
        x_target, x8_t = scaling.target(number, INPUT), None
        if x8 is None:
            x_target = scaling.target_for(x, number, INPUT)
            x8, x8_t, _ = cast_transpose(x, x_target)
        w_target = scaling.target_for(weight, number, WEIGHT)
        w8, w8_t, _ = cast_transpose(weight, w_target)
        # One order of x is kept; the other one is made of it in the backward pass.
        ctx.save_for_backward(
            x8 if x8_t is None else None, x8_t, w8_t, x_target.inverse, w_target.inverse
        )
        ctx.scaling, ctx.number = scaling, number
        ctx.sums_bias = bias is not None and ctx.needs_input_grad[3]
        ctx.weight_target = GradientTarget(weight)
        return product(
            x8, w8.t(), x_target.inverse, w_target.inverse, bias, x.dtype, fast=True
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x8, x8_t, w8_t, x_inverse, w_inverse = ctx.saved_tensors
        gradient = gradient.contiguous()
        # e5m2: gradients span more magnitudes than activations, and need fewer digits.
        target = ctx.scaling.target_for(gradient, ctx.number, GRADIENT)
        g8, g8_t, bias_gradient = cast_transpose(
            gradient, target, column_sums=ctx.sums_bias
        )
        # (T, N) times (N, K).
        dtype, fast = gradient.dtype, ctx.scaling.fast_backward
        x_gradient = product(g8, w8_t.t(), target.inverse, w_inverse, None, dtype, fast)
        x8_t = transpose(x8) if x8_t is None else x8_t
        # (N, T) times (T, K), written into the optimizer's buffer where it has one.
        operands = g8_t, x8_t.t(), target.inverse, x_inverse, None, dtype
        weight_gradient = ctx.weight_target.write(
            lambda out: product(*operands, fast, out)
        )
        return x_gradient, None, weight_gradient, bias_gradient, None, None
