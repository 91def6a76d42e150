"""Executes the assembly of the kernels on a CPU, as the PTX ISA describes its instructions (version 8.5, chapter 9.7).

Operands are 32 bits of a thread each; of ``pack`` elements of 16 bits the first is the lower half of a register, as
Triton hands them over. Instructions beyond those that the kernels use are errors.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor


def inline_asm_elementwise(
    assembly: str, constraints: str, operands: list[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    """As of triton.language, on tensors [n] in place of blocks and torch's types in place of Triton's."""
    results = dtype if isinstance(dtype, tuple) else (dtype,)
    registers: dict[str, Tensor] = {}
    count = next(len(operand.values) for operand in operands if isinstance(operand, Block))
    inputs = [
        register
        for operand in operands
        for register in _split(
            operand.values
            if isinstance(operand, Block)
            else _word(operand).expand(count).contiguous(),
            pack,
        )
    ]
    number_of_outputs = constraints.count("=")
    assert len(inputs) == len(constraints.split(",")) - number_of_outputs, (
        "operands and constraints do not fit"
    )
    for number, register in enumerate(inputs, start=number_of_outputs):
        registers[f"${number}"] = register
    for statement in re.sub(r"\{ (\.reg.*) \}", r"\1", assembly.strip()).split(";"):
        if statement.strip() and not statement.strip().startswith(".reg"):
            _execute(statement.strip(), registers)
    outputs = [registers[f"${number}"] for number in range(number_of_outputs)]
    each = len(outputs) // len(results)
    found = [
        Block(_join(outputs[i * each : (i + 1) * each], kind, pack))
        for i, kind in enumerate(results)
    ]
    return tuple(found) if isinstance(dtype, tuple) else found[0]


class Block:
    """A block of numbers of a kernel: what the assembly's callers do with one."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Block:
        """Another type, or the same bits as another type."""
        return Block(self.values.view(dtype) if bitcast else self.values.to(dtype))


def _word(number: int) -> Tensor:
    return torch.tensor([number - 2**32 if number >= 2**31 else number], dtype=torch.int32)


def _split(values: Tensor, pack: int) -> list[Tensor]:
    """Registers (int32) of ``pack`` elements a thread."""
    if values.element_size() == 2:
        assert pack == 2
        return [values.view(torch.int32)]
    return [part.contiguous().view(torch.int32) for part in values.view(-1, pack).unbind(1)]


def _join(registers: list[Tensor], dtype: torch.dtype, pack: int) -> Tensor:
    if dtype.itemsize == 2:
        assert len(registers) == 1
        return registers[0].view(dtype)
    assert len(registers) == pack
    return torch.stack(registers, dim=1).view(-1).view(dtype)


def _execute(statement: str, registers: dict[str, Tensor]) -> None:
    name, _, rest = statement.partition(" ")
    target, *given = [part.strip() for part in re.findall(r"\{[^}]*\}|[^,]+", rest)]
    values = [registers[text] if text in registers else _word(int(text, 0)) for text in given]
    if name == "ex2.approx.ftz.f32":
        registers[target] = _flushed(torch.exp2(_flushed(values[0].view(torch.float32)))).view(
            torch.int32
        )
    elif name == "rcp.approx.ftz.f32":
        registers[target] = _flushed(1 / _flushed(values[0].view(torch.float32))).view(torch.int32)
    elif name == "shl.b32":
        registers[target] = (values[0].long() << values[1].long()).to(torch.int32)
    elif name == "and.b32":
        registers[target] = values[0] & values[1]
    elif name == "mov.b32":
        registers[target] = values[0]
    elif name == "abs.f32":
        registers[target] = values[0].view(torch.float32).abs().view(torch.int32)
    elif name == "abs.f16x2":
        registers[target] = values[0] & 0x7FFF7FFF
    elif name == "set.geu.f32.f32":  # greater or equal, or either is NaN
        registers[target] = (
            (~(values[0].view(torch.float32) < values[1].view(torch.float32)))
            .float()
            .view(torch.int32)
        )
    elif name == "set.geu.u32.f16x2":  # all bits of a half that is
        first, second = (
            value.expand_as(values[0]).contiguous().view(torch.float16) for value in values
        )
        registers[target] = (-(~(first < second)).to(torch.int16)).view(torch.int32)
    elif name == "cvt.rn.bf16x2.f32":  # d, a, b: a becomes the upper half, b the lower one
        upper, lower = (
            value.view(torch.float32).bfloat16().view(torch.int16).long() for value in values
        )
        registers[target] = ((upper << 16) | (lower & 0xFFFF)).to(torch.int32)
    elif name == "mul.wide.u32":
        first, second = (value.long() & 0xFFFFFFFF for value in values)
        registers[target] = first * second  # 64 bits
    elif name == "mov.b64" and target.startswith("{"):  # the first of the list is the lowest part
        low, high = (text.strip() for text in target.strip("{}").split(","))
        registers[low], registers[high] = (
            values[0].to(torch.int32),
            (values[0] >> 32).to(torch.int32),
        )
    else:
        raise NotImplementedError(statement)


def _flushed(values: Tensor) -> Tensor:
    """Subnormal numbers as zeros of their sign."""
    return torch.where(values.abs() < 2.0**-126, values * 0.0, values)
