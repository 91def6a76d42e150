"""The matrix products of a BERT-large layer, forward and backward: TFLOP/s in bf16 and fp8, and what fp8 casts cost.

Random data: zeros run faster, because the chip is limited by power. Prints one JSON line.

usage: python bench/gemm.py [--tokens 24576 49152] [--tiny]
"""

from __future__ import annotations

from typing import Any

import torch
from command_line import Parser, integer
from common import device, emit, gpu_state, machine, matmul_ceiling, median_milliseconds

from bert.kernels.fp8 import BACKWARD, FORWARD, Target, product
from bert.kernels.fp8_cast import cast_transpose, transpose

WIDTH, INNER = 1024, 4096


def layers(width: int, inner: int) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the linear layers."""
    return {
        "qkv": (width, 3 * width),
        "output": (width, width),
        "intermediate": (width, inner),
        "feed_forward_output": (inner, width),
    }


def products(tokens: int, inputs: int, outputs: int) -> dict[str, tuple[int, int, int]]:
    """(M, K, N) of the forward product and of the gradients of input and weight."""
    return {
        "forward": (tokens, inputs, outputs),
        "input_gradient": (tokens, outputs, inputs),
        "weight_gradient": (outputs, tokens, inputs),
    }


def bf16(m: int, k: int, n: int, kind: str) -> float:
    """TFLOP/s of the product as autograd runs it: the operands' layouts differ between the three."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    make = {"device": device(), "dtype": dtype}
    if kind == "forward":
        a, b = torch.randn(m, k, **make), torch.randn(n, k, **make).t()
    elif kind == "input_gradient":
        a, b = torch.randn(m, k, **make), torch.randn(k, n, **make)
    else:
        a, b = torch.randn(k, m, **make).t(), torch.randn(k, n, **make)
    return 2 * m * k * n / median_milliseconds(lambda: a @ b) / 1e9


def target(dtype: torch.dtype) -> Target:
    """A cast with a scale of 1."""
    one = torch.ones((), device=device())
    return Target(dtype=dtype, scale=one, inverse=one, largest=torch.zeros((), device=device()))


def fp8(m: int, k: int, n: int, kind: str) -> float:
    """TFLOP/s of the product in fp8 as a run does it, without the casts: fast sums forward, exact ones backward."""
    return _fp8(m, k, n, kind, fast=kind == "forward")


def fp8_fast(m: int, k: int, n: int, kind: str) -> float:
    """The same with fast sums in all."""
    return _fp8(m, k, n, kind, fast=True)


def _fp8(m: int, k: int, n: int, kind: str, fast: bool) -> float:
    a_target, b_target = target(FORWARD if kind == "forward" else BACKWARD), target(FORWARD)
    a, _, _ = cast_transpose(torch.randn(m, k, device=device()), a_target)
    b, _, _ = cast_transpose(torch.randn(n, k, device=device()), b_target)
    time = median_milliseconds(
        lambda: product(a, b.t(), a_target.inverse, b_target.inverse, None, torch.bfloat16, fast)
    )
    return 2 * m * k * n / time / 1e9


def cast(rows: int, columns: int) -> dict[str, float]:
    """Milliseconds of a cast with its transpose, and the bandwidth: 2 bytes read, 2 written an element."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    x, into = torch.randn(rows, columns, device=device(), dtype=dtype), target(FORWARD)
    return _bandwidth(median_milliseconds(lambda: cast_transpose(x, into)), rows * columns * 4)


def fp8_transpose(rows: int, columns: int) -> dict[str, float]:
    """Milliseconds of a transpose within fp8, and the bandwidth: 1 byte read, 1 written an element."""
    x, _, _ = cast_transpose(torch.randn(rows, columns, device=device()), target(FORWARD))
    return _bandwidth(median_milliseconds(lambda: transpose(x)), rows * columns * 2)


def _bandwidth(time: float, num_bytes: int) -> dict[str, float]:
    return {"milliseconds": round(time, 4), "terabytes_per_second": round(num_bytes / time / 1e9, 3)}


def measure(tokens: int, width: int, inner: int) -> dict[str, Any]:
    """Every product of a layer at one size, and the layer as a whole."""
    table: dict[str, Any] = {}
    for precision, run in (("bf16", bf16), ("fp8", fp8), ("fp8_fast", fp8_fast)):
        operations = seconds = 0.0
        rates: dict[str, float] = {}
        for name, (inputs, outputs) in layers(width, inner).items():
            for kind, (m, k, n) in products(tokens, inputs, outputs).items():
                rate = run(m, k, n, kind)
                rates[f"{name}.{kind}"] = round(rate, 4)
                operations += 2.0 * m * k * n
                seconds += 2.0 * m * k * n / rate
        table[precision] = {"layer": round(operations / seconds, 4), **rates}
    table["cast"] = {f"{tokens}x{columns}": cast(tokens, columns) for columns in (width, 3 * width, inner)}
    table["transpose"] = {f"{tokens}x{width}": fp8_transpose(tokens, width)}
    return table


def main() -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_argument("--tokens", type=integer, nargs="+", default=[24576, 49152], help="T (default 24576 49152)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script out")
    options = parser.parse_args()
    width, inner = (32, 64) if options.tiny else (WIDTH, INNER)
    tokens = [64] if options.tiny else options.tokens
    result: dict[str, Any] = {"benchmark": "gemm", "ceiling_tflops": round(matmul_ceiling(), 4)}
    result["tflops"] = {str(count): measure(count, width, inner) for count in tokens}
    emit(result | {"clocks": gpu_state(), "machine": machine()})


if __name__ == "__main__":
    main()
