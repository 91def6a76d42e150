"""Compiles the Triton kernels without a GPU, as BERT-large launches them, and prints their
resources.

usage: python tests/bert/kernels/ahead_of_time.py [CAPABILITY ...] [--only NAME] [--all]

One JSON line a kernel and target: registers and spilled bytes a thread, shared memory a program.
Launches are recorded on the meta device, so types, constants and warps are those of the real call;
nothing runs. Not under TRITON_INTERPRET.
"""

from __future__ import annotations

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
from fused_cases import CASES
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
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
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
        divisible = isinstance(value, torch.Tensor)
        if param.is_constexpr or value is None:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
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
    return ASTSource(
        fn=function, signature=signature, constexprs=constants, attrs=attributes
    )


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each operation forward and backward on BERT-large's sizes, with dropout 0.1."""
    for name, module in OPERATIONS.items():
        large = [case for case in CASES[name] if case.large]
        for case, (dtype, suffix) in itertools.product(large, SUFFIXES.items()):
            arguments = [
                0.1 if isinstance(a, float) and a == 0 else a
                for a in dataclasses.replace(case, dtype=dtype).arguments(META)
            ]
            yield (
                name + suffix,
                functools.partial(_forward_and_backward, module.fused, *arguments),
            )
    attended = {
        "attention": (torch.bfloat16, 64),
        "attention_fp16": (torch.float16, 64),
        "attention_fp32": (torch.float32, 64),
        "attention_wide": (torch.bfloat16, 128),
        "attention_wide_fp16": (torch.float16, 128),
    }
    for name, (dtype, width) in attended.items():
        qkv = torch.empty(
            12_288,
            3,
            1024 // width,
            width,
            dtype=dtype,
            device=META,
            requires_grad=True,
        )
        cu_seqlens = torch.empty(97, dtype=torch.int32, device=META)
        arguments = qkv, ForwardPass(cu_seqlens, 512), 0.1
        yield (
            name,
            functools.partial(
                _forward_and_backward, triton_attention.attention, *arguments
            ),
        )
    yield "lamb", _lamb
    yield "fp8", _fp8_layer
    yield "fp8_evaluation", _fp8_evaluation


def _forward_and_backward(function: Callable[..., Any], *arguments: Any) -> None:
    result = function(*arguments)
    results = result if isinstance(result, tuple) else (result,)
    torch.autograd.backward(results, [torch.empty_like(tensor) for tensor in results])


def _lamb() -> None:
    table = 30_528 * 1024
    spans = [[(0, table)], [(table, table + 1024)]]
    layout = lamb.spans_layout(table + 1024, spans, [0.01, 0.0], META)
    gradient, low = (
        torch.empty(layout.size, dtype=torch.bfloat16, device=META) for _ in range(2)
    )
    master, first, second = (torch.empty(layout.size, device=META) for _ in range(3))
    scalars = torch.empty(4, device=META)
    norms = lamb.moments(
        layout, gradient, master, first, second, scalars, 0.9, 0.999, 1e-6
    )
    lamb.update(layout, master, first, second, low, norms, scalars, 1e-6)


def _fp8_layer() -> None:
    """A layer's fp8 products with the casts in the kernels, between two layers like it."""
    y, residual = _fp8_forward(_scaling(), 0.1)
    torch.autograd.backward(
        [y, residual], [torch.empty_like(y), torch.empty_like(residual)]
    )


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


def _fp8_forward(
    scaling: fp8.Scaling, dropout: float
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, width, inner = 12_288, 1024, 4096

    def half(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META, requires_grad=True)

    qkv, first, second = (Fp8Linear(scaling, number) for number in range(3))
    vectors, qkv_weight = [half(width) for _ in range(3)], half(3 * width, width)
    operands, sites = (
        Operands(half(tokens, width), vectors[0], half(tokens, width), *vectors[1:]),
        DropoutSites(META),
    )
    x, residual, x8 = fused_with_cast(
        operands, 1e-12, dropout, sites, first.target(fp8.INPUT)
    )
    settings = fp8_feed_forward.Settings(
        first, second, "tanh", 1e-12, dropout, sites, qkv.target(fp8.INPUT)
    )
    weights = fp8_feed_forward.Weights(
        half(inner, width), half(inner), half(width, inner), *vectors
    )
    if scaling.evaluates:
        for product, weight in (
            (qkv, qkv_weight),
            (first, weights.weight_1),
            (second, weights.weight_2),
        ):
            product.hold(weight)
    x, residual, x8 = fp8_feed_forward.feed_forward(x, x8, residual, weights, settings)
    return qkv(x, qkv_weight, half(3 * width), x8), residual


def record(only: str, capability: int, rare: bool = True) -> dict[str, Launch]:
    """Every kernel that the operations launch at BERT-large's sizes on a GPU, by name. rare: those
    of RARE, too.
    """
    found: dict[str, Launch] = {}
    operation = ""
    launches.assumed = capability

    def launch(
        function: JITFunction, *positional: Any, grid: Any, warmup: bool, **named: Any
    ) -> None:
        options = {
            name: named.pop(name)
            for name in named.keys() - {p.name for p in function.params}
        }
        args = function.signature.bind(*positional, **named).args
        assert all(0 < size < 2**16 or axis == 0 for axis, size in enumerate(grid)), (
            grid
        )
        constants = "".join(
            f"-{a}"
            for a, p in zip(args, function.params, strict=True)
            if p.is_constexpr
        )
        found.setdefault(
            f"{operation}:{function.__name__}{constants}",
            (source_of(function, args), options),
        )

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
    """Registers and bytes of local memory per thread, read from the machine code by Triton's copy
    of cuobjdump.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout))
    return {
        "registers": int(found["REG"]),
        "spilled_bytes": int(found["STACK"]) + int(found.get("LOCAL", 0)),
    }


def main() -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "capabilities",
        nargs="*",
        type=int,
        default=CAPABILITIES,
        help="such as 90 for Hopper (default: 80 89 90 100 103 120)",
    )
    parser.add_argument(
        "--keep", type=Path, help="folder for the compiler's files of each kernel"
    )
    parser.add_argument(
        "--only", default="", help="operations whose name has this in it"
    )
    parser.add_argument(
        "--all", action="store_true", help="rare ones too: wide heads, fp32"
    )
    options = parser.parse_args()
    for capability in options.capabilities:
        for name, (source, launch_options) in record(
            options.only, capability, rare=options.all or bool(options.only)
        ).items():
            compiled = triton.compile(
                source, target=GPUTarget("cuda", capability, 32), options=launch_options
            )
            if options.keep:
                for stage in ("ttgir", "ptx"):
                    file = (
                        options.keep
                        / f"{name.replace(':', '.')}.sm{capability}.{stage}"
                    )
                    file.write_text(compiled.asm[stage], encoding="utf-8")
            figures = resources(compiled.asm["cubin"]) | {
                "shared_bytes": compiled.metadata.shared
            }
            vectors = sorted(
                set(
                    re.findall(r"(?:ld|st)\.global[.\w:]*?\.(v\d)", compiled.asm["ptx"])
                )
            )
            wgmma = "wgmma" in compiled.asm["ptx"]
            figures["symbol"] = compiled.metadata.name
            print(
                json.dumps(
                    {
                        "kernel": name,
                        "capability": capability,
                        **figures,
                        "vectors": vectors,
                        "wgmma": wgmma,
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
