"""The kernels on a GPU where there is one, else in Triton's interpreter (which tests/conftest.py has asked for)."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bert.kernels.support import triton_support


def _teach_the_interpreter_bf16_products() -> None:
    """Triton's interpreter keeps bf16 as 16-bit integers, which its dot would multiply."""
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    plain, tl = builder.create_dot, triton_support.tl

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(operand, tl.float32) for operand in (a, b))
        return plain(self, a, b, *rest)

    builder.create_dot = create_dot


def _teach_the_interpreter_to_round_to_fp8() -> None:
    """Triton's interpreter loses a carry into the exponent (127 becomes 64) and turns NaN into numbers."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    plain = interpreter._convert_float
    tl = triton_support.tl
    formats = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def convert(numbers: Any, source: Any, destination: Any, rounding: Any) -> Any:
        if source == tl.float32 and destination in formats:
            floats = torch.from_numpy(numbers.view("float32").copy())
            return floats.to(formats[destination]).view(torch.uint8).numpy()
        return plain(numbers, source, destination, rounding)

    interpreter._convert_float = convert


if triton_support.triton is not None and not torch.cuda.is_available():
    _teach_the_interpreter_bf16_products()
    _teach_the_interpreter_to_round_to_fp8()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With a GPU, tests that run the kernels are tests of the GPU, without a marker in their files."""
    if not torch.cuda.is_available():
        return
    for item in items:
        runs_kernels = "device" in getattr(item, "fixturenames", ())
        if item.path.parent == Path(__file__).parent and runs_kernels:
            item.add_marker("gpu")


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device of the Triton kernels; skips without Triton."""
    if triton_support.triton is None:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    with triton_support.interpreted():
        yield torch.device("cpu")


@pytest.fixture
def gpu() -> torch.device:
    """A GPU; skips without one."""
    if triton_support.triton is None or not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device("cuda")
