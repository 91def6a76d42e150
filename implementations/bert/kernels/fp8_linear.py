"""Matrix products in fp8: x W^T forward, dy W and dy^T x backward, each with one scale a tensor.

Activations and weights are cast to e4m3, gradients to e5m2 (Micikevicius et al. 2022, arXiv 2209.05433). A tensor is
multiplied by its scale, cast with saturation, and the product is divided by both scales. With the current recipe the
scale brings the tensor's own largest magnitude to the largest number of the format; with the delayed one, that of the
step before, so that the tensor is read once. The first step always measures its own.

The tensor cores of Hopper want both operands with the summed dimension innermost, so each tensor is written twice, as
it is and transposed, in one pass. Where there is no such hardware the product is done in fp32 on the same fp8 numbers.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bert.kernels import jit as jit_module
from bert.kernels.jit import constexpr, jit, tl

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
INPUT, WEIGHT, GRADIENT = 0, 1, 2  # which tensor of a product
FORMATS = (FORWARD, FORWARD, BACKWARD)
ROW_MULTIPLE = 16  # what the hardware's product wants of every dimension
BLOCK = 64


class Fp8Scaling:
    """Scales of all fp8 products of a model, and the largest magnitudes seen in the step in progress.

    scales, inverses, largest: fp32 [products, 3] on the device, by INPUT, WEIGHT and GRADIENT.
    """

    def __init__(self, recipe: str, num_products: int, device: torch.device) -> None:
        self.delayed_recipe = recipe == "delayed"
        self.calibrated = False
        self.scales, self.inverses = torch.ones(2, num_products, 3, device=device)
        self.largest = torch.zeros(num_products, 3, device=device)
        self.maxima = torch.tensor([torch.finfo(dtype).max for dtype in FORMATS], device=device)

    def linear(self, number: int) -> Fp8Linear:
        """The product of that number."""
        return Fp8Linear(self, number)

    def cast(self, x: Tensor, number: int, which: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, C] -> fp8 [R, C], fp8 transposed [C, R], and the factor (fp32, 0-d) that undoes the scale."""
        scale, inverse, largest = (t[number, which] for t in (self.scales, self.inverses, self.largest))
        if not (self.delayed_recipe and self.calibrated):
            seen = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
            scale = torch.where((seen > 0) & torch.isfinite(seen), self.maxima[which] / seen, 1.0)
            inverse = 1 / scale
        cast, transposed = cast_transpose(x, scale, largest, FORMATS[which])
        return cast, transposed, inverse

    @torch.no_grad()
    def update(self) -> None:
        """After a step: scales from the largest magnitudes seen in it. A tensor with none, or with inf, keeps its."""
        seen = self.largest
        known = (seen > 0) & torch.isfinite(seen)
        self.scales.copy_(torch.where(known, self.maxima / seen, self.scales))
        self.inverses.copy_(1 / self.scales)
        self.largest.zero_()

    def state_tensors(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        return [self.scales, self.inverses, self.largest]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"scales": self.scales.clone(), "calibrated": self.calibrated}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()``."""
        self.scales.copy_(state["scales"])
        self.inverses.copy_(1 / self.scales)
        self.calibrated = bool(state["calibrated"])


class Fp8Linear:
    """F.linear in fp8."""

    def __init__(self, scaling: Fp8Scaling, number: int) -> None:
        self.scaling, self.number = scaling, number

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K], weight [N, K], bias [N] -> [T, N] in x's type. N and K are multiples of 16."""
        num_rows = x.shape[0]
        missing = -num_rows % ROW_MULTIPLE
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        y = _Fp8Product.apply(x, weight, bias, self.scaling, self.number)
        return y[:num_rows] if missing else y


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Fp8Scaling, number: int) -> Tensor:
        x8, x8_t, x_inverse = scaling.cast(x, number, INPUT)
        w8, w8_t, w_inverse = scaling.cast(weight, number, WEIGHT)
        ctx.save_for_backward(x8_t, w8_t, x_inverse, w_inverse)
        ctx.scaling, ctx.number, ctx.has_bias = scaling, number, bias is not None
        return product(x8, w8.t(), x_inverse, w_inverse, bias, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x8_t, w8_t, x_inverse, w_inverse = ctx.saved_tensors
        gradient = gradient.contiguous()
        g8, g8_t, g_inverse = ctx.scaling.cast(gradient, ctx.number, GRADIENT)
        x_gradient = product(g8, w8_t.t(), g_inverse, w_inverse, None, gradient.dtype, fast=False)
        weight_gradient = product(g8_t, x8_t.t(), g_inverse, x_inverse, None, gradient.dtype, fast=False)
        bias_gradient = gradient.sum(0) if ctx.has_bias else None
        return x_gradient, weight_gradient, bias_gradient, None, None


def product(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    """a [M, K] row-major times b [K, N] column-major, both fp8, times both factors, plus bias [N] -> [M, N].

    ``fast`` lets the tensor cores keep their partial sums at lower precision.
    """
    if a.is_cuda:
        return torch._scaled_mm(a, b, a_inverse, b_inverse, bias=bias, out_dtype=dtype, use_fast_accum=fast)
    y = (a.float() @ b.float()) * (a_inverse * b_inverse)
    return (y if bias is None else y + bias).to(dtype)


@jit
def _cast_transpose(x, scale, largest, cast, transposed, num_rows, num_columns, maximum: constexpr, block: constexpr):
    row = tl.program_id(0) * block + tl.arange(0, block)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    wide = row.to(tl.int64)
    value = tl.load(x + wide[:, None] * num_columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.atomic_max(largest, tl.max(tl.max(tl.abs(value), axis=1), axis=0), sem="relaxed")
    value = tl.minimum(tl.maximum(value * tl.load(scale), -maximum), maximum).to(cast.dtype.element_ty)
    tl.store(cast + wide[:, None] * num_columns + column[None, :], value, mask=inside)
    across = column.to(tl.int64)
    inside_t = (column < num_columns)[:, None] & (row < num_rows)[None, :]
    tl.store(transposed + across[:, None] * num_rows + row[None, :], tl.trans(value), mask=inside_t)


def cast_transpose(x: Tensor, scale: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [R, C] times ``scale``, saturated, in fp8 [R, C] and transposed [C, R]; raises ``largest`` to max |x|."""
    maximum = torch.finfo(dtype).max
    if not jit_module.supported(x.device):
        torch.maximum(largest, x.abs().amax().float(), out=largest)
        cast = (x.float() * scale).clamp(-maximum, maximum).to(dtype)
        return cast, cast.t().contiguous()
    x = x.contiguous()
    num_rows, num_columns = x.shape
    cast = torch.empty(num_rows, num_columns, dtype=dtype, device=x.device)
    transposed = torch.empty(num_columns, num_rows, dtype=dtype, device=x.device)
    grid = (-(-num_rows // BLOCK), -(-num_columns // BLOCK))
    _cast_transpose[grid](
        x, scale, largest, cast, transposed, num_rows, num_columns, maximum, BLOCK, num_warps=4
    )  # fmt: skip
    return cast, transposed
