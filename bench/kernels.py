"""Kernels of BERT-large on one GPU, timed in CUDA graphs that take turns. Prints one JSON line.

All with 48 packed rows of 512 tokens with Wikipedia's length distribution, bf16, dropout 0.1 unless noted.

attention   every backend, with and without dropout. TFLOP/s counts two products forward and five backward on the real
            lengths.
gemm        the products of a layer, forward and backward, in bf16 and fp8, at 24,576 and 49,152 tokens of random data,
            since zeros run faster under a power limit.
operations  every fused operation in Triton and in PyTorch at the size of its large case; the kernels that cast to fp8;
            a LAMB update. GB/s counts each input read once and each result written once (LAMB: 42 bytes per
            parameter); the ceiling is a copy on the same GPU.

usage: python bench/kernels.py attention|gemm|operations [--repeats 15]
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from lib import Parser, emit, integer
from torch import Tensor
from torch_lib import (
    Call,
    copy_bandwidth,
    device,
    gpu_state,
    graphs_in_turns,
    matmul_ceiling,
    median_milliseconds,
    spread,
)

from bert import kernels
from bert.data.synthetic import wikipedia_like_lengths
from bert.kernels import OPERATIONS
from bert.kernels.attention import candidates
from bert.kernels.fp8 import BACKWARD, FORWARD, Target, product
from bert.kernels.fp8 import cast as fp8_cast
from bert.kernels.operations import dropout_add_layer_norm, fp8_feed_forward, lamb
from bert.kernels.support.dropout import DropoutSites, ForwardPass
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.optim.rules import is_decayed

ROWS, LENGTH, HIDDEN, FEED_FORWARD, HEADS, HEAD_SIZE, DROPOUT = 48, 512, 1024, 4096, 16, 64, 0.1
# 15% of 24,576 tokens are 3,686; 30,522 words are padded to a multiple of 8.
TOKENS, MASKED, VOCABULARY = ROWS * LENGTH, 4_096, 30_528
# NVIDIA's in MLPerf v4.1, for a global batch of 768 sequences (DGXH100_1x8x48x1_pack).
BETA1, BETA2, EPS, DECAY = 0.60466, 0.85437, 1e-6, 0.1
# Used in turn, since one set of inputs would stay in the L2 cache.
NUM_SETS = 4  # of inputs
# fp8 products need Ada (8.9) or Hopper.
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
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


def bandwidths(
    functions: dict[str, tuple[Call, float]], ceiling: float, **options: int
) -> dict[str, dict[str, float]]:
    """Microseconds, GB/s and fraction of a copy's bandwidth. functions: calls with the bytes they move."""
    figures = spread(
        graphs_in_turns({name: call for name, (call, _) in functions.items()}, **options)
    )
    for name, figure in figures.items():
        rate = functions[name][1] / figure["us"] / 1e3
        figure |= {"gb_per_s": round(rate), "share_of_copy": round(rate / ceiling, 3)}
    return figures


def measure_attention(options: argparse.Namespace) -> dict[str, Any]:
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
    figures, ceiling = spread(graphs_in_turns(functions, repeats=options.repeats)), matmul_ceiling()
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
    """TFLOP/s of a product as in training: the layouts of bf16 operands differ between the three kinds.

    fp8 excludes the casts, with fast accumulation in the forward pass ("fp8") or everywhere ("fp8_fast").
    """
    if precision == "bf16":
        a = normal(k, m).t() if kind == "weight_gradient" else normal(m, k)
        b = normal(n, k).t() if kind == "forward" else normal(k, n)
        return 2 * m * k * n / median_milliseconds(lambda: a @ b) / 1e9
    # Gradients are wider in range and less exact (e5m2) than weights and activations (e4m3).
    a_target, b_target = (
        unit_target(FORWARD if kind == "forward" else BACKWARD),
        unit_target(FORWARD),
    )
    a, _, _ = fp8_cast.cast_transpose(torch.randn(m, k, device=device()), a_target)
    b, _, _ = fp8_cast.cast_transpose(torch.randn(n, k, device=device()), b_target)
    fast = kind == "forward" or precision == "fp8_fast"
    # cuBLASLt multiplies fp8 row-major by column-major only.
    operands = a, b.t(), a_target.inverse, b_target.inverse, None, torch.bfloat16, fast
    return 2 * m * k * n / median_milliseconds(lambda: product(*operands)) / 1e9


def layer_rates(tokens: int, width: int, inner: int) -> dict[str, Any]:
    """TFLOP/s of every product of a layer, and of the whole layer."""
    # Inputs and outputs of the layer's products; a shape is (m, k, n), the product m x k by k x n.
    layers = {
        "qkv": (width, 3 * width), "output": (width, width), "intermediate": (width, inner),
        "feed_forward_output": (inner, width),
    }  # fmt: skip
    shapes = {}
    for name, (inputs, outputs) in layers.items():
        shapes[name, "forward"] = tokens, inputs, outputs
        shapes[name, "input_gradient"] = tokens, outputs, inputs
        shapes[name, "weight_gradient"] = outputs, tokens, inputs
    table: dict[str, Any] = {}
    for precision in ("bf16", "fp8", "fp8_fast"):
        rates = {key: product_rate(*shape, key[1], precision) for key, shape in shapes.items()}
        operations = {key: 2.0 * math.prod(shape) for key, shape in shapes.items()}
        # Times add up, so the rate of the layer is the harmonic mean by operations.
        layer = sum(operations.values()) / sum(
            operations[key] / rate for key, rate in rates.items()
        )
        table[precision] = {"layer": round(layer, 4)} | {
            ".".join(key): round(rate, 4) for key, rate in rates.items()
        }
    return table


def measure_gemm(options: argparse.Namespace) -> dict[str, Any]:
    sizes = (
        [(64, 32, 64)]
        if options.tiny
        else [(tokens, HIDDEN, FEED_FORWARD) for tokens in (24_576, 49_152)]
    )
    ceiling = round(matmul_ceiling(), 4)
    return {
        "ceiling_tflops": ceiling,
        "tflops": {str(s[0]): layer_rates(*s) for s in sizes},
        "clocks": gpu_state(),
    }


def lamb_update() -> tuple[Call, float]:
    """Gradient norm and both passes of LAMB on flat buffers of BERT-large's sizes, and the bytes they move."""
    # Only the sizes of the parameters are needed.
    with torch.device("meta"):
        bound = kernels.bind_kernels(
            kernels.Config(fused="none", attention="sdpa_loop"), torch.device("cpu")
        )
        model = BertForPreTraining(BertConfig(), bound)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layout = lamb.make_layout(
        list(sizes.values()), [DECAY if is_decayed(name) else 0.0 for name in sizes], device()
    )
    gradient = normal(layout.size, scale=1e-3)
    master, first = (torch.randn(layout.size, device=device()) * scale for scale in (0.02, 1e-3))
    second, low = first.square(), torch.empty_like(gradient)
    scalars = torch.tensor([1e-6, 1.0, 1 / (1 - BETA1), 1 / (1 - BETA2)], device=device())

    def step(_: int) -> None:
        # The factor of clipping to norm 1, on the device: the host does not wait for the norm.
        scalars[1] = (1.0 / (lamb.squared_norm(gradient).sqrt() + 1e-6)).clamp(max=1.0)
        norms = lamb.moments(layout, gradient, master, first, second, scalars, BETA1, BETA2, EPS)
        lamb.update(layout, master, first, second, low, norms, scalars, EPS)

    # The gradient is read twice, masters and moments are read twice and written once, parameters are written.
    return step, 42.0 * sum(sizes.values())


def operation_inputs(name: str) -> list[tuple[Any, ...]]:
    """NUM_SETS sets of arguments of the case of 48 rows, with dropout."""
    case = next(case for case in OPERATIONS[name].CASES if case.name == "48_rows_of_bert_large")
    sets = [case.arguments(device(), seed) for seed in range(NUM_SETS)]
    return [
        # The cases are without dropout, as tests compare them with the reference.
        tuple(DROPOUT if isinstance(a, float) and a == 0 else a for a in arguments)
        for arguments in sets
    ]


def operation_calls(name: str, function: Callable[..., Any]) -> dict[str, Call]:
    sets = operation_inputs(name)
    leaves = [
        [a for a in arguments if isinstance(a, Tensor) and a.requires_grad] for arguments in sets
    ]

    def forward(number: int) -> object:
        chosen = sets[number % NUM_SETS]  # each call draws its own seed
        return function(
            *(DropoutSites(a.device) if isinstance(a, DropoutSites) else a for a in chosen)
        )

    return with_backward(forward, lambda number: leaves[number % NUM_SETS])


def fp8_calls() -> dict[str, tuple[Call, float]]:
    """Kernels fused with the cast, the cast alone and the transpose, and the bytes they move."""
    inner, upstream = ([normal(TOKENS, FEED_FORWARD) for _ in range(NUM_SETS)] for _ in range(2))
    bias, norms = normal(FEED_FORWARD), operation_inputs("dropout_add_layer_norm")
    # Casts to e4m3 forward and to e5m2 backward.
    forward, backward = unit_target(FORWARD), unit_target(BACKWARD)
    narrow = [fp8_cast.cast_transpose(arguments[0].detach(), forward)[0] for arguments in norms]

    def norm_with_cast(n: int) -> object:
        operands = dropout_add_layer_norm.Operands(*norms[n % NUM_SETS][:5])
        return dropout_add_layer_norm.fused_with_cast(
            operands, 1e-12, DROPOUT, DropoutSites(device()), forward
        )

    def gelu_backward(n: int) -> object:
        gradient, x = upstream[n % NUM_SETS], inner[n % NUM_SETS]
        return fp8_feed_forward.gelu_backward_cast(gradient, x, bias, "tanh", backward)

    # Bytes a token: bf16 has 2, fp8 1; a cast writes its result twice, the second time transposed.
    functions: dict[str, tuple[Call, int]] = {
        "gelu with cast": (
            lambda n: fp8_feed_forward.gelu_cast(inner[n % NUM_SETS], bias, "tanh", forward), 4 * FEED_FORWARD
        ),
        "gelu backward with cast": (gelu_backward, 6 * FEED_FORWARD),
        "norm with cast": (norm_with_cast, 7 * HIDDEN),
        "cast": (lambda n: fp8_cast.cast_transpose(inner[n % NUM_SETS], forward), 4 * FEED_FORWARD),
        "transpose": (lambda n: fp8_cast.transpose(narrow[n % NUM_SETS]), 2 * HIDDEN),
    }  # fmt: skip
    return {name: (call, float(TOKENS * least)) for name, (call, least) in functions.items()}


def measure_operations(options: argparse.Namespace) -> dict[str, Any]:
    ceiling = copy_bandwidth()
    figures: dict[str, Any] = {"tokens": TOKENS, "copy_gb_per_s": round(ceiling)}
    for name, (forward, backward) in OPERATION_BYTES.items():
        variants = {"triton": OPERATIONS[name].fused, "eager": OPERATIONS[name].reference}
        least = {"forward": forward, "forward+backward": forward + backward}
        functions = {
            f"{variant} {what}": (call, float(least[what]))
            for variant, function in variants.items()
            for what, call in operation_calls(name, function).items()
        }
        figures[name] = bandwidths(functions, ceiling, repeats=options.repeats)
    if HAS_FP8:
        figures["fp8"] = bandwidths(fp8_calls(), ceiling, repeats=options.repeats)
    # Three calls in a graph suffice: each moves 14 GB.
    figures["lamb"] = bandwidths(
        {"triton": lamb_update()}, ceiling, num_calls=3, repeats=options.repeats
    )["triton"]
    return figures


def main() -> None:
    measures = {
        "attention": measure_attention,
        "gemm": measure_gemm,
        "operations": measure_operations,
    }
    parser = Parser(__doc__)
    parser.add_argument("kernel", choices=list(measures))
    parser.add_argument("--repeats", type=integer, default=15, help="replays of each (default 15)")
    parser.add_argument(
        "--tiny", action="store_true", help="gemm: a small size, to try it out on a CPU"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available() and not (options.kernel == "gemm" and options.tiny):
        print("kernels.py: no GPU: this benchmark measures GPU kernels", file=sys.stderr)
        sys.exit(2)
    emit(options.kernel, measures[options.kernel](options), data="random bf16")


if __name__ == "__main__":
    main()
