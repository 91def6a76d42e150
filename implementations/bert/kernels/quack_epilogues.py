"""GELU, its slope, bias gradients and casts to fp8 inside the products beside them, by QuACK (quack-kernels).

fp8 is Hopper's. The first product writes what GELU takes, and GELU's result in fp8; in the backward pass the product
that gives GELU's gradient multiplies it by the slope, sums the bias gradient and writes fp8. Both write rows alone: the
other order is a pass of one byte an element. For each element of a hidden state [T, D] the kernels beside the products
move 16 bytes, separate ones 40. Unlike in separate kernels, nothing is rounded to 16 bits before it is cast, so results
are equal only to that rounding. The largest magnitude leaves out NaN, which the cast keeps: it reaches the loss.

Imports QuACK: import this module where it is installed.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
from quack.activation import dgelu_erf, dgelu_tanh_approx, gelu_erf, gelu_tanh_approx
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.ops import ColVecReduce, RowVecReduce
from torch import Tensor

from bert.kernels.arithmetic import column_sums
from bert.kernels.fp8 import Target
from bert.kernels.fp8_cast import transpose

ROWS = 64  # of a program's tile; with these columns nothing spills: 168 registers a thread, compiled for sm_90a
COLUMNS = {True: 256, False: 128}  # by whether partial sums are fast; exact ones are held twice


def _backward(gelu_backward):
    @gemm_epilogue(outputs=("activated",), reduces={"bias": RowVecReduce("bias")})
    def epilogue(acc, c):
        inner, activated = gelu_backward(c, acc)
        return {"D": inner, "activated": activated, "bias": inner}

    return epilogue


def _value(gelu):
    @gemm_epilogue(
        outputs=("cast",), reduces={"largest": ColVecReduce("largest", combine="max_abs")}
    )
    def epilogue(acc, a_inverse, b_inverse, bias, scale):
        inner = acc * (a_inverse * b_inverse) + bias
        value = gelu(inner)
        return {"D": inner, "cast": value * scale, "largest": value}

    return epilogue


def _gradient(gelu_backward):
    reduces = {"largest": ColVecReduce("largest", combine="max_abs"), "bias": RowVecReduce("bias")}

    @gemm_epilogue(reduces=reduces)
    def epilogue(acc, c, a_inverse, b_inverse, scale):
        gradient, _ = gelu_backward(c, acc * (a_inverse * b_inverse))
        return {"D": gradient * scale, "largest": gradient, "bias": gradient}

    return epilogue


# QuACK finds an epilogue again by its name in the module.
backward_tanh, backward_erf = _backward(dgelu_tanh_approx), _backward(dgelu_erf)
value_tanh, value_erf = _value(gelu_tanh_approx), _value(gelu_erf)
gradient_tanh, gradient_erf = _gradient(dgelu_tanh_approx), _gradient(dgelu_erf)


def gelu_backward_of_product(
    gradient: Tensor, weight: Tensor, linear: Tensor, approximate: str
) -> tuple[Tensor, Tensor, Tensor]:
    """gradient [T, D], weight [D, F], what GELU takes [T, F], in 16 bits: its gradient, GELU's result, the sum of the
    gradient over T in fp32 [F]."""
    epilogue = backward_tanh if approximate == "tanh" else backward_erf
    # tuned=False: which kernel runs, and with it the order of its sums, does not hang on a timing.
    found = epilogue(gradient, weight, linear, tuned=False)
    return found["D"], found["activated"], found["bias"]


def _start(
    epilogue,
    a: Tensor,
    b: Tensor,
    output: Tensor,
    c: Tensor | None,
    fast: bool,
    target: Target,
    **named: Any,
):
    """a [M, K], b [N, K], both fp8: what the epilogue makes of their product; raises ``target.largest``."""
    largest = torch.empty(len(a), -(-len(b) // COLUMNS[fast]), device=a.device)
    epilogue.gemm(
        a, b, output, c, epi_args={"scale": target.scale, "largest": largest, **named},
        tile_M=ROWS, tile_N=COLUMNS[fast], cluster_M=2, pingpong=True, post_init_attrs=(("fp8_slow_accum", not fast),),
    )  # fmt: skip
    assert target.largest is not None
    torch.maximum(target.largest, largest.amax(), out=target.largest)


def gelu_of_product(
    x8: Tensor,
    weight: Tensor,
    inverses: tuple[Tensor, Tensor],
    bias: Tensor,
    approximate: str,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    """As fp8_feed_forward's; the linear result includes the bias."""
    inner = torch.empty(len(x8), len(weight), dtype=bias.dtype, device=x8.device)
    cast = torch.empty_like(inner, dtype=target.dtype)
    named = {
        "a_inverse": inverses[0],
        "b_inverse": inverses[1],
        "bias": bias.view(1, -1),
        "cast": cast,
    }
    _start(
        value_tanh if approximate == "tanh" else value_erf,
        x8,
        weight,
        inner,
        None,
        True,
        target,
        **named,
    )
    return inner, cast, transpose(cast)


def gelu_gradient_of_product(
    g8: Tensor, weight: Tensor, inverses: tuple[Tensor, Tensor], inner: Tensor, bias: Tensor, approximate: str,
    target: Target, fast: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As fp8_feed_forward's, of the linear result that includes the bias."""
    cast = torch.empty_like(inner, dtype=target.dtype)
    sums = torch.empty(-(-len(g8) // ROWS), len(weight), device=g8.device)
    named = {"a_inverse": inverses[0], "b_inverse": inverses[1], "bias": sums}
    epilogue = gradient_tanh if approximate == "tanh" else gradient_erf
    _start(epilogue, g8, weight, cast, inner, fast, target, **named)
    return cast, transpose(cast), column_sums(sums, bias.dtype)
