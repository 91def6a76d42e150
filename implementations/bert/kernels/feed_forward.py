"""The feed-forward half of a layer with bias and GELU inside its first product, by QuACK (quack-kernels), in 16 bits.

The first product writes what GELU takes, and GELU of it, so that no pass over memory of its own is left. The backward
pass multiplies the gradient by the second weight and GELU's slope in one product, which makes GELU's result again: it
is not kept. QuACK's kernels compile for Hopper and Blackwell; whether they are right and faster than separate ones on
the GPU at hand is tried before a run takes them (trials.py).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bert.kernels.attention_libraries import needs, package
from bert.kernels.weight_gradient import into, sources, take

missing = needs((9, 0), package("quack", "quack-kernels"))


def missing_in_fp8(device: torch.device) -> str | None:
    """Why quack_epilogues.py cannot run: QuACK's products of both fp8 formats are Hopper's."""
    later = (
        device.type == "cuda"
        and not torch.version.hip
        and torch.cuda.get_device_capability(device) >= (10, 0)
    )
    return missing(device) or ("its fp8 needs compute capability 9.0" if later else None)


def reference(
    x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, approximate: str
) -> Tensor:
    """x [T, D], weight [F, D], bias [F], out_weight [D, F] -> GELU(x weight^T + bias) out_weight^T [T, D]."""
    return F.linear(F.gelu(F.linear(x, weight, bias), approximate=approximate), out_weight)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, approximate: str
    ) -> Tensor:
        activation, ctx.approximate = (
            "gelu_tanh_approx" if approximate == "tanh" else "gelu_erf",
            approximate,
        )
        linear, activated = importlib.import_module("quack.gemm_interface").gemm_act(
            x,
            weight.t(),
            bias=bias,
            activation=activation,
            store_preact=any(ctx.needs_input_grad),
            tuned=False,
        )
        ctx.save_for_backward(x, weight, out_weight, linear)
        ctx.sources = sources(weight), sources(out_weight)
        return F.linear(activated, out_weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out_weight, linear = ctx.saved_tensors
        gradient = gradient.contiguous()
        epilogues = importlib.import_module("bert.kernels.quack_epilogues")
        inner, activated, bias = epilogues.gelu_backward_of_product(
            gradient, out_weight, linear, ctx.approximate
        )
        out_gradient = into(
            take(ctx.sources[1]), lambda out: torch.mm(gradient.t(), activated, out=out)
        )
        weight_gradient = into(take(ctx.sources[0]), lambda out: torch.mm(inner.t(), x, out=out))
        x_gradient = inner @ weight if ctx.needs_input_grad[0] else None
        return x_gradient, weight_gradient, bias.to(x.dtype), out_gradient, None


def fused(x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, approximate: str) -> Tensor:
    """``reference`` with two products forward and four backward. Sizes: multiples of 8."""
    return _FeedForward.apply(x, weight, bias, out_weight, approximate)
