"""Triton where it can be used, and what several kernels share: counter-based dropout and column sums.

Triton is optional. It is imported where PyTorch sees a GPU, or where it has been imported already: the tests import it
in interpreter mode (TRITON_INTERPRET=1), and compile kernels for a GPU that is not there.

Dropout is recomputed in the backward pass, so no mask is stored. Whether element (row, column) is kept depends on a
64-bit seed that lives on the device, the number of the call within the forward pass (site) and its coordinates alone,
so masks do not depend on tile sizes, and a replayed CUDA graph that draws a new seed drops other elements. Each row
takes two 32-bit keys from Philox4x32-10 (Salmon et al. 2011), which the forward kernel leaves to the backward one; a
multiply-xorshift hash of keys and column then gives 32 bits an element, for half the instructions that Philox takes
an element. The probability is exact to 2^-32 and survivors are scaled by its exact inverse.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

triton: Any = None
tl: Any = None
if torch.cuda.is_available() or "triton" in sys.modules:
    with suppress(ImportError):
        triton = importlib.import_module("triton")
        tl = importlib.import_module("triton.language")
# Annotates the compile-time constants of a kernel. Triton's interpreter knows them by this very name.
if TYPE_CHECKING:
    constexpr = Any
else:
    constexpr = getattr(tl, "constexpr", None)

_interpreted = False


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit, or the bare function where there is no Triton; it is never called there.

    Integers that change from call to call (``site``) are kept out of Triton's specialisation, which would compile anew.
    """
    if triton is None:
        return function
    changing = [name for name in ("site",) if name in inspect.signature(function).parameters]
    return triton.jit(function, do_not_specialize=changing)


@contextmanager
def interpreted() -> Iterator[None]:
    """Lets CPU tensors count as supported while inside: for tests, under Triton's interpreter. Never for a run."""
    global _interpreted
    _interpreted = True
    try:
        yield
    finally:
        _interpreted = False


def missing(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on a device, in a few words; None where they can."""
    if device.type != "cuda" and not _interpreted:
        return f"the device is a {device.type.upper()}"
    if triton is None:
        return "Triton is not installed"
    if device.type == "cuda" and torch.version.cuda is None:
        return "the GPU is not NVIDIA's"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def supported(device: torch.device) -> bool:
    """True where the Triton kernels run: NVIDIA GPUs from compute capability 8.0 on, with Triton installed."""
    return missing(device) is None


@functools.cache
def _multiprocessors(index: int | None) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def num_programs(device: torch.device, per_multiprocessor: int, num_tiles: int) -> int:
    """Grid of a persistent kernel: some programs a multiprocessor, and no more than there are tiles."""
    multiprocessors = _multiprocessors(device.index) if device.type == "cuda" else 1
    return max(1, min(multiprocessors * per_multiprocessor, num_tiles))


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


# --- arithmetic ------------------------------------------------------------------------------------------------------


@jit
def _probe():
    pass


# False in Triton's interpreter, which knows no assembly.
NATIVE = constexpr(isinstance(_probe, triton.runtime.JITFunction)) if triton is not None else False


@jit
def exp2(x):
    """2^x of fp32 to 2^-22, in one instruction; Triton's takes three more for results that are subnormal, 0 here."""
    if NATIVE:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        y = tl.exp2(x)
    return y


@jit
def reciprocal(x):
    """1 / x of fp32 to its last bit, in one instruction; a division takes seven. 0 where the result is subnormal."""
    if NATIVE:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        y = 1.0 / x
    return y


@jit
def rounded(x, dtype: constexpr):
    """fp32 -> fp32 by way of ``dtype``: what a number would be once it is written and read again."""
    if NATIVE and dtype == tl.bfloat16:
        # Two at a time, on the pipe of the additions; conversions one by one would queue with exp2 and reciprocal.
        y = tl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
            "=r,=r,f,f", [x], dtype=tl.int32, is_pure=True, pack=2,
        ).to(tl.float32, bitcast=True)  # fmt: skip
    else:
        y = x.to(dtype).to(tl.float32)
    return y


# --- dropout ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dropout:
    """One application of dropout: what forward and backward both need to find the same mask.

    seed: int64 [1] on the device (None: no dropout); site: number of the call in this forward pass;
    threshold: an element is dropped where its 32 random bits are below it; scale: of the survivors.
    """

    seed: Tensor | None
    site: int
    threshold: int
    scale: float

    def new_keys(self, *shape: int) -> Tensor | None:
        """Room for the two keys of each row, which the forward kernel leaves to the backward one: int32 [..., 2]."""
        return None if self.seed is None else torch.empty(*shape, 2, dtype=torch.int32, device=self.seed.device)


class _Pass:
    """The forward pass in progress on one device."""

    seed: Tensor | None = None
    num_sites = 0

    def __init__(self) -> None:
        self.made: dict[tuple[int, Any], tuple[Any, Tensor]] = {}


_passes: dict[torch.device, _Pass] = {}


def new_pass(device: torch.device) -> None:
    """Starts a forward pass: the next site draws a new seed from the device's generator, and counting restarts.

    torch.manual_seed before a step therefore fixes every mask of that step.
    """
    _passes[device] = _Pass()


def dropout_site(device: torch.device, probability: float) -> Dropout:
    """The next site of the forward pass in progress. Probability 0 uses no site."""
    if not probability:
        return Dropout(None, 0, 0, 1.0)
    current = _passes.setdefault(device, _Pass())
    if current.seed is None:
        current.seed = torch.empty(1, dtype=torch.int64, device=device).random_()
    site = current.num_sites
    current.num_sites += 1
    threshold = round(probability * 2**32)
    return Dropout(current.seed, site, threshold, 1 / (1 - threshold / 2**32))


def once_a_pass(source: Tensor, key: Any, make: Callable[[], Tensor]) -> Tensor:
    """What ``make`` computes from ``source``, computed once in a forward pass for each ``key``.

    Computed anew where the source has changed, or where a CUDA graph is being recorded and what there is lies outside.
    """
    if source.is_inference():  # changes of such tensors are not counted
        return make()
    current = _passes.setdefault(source.device, _Pass())
    recording = source.is_cuda and torch.cuda.is_current_stream_capturing()
    identity = (source, source._version, recording)
    found = current.made.get((id(source), key))
    # The entry holds on to its source, so that no other tensor can take its id.
    if found is not None and found[0][0] is source and found[0][1:] == identity[1:]:
        return found[1]
    made = make()
    current.made[id(source), key] = (identity, made)
    return made


@jit
def row_keys(seed, site, row, head):
    """Two 32-bit keys for each row (int32). Rows are tokens; ``head`` tells rows of the same token apart."""
    key_0, key_1, _, _ = tl.philox(seed, row, row * 0 + site, row * 0 + head, row * 0)
    return key_0, key_1


@jit
def store_keys(keys, row, key_0, key_1, mask):
    """Writes the keys of rows into int32 [..., 2]; ``row`` is the flat index."""
    tl.store(keys + 2 * row, key_0.to(tl.int32, bitcast=True), mask=mask)
    tl.store(keys + 2 * row + 1, key_1.to(tl.int32, bitcast=True), mask=mask)


@jit
def load_keys(keys, row, mask):
    """Reads what ``store_keys`` wrote."""
    key_0 = tl.load(keys + 2 * row, mask=mask, other=0).to(tl.uint32, bitcast=True)
    key_1 = tl.load(keys + 2 * row + 1, mask=mask, other=0).to(tl.uint32, bitcast=True)
    return key_0, key_1


@jit
def keep_mask(key_0, key_1, column, threshold: constexpr):
    """True where an element survives; keys and column (uint32) broadcast against each other."""
    bits = column * 0x9E3779B1 + key_0
    bits = (bits ^ (bits >> 16) ^ key_1) * 0x85EBCA77
    bits = (bits ^ (bits >> 15)) * 0xC2B2AE3D
    return bits >= threshold


# --- sums over rows --------------------------------------------------------------------------------------------------


@jit
def _column_sums(partials, output, num_rows, num_columns, block_rows: constexpr, block_columns: constexpr):
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    row = tl.arange(0, block_rows)
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for begin in range(0, num_rows, block_rows):
        inside = (begin + row < num_rows)[:, None] & (column < num_columns)[None, :]
        pointers = partials + (begin + row).to(tl.int64)[:, None] * num_columns + column[None, :]
        total += tl.load(pointers, mask=inside, other=0.0)
    tl.store(output + column, tl.sum(total, axis=0).to(output.dtype.element_ty), mask=column < num_columns)


def column_sums(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums fp32 [P, ...] over its first dimension in a fixed order, in one launch. Returns [...] of ``dtype``."""
    num_rows, num_columns = partials.shape[0], partials[0].numel()
    output = torch.empty(partials.shape[1:], dtype=dtype, device=partials.device)
    block_rows, block_columns = 32, 32
    grid = (-(-num_columns // block_columns),)
    _column_sums[grid](partials, output, num_rows, num_columns, block_rows, block_columns)
    return output
