"""Attention and matrix products of BERT-large on one GPU. Prints one JSON line.

The other kernels' times are those of train_step.py --profile.

attention   every backend on 48 packed rows of 512 tokens with Wikipedia's length distribution, in
            bf16, with and without dropout of 0.1, in CUDA graphs that take turns. TFLOP/s counts
            two products forward and five backward on the real lengths.
gemm        the products of a layer, forward and backward, in bf16 and fp8, at 24,576 and 49,152
            tokens of random data, since zeros run faster under a power limit; and a copy.

usage: python bench/kernels.py attention|gemm
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from lib import Parser, emit
from torch import Tensor
from torch_lib import (
    Call,
    copy_bandwidth,
    device,
    gpu_state,
    graphs_in_turns,
    matmul_ceiling,
    median_milliseconds,
)

from bert.data.synthetic import wikipedia_like_lengths
from bert.kernels.attention import candidates
from bert.kernels.fp8 import BACKWARD, FORWARD, Target, product
from bert.kernels.fp8 import cast as fp8_cast
from bert.kernels.support.dropout import ForwardPass

ROWS, LENGTH, HIDDEN, FEED_FORWARD, HEADS, HEAD_SIZE, DROPOUT = 48, 512, 1024, 4096, 16, 64, 0.1


def normal(*shape: int) -> Tensor:
    dtype = torch.bfloat16 if torch.cuda.is_available() else None
    return torch.randn(shape, device=device(), dtype=dtype)


def measure_attention() -> dict[str, Any]:
    # Two sequences per row.
    lengths = wikipedia_like_lengths(2 * ROWS, LENGTH, np.random.default_rng(0)).tolist()
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device())
    inputs = [normal(sum(lengths), 3, HEADS, HEAD_SIZE).requires_grad_() for _ in range(2)]
    upstream = normal(sum(lengths), HEADS, HEAD_SIZE)
    functions: dict[str, Call] = {}
    for (name, run), dropout in itertools.product(candidates(device()).items(), (0.0, DROPOUT)):

        def forward(number: int, run: Any = run, dropout: float = dropout) -> Tensor:
            return run(inputs[number % 2], ForwardPass(offsets, LENGTH), dropout)

        def both(number: int, forward: Call = forward) -> object:
            result: Any = forward(number)
            return torch.autograd.grad(result, inputs[number % 2], upstream.view_as(result))

        functions[f"{name} dropout={dropout:g} forward"] = forward
        functions[f"{name} dropout={dropout:g} forward+backward"] = both
    figures, ceiling = graphs_in_turns(functions), matmul_ceiling()
    # Two products, and 2 operations for each multiply-add.
    operations = 4 * HEADS * HEAD_SIZE * sum(length**2 for length in lengths)
    for name, figure in figures.items():
        # Two products forward and five backward: 3.5 times the forward pass.
        rate = operations * (3.5 if name.endswith("backward") else 1) / figure["us"] / 1e6
        figure |= {"tflop_per_s": round(rate, 1), "share_of_gemm": round(rate / ceiling, 3)}
    sizes = {"tokens": sum(lengths), "sequences": len(lengths), "gemm_tflop_per_s": round(ceiling)}
    return sizes | {"attention": figures}


def unit_target(dtype: torch.dtype) -> Target:
    """A cast with a scale of 1."""
    one = torch.ones((), device=device())
    return Target(dtype=dtype, scale=one, inverse=one, largest=torch.zeros((), device=device()))


def product_rate(m: int, k: int, n: int, kind: str, precision: str) -> float:
    """TFLOP/s of a product as in training: the layouts of bf16 operands differ by kind.

    fp8 excludes the casts, with fast accumulation in the forward pass.
    """
    forward = kind == "forward"
    if precision == "bf16":
        a = normal(k, m).t() if kind == "weight_gradient" else normal(m, k)
        b = normal(n, k).t() if forward else normal(k, n)
        return 2 * m * k * n / median_milliseconds(lambda: a @ b) / 1e9
    # Gradients are wider in range and less exact (e5m2) than weights and activations (e4m3).
    targets = unit_target(FORWARD if forward else BACKWARD), unit_target(FORWARD)
    a, b = (
        fp8_cast.cast_transpose(torch.randn(size, k, device=device()), target)[0]
        for size, target in zip((m, n), targets, strict=True)
    )
    inverses = [target.inverse for target in targets]
    # cuBLASLt multiplies fp8 row-major by column-major only.
    operands = a, b.t(), *inverses, None, torch.bfloat16, forward
    return 2 * m * k * n / median_milliseconds(lambda: product(*operands)) / 1e9


def layer_rates(tokens: int, width: int, inner: int) -> dict[str, Any]:
    """TFLOP/s of every product of a layer, and of the whole layer."""
    # Inputs and outputs of the layer's products.
    layers = {
        "qkv": (width, 3 * width),
        "output": (width, width),
        "intermediate": (width, inner),
        "feed_forward_output": (inner, width),
    }
    shapes = {}  # (m, k, n), the product m x k by k x n
    for name, (inputs, outputs) in layers.items():
        shapes[name, "forward"] = tokens, inputs, outputs
        shapes[name, "input_gradient"] = tokens, outputs, inputs
        shapes[name, "weight_gradient"] = outputs, tokens, inputs
    operations = {key: 2.0 * math.prod(shape) for key, shape in shapes.items()}
    table: dict[str, Any] = {}
    for precision in ("bf16", "fp8"):
        rates = {key: product_rate(*shape, key[1], precision) for key, shape in shapes.items()}
        # Times add up, so the rate of the layer is the harmonic mean by operations.
        seconds = sum(operations[key] / rate for key, rate in rates.items())
        table[precision] = {"layer": round(sum(operations.values()) / seconds, 4)}
        table[precision] |= {".".join(key): round(rate, 4) for key, rate in rates.items()}
    return table


def measure_gemm(tiny: bool) -> dict[str, Any]:
    sizes = [(tokens, HIDDEN, FEED_FORWARD) for tokens in (24_576, 49_152)]
    if tiny:
        sizes = [(64, 32, 64)]
    return {
        "ceiling_tflops": round(matmul_ceiling(), 4),
        "copy_gb_per_s": 0 if tiny else round(copy_bandwidth()),
        "tflops": {str(size[0]): layer_rates(*size) for size in sizes},
        "clocks": gpu_state(),
    }


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("kernel", choices=["attention", "gemm"])
    parser.add_argument(
        "--tiny", action="store_true", help="gemm: a small size, to try it out on a CPU"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available() and not (options.kernel == "gemm" and options.tiny):
        parser.exit(2, "kernels.py: no GPU: this benchmark measures GPU kernels\n")
    figures = measure_gemm(options.tiny) if options.kernel == "gemm" else measure_attention()
    emit(options.kernel, figures, data="random bf16")


if __name__ == "__main__":
    main()
