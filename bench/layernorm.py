"""The memory-bound operations of a layer: ours in Triton against PyTorch, eager and compiled, at BERT-large's sizes.

For fp8: GELU and the end of a half layer with the cast inside, against the same with a cast of its own.

Bias+dropout+residual+LayerNorm, bias+GELU and the embeddings, forward alone and with backward, bf16, dropout 0.1, each
in a CUDA graph over four sets of inputs. GB/s counts each input read once and each result written once, for all alike;
the ceiling is this GPU's own copy. Prints one JSON line.

usage: python bench/layernorm.py [--tokens 12288] [--repeats 15] [--no-compile]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu
import result
import torch
from command_line import Parser, integer
from torch import Tensor

from bert.kernels import OPERATIONS, fp8_cases, fp8_cast, fp8_feed_forward
from bert.kernels import bias_gelu as bias_gelu_kernel
from bert.kernels import dropout_add_layer_norm as norm_kernel
from bert.kernels.cases import Draw
from bert.kernels.dropout import DropoutSites
from bert.kernels.fp8 import BACKWARD, FORWARD

HIDDEN, FEED_FORWARD, VOCABULARY, POSITIONS = 1024, 4096, 30_528, 512
DROPOUT = 0.1
NUM_SETS = 4

Arguments = tuple[Any, ...]


def dropout_add_layer_norm(draw: Draw, tokens: int) -> Arguments:
    """Its arguments."""
    x, residual = draw.normal(tokens, HIDDEN), draw.normal(tokens, HIDDEN)
    vectors = draw.normal(HIDDEN), draw.normal(HIDDEN)
    return x, draw.normal(HIDDEN), residual, *vectors, 1e-12, DROPOUT, DropoutSites(draw.device)


def bias_gelu(draw: Draw, tokens: int) -> Arguments:
    """Its arguments."""
    return draw.normal(tokens, FEED_FORWARD), draw.normal(FEED_FORWARD), "tanh"


def embeddings(draw: Draw, tokens: int) -> Arguments:
    """Its arguments; 12% of the tokens are one word, as [MASK] is."""
    ids = draw.integers(VOCABULARY, tokens)
    ids[draw.integers(100, tokens) < 12] = 103
    places = torch.arange(tokens, dtype=torch.int32, device=ids.device) % POSITIONS
    tables = draw.normal(VOCABULARY, HIDDEN), draw.normal(POSITIONS, HIDDEN), draw.normal(2, HIDDEN)
    vectors = draw.normal(HIDDEN), draw.normal(HIDDEN)
    return ids, draw.integers(2, tokens), places, *tables, *vectors, 1e-12, DROPOUT, DropoutSites(draw.device)


# Least bytes a token, forward and backward, in bf16.
MEASURED: dict[str, tuple[Callable[[Draw, int], Arguments], int, int]] = {
    "dropout_add_layer_norm": (dropout_add_layer_norm, 3 * 2 * HIDDEN, 6 * 2 * HIDDEN),
    "bias_gelu": (bias_gelu, 2 * 2 * FEED_FORWARD, 3 * 2 * FEED_FORWARD),
    "embeddings": (embeddings, 2 * 2 * HIDDEN, 2 * 2 * HIDDEN),
}


def half(value: Any) -> Any:
    """Floating tensors as bf16 leaves."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.bfloat16).requires_grad_()
    return value


def of_a_new_pass(arguments: Arguments) -> Arguments:
    """The arguments with dropout that draws a seed of its own."""
    return tuple(DropoutSites(a.device) if isinstance(a, DropoutSites) else a for a in arguments)


def calls(function: Callable[..., Any], sets: list[Arguments], upstream: Tensor) -> dict[str, gpu.Call]:
    """Forward alone, and forward with backward."""

    def forward(number: int) -> Any:
        return function(*of_a_new_pass(sets[number % len(sets)]))

    def both(number: int) -> object:
        leaves = [a for a in sets[number % len(sets)] if isinstance(a, Tensor) and a.requires_grad]
        result = forward(number)
        results = result if isinstance(result, tuple) else (result,)
        return torch.autograd.grad(results, leaves, [upstream] * len(results))

    return {"forward": forward, "forward+backward": both}


def measure(name: str, tokens: int, repeats: int, compiled: bool, ceiling: float, device: torch.device) -> Any:
    """Figures of one operation."""
    build, forward_bytes, backward_bytes = MEASURED[name]
    module = OPERATIONS[name]
    sets = [tuple(half(a) for a in build(Draw(device, seed), tokens)) for seed in range(NUM_SETS)]
    example = module.reference(*sets[0])
    upstream = torch.randn_like(example[0] if isinstance(example, tuple) else example)
    variants = {"triton": module.fused, "eager": module.reference}
    if compiled:
        variants["compile"] = torch.compile(module.reference, dynamic=False)
    functions = {
        f"{variant} {what}": call
        for variant, function in variants.items()
        for what, call in calls(function, sets, upstream).items()
    }
    figures: dict[str, Any] = gpu.microseconds(gpu.seconds_in_turns(functions, repeats=repeats))
    for key, figure in figures.items():
        moved = tokens * (forward_bytes + (backward_bytes if key.endswith("backward") else 0))
        rate = moved / figure["us"] / 1e3
        figure |= {"gb_per_s": round(rate), "share_of_copy": round(rate / ceiling, 3)}
    return figures


def measure_fp8(tokens: int, repeats: int, ceiling: float, device: torch.device) -> Any:
    """Kernels with the cast inside and with one of its own, and the transpose within fp8; the least bytes of each."""
    draws = [Draw(device, seed) for seed in range(NUM_SETS)]
    inner, upstream = ([half(draw.normal(tokens, FEED_FORWARD)).detach() for draw in draws] for _ in range(2))
    bias = half(draws[0].normal(FEED_FORWARD)).detach()
    norms = [tuple(half(a) for a in dropout_add_layer_norm(draw, tokens)) for draw in draws]
    forward, backward = (fp8_cases.new_target(dtype, 50.0, device) for dtype in (FORWARD, BACKWARD))
    narrow = [fp8_cast.cast_transpose(arguments[0].detach(), forward)[0] for arguments in norms]

    def of(number: int) -> int:
        return number % NUM_SETS

    def norm_with_cast(number: int) -> object:
        operands = norm_kernel.Operands(*norms[of(number)][:5])
        return norm_kernel.fused_with_cast(operands, 1e-12, DROPOUT, DropoutSites(device), forward)

    def separate_backward(number: int) -> object:
        leaves = inner[of(number)].detach().requires_grad_(), bias.detach().requires_grad_()
        value = bias_gelu_kernel.fused(*leaves, "tanh")
        gradient, _ = torch.autograd.grad(value, leaves, upstream[of(number)])
        return fp8_cast.cast_transpose(gradient, backward)

    def inside_backward(number: int) -> object:
        bias_gelu_kernel.fused(inner[of(number)], bias, "tanh")  # as in the other: the forward pass counts in both
        return fp8_feed_forward.gelu_backward_cast(upstream[of(number)], inner[of(number)], bias, "tanh", backward)

    functions: dict[str, tuple[gpu.Call, int]] = {
        "gelu, separate cast": (
            lambda n: fp8_cast.cast_transpose(bias_gelu_kernel.fused(inner[of(n)], bias, "tanh"), forward),
            8 * FEED_FORWARD,
        ),
        "gelu, cast inside": (
            lambda n: fp8_feed_forward.gelu_cast(inner[of(n)], bias, "tanh", forward),
            4 * FEED_FORWARD,
        ),
        "gelu forward+backward, separate cast": (separate_backward, 14 * FEED_FORWARD),
        "gelu forward+backward, cast inside": (inside_backward, 10 * FEED_FORWARD),
        "norm, separate cast": (
            lambda n: fp8_cast.cast_transpose(norm_kernel.fused(*of_a_new_pass(norms[of(n)]))[0].detach(), forward),
            10 * HIDDEN,
        ),
        "norm, cast inside": (norm_with_cast, 7 * HIDDEN),
        "transpose": (lambda n: fp8_cast.transpose(narrow[of(n)]), 2 * HIDDEN),
    }
    calls_in_turns = {name: call for name, (call, _) in functions.items()}
    figures: dict[str, Any] = gpu.microseconds(gpu.seconds_in_turns(calls_in_turns, repeats=repeats))
    for name, figure in figures.items():
        rate = tokens * functions[name][1] / figure["us"] / 1e3
        figure |= {"gb_per_s": round(rate), "share_of_copy": round(rate / ceiling, 3)}
    return figures


def main() -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_argument("--tokens", type=integer, default=12_288, help="tokens of the batch (default 12288: 24 rows)")
    parser.add_argument("--repeats", type=integer, default=15, help="replays of each (default 15)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out (it takes a minute)")
    options = parser.parse_args()
    device = gpu.require_gpu()
    ceiling = gpu.copy_bandwidth()
    figures = {"tokens": options.tokens, "copy_gb_per_s": round(ceiling)}
    for name in MEASURED:
        figures[name] = measure(name, options.tokens, options.repeats, not options.no_compile, ceiling, device)
    if torch.cuda.get_device_capability() >= (8, 9):
        figures["fp8"] = measure_fp8(options.tokens, options.repeats, ceiling, device)
    result.emit("layernorm", figures, data="random bf16", targets={})


if __name__ == "__main__":
    main()
