"""The kernels' assembly is right, and a GPU on which it is not disables it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bert import kernels
from bert.kernels.attention import benchmark
from bert.kernels.support import arithmetic, assembly_check, triton_support
from bert.model.config import BertConfig

from .. import no_gpu
from . import ptx

CPU = torch.device("cpu")
TYPES = SimpleNamespace(
    float32=torch.float32, int32=torch.int32, uint32=torch.int32, bfloat16=torch.bfloat16,
    inline_asm_elementwise=ptx.inline_asm_elementwise,
)  # fmt: skip


@pytest.fixture
def executed(monkeypatch):
    """assembly_check on a GPU that follows the PTX ISA; ``executed(old, new)`` changes what it is given."""
    if triton_support.triton is None:
        pytest.skip("Triton is not installed")
    changes = []

    def changed(assembly, *rest, **named):
        for old, new in changes:
            assembly = assembly.replace(old, new)
        return ptx.inline_asm_elementwise(assembly, *rest, **named)

    def results(what, x):
        piece = getattr(arithmetic, f"native_{what}").fn
        if what == "product":
            high, low = piece(assembly_check.FACTOR, ptx.Block(x))
            return high.values, low.values
        if what == "masked":
            return piece(
                ptx.Block(x), ptx.Block(x.view(torch.int16)), assembly_check.THRESHOLD
            ).values, x
        return piece(ptx.Block(x), *[assembly_check.THRESHOLD] * (what == "kept")).values, x

    monkeypatch.setattr(
        arithmetic, "tl", SimpleNamespace(**vars(TYPES) | {"inline_asm_elementwise": changed})
    )
    monkeypatch.setattr(assembly_check, "results", results)
    return lambda *change: changes.append(change)


def test_every_piece_of_assembly_gives_what_plain_arithmetic_gives(executed):
    assert assembly_check.problems(CPU) == {}


@pytest.mark.parametrize(
    ("old", "new", "pieces"),
    [
        ("both, $3, $2", "both, $2, $3", ["rounded"]),  # the halves of a register exchanged
        ("$0, $2, $1", "$0, $1, $2", ["narrowed"]),
        ("$2, 16", "$2, 15", ["widened"]),
        ("0xffff0000", "0xfffe0000", ["widened", "rounded"]),
        ("{$1, $0}", "{$0, $1}", ["product"]),
        ("ex2.approx.ftz.f32", "rcp.approx.ftz.f32", ["exp2"]),
        ("rcp.approx.ftz.f32", "rcp.approximate", ["reciprocal"]),  # refused
        ("set.geu.f32.f32 $0, size", "set.geu.f32.f32 $0, $1", ["kept"]),  # with the sign
        (
            "abs.f16x2 mask, $2; mov.b32 least, $3",
            "abs.f16x2 mask, $2; mov.b32 least, 3277",
            ["masked"],
        ),  # one half
    ],
)
def test_a_piece_that_is_wrong_is_found_and_no_other(old, new, pieces, executed):
    executed(old, new)
    assert list(assembly_check.problems(CPU)) == pieces


def test_where_a_piece_is_wrong_on_any_rank_the_kernels_do_without_and_a_line_says_so(monkeypatch):
    no_gpu.in_name(monkeypatch)
    native = SimpleNamespace(value=True)
    monkeypatch.setattr(triton_support, "NATIVE", native)
    for mine, others, expected in (
        ("", False, ""),
        ("", True, "on another one"),
        ("exp2: 3 of 65536 numbers are wrong", False, "exp2: 3 of"),
    ):
        native.value = True
        found = [
            benchmark.Trial(name=benchmark.ASSEMBLY, problem=mine),
            benchmark.Trial(name="triton", milliseconds=1.0),
        ]
        monkeypatch.setattr(
            benchmark, "benchmark_backends", lambda device, heads, name, found=found: found
        )
        anywhere = bool(mine) or others
        world = SimpleNamespace(
            device=torch.device("cuda", 0),
            any=lambda wrong, anywhere=anywhere: anywhere,
            gather=lambda times: [times],
        )
        words = kernels.Config(attention="triton").resolve_attention(
            BertConfig(), torch.bfloat16, True, world
        )[1]
        assert native.value is not bool(expected)
        assert ("do without assembly" in words) is bool(expected)
        assert expected in words


@pytest.mark.gpu
def test_every_piece_of_assembly_is_right_on_this_gpu(gpu):
    assert assembly_check.problems(gpu) == {}
