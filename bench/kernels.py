"""Kernels of BERT-large on one GPU, timed in CUDA graphs that take turns. Prints one JSON line.

All with 48 packed rows of 512 tokens with Wikipedia's length distribution, bf16, dropout 0.1 unless
noted. What fp8's casts and LAMB take is in train_step.py --profile.

attention   every backend, with and without dropout. TFLOP/s counts two products forward and five
            backward on the real lengths.
gemm        the products of a layer, forward and backward, in bf16 and fp8, at 24,576 and 49,152
            tokens of random data, since zeros run faster under a power limit.
operations  every fused operation in Triton and in PyTorch at the size of its large case. GB/s
            counts each input read once and each result written once; the ceiling is a copy.

usage: python bench/kernels.py attention|gemm|operations
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
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
from bert.kernels import OPERATIONS
from bert.kernels.attention import candidates
from bert.kernels.fp8 import BACKWARD, FORWARD, Target, product
from bert.kernels.fp8 import cast as fp8_cast
from bert.kernels.support.dropout import DropoutSites, ForwardPass

ROWS, LENGTH, HIDDEN, FEED_FORWARD, HEADS, HEAD_SIZE, DROPOUT = 48, 512, 1024, 4096, 16, 64, 0.1
# 15% of 24,576 tokens are 3,686; 30,522 words are padded to a multiple of 8.
TOKENS, MASKED, VOCABULARY = ROWS * LENGTH, 4_096, 30_528
# Used in turn, since one set of inputs would stay in the L2 cache.
NUM_SETS = 4  # of inputs
# Minimum bytes that an operation moves in bf16, forward and backward.
# Factors: tensors read or written, 2 bytes an element.
# LayerNorm's backward pass takes six, GELU's three.
OPERATION_BYTES = {
    "embeddings": (TOKENS * 2 * 2 * HIDDEN, TOKENS * 2 * 2 * HIDDEN),
    "dropout_add_layer_norm": (TOKENS * 3 * 2 * HIDDEN, TOKENS * 6 * 2 * HIDDEN),
    "bias_gelu": (TOKENS * 2 * 2 * FEED_FORWARD, TOKENS * 3 * 2 * FEED_FORWARD),
    "cross_entropy": (MASKED * 2 * VOCABULARY, MASKED * 2 * 2 * VOCABULARY),
}


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(
        shape, device=device(), dtype=torch.bfloat16 if torch.cuda.is_available() else None
    )


def with_backward(forward: Call, leaves: Callable[[int], Any]) -> dict[str, Call]:
    """Forward, and forward with backward."""

    def results(number: int) -> tuple[Tensor, ...]:
        result: Any = forward(number)
        return result if isinstance(result, tuple) else (result,)

    # Drawn once: it is an input of the backward pass, not a part of it.
    upstream = [torch.randn_like(tensor) for tensor in results(0)]
    return {
        "forward": forward,
        "forward+backward": lambda number: torch.autograd.grad(
            results(number), leaves(number), upstream
        ),
    }


def measure_attention(_: bool) -> dict[str, Any]:
    lengths = wikipedia_like_lengths(
        2 * ROWS, LENGTH, np.random.default_rng(0)
    ).tolist()  # two sequences per row
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device())
    inputs = [normal(sum(lengths), 3, HEADS, HEAD_SIZE).requires_grad_() for _ in range(2)]

    def forward(run: Any, dropout: float, number: int) -> Tensor:
        return run(inputs[number % 2], ForwardPass(offsets, LENGTH), dropout)

    functions: dict[str, Call] = {}
    for (name, run), dropout in itertools.product(candidates(device()).items(), (0.0, DROPOUT)):
        calls = with_backward(partial(forward, run, dropout), lambda number: inputs[number % 2])
        functions |= {f"{name} dropout={dropout:g} {what}": call for what, call in calls.items()}
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
        "tflops": {str(size[0]): layer_rates(*size) for size in sizes},
        "clocks": gpu_state(),
    }


def operation_calls(name: str, function: Callable[..., Any]) -> dict[str, Call]:
    """Calls of the case of 48 rows, with dropout, which the cases of the tests are without."""
    case = next(case for case in OPERATIONS[name].CASES if case.name == "48_rows_of_bert_large")
    sets = [case.arguments(device(), seed) for seed in range(NUM_SETS)]
    leaves = [
        [a for a in arguments if isinstance(a, Tensor) and a.requires_grad] for arguments in sets
    ]

    def given(argument: Any) -> Any:
        if isinstance(argument, DropoutSites):
            return DropoutSites(argument.device)  # each call draws its own seed
        return DROPOUT if isinstance(argument, float) and argument == 0 else argument

    def forward(number: int) -> object:
        return function(*map(given, sets[number % NUM_SETS]))

    return with_backward(forward, lambda number: leaves[number % NUM_SETS])


def measure_operations(_: bool) -> dict[str, Any]:
    ceiling = copy_bandwidth()
    figures: dict[str, Any] = {"tokens": TOKENS, "copy_gb_per_s": round(ceiling)}
    for name, (forward, backward) in OPERATION_BYTES.items():
        variants = {"triton": OPERATIONS[name].fused, "eager": OPERATIONS[name].reference}
        least = {"forward": forward, "forward+backward": forward + backward}
        calls = {
            f"{variant} {what}": call
            for variant, function in variants.items()
            for what, call in operation_calls(name, function).items()
        }
        figures[name] = graphs_in_turns(calls)
        for called, figure in figures[name].items():
            rate = least[called.split()[1]] / figure["us"] / 1e3
            figure |= {"gb_per_s": round(rate), "share_of_copy": round(rate / ceiling, 3)}
    return figures


def main() -> None:
    measures = {
        "attention": measure_attention,
        "gemm": measure_gemm,
        "operations": measure_operations,
    }
    parser = Parser(__doc__)
    parser.add_argument("kernel", choices=list(measures))
    parser.add_argument(
        "--tiny", action="store_true", help="gemm: a small size, to try it out on a CPU"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available() and not (options.kernel == "gemm" and options.tiny):
        print("kernels.py: no GPU: this benchmark measures GPU kernels", file=sys.stderr)
        sys.exit(2)
    emit(options.kernel, measures[options.kernel](options.tiny), data="random bf16")


if __name__ == "__main__":
    main()
