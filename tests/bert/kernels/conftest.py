"""The kernels on a GPU where there is one, else in Triton's interpreter (which tests/conftest.py has asked for)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bert.kernels import jit


def _teach_the_interpreter_bf16_products() -> None:
    """Triton's interpreter keeps bf16 as 16-bit integers, which its dot would multiply."""
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    plain = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == jit.tl.bfloat16:
            a, b = (self.cast_impl(operand, jit.tl.float32) for operand in (a, b))
        return plain(self, a, b, *rest)

    builder.create_dot = create_dot


if jit.triton is not None and not torch.cuda.is_available():
    _teach_the_interpreter_bf16_products()


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Where the Triton kernels run; skips where Triton is not installed."""
    if jit.triton is None:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    with jit.interpreted():
        yield torch.device("cpu")


@pytest.fixture
def gpu() -> torch.device:
    """A GPU; skips where there is none."""
    if jit.triton is None or not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device("cuda")
