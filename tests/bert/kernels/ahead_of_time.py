"""Compiles the Triton kernels without a GPU, as BERT-large launches them, and prints their
resources.

usage: python tests/bert/kernels/ahead_of_time.py [CAPABILITY ...] [--only NAME] [--all]

One JSON line a kernel and target: registers and spilled bytes a thread, shared memory a program.
Launches are recorded on the meta device, so types, constants and warps are those of the real call;
nothing runs. Not under TRITON_INTERPRET.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from fused_cases import CASES, tensors
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from bert.kernels import OPERATIONS, fp8
from bert.kernels.attention import triton_attention
from bert.kernels.fp8.linear import Fp8Linear
from bert.kernels.operations import fp8_feed_forward, lamb
from bert.kernels.operations.dropout_add_layer_norm import Operands, fused_with_cast
from bert.kernels.support import launches, triton_support
from bert.kernels.support.dropout import DropoutSites, ForwardPass

TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32",
    torch.int64: "*i64", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
}  # fmt: skip
# Every type that a run's activations may have.
SUFFIXES = {torch.bfloat16: "", torch.float16: "_fp16", torch.float32: "_fp32"}
# Of other models and precisions; they take long in all.
RARE = "_wide", "_fp16", "_fp32"
FP8_CAPABILITY = 89  # the first GPUs that know fp8
CAPABILITIES = [80, 89, 90, 100, 103, 120]
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

META = torch.device("meta")
Launch = tuple[ASTSource, dict[str, int]]


def source_of(function: JITFunction, args: tuple[Any, ...]) -> ASTSource:
    """The specialization that triton.jit would compile for these arguments."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for number, (param, value) in enumerate(zip(function.params, args, strict=True)):
        divisible = isinstance(value, Tensor)
        if param.is_constexpr or value is None:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[param.name] = TYPES[value.dtype]
        elif isinstance(value, int) and value == 1 and not param.do_not_specialize:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, int):
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            divisible = value % 16 == 0 and not param.do_not_specialize
        else:
            signature[param.name] = "fp32"
        if divisible:
            attributes[(number,)] = [["tt.divisibility", 16]]
    specialized = {"signature": signature, "constexprs": constants, "attrs": attributes}
    return ASTSource(fn=function, **specialized)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each operation forward and backward on BERT-large's sizes, with dropout 0.1."""
    for name, module in OPERATIONS.items():
        large = [case for case in CASES[name] if case.large]
        for case, (dtype, suffix) in itertools.product(large, SUFFIXES.items()):
            given = dataclasses.replace(case, dtype=dtype).arguments(META)
            no_dropout = lambda value: isinstance(value, float) and value == 0  # noqa: E731
            arguments = [0.1 if no_dropout(value) else value for value in given]
            yield name + suffix, _passes(module.fused, *arguments)
    attended = {
        "attention": (torch.bfloat16, 64),
        "attention_fp16": (torch.float16, 64),
        "attention_fp32": (torch.float32, 64),
        "attention_wide": (torch.bfloat16, 128),
        "attention_wide_fp16": (torch.float16, 128),
    }
    for name, (dtype, width) in attended.items():
        shape, new = (12_288, 3, 1024 // width, width), {"dtype": dtype, "device": META}
        qkv = torch.empty(*shape, **new, requires_grad=True)
        cu_seqlens = torch.empty(97, dtype=torch.int32, device=META)
        arguments = qkv, ForwardPass(cu_seqlens, 512), 0.1
        yield name, _passes(triton_attention.attention, *arguments)
    yield "lamb", _lamb
    yield "fp8", _fp8_layer
    yield "fp8_evaluation", _fp8_evaluation


def _passes(function: Callable[..., Any], *arguments: Any) -> Callable[[], object]:
    return functools.partial(_forward_and_backward, function, *arguments)


def _forward_and_backward(function: Callable[..., Any], *arguments: Any) -> None:
    results = tensors(function(*arguments))
    torch.autograd.backward(results, [torch.empty_like(tensor) for tensor in results])


def _lamb() -> None:
    table = 30_528 * 1024
    spans = [[(0, table)], [(table, table + 1024)]]
    layout = lamb.spans_layout(table + 1024, spans, [0.01, 0.0], META)
    new = {"dtype": torch.bfloat16, "device": META}
    gradient, low = (torch.empty(layout.size, **new) for _ in range(2))
    master, first, second = (torch.empty(layout.size, device=META) for _ in range(3))
    scalars = torch.empty(4, device=META)
    moments, betas = (first, second, scalars), (0.9, 0.999)
    norms = lamb.moments(layout, gradient, master, *moments, *betas, 1e-6)
    lamb.update(layout, master, first, second, low, norms, scalars, 1e-6)


def _fp8_layer() -> None:
    """A layer's fp8 products with the casts in the kernels, between two layers like it."""
    y, residual = _fp8_forward(_scaling(), 0.1)
    gradients = [torch.empty_like(y), torch.empty_like(residual)]
    torch.autograd.backward([y, residual], gradients)


@torch.no_grad()
def _fp8_evaluation() -> None:
    """The same in an evaluation: weights that are held, no dropout, nothing for a backward pass."""
    scaling = _scaling()
    with scaling.evaluation():
        _fp8_forward(scaling, 0.0)


def _scaling() -> fp8.Scaling:
    scaling = fp8.Scaling(3, META)
    scaling.calibrated = True
    return scaling


def _fp8_forward(scaling: fp8.Scaling, dropout: float) -> tuple[Tensor, Tensor]:
    tokens, width, inner = 12_288, 1024, 4096

    def half(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META, requires_grad=True)

    qkv, first, second = (Fp8Linear(scaling, number) for number in range(3))
    vectors, qkv_weight = [half(width) for _ in range(3)], half(3 * width, width)
    sites = DropoutSites(META)
    attended, before = half(tokens, width), half(tokens, width)
    operands = Operands(attended, vectors[0], before, *vectors[1:])
    target = first.target(fp8.INPUT)
    x, residual, x8 = fused_with_cast(operands, 1e-12, dropout, sites, target)
    settings = fp8_feed_forward.Settings(
        first, second, "tanh", 1e-12, dropout, sites, qkv.target(fp8.INPUT)
    )
    wide = half(inner, width), half(inner), half(width, inner)
    weights = fp8_feed_forward.Weights(*wide, *vectors)
    if scaling.evaluates:
        held = qkv_weight, weights.weight_1, weights.weight_2
        for product, weight in zip((qkv, first, second), held, strict=True):
            product.hold(weight)
    x, residual, x8 = fp8_feed_forward.feed_forward(x, x8, residual, weights, settings)
    return qkv(x, qkv_weight, half(3 * width), x8), residual


def record(only: str, capability: int, rare: bool = True) -> dict[str, Launch]:
    """Every kernel that the operations launch at BERT-large's sizes on a GPU, by name. rare: those of RARE, too."""
    found: dict[str, Launch] = {}
    operation = ""
    launches.assumed = capability

    def launch(
        function: JITFunction, *positional: Any, grid: Any, warmup: bool, **named: Any
    ) -> None:
        known = {param.name for param in function.params}
        options = {name: named.pop(name) for name in named.keys() - known}
        args = function.signature.bind(*positional, **named).args
        assert all(0 < size < 2**16 for size in grid[1:]), grid
        pairs = zip(args, function.params, strict=True)
        constants = "".join(f"-{a}" for a, p in pairs if p.is_constexpr)
        name = f"{operation}:{function.__name__}{constants}"
        found.setdefault(name, (source_of(function, args), options))

    JITFunction.run = launch  # type: ignore[method-assign]
    with triton_support.interpreted():
        for name, run in calls():
            if name.startswith("fp8") and capability < FP8_CAPABILITY:
                continue
            if only in name and (rare or not name.endswith(RARE)):
                operation = name
                run()
    return found


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of local memory per thread, read from the machine code by Triton's copy of cuobjdump."""
    command = [str(CUOBJDUMP), "--dump-resource-usage"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        done = subprocess.run([*command, file.name], capture_output=True, text=True, check=True)  # fmt: skip
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout))
    spilled = int(found["STACK"]) + int(found.get("LOCAL", 0))
    return {"registers": int(found["REG"]), "spilled_bytes": spilled}


def main() -> None:
    """Compiles and prints."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    numbers = "such as 90 for Hopper (default: 80 89 90 100 103 120)"
    add("capabilities", nargs="*", type=int, default=CAPABILITIES, help=numbers)
    add("--only", default="", help="operations whose name has this in it")
    add("--all", action="store_true", help="rare ones too: wide heads, fp32")
    options = parser.parse_args()
    rare = options.all or bool(options.only)
    for capability in options.capabilities:
        recorded = record(options.only, capability, rare)
        for name, (source, launch_options) in recorded.items():
            target = GPUTarget("cuda", capability, 32)
            compiled = triton.compile(source, target=target, options=launch_options)
            ptx = compiled.asm["ptx"]
            wide = re.findall(r"(?:ld|st)\.global[.\w:]*?\.(v\d)", ptx)
            figures = {
                "kernel": name,
                "capability": capability,
                **resources(compiled.asm["cubin"]),
                "shared_bytes": compiled.metadata.shared,
                "symbol": compiled.metadata.name,
                "vectors": sorted({*wide}),
                "wgmma": "wgmma" in ptx,
            }
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
