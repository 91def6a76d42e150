"""A stand-in for quack-kernels: what is used of it, as documented, computed by PyTorch on a CPU.

As strict as the package: matrices whose last or last but one stride is 1, of one type, and fp8 ones in rows alone;
buffers of the shapes that its kernels write; no argument that it has not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FORMS = {"gelu_tanh_approx": "tanh", "gelu_erf": "none"}
EPILOGUES = "bert.kernels.quack_epilogues"  # the module that imports the package
MODULES = (
    "quack.gemm_interface",
    "quack.activation",
    "quack.epilogue.frontend",
    "quack.epilogue.ops",
)


def _product(a: Tensor, b: Tensor) -> Tensor:
    assert a.ndim == b.ndim == 2
    assert a.dtype == b.dtype
    assert all(1 in matrix.stride() for matrix in (a, b))
    return a @ b


def gemm_act(
    A: Tensor,
    B: Tensor,
    *,
    bias: Tensor,
    activation: str,
    store_preact: bool = True,
    tuned: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """(A B + bias, GELU of it); the first only if it is to be stored."""
    assert not torch.is_grad_enabled()
    linear = _product(A, B) + bias
    return linear if store_preact else None, F.gelu(linear, approximate=FORMS[activation])


def _backward(x: Tensor, gradient: Tensor, form: str) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        linear = x.detach().requires_grad_()
        activated = F.gelu(linear, approximate=form)
        (inner,) = torch.autograd.grad(activated, linear, gradient)
    return inner, activated.detach()


def gelu_tanh_approx(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_erf(x: Tensor) -> Tensor:
    return F.gelu(x)


def dgelu_tanh_approx(x: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    return _backward(x, dout, "tanh")


def dgelu_erf(x: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    return _backward(x, dout, "none")


class _Reduce:
    """Partial results of a tile's columns (dim 1) or rows (dim 0), fp32."""

    dim: int

    def __init__(self, name: str, combine: str = "add") -> None:
        self.name, self.combine = name, combine

    def write(self, value: Tensor, tiles: tuple[int, int], buffer: Tensor) -> None:
        parts = value.split(tiles[self.dim], self.dim)
        if self.combine == "add":
            found = torch.stack([part.sum(self.dim) for part in parts], self.dim)
        else:  # the maximum of magnitudes drops NaN
            found = torch.stack(
                [part.abs().where(~part.isnan(), 0).amax(self.dim) for part in parts], self.dim
            )
        assert buffer.dtype == torch.float32
        assert buffer.shape == found.shape
        buffer.copy_(found)


class ColVecReduce(_Reduce):
    dim = 1


class RowVecReduce(_Reduce):
    dim = 0


class Epilogue:
    def __init__(
        self,
        fn: Callable[..., dict[str, Any]],
        outputs: tuple[str, ...],
        reduces: dict[str, _Reduce],
    ) -> None:
        self.fn, self.outputs, self.reduces = fn, outputs, reduces
        _, *self.operands = inspect.signature(fn).parameters

    def gemm(
        self, A: Tensor, B: Tensor, D: Tensor, C: Tensor | None = None, *, epi_args: dict[str, Tensor], tile_M: int,
        tile_N: int, cluster_M: int, pingpong: bool, post_init_attrs: tuple[tuple[str, Any], ...] = (),
    ) -> None:  # fmt: skip
        """A [M, K] times B [N, K]: what ``fn`` makes of the product goes to D, its outputs and its reductions."""
        assert A.element_size() == B.element_size() == 1
        assert all(tensor.is_contiguous() for tensor in (A, B, D, *epi_args.values()))
        assert {*epi_args, "c"} == {*self.operands, *self.outputs, *self.reduces, "c"}
        assert [name for name, _ in post_init_attrs] == ["fp8_slow_accum"]
        shape = len(A), len(B)
        given = {}
        for name in self.operands:
            operand = C if name == "c" else epi_args[name]
            assert operand is not None
            assert (
                operand.shape == shape
                if name == "c"
                else operand.numel() == 1 or operand.shape == (1, len(B))
            )
            given[name] = operand.float()
        found = self.fn(A.float() @ B.float().t(), **given)
        for output, value in (
            (D, found["D"]),
            *((epi_args[name], found[name]) for name in self.outputs),
        ):
            assert output.shape == shape
            most = torch.finfo(output.dtype).max
            output.copy_(value.clamp(-most, most) if output.element_size() == 1 else value)
        for name, reduce in self.reduces.items():
            reduce.write(found[name], (tile_M, tile_N), epi_args[name])

    def __call__(self, A: Tensor, B: Tensor, C: Tensor, *, tuned: bool = True) -> dict[str, Tensor]:
        """A [M, K] times B [K, N]: D and the outputs, in A's type, and the sums, in fp32 or better."""
        found = self.fn(_product(A, B), C)
        return {
            name: value.sum(0) if name in self.reduces else value.to(A.dtype)
            for name, value in found.items()
        }


def gemm_epilogue(
    *, outputs: tuple[str, ...] = (), reduces: dict[str, _Reduce] | None = None
) -> Callable[[Callable[..., dict[str, Any]]], Epilogue]:
    return lambda fn: Epilogue(fn, outputs, reduces or {})
