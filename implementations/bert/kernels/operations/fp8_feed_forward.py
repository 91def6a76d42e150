"""The second half of an encoder layer in fp8: LayerNorm(x + dropout(W_2 GELU(W_1 x + b_1) + b_2)),
as one function.

Being one, nothing between its two products exists in bf16 that only a cast would read: GELU leaves
its result in fp8, in both orders, and its backward pass the gradient; the backward pass of
dropout_add_layer_norm leaves that of the second product. The scales must be known in advance:
calibrated.

Bytes that the kernels around the fp8 products of a layer move, for each element [T, D] of a hidden
state, F = 4 D:

    what                               separate casts             here
    input of QKV, of the first product 2 (2 + 1 + 1)              2 (1), 2 (1 + 1) to transpose
    GELU                               4 (2 + 2), 4 (2 + 1 + 1)   4 (2 + 1 + 1)
    gradient of GELU                   4 (4 + 2), 4 (2 + 1 + 1)   4 (4 + 1 + 1)
    gradient of the second product     2 written, 2 + 1 + 1       1 written, 1 + 1
    gradient of QKV, of its bias       3 (2 + 1 + 1), 3 (2)       3 (2 + 1 + 1)
    together                           104                        61

With BERT-large's 12,288 tokens of 1,024 in 24 layers that is 31.4 GB and 18.4 GB a step: 3.0 ms of
an H200's memory.

Compiled for sm_90 the two GELU kernels take 32 and 44 instructions an element by the tanh formula;
28 and 41 are what an H200 has time for while it moves the 4 and 6 bytes.

Everything is rounded to the type of the activations before it is cast, as if it had been written
and read again, so that all results equal those of the separate kernels bit for bit, but the
gradient of b_1, whose sum is in another order: by tiles, then over tiles. That gradient too is the
same every time.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bert.kernels.fp8 import GRADIENT, INPUT, WEIGHT, Target, product
from bert.kernels.fp8 import cast as fp8_cast
from bert.kernels.fp8.cast import bits, cast_transpose, store_both_orders, transpose
from bert.kernels.fp8.linear import Fp8Linear, Operand
from bert.kernels.operations import dropout_add_layer_norm as norm_kernels
from bert.kernels.operations.bias_gelu import _value_and_slope
from bert.kernels.support import launches
from bert.kernels.support.arithmetic import (
    column_sums,
    empty_fp32,
    load_fp32,
    program_tile,
    rounded,
    tile_at,
)
from bert.kernels.support.dropout import DropoutSites
from bert.kernels.support.triton_support import constexpr, jit, tl
from bert.kernels.support.weight_gradient import GradientTarget


@jit
def _gelu_cast(
    x,
    bias,
    cast,
    transposed,
    scale,
    largest,
    num_rows,
    width,
    tanh: constexpr,
    maximum: constexpr,
    block_rows: constexpr,
    block: constexpr,
):
    _, row, column = program_tile(width, block_rows, block)
    offset, inside = tile_at(row, column, num_rows, width)
    b = load_fp32(bias + column, column < width)
    h = load_fp32(x + offset, inside) + b[None, :]
    value, _ = _value_and_slope(h, tanh)
    # Rows outside hold GELU(bias), which would raise the largest magnitude.
    value = tl.where(inside, rounded(value, x.dtype.element_ty), 0.0)
    store_both_orders(
        value, cast, transposed, scale, largest, row, column, num_rows, width, maximum
    )


@jit
def _gelu_backward_cast(
    gradient,
    x,
    bias,
    cast,
    transposed,
    partials,
    scale,
    largest,
    num_rows,
    width,
    tanh: constexpr,
    maximum: constexpr,
    block_rows: constexpr,
    block: constexpr,
):
    tile, row, column = program_tile(width, block_rows, block)
    in_column = column < width
    offset, inside = tile_at(row, column, num_rows, width)
    b = load_fp32(bias + column, in_column)
    dy = load_fp32(gradient + offset, inside)
    h = load_fp32(x + offset, inside) + b[None, :]
    _, slope = _value_and_slope(h, tanh)
    dh = dy * slope  # 0 outside, as dy is
    tl.store(
        partials + tile.to(tl.int64) * width + column,
        tl.sum(dh, axis=0),
        mask=in_column,
    )
    value = rounded(dh, x.dtype.element_ty)
    store_both_orders(
        value, cast, transposed, scale, largest, row, column, num_rows, width, maximum
    )


def gelu_cast(
    x: Tensor, bias: Tensor, approximate: str, target: Target, rows_alone: bool = False
) -> tuple[Tensor, Tensor | None]:
    """GELU(x + bias) of x [R, F] in fp8 [R, F] and transposed [F, R], but for a product without a
    backward pass.
    """
    num_rows, width = x.shape
    cast = torch.empty(num_rows, width, dtype=target.dtype, device=x.device)
    transposed = None if rows_alone else cast.new_empty(width, num_rows)
    take = launches.blocks("cast", x.device)
    _gelu_cast[(take.tiles(num_rows, width)[1],)](
        x,
        bias,
        cast,
        transposed,
        target.scale,
        bits(target.largest),
        num_rows,
        width,
        approximate == "tanh",
        target.maximum,
        take.rows,
        take.columns,
        **take.options,
    )
    return cast, transposed


def gelu_backward_cast(
    gradient: Tensor, x: Tensor, bias: Tensor, approximate: str, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of x [R, F] in fp8 [R, F] and transposed [F, R], and that of the bias [F]."""
    num_rows, width = x.shape
    cast, transposed = fp8_cast.new_both_orders(num_rows, width, target)
    take = launches.blocks("cast", x.device)
    down, tiles = take.tiles(num_rows, width)
    partials = empty_fp32(x.device, down, width)
    _gelu_backward_cast[(tiles,)](
        gradient,
        x,
        bias,
        cast,
        transposed,
        partials,
        target.scale,
        bits(target.largest),
        num_rows,
        width,
        approximate == "tanh",
        target.maximum,
        take.rows,
        take.columns,
        **take.options,
    )
    return cast, transposed, column_sums(partials, bias.dtype)


class Settings(NamedTuple):
    """Non-tensor arguments. following: cast target of the result, if the next product takes fp8;
    pre_norm: see dropout_add_layer_norm.
    """

    first: Fp8Linear
    second: Fp8Linear
    approximate: str
    eps: float
    dropout: float
    sites: DropoutSites
    following: Target | None
    pre_norm: bool = False


class Weights(NamedTuple):
    """Both products' weights [F, D], [D, F] and biases [F], [D], and LayerNorm's two [D]."""

    weight_1: Tensor
    bias_1: Tensor
    weight_2: Tensor
    bias_2: Tensor
    norm_weight: Tensor
    norm_bias: Tensor


def _product(
    a: Operand, b: Operand, dtype: torch.dtype, fast: bool, out: Any = None
) -> Tensor:
    """a [M, K] times b [N, K] transposed -> [M, N] of ``dtype``."""
    factors = a.numbers, b.numbers.t(), a.inverse, b.inverse
    return product(*factors, None, dtype, fast, out)


def _weight_gradient(
    weight: Tensor,
    gradient_t: Operand,
    input_t: Operand,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """[N, T] times [T, K], where the optimizer has memory for the weight's gradient or elsewhere.

    Both in the order of a product's transposes: gradient_t [N, T], input_t [K, T].
    """
    return GradientTarget(weight).write(
        lambda out: _product(gradient_t, input_t, dtype, fast, out)
    )


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        x: Tensor,
        x8: Tensor,
        residual: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        weights, dtype = Weights(*tensors), x.dtype
        first, second = settings.first, settings.second
        x_inverse, a_target = first.target(INPUT).inverse, second.target(INPUT)
        # Weights change every step, and so are cast in each.
        w1_target, w2_target = first.target(WEIGHT), second.target(WEIGHT)
        w1, w1_t, _ = cast_transpose(weights.weight_1, w1_target)
        w2, w2_t, _ = cast_transpose(weights.weight_2, w2_target)
        inner = _product(
            Operand(x8, x_inverse), Operand(w1, w1_target.inverse), dtype, fast=True
        )  # (T, F)
        a8, a8_t = gelu_cast(inner, weights.bias_1, settings.approximate, a_target)
        projected = _product(
            Operand(a8, a_target.inverse),
            Operand(w2, w2_target.inverse),
            dtype,
            fast=True,
        )  # (T, D)
        # Kept for the backward pass, which makes the same mask again.
        ctx.drop = settings.sites.next(settings.dropout)
        operands = norm_kernels.Operands(
            projected, weights.bias_2, residual, weights.norm_weight, weights.norm_bias
        )
        output, stream, cast, saved = norm_kernels.start_forward(
            operands, settings.eps, ctx.drop, settings.following, settings.pre_norm
        )
        # Of each factor the order that the backward pass multiplies: of x the one that is there.
        x_and_a = x8, x_inverse, a8_t, a_target.inverse
        both_weights = w1_t, w1_target.inverse, w2_t, w2_target.inverse
        ctx.save_for_backward(*x_and_a, *both_weights, inner, weights.bias_1, *saved)
        ctx.settings, ctx.weights = settings, (weights.weight_1, weights.weight_2)
        # An unused result then has no gradient, instead of zeros to be read.
        ctx.set_materialize_grads(False)
        if cast is not None:
            ctx.mark_non_differentiable(cast)
        return output, stream, cast

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        settings, tensors = ctx.settings, ctx.saved_tensors
        x, a_t, w1_t, w2_t = (Operand(*tensors[i : i + 2]) for i in range(0, 8, 2))
        inner, bias_1, *saved = tensors[8:]
        dtype, fast = inner.dtype, settings.first.scaling.fast_backward
        # Dropout and LayerNorm: y [T, D] is the second product's result.
        y_target = settings.second.target(GRADIENT)
        of_norm = norm_kernels.start_backward(
            norm_kernels.Saved(*saved), ctx.drop, gradients[:2], y_target
        )
        y = Operand(of_norm.x, y_target.inverse)
        # The second product, of a [T, F] and W_2 [D, F].
        weight_1, weight_2 = ctx.weights
        weight_2_gradient = _weight_gradient(
            weight_2, y._replace(numbers=transpose(y.numbers)), a_t, dtype, fast
        )
        a_gradient = _product(y, w2_t, dtype, fast)
        # GELU: h [T, F] is the first product's result.
        h_target = settings.first.target(GRADIENT)
        h8, h8_t, bias_1_gradient = gelu_backward_cast(
            a_gradient, inner, bias_1, settings.approximate, h_target
        )
        # The first product, of x [T, D] and W_1 [F, D].
        weight_1_gradient = _weight_gradient(
            weight_1,
            Operand(h8_t, h_target.inverse),
            x._replace(numbers=transpose(x.numbers)),
            dtype,
            fast,
        )
        x_gradient = _product(Operand(h8, h_target.inverse), w1_t, dtype, fast)
        of_first = (
            x_gradient,
            None,
            of_norm.residual,
            weight_1_gradient,
            bias_1_gradient,
        )
        of_second = weight_2_gradient, of_norm.bias, of_norm.weight, of_norm.norm_bias
        return None, *of_first, *of_second


def feed_forward(
    x: Tensor, x8: Tensor, residual: Tensor, weights: Weights, settings: Settings
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x and residual [T, D] (as dropout_add_layer_norm leaves them), x8 [T, D]: x in fp8 for the
    first product.

    Returns the two results [T, D] of dropout_add_layer_norm, and the first one in fp8 where
    something takes it.
    """
    first, second = settings.first, settings.second
    if not first.scaling.evaluates:
        return _FeedForward.apply(settings, x, x8, residual, *weights)
    # An evaluation: no transposes, and weights cast once (Fp8Linear.hold).
    inner = first.held_product(x8, first.target(INPUT).inverse, None, x.dtype)  # (T, F)
    target = second.target(INPUT)
    a8, _ = gelu_cast(
        inner, weights.bias_1, settings.approximate, target, rows_alone=True
    )
    projected = second.held_product(a8, target.inverse, None, x.dtype)  # (T, D)
    operands = norm_kernels.Operands(
        projected, weights.bias_2, residual, weights.norm_weight, weights.norm_bias
    )
    drop = settings.sites.next(settings.dropout)
    return norm_kernels.start_forward(
        operands, settings.eps, drop, settings.following, settings.pre_norm
    )[:3]
