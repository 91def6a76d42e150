"""The varlen batch: token fields, which every task has, and label fields, which a task adds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

AnyBatch = TypeVar("AnyBatch", bound="Batch")
AnyCapacity = TypeVar("AnyCapacity", bound="Capacity")


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Fixed sizes of a batch (for a CUDA graph): tokens T, sequences S. A task whose labels have a size of their own
    adds it.
    """

    tokens: int
    sequences: int


def padded(fills: str, padding: int) -> Any:
    """A tensor field of a batch: which size of the Capacity its first dimension fills, and what fills it up."""
    return dataclasses.field(metadata={"fills": fills, "padding": padding})


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences end to end. Positions restart in each; attention never crosses ``cu_seqlens``.

    input_ids, segment_ids, position_ids: int32 [T]; cu_seqlens: int32 [S+1]. ``max_seqlen`` bounds the length of a
    sequence. The num_ fields count what is real. A task's batch is a subclass with label fields, each declared by
    ``padded``; with their padding, losses and gradients must stay what they are without it.
    """

    input_ids: Tensor = padded("tokens", 0)
    segment_ids: Tensor = padded("tokens", 0)
    position_ids: Tensor = padded("tokens", 0)
    cu_seqlens: Tensor
    max_seqlen: int
    num_tokens: int
    num_sequences: int

    def to(self: AnyBatch, device: torch.device) -> AnyBatch:
        """The batch on another device; from pinned memory the copies do not block."""
        moved: dict[str, Any] = {name: value.to(device, non_blocking=True) for name, value in self.tensors().items()}
        return dataclasses.replace(self, **moved)

    def pin_memory(self: AnyBatch) -> AnyBatch:
        """The batch in page-locked memory."""
        pinned: dict[str, Any] = {name: value.pin_memory() for name, value in self.tensors().items()}
        return dataclasses.replace(self, **pinned)

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def pad_to(self: AnyBatch, capacity: Capacity) -> AnyBatch:
        """The batch filled up to fixed sizes; losses and gradients stay what they were.

        Raises ValueError where the batch holds more than the capacity.
        """
        sequences = capacity.sequences + 1 - len(self.cu_seqlens)
        missing, filled = {"sequences": sequences}, {}
        for field in dataclasses.fields(self):
            if "fills" in field.metadata:
                size, values = field.metadata["fills"], getattr(self, field.name)
                missing[size] = getattr(capacity, size) - len(values)
                filled[field.name] = values, missing[size], field.metadata["padding"]
        if min(missing.values()) < 0:
            held = ", ".join(f"{getattr(capacity, size) - count} {size}" for size, count in missing.items())
            raise ValueError(f"batch of {held} exceeds {capacity}")
        filled["cu_seqlens"] = self.cu_seqlens, sequences, self.num_tokens
        extended: dict[str, Any] = {name: _extend(*values) for name, values in filled.items()}
        return dataclasses.replace(self, **extended)


def _extend(values: Tensor, count: int, fill: int) -> Tensor:
    return torch.cat([values, values.new_full((count, *values.shape[1:]), fill)])
