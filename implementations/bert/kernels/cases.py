"""What a fused operation is tested on: inputs, and the error allowed with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

# Unit roundoff times a small factor: the result is rounded once, and it is summed in fp32.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison of ``fused`` with ``reference``.

    ``build`` makes the arguments in order (floating tensors in fp32 or fp64; they are cast to ``dtype``). The result
    and the gradient of each floating tensor must be within ``tolerance`` of the reference in fp64 on the same numbers,
    relative to the largest element of the tensor (or to 1).
    """

    name: str
    dtype: torch.dtype
    tolerance: float
    reason: str
    build: Callable[[Generator], tuple[Any, ...]]

    def arguments(self, seed: int = 0) -> tuple[Any, ...]:
        """The arguments, floating tensors of ``dtype`` and requiring gradients."""
        return tuple(self._leaf(value) for value in self.build(torch.Generator().manual_seed(seed)))

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self.dtype).detach().requires_grad_()
        return value


def each_dtype(
    name: str, build: Callable[[Generator], tuple[Any, ...]], reason: str = "one rounding of the result"
) -> list[Case]:
    """The case in fp32, bf16 and fp16 with the usual tolerances."""
    return [
        Case(
            name=f"{name}-{str(dtype).removeprefix('torch.')}",
            dtype=dtype,
            tolerance=tolerance,
            reason=reason,
            build=build,
        )
        for dtype, tolerance in TOLERANCE.items()
    ]
