"""Attention and matrix products at BERT-large's sizes on one GPU. Prints one JSON line.

The other kernels' times are those of train_step.py --profile; beside apex's:
tests/bench/against_apex.py.

attention  milliseconds of every backend that ATTENTION=auto tries, forward and backward, on 24,576
           tokens with dropout; or why it does not work.
gemm       TFLOP/s of the products of a layer, forward and backward, in bf16 and fp8, at 24,576 and
           49,152 tokens of random data, since zeros run faster under a power limit; and a copy.

usage: python bench/kernels.py attention|gemm
"""

import math
from typing import Any

import torch
from lib import Parser, emit
from torch import Tensor
from torch_lib import (
    copy_bandwidth,
    device,
    gpu_state,
    matmul_ceiling,
    median_milliseconds,
    no_fp8,
    precisions,
)

from bert.kernels.attention import benchmark
from bert.kernels.fp8 import BACKWARD, FORWARD, Target, product
from bert.kernels.fp8 import cast as fp8_cast

HIDDEN, FEED_FORWARD = 1024, 4096


def normal(*shape: int) -> Tensor:
    dtype = torch.bfloat16 if torch.cuda.is_available() else None
    return torch.randn(shape, device=device(), dtype=dtype)


def unit_target(dtype: torch.dtype) -> Target:
    """A cast with a scale of 1."""
    one = torch.ones((), device=device())
    return Target(
        dtype=dtype, scale=one, inverse=one, largest=torch.zeros((), device=device())
    )


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
    for precision in precisions():
        rates = {
            key: product_rate(*shape, key[1], precision)
            for key, shape in shapes.items()
        }
        # Times add up, so the rate of the layer is the harmonic mean by operations.
        seconds = sum(operations[key] / rate for key, rate in rates.items())
        table[precision] = {"layer": round(sum(operations.values()) / seconds, 4)}
        table[precision] |= {
            ".".join(key): round(rate, 4) for key, rate in rates.items()
        }
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
        "no_fp8": no_fp8(),
    }


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("kernel", choices=["attention", "gemm"])
    parser.add_argument(
        "--tiny", action="store_true", help="gemm: a small size, on a CPU too"
    )
    options = parser.parse_args()
    on_cpu = options.tiny and options.kernel != "attention"
    if not (torch.cuda.is_available() or on_cpu):
        parser.exit(2, "kernels.py: no GPU: this benchmark measures GPU kernels\n")
    if options.kernel == "gemm":
        figures = measure_gemm(options.tiny)
    else:
        figures = {
            "trials": [vars(trial) for trial in benchmark.benchmark_backends(device())]
        }
    emit(options.kernel, figures, data="random bf16")


if __name__ == "__main__":
    main()
