"""Which tile sizes, warps and programs are best on this GPU: each kernel with each choice of its constants, in turns.

The constants stand in the kernels' files, one choice for all runs, so that results repeat bit for bit; this says
whether another choice would be faster, at BERT-large's sizes in bf16. Prints one JSON line, fastest choice first.

usage: python bench/kernel_constants.py [--only NAME] [--tokens 12288]
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import gpu
import lamb as lamb_bench
import layernorm as layernorm_bench
import loss as loss_bench
import numpy as np
import result
import torch
from command_line import Parser, integer

from bert.data.synthetic import wikipedia_like_lengths
from bert.kernels import (
    attention_triton,
    bias_gelu,
    cross_entropy,
    dropout_add_layer_norm,
    fp8_cases,
    fp8_cast,
    fp8_feed_forward,
    lamb,
)
from bert.kernels.cases import Draw
from bert.kernels.dropout import ForwardPass
from bert.kernels.fp8 import BACKWARD, FORWARD


class Sweep(NamedTuple):
    """A kernel's module, the names of its constants, the choices, and what makes the call once they are set."""

    name: str
    module: ModuleType
    constants: tuple[str, ...]
    choices: list[tuple[Any, ...]]
    make: Callable[[], gpu.Call]


BLOCKS = [
    (attention_triton.Blocks(queries=queries, keys=keys, num_warps=warps, num_stages=stages),)
    for queries, keys, warps in ((64, 64, 4), (128, 64, 8), (64, 128, 8), (128, 128, 8), (32, 64, 4), (64, 32, 4))
    for stages in (2, 3)
]


def attention_call(tokens: int, device: torch.device, backward: bool) -> gpu.Call:
    """Attention on packed rows."""
    lengths = wikipedia_like_lengths(tokens // 256, 512, np.random.default_rng(0)).tolist()
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    qkv = torch.randn(sum(lengths), 3, 16, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn_like(qkv[:, 0])

    def run(_: int) -> object:
        context = attention_triton.attention(qkv, ForwardPass(offsets, 512), 0.1)
        return torch.autograd.grad(context, qkv, upstream) if backward else context

    return run


def operation_call(name: str, tokens: int, device: torch.device, what: str) -> gpu.Call:
    """An operation of bench/layernorm.py."""
    build = layernorm_bench.MEASURED[name][0]
    sets = [
        tuple(layernorm_bench.half(a) for a in build(Draw(device, seed), tokens))
        for seed in range(layernorm_bench.NUM_SETS)
    ]
    module = layernorm_bench.OPERATIONS[name]
    return layernorm_bench.calls(module.fused, sets, torch.randn_like(sets[0][0]))[what]


def loss_call(tokens: int, device: torch.device) -> gpu.Call:
    """The cross-entropy of a sixth of the tokens, the copy of fresh logits included."""
    rows = tokens // 6
    source = 3 * torch.randn(rows, loss_bench.WIDTH, device=device).bfloat16()
    labels = torch.randint(loss_bench.VOCABULARY, (rows,), device=device)
    return loss_bench.call(cross_entropy.fused, source, labels, torch.rand(rows, device=device) / rows)


def fp8_call(tokens: int, device: torch.device, what: str) -> gpu.Call:
    """GELU with the cast inside, both ways, or the transpose within fp8."""
    draw = Draw(device, 0)
    wide, upstream = (layernorm_bench.half(draw.normal(tokens, 4096)).detach() for _ in range(2))
    bias = layernorm_bench.half(draw.normal(4096)).detach()
    forward, backward = (fp8_cases.new_target(dtype, 50.0, device) for dtype in (FORWARD, BACKWARD))
    narrow = fp8_cast.cast_transpose(wide[:, :1024].contiguous(), forward)[0]
    return {
        "gelu": lambda _: fp8_feed_forward.gelu_cast(wide, bias, "tanh", forward),
        "gelu backward": lambda _: fp8_feed_forward.gelu_backward_cast(upstream, wide, bias, "tanh", backward),
        "cast": lambda _: fp8_cast.cast_transpose(wide, forward),
        "transpose": lambda _: fp8_cast.transpose(narrow),
    }[what]


def fp8_sweeps(tokens: int, device: torch.device) -> Iterator[Sweep]:
    """Tiles of the kernels that write both orders, which share their constants, and of the transpose."""
    tiles = [(64, 64, 4), (64, 64, 8), (64, 128, 4), (64, 128, 8), (128, 64, 4), (128, 64, 8), (128, 128, 8)]
    constants = ("BLOCK_ROWS", "BLOCK", "NUM_WARPS")
    for what in ("gelu", "gelu backward", "cast"):
        make = functools.partial(fp8_call, tokens, device, what)
        yield Sweep(f"fp8 {what}", fp8_cast, constants, tiles, make)
    make = functools.partial(fp8_call, tokens, device, "transpose")
    blocks = [(64, 2), (64, 4), (128, 4), (128, 8), (256, 8)]
    yield Sweep("fp8 transpose", fp8_cast, ("TRANSPOSE_BLOCK", "TRANSPOSE_NUM_WARPS"), blocks, make)


def sweeps(tokens: int, device: torch.device) -> Iterator[Sweep]:
    """Every kernel with its choices."""
    for name, backward in (("FORWARD", False), ("QUERY_GRADIENT", True), ("KEY_GRADIENT", True)):
        make = functools.partial(attention_call, tokens, device, backward)
        yield Sweep(f"attention {name}", attention_triton, (name,), BLOCKS, make)
    norm = functools.partial(operation_call, "dropout_add_layer_norm", tokens, device)
    yield Sweep(
        "dropout_add_layer_norm forward",
        dropout_add_layer_norm,
        ("BLOCK_ROWS_FORWARD", "NUM_WARPS_FORWARD"),
        [(1, 1), (1, 4), (2, 4), (4, 4), (4, 8), (8, 8)],
        functools.partial(norm, "forward"),
    )
    yield Sweep(
        "dropout_add_layer_norm backward",
        dropout_add_layer_norm,
        ("BLOCK_ROWS_BACKWARD", "NUM_WARPS_BACKWARD", "PROGRAMS_PER_SM"),
        [(1, 4, 4), (1, 4, 6), (1, 2, 8), (2, 4, 2), (2, 4, 4), (2, 8, 2), (4, 4, 2), (4, 8, 2)],
        functools.partial(norm, "forward+backward"),
    )
    yield Sweep(
        "bias_gelu",
        bias_gelu,
        ("BLOCK", "BLOCK_ROWS", "NUM_WARPS", "PROGRAMS_PER_SM"),
        list(itertools.product((512, 1024), (2, 4, 8), (4, 8), (3, 5, 8))),
        functools.partial(operation_call, "bias_gelu", tokens, device, "forward+backward"),
    )
    if torch.cuda.get_device_capability() >= (8, 9):
        yield from fp8_sweeps(tokens, device)
    yield Sweep(
        "cross_entropy",
        cross_entropy,
        ("DEPTH", "LANES", "BLOCK"),
        list(itertools.product((2, 4), (1024, 2048), (2048, 4096, 8192))),
        functools.partial(loss_call, tokens, device),
    )
    yield Sweep(
        "lamb",
        lamb,
        ("CHUNK", "BLOCK", "NUM_WARPS"),
        list(itertools.product((8192, 16384, 65536), (1024, 2048, 4096), (4, 8))),
        functools.partial(lamb_bench.flat_step, lamb_bench.parameters(6), device),
    )


def measure(sweep: Sweep) -> list[dict[str, Any]]:
    """Median microseconds of each choice, fastest first; the one in the kernel's file is marked."""
    _, module, names, choices, make = sweep
    standing = tuple(getattr(module, name) for name in names)
    functions: dict[str, gpu.Call] = {}
    for choice in dict.fromkeys([standing, *choices]):
        call: list[gpu.Call] = []

        def run(number: int, choice: tuple[Any, ...] = choice, call: list[gpu.Call] = call) -> object:
            for name, value in zip(names, choice, strict=True):
                setattr(module, name, value)
            if not call:
                call.append(make())
            return call[0](number)

        functions[repr(choice)] = run
    figures = gpu.microseconds(gpu.seconds_in_turns(functions, num_calls=4, repeats=7))
    for name, value in zip(names, standing, strict=True):
        setattr(module, name, value)
    rows = [{"choice": key, "standing": key == repr(standing), **figure} for key, figure in figures.items()]
    return sorted(rows, key=lambda row: row["us"])


def main() -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_argument("--only", default="", help="kernels whose name has this in it")
    parser.add_argument("--tokens", type=integer, default=12_288, help="tokens of the batch (default 12288: 24 rows)")
    options = parser.parse_args()
    device = gpu.require_gpu()
    known = list(sweeps(options.tokens, device))
    figures = {sweep.name: measure(sweep) for sweep in known if options.only in sweep.name}
    if not figures:
        parser.error(f"--only {options.only}: no such kernel: {', '.join(sweep.name for sweep in known)}")
    result.emit("kernel_constants", figures, data="random bf16", targets={})


if __name__ == "__main__":
    main()
