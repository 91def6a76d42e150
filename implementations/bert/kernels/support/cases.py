"""Test cases of fused operations: inputs, and the allowed error with its reason."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# Spacing of the type's numbers just above 1: results are summed in fp32 and rounded (or truncated)
# once.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


class Draw:
    """Random inputs on a device; on the meta device only shapes."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = (
            None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        )

    def normal(self, *shape: int) -> Tensor:
        """Standard normal, fp32."""
        return torch.randn(shape, generator=self.generator, device=self.device)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Uniform in [0, high), int32."""
        return torch.randint(
            high, shape, generator=self.generator, device=self.device, dtype=torch.int32
        )


@dataclass(frozen=True)
class Case:
    """One comparison of ``fused`` with ``reference``.

    ``build`` makes the arguments in order, floating tensors in fp32, which are cast to ``dtype``.
    The result and the gradient of each floating tensor must be within ``tolerance`` of the
    reference in fp64 on the same numbers, relative to the tensor's largest element (or to 1).
    ``large`` cases have BERT-large's sizes, for GPUs.
    """

    name: str
    dtype: torch.dtype
    tolerance: float
    reason: str
    build: Callable[[Draw], tuple[Any, ...]]
    large: bool = False

    def arguments(self, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """The arguments, floating tensors of ``dtype`` and requiring gradients."""
        return tuple(
            # Ids and lengths stay integers, and have no gradient.
            value.to(self.dtype).detach().requires_grad_()
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for value in self.build(Draw(device, seed))
        )


def each_dtype(
    name: str,
    build: Callable[[Draw], tuple[Any, ...]],
    reason: str = "one rounding of the result",
    factor: float = 1,
) -> list[Case]:
    """The case in fp32, bf16 and fp16 with ``factor`` times the usual tolerances."""
    return [
        Case(
            f"{name}-{str(dtype).removeprefix('torch.')}",
            dtype,
            factor * tolerance,
            reason,
            build,
        )
        for dtype, tolerance in TOLERANCE.items()
    ]


def extreme(name: str, build: Callable[[Draw], tuple[Any, ...]]) -> Case:
    """A case in bf16 of magnitudes that fp16 lacks, whose squares may not fit into fp32."""
    return replace(large(name, build), large=False)


def large(
    name: str,
    build: Callable[[Draw], tuple[Any, ...]],
    reason: str = "one rounding of the result",
    factor: float = 1,
) -> Case:
    """A case of real size in bf16."""
    return Case(
        name,
        torch.bfloat16,
        factor * TOLERANCE[torch.bfloat16],
        reason,
        build,
        large=True,
    )
