"""Tests the kernels' inline assembly on this GPU before it is used.

The compiler does not check assembly: errors such as a wrong order of operands, or of halves of a register, show only at
run time. Each piece is compared with PyTorch's plain arithmetic, on all exponents and signs, infinities and NaN.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
from torch import Tensor

from bert.kernels.support.arithmetic import (
    native_exp2,
    native_kept,
    native_masked,
    native_narrowed,
    native_product,
    native_reciprocal,
    native_rounded,
    native_widened,
)
from bert.kernels.support.triton_support import constexpr, jit, tl
from common.process import root_cause

BLOCK, COUNT = 1024, 1 << 16  # numbers per program, and in all
FACTOR, THRESHOLD = 0xD2511F53, 3277  # a factor of Philox; the threshold of dropout 0.1
SMALLEST = 2.0**-126  # smallest normal fp32 number; the approximations give 0 below
EXP2_ERROR, RECIPROCAL_ERROR = (
    2.0**-21,
    2.0**-22,
)  # relative, twice the instructions' documented errors


@jit
def _apply(x, y, low, what: constexpr, factor: constexpr, threshold: constexpr, block: constexpr):
    place = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + place)
    if what == "exp2":
        result = native_exp2(value)
    elif what == "reciprocal":
        result = native_reciprocal(value)
    elif what == "widened":
        result = native_widened(value)
    elif what == "narrowed":
        result = native_narrowed(value)
    elif what == "rounded":
        result = native_rounded(value)
    elif what == "kept":
        result = native_kept(value, threshold)
    elif what == "masked":
        result = native_masked(value, value.to(tl.uint16, bitcast=True), threshold)
    else:
        result, other = native_product(factor, value.to(tl.uint32, bitcast=True))
        tl.store(low + place, other.to(tl.int32, bitcast=True))
        result = result.to(tl.int32, bitcast=True)
    tl.store(y + place, result)


PIECES = ("exp2", "reciprocal", "widened", "narrowed", "rounded", "product", "kept", "masked")


def numbers(what: str, device: torch.device) -> Tensor:
    """Inputs of a piece, [COUNT]: all upper halves of a number, each with some lower half; for exp2 its range."""
    bits = torch.arange(COUNT, dtype=torch.int64, device=device)
    if what == "exp2":
        # -160 to 140: beyond the results' range at both ends, 2^-149 and 2^128.
        return bits.float() / COUNT * 300 - 160
    if what in ("widened", "masked"):
        # Of 16 bits these are all numbers.
        return bits.to(torch.int16).view(torch.bfloat16)
    # The upper halves count up; the lower ones need only vary.
    spread = ((bits * 0x10001) ^ ((bits * 40503) & 0xFFFF)).to(torch.int32)
    return spread if what in ("product", "kept") else spread.view(torch.float32)


def results(what: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Results of the assembly on ``x``; for a product the high and the low words."""
    dtype = {"narrowed": torch.bfloat16, "masked": torch.bfloat16, "product": torch.int32}.get(
        what, torch.float32
    )
    y, low = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=torch.int32)
    _apply[(COUNT // BLOCK,)](x, y, low, what, FACTOR, THRESHOLD, BLOCK, num_warps=4)
    return y, low


def wrong(what: str, x: Tensor, y: Tensor, low: Tensor) -> Tensor:
    """Where the results differ from plain arithmetic (bool)."""
    if what in ("exp2", "reciprocal"):
        exact = torch.exp2(x.double()) if what == "exp2" else 1 / x.double()
        allowed = (EXP2_ERROR if what == "exp2" else RECIPROCAL_ERROR) * exact.abs() + SMALLEST
        near = (y.double() - exact).abs() <= allowed
        same = (y == exact.float()) | (y.isnan() & x.isnan())  # infinities too
        # Subnormal numbers may count as 0.
        return ~(
            near | same | ((what == "reciprocal") & (x.abs() < SMALLEST) & (y.abs() > 2.0**125))
        )
    if what == "product":
        words = (
            ((x.long() & 0xFFFFFFFF) * FACTOR).view(torch.int32).view(-1, 2)
        )  # the bits of an unsigned product
        return (low != words[:, 0]) | (y != words[:, 1])
    if what in ("kept", "masked"):
        places = x.view(torch.int16) if what == "masked" else x >> 16
        survives = (places & 0x7FFF) >= THRESHOLD
        x = torch.where(survives, x, 0.0) if what == "masked" else survives.float()
    exact = {
        "widened": x.float,
        "narrowed": x.bfloat16,
        "rounded": lambda: x.bfloat16().float(),
    }.get(what, lambda: x)()
    # Bits, not values, since the conversions must keep the sign of zero, too.
    bits = torch.int16 if what in ("narrowed", "masked") else torch.int32
    return (y.view(bits) != exact.view(bits)) & ~(y.isnan() & exact.isnan())


def problems(device: torch.device) -> dict[str, str]:
    """The pieces that are wrong on a device that supports Triton's kernels, and how."""
    found = {}
    for what in PIECES:
        try:
            x = numbers(what, device)
            count = int(wrong(what, x, *results(what, x)).sum())
        except Exception as error:  # any error of a compiler
            found[what] = " ".join(str(root_cause(error)).split())[:200]
            continue
        if count:
            found[what] = f"{count} of {COUNT} numbers are wrong"
    return found
