"""The end of both halves of an encoder layer: LayerNorm(residual + dropout(x + bias)).

The result is returned twice, for the next product and for the residual connection around it, so
that the kernel can add up their gradients; those of one tensor used twice would be summed in a
separate pass over memory.

Fused, the forward pass reads x and the residual once and writes the result; the backward pass reads
them again with the incoming gradient and recomputes sum and dropout, so that only two numbers per
row are stored. Gradients of bias, weight and norm_bias are summed over rows within each program,
then over programs, always in the same order.

With ``pre_norm`` the second result is the sum that was normalized, the residual stream of a Pre-LN
layer, which may begin here (no residual). Fused, that sum is stored for the backward pass instead
of the operands, and normalized after rounding; the gradients of both results are added up in the
same pass.

With a Target, the forward pass also writes the result in fp8 for the next product, one more byte
per element instead of four of a separate cast; the backward pass writes x's gradient in fp8 only.
Both round to x's type first, and so equal a separate cast.

Kept beside libraries: Liger's, apex's and TransformerEngine's LayerNorm take neither dropout nor
residual, so that the sum is written and read once more. torch.compile (2.13) fuses the forward
pass, but keeps mask and sum for the backward pass, 3 more bytes an element written and read, sums
the vectors' gradients in passes of their own, and does not cast the result.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bert.kernels.fp8 import Target
from bert.kernels.fp8.cast import by_eights, cast_arguments, magnitude_bits, to_fp8
from bert.kernels.support import launches, triton_support
from bert.kernels.support.arithmetic import (
    centered_rows,
    column_sums,
    empty_fp32,
    gradient_of_rows,
    load_fp32,
    rounded,
    tile_at,
)
from bert.kernels.support.dropout import Dropout, DropoutSites, keep_rows
from bert.kernels.support.triton_support import (
    constexpr,
    jit,
    next_power_of_2,
    row_warps,
    tl,
)


def reference(
    x: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    dropout: float,
    sites: DropoutSites,
    pre_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """x, residual [T, D]; bias, weight, norm_bias [D]. Returns the same [T, D] twice; with
    ``pre_norm`` it and the sum.

    Dropout is PyTorch's own; only the fused kernel takes a site.
    """
    x = x + bias
    if dropout:
        x = F.dropout(x, dropout)
    z = x if residual is None else residual + x
    y = F.layer_norm(z, (x.shape[-1],), weight, norm_bias, eps)
    return y, z if pre_norm else y


@jit
def _forward(
    x,
    bias,
    residual,
    weight,
    norm_bias,
    output,
    sums,
    cast,
    cast_scale,
    largest,
    mean_out,
    rstd_out,
    seed,
    site,
    scale,
    num_rows,
    width,
    eps,
    maximum: constexpr,
    threshold: constexpr,
    block_rows: constexpr,
    block: constexpr,
):
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, block)
    in_column = column < width
    offset, inside = tile_at(row, column, num_rows, width)
    b = load_fp32(bias + column, in_column)
    h = load_fp32(x + offset, inside) + b[None, :]
    if threshold > 0:
        h = tl.where(keep_rows(seed, site, row, column, threshold), h * scale, 0.0)
    z = h
    if residual is not None:
        z = load_fp32(residual + offset, inside) + h
    if sums is not None:
        # As the backward pass will read it, so that both see one sum.
        z = rounded(z, sums.dtype.element_ty)
        tl.store(sums + offset, z.to(sums.dtype.element_ty), mask=inside)
    centered, mean, rstd = centered_rows(z, inside, width, eps)
    w = load_fp32(weight + column, in_column)
    nb = load_fp32(norm_bias + column, in_column)
    y = centered * rstd[:, None] * w[None, :] + nb[None, :]
    y = y.to(output.dtype.element_ty)
    tl.store(output + offset, y, mask=inside)
    if cast is not None:
        value = tl.where(inside, y.to(tl.float32), 0.0)
        if largest is not None:
            # Relaxed: a maximum does not depend on the order, and is read by a later kernel.
            tl.atomic_max(largest, tl.max(magnitude_bits(value)), sem="relaxed")
        value = to_fp8(value, tl.load(cast_scale), maximum, cast.dtype.element_ty)
        tl.store(cast + by_eights(offset, inside), value, mask=inside)
    tl.store(mean_out + row, mean, mask=row < num_rows)
    tl.store(rstd_out + row, rstd, mask=row < num_rows)


@jit
def _backward(
    gradient_1,
    gradient_2,
    x,
    bias,
    residual,
    weight,
    mean_in,
    rstd_in,
    seed,
    site,
    x_gradient,
    cast_scale,
    largest,
    residual_gradient,
    partials,
    scale,
    num_rows,
    width,
    maximum: constexpr,
    both: constexpr,
    threshold: constexpr,
    block_rows: constexpr,
    block: constexpr,
):
    column = tl.arange(0, block)
    in_column = column < width
    if bias is not None:
        b = load_fp32(bias + column, in_column)
    w = load_fp32(weight + column, in_column)
    bias_sum = tl.zeros([block], tl.float32)
    weight_sum = tl.zeros([block], tl.float32)
    norm_bias_sum = tl.zeros([block], tl.float32)
    if largest is not None:
        magnitude = tl.zeros([block], tl.int32)
    num_tiles = tl.cdiv(num_rows, block_rows)
    # As many programs as are resident, each over many tiles, for few partial sums.
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = tile * block_rows + tl.arange(0, block_rows)
        in_row = row < num_rows
        offset, inside = tile_at(row, column, num_rows, width)
        dy = load_fp32(gradient_1 + offset, inside)
        # The result was returned twice; of Pre-LN the second one is the sum, which is added below.
        if both and bias is not None:
            dy += load_fp32(gradient_2 + offset, inside)
        # Without bias x is the sum.
        z = load_fp32(x + offset, inside)
        # The mask is computed again, not stored.
        keep_scale = tl.full([block_rows, block], 1.0, tl.float32)
        if threshold > 0:
            keep_scale = tl.where(
                keep_rows(seed, site, row, column, threshold), scale, 0.0
            )
        if bias is not None:
            h = z + b[None, :]
            z = load_fp32(residual + offset, inside) + h * keep_scale
        mean = load_fp32(mean_in + row, in_row)
        rstd = load_fp32(rstd_in + row, in_row)
        normalized = tl.where(inside, (z - mean[:, None]) * rstd[:, None], 0.0)
        dz = gradient_of_rows(dy, w, normalized, rstd, width)
        if both and bias is None:
            dz += load_fp32(gradient_2 + offset, inside)
        dh = tl.where(inside, dz * keep_scale, 0.0)
        if residual_gradient is not None:
            tl.store(
                residual_gradient + offset,
                dz.to(residual_gradient.dtype.element_ty),
                mask=inside,
            )
        # In registers until the end of all tiles; fp32, as thousands of rows are summed.
        bias_sum += tl.sum(dh, axis=0)
        weight_sum += tl.sum(dy * normalized, axis=0)
        norm_bias_sum += tl.sum(dy, axis=0)
        if largest is None:
            tl.store(
                x_gradient + offset, dh.to(x_gradient.dtype.element_ty), mask=inside
            )
        else:
            # Rounded first, as a separate cast would have read it.
            value = dh.to(x.dtype.element_ty).to(tl.float32)
            magnitude = tl.maximum(magnitude, tl.max(magnitude_bits(value), axis=0))
            value = to_fp8(
                value, tl.load(cast_scale), maximum, x_gradient.dtype.element_ty
            )
            tl.store(x_gradient + by_eights(offset, inside), value, mask=inside)
    # Bias, weight and norm_bias: (programs, 3, D).
    line = partials + tl.program_id(0).to(tl.int64) * 3 * width + column
    tl.store(line, bias_sum, mask=in_column)
    tl.store(line + width, weight_sum, mask=in_column)
    tl.store(line + 2 * width, norm_bias_sum, mask=in_column)
    if largest is not None:
        tl.atomic_max(largest, tl.max(magnitude), sem="relaxed")


FITTING_WIDTH = 1024  # up to which registers are limited


class Operands(NamedTuple):
    """The tensors of the operation, or their gradients: x, residual [T, D]; bias, weight, norm_bias
    [D].
    """

    x: Tensor
    bias: Tensor
    residual: Tensor | None
    weight: Tensor
    norm_bias: Tensor


class Saved(NamedTuple):
    """Tensors saved for the backward kernel: x, residual [T, D], bias, weight [D]; of each row
    mean and 1 / standard deviation, fp32 [T]. Of Pre-LN x is the sum, and bias None."""

    x: Tensor
    bias: Tensor | None
    residual: Tensor | None
    weight: Tensor
    mean_in: Tensor
    rstd_in: Tensor


def _blocks(direction: str, x: Tensor) -> launches.Blocks:
    suffix = ", fp32" if x.dtype == torch.float32 else ""
    return launches.blocks(f"layer norm {direction}{suffix}", x.device)


def start_forward(
    operands: Operands,
    eps: float,
    drop: Dropout,
    target: Target | None,
    pre_norm: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Saved]:
    """Launches the kernel. Returns both results, the first one also in fp8 if there is a target,
    and Saved.
    """
    x, residual = operands.x.contiguous(), operands.residual
    residual = None if residual is None else residual.contiguous()
    operands = operands._replace(x=x, residual=residual)
    num_rows, width = x.shape
    output, sums = torch.empty_like(x), torch.empty_like(x) if pre_norm else None
    cast = None if target is None else torch.empty_like(x, dtype=target.dtype)
    mean, rstd = empty_fp32(x.device, 2, num_rows)
    take = _blocks("forward", x)
    _forward[(-(-num_rows // take.rows),)](
        **operands._asdict(),
        output=output,
        sums=sums,
        cast=cast,
        **cast_arguments(target),
        mean_out=mean,
        rstd_out=rstd,
        **vars(drop),
        num_rows=num_rows,
        width=width,
        eps=eps,
        block_rows=take.rows,
        block=next_power_of_2(width),
        num_warps=row_warps(take.num_warps, width),
    )
    if sums is not None:
        return (
            output,
            sums,
            cast,
            Saved(sums, None, residual, operands.weight, mean, rstd),
        )
    saved = Saved(x, operands.bias, residual, operands.weight, mean, rstd)
    # The same memory, but to autograd a second result, not a view.
    stream = output.new_empty(0).set_(
        output.untyped_storage(), 0, output.shape, output.stride()
    )
    return output, stream, cast, saved


def start_backward(
    saved: Saved,
    drop: Dropout,
    gradients: Sequence[Tensor | None],
    target: Target | None,
) -> Operands:
    """Launches the kernel on Saved and the gradients of the two results, None for an unused one.

    Returns the gradients of the operands; that of x in fp8 if there is a target.
    """
    x = saved.x
    if saved.bias is None and gradients[0] is None:  # only the sum was used
        gradients = [torch.zeros_like(x), *gradients[1:]]
    given = [gradient.contiguous() for gradient in gradients if gradient is not None]
    num_rows, width = x.shape
    take = _blocks("backward", x)
    # A line of partial sums for each program: no more than are resident.
    num_programs = triton_support.num_programs(
        x.device, take.programs, -(-num_rows // take.rows)
    )
    partials = empty_fp32(x.device, num_programs, 3, width)
    x_gradient = torch.empty_like(x, dtype=x.dtype if target is None else target.dtype)
    residual_gradient = (
        None if saved.residual is None else torch.empty_like(saved.residual)
    )
    _backward[(num_programs,)](
        # With one gradient both names are its memory, and the kernel reads it once.
        gradient_1=given[0],
        gradient_2=given[-1],
        both=len(given) == 2,
        **saved._asdict(),
        **vars(drop),
        x_gradient=x_gradient,
        residual_gradient=residual_gradient,
        partials=partials,
        **cast_arguments(target),
        num_rows=num_rows,
        width=width,
        block_rows=take.rows,
        block=next_power_of_2(width),
        num_warps=row_warps(take.num_warps, width),
        maxnreg=take.max_registers if width <= FITTING_WIDTH else None,
    )
    bias_gradient, *of_norm = column_sums(partials, saved.weight.dtype)
    return Operands(x_gradient, bias_gradient, residual_gradient, *of_norm)


class _DropoutAddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        eps: float,
        drop: Dropout,
        target: Target | None,
        pre_norm: bool,
        *operands: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        output, stream, cast, saved = start_forward(
            Operands(*operands), eps, drop, target, pre_norm
        )
        ctx.save_for_backward(*saved)
        ctx.drop = drop
        # An unused result then has no gradient, instead of zeros to be read.
        ctx.set_materialize_grads(False)
        if cast is not None:
            # The first result carries the gradient of both.
            ctx.mark_non_differentiable(cast)
        return output, stream, cast

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_inputs = start_backward(
            Saved(*ctx.saved_tensors), ctx.drop, gradients[:2], None
        )
        return None, None, None, None, *of_inputs


def fused(
    x: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    dropout: float,
    sites: DropoutSites,
    pre_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """``reference`` in one kernel each way; dropout of the next of ``sites``."""
    operands = Operands(x, bias, residual, weight, norm_bias)
    y, stream, _ = _DropoutAddLayerNorm.apply(
        eps, sites.next(dropout), None, pre_norm, *operands
    )
    return y, stream


def fused_with_cast(
    operands: Operands,
    eps: float,
    dropout: float,
    sites: DropoutSites,
    target: Target,
    pre_norm: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``fused``, and its first result in fp8 [T, D] (no gradient)."""
    return _DropoutAddLayerNorm.apply(
        eps, sites.next(dropout), target, pre_norm, *operands
    )
