"""Optional use of Triton: the decorator of kernels, supported devices, and the sizes of grids.

Triton is imported if PyTorch sees a GPU, or if it has been imported already: the tests import it in
interpreter mode (TRITON_INTERPRET=1), and compile kernels without a GPU.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from common.env import announce

triton: Any = None
tl: Any = None
if torch.cuda.is_available() or "triton" in sys.modules:
    # The default until 3.9, which warns that 3.10 has another one: with it results would differ.
    announce("TRITON_DEFAULT_FP_FUSION", "1")
    with suppress(ImportError):
        triton = importlib.import_module("triton")
        tl = importlib.import_module("triton.language")
# Annotates the compile-time constants of a kernel. Triton's interpreter requires this name.
if TYPE_CHECKING:
    constexpr = Any
else:
    constexpr = getattr(tl, "constexpr", None)

_interpreted = False


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit, or without Triton the bare function, which is then never called.

    Profilers show the kernel with its module's name, as many are called _forward. Integers that
    change from call to call (``site``) are not specialized, which would recompile the kernel.
    """
    if triton is None:
        return function
    changing = [
        name for name in ("site",) if name in inspect.signature(function).parameters
    ]
    name = f"{function.__module__.rpartition('.')[2]}_{function.__name__}"
    return triton.jit(function, do_not_specialize=changing, repr=lambda _: name)


@contextmanager
def interpreted() -> Iterator[None]:
    """Supports CPU tensors inside, for tests with Triton's interpreter."""
    global _interpreted
    _interpreted = True
    try:
        yield
    finally:
        _interpreted = False


def missing(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on a device, in a few words; None if they can."""
    if device.type != "cuda" and not _interpreted:
        return f"the device is a {device.type.upper()}"
    if triton is None:
        return "Triton is not installed"
    # Launch settings are for NVIDIA's architectures.
    if device.type == "cuda" and torch.version.cuda is None:
        return "the GPU is AMD's"
    # 8.0, Ampere: the first with conversions and matrix products in bf16.
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def supported(device: torch.device) -> bool:
    """Whether the Triton kernels run: on NVIDIA GPUs from compute capability 8.0 on, with Triton
    installed.
    """
    return missing(device) is None


@functools.cache
def _multiprocessors(index: int | None) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def num_programs(device: torch.device, per_multiprocessor: int, num_tiles: int) -> int:
    """Grid of a persistent kernel: ``per_multiprocessor`` programs each, but no more than there are
    tiles.
    """
    multiprocessors = _multiprocessors(device.index) if device.type == "cuda" else 1
    return max(1, min(multiprocessors * per_multiprocessor, num_tiles))


def row_warps(num_warps: int, width: int) -> int:
    """Warps of a program that holds whole rows: ``num_warps`` up to a width of 1,024, above it in
    proportion.
    """
    return num_warps * max(1, next_power_of_2(width) // 1024)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
