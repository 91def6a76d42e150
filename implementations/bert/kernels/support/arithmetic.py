"""fp32 arithmetic of the kernels in fewer instructions than the compiler's; sums over rows.

Inline assembly is in separate functions, ``native_...``, which assembly_check.py tests on a GPU before they are used;
if one is wrong all are disabled (triton_support.NATIVE).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
from torch import Tensor

from bert.kernels.support.triton_support import NATIVE, constexpr, jit, tl


@jit
def native_exp2(x):
    """exp2 in assembly."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip


@jit
def exp2(x):
    """2^x of fp32 to 2^-22, in one instruction; Triton's takes three more for subnormal results, which are 0 here."""
    if NATIVE:
        return native_exp2(x)
    return tl.exp2(x)


@jit
def native_reciprocal(x):
    """reciprocal in assembly."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip


@jit
def reciprocal(x):
    """1 / x of fp32 to its last bit, in one instruction; a division takes seven. 0 where the result is subnormal."""
    if NATIVE:
        return native_reciprocal(x)
    return 1.0 / x


@jit
def native_widened(x):
    """widened in assembly, of bf16."""
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.int32, is_pure=True, pack=2
    ).to(tl.float32, bitcast=True)  # fmt: skip


@jit
def widened(x):
    """``x`` -> fp32. In assembly, because the compiler would otherwise repeat the conversion, and all that follows,
    rather than keep the result.
    """
    if NATIVE and x.dtype == tl.bfloat16:
        return native_widened(x)
    return x.to(tl.float32)


@jit
def native_narrowed(x):
    """narrowed in assembly, to bf16."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )  # fmt: skip


@jit
def narrowed(x, dtype: constexpr):
    """fp32 -> ``dtype``, two numbers in one instruction.

    The compiler would move its own conversion before a select, which then works on halves of registers.
    """
    if NATIVE and dtype == tl.bfloat16:
        return native_narrowed(x)
    return x.to(dtype)


@jit
def native_rounded(x):
    """rounded in assembly, by way of bf16."""
    # Two at a time, on the addition pipe; single conversions would compete with exp2 and reciprocal.
    return tl.inline_asm_elementwise(
        "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
        "=r,=r,f,f", [x], dtype=tl.int32, is_pure=True, pack=2,
    ).to(tl.float32, bitcast=True)  # fmt: skip


@jit
def rounded(x, dtype: constexpr):
    """fp32 -> ``dtype`` -> fp32, as if written to memory and read."""
    if NATIVE and dtype == tl.bfloat16:
        return native_rounded(x)
    return x.to(dtype).to(tl.float32)


@jit
def native_kept(word, threshold: constexpr):
    """kept in assembly: magnitudes are ordered as their bits, NaN last."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 size, least; abs.f32 size, $1; mov.b32 least, $2; set.geu.f32.f32 $0, size, least; }",
        "=f,r,r", [word, threshold << 16], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@jit
def kept(word, threshold: constexpr):
    """1.0 where bits 16 to 30 of a word (uint32) are at least ``threshold``, else 0.0."""
    if NATIVE:
        return native_kept(word, threshold)
    return tl.where((word & 0x7FFFFFFF) >= (threshold << 16), 1.0, 0.0)


@jit
def native_masked(x, bits, threshold: constexpr):
    """masked in assembly, for two 16-bit numbers at a time, with 16 random bits each (uint16)."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 least, mask; abs.f16x2 mask, $2; mov.b32 least, $3; set.geu.u32.f16x2 mask, mask, least; "
        "and.b32 $0, $1, mask; }",
        "=r,r,r,r,r", [x, bits, (threshold << 16) | threshold], dtype=x.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@jit
def masked(x, word, threshold: constexpr):
    """x where bits 16 to 30 of its word (uint32) are at least ``threshold``, else 0."""
    if NATIVE and x.dtype != tl.float32:
        return native_masked(x, (word >> 16).to(tl.uint16), threshold)
    return tl.where((word & 0x7FFFFFFF) >= (threshold << 16), x, 0.0)


@jit
def native_product(constant: constexpr, word):
    """High and low word of a product of 32-bit numbers, in assembly."""
    return tl.inline_asm_elementwise(
        "{ .reg .b64 both; mul.wide.u32 both, $2, $3; mov.b64 {$1, $0}, both; }",
        "=r,=r,r,r", [word, constant], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
    )  # fmt: skip


@jit
def _column_sums(
    partials, output, num_rows, num_columns, block_rows: constexpr, block_columns: constexpr
):
    # One program for all rows of its columns: the order of additions is that of the loop.
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    row = tl.arange(0, block_rows)
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for begin in range(0, num_rows, block_rows):
        inside = (begin + row < num_rows)[:, None] & (column < num_columns)[None, :]
        pointers = partials + (begin + row).to(tl.int64)[:, None] * num_columns + column[None, :]
        total += tl.load(pointers, mask=inside, other=0.0)
    tl.store(
        output + column,
        tl.sum(total, axis=0).to(output.dtype.element_ty),
        mask=column < num_columns,
    )


def column_sums(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums the programs' partial results, fp32 [P, ...], over the first dimension, in one launch: [...] of ``dtype``.

    Always in the same order, so that results are reproducible bit for bit.
    """
    num_rows, num_columns = partials.shape[0], partials[0].numel()
    output = torch.empty(partials.shape[1:], dtype=dtype, device=partials.device)
    block_rows, block_columns = 32, 32
    grid = (-(-num_columns // block_columns),)
    _column_sums[grid](partials, output, num_rows, num_columns, block_rows, block_columns)
    return output
