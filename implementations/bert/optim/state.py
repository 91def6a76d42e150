"""The state of a rule over flat shards, by parameter: what checkpoints hold, whatever the
engine.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bert.checkpoint.sharded import Span, spans_of
from bert.optim.flat import Shard
from bert.optim.layout import fill
from bert.optim.mesh import Mesh

MASTERS, OTHERS = "masters", "others"


class ShardState:
    """num_steps: updates so far, on the device."""

    def __init__(self, shard: Shard, num_steps: Tensor, mesh: Mesh) -> None:
        self.shard, self.num_steps, self.mesh = shard, num_steps, mesh
        self.shapes = shard.shapes

    def parts(self) -> dict[str, Tensor]:
        """The flat buffers: fp32 masters and the rule's states."""
        return {MASTERS: self.shard.masters, **self.shard.states}

    def state_dict(self) -> dict[str, Any]:
        """Step count, masters and states by parameter, on the CPU of rank 0; a collective.

        The same for any number of ranks and either engine. Other ranks get only the step count.
        """
        # Waits for the device.
        state: dict[str, Any] = {"num_steps": int(self.num_steps)}
        for part, flat in self.parts().items():
            tensors = self.gathered(flat)
            if self.mesh.world.is_main:
                state[part] = tensors
        return state | self._others()

    def _others(self) -> dict[str, Any]:
        """Tensors of the rule's own, the same on every rank."""
        others = self.shard.others
        return {OTHERS: {key: x.cpu() for key, x in others.items()}} if others else {}

    def gathered(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters in a flat buffer, on the CPU of rank 0; one at a time on the device. A
        collective.
        """
        world, tensors = self.mesh.world, {}
        if self.mesh.size == 1 and not world.is_main:
            return {}
        for number, (name, shape) in enumerate(self.shapes.items()):
            whole = torch.zeros(shape.numel(), dtype=flat.dtype, device=world.device)
            # Every group has a full copy: that of one is enough.
            for segment in self.shard.segments if self.mesh.group == 0 else ():
                if segment.parameter == number:
                    mine = flat[segment.begin : segment.begin + segment.size]
                    whole[segment.start : segment.start + segment.size].copy_(mine)
            if self.mesh.size > 1:
                world.sum(whole)  # each number is on one rank, and 0 on the others
            if world.is_main:
                tensors[name] = whole.cpu().view(shape)
        return tensors

    def shard_state(self) -> dict[str, Any]:
        """This rank's part of ``state_dict()``: its flat buffers, and (name, start, begin, size) of
        each segment.

        Groups have equal shards, of which each saves a stretch [low, high).
        """
        group, groups = self.mesh.group, self.mesh.groups
        size = self.shard.masters.numel()
        # Each group writes another part of what all have, so that the groups share the writing.
        low, high = size * group // groups, size * (group + 1) // groups
        segments = []
        names = self.shard.names
        for segment in self.shard.segments:
            begin = max(segment.begin, low)
            end = min(segment.begin + segment.size, high)
            if end > begin:
                name = names[segment.parameter]
                start = segment.start + begin - segment.begin
                segments.append((name, start, begin - low, end - begin))
        return {
            "parts": {part: flat[low:high] for part, flat in self.parts().items()},
            "segments": segments,
        }

    def index(self) -> dict[str, Any]:
        """What all ranks have in common."""
        shapes = {name: tuple(shape) for name, shape in self.shapes.items()}
        return {"num_steps": int(self.num_steps), "shapes": shapes, **self._others()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict()`` of any engine and number of ranks. Raises KeyError for a
        missing name.
        """
        # In place: rules and captured graphs hold this tensor.
        self.num_steps.fill_(int(state["num_steps"]))
        for name, tensor in self.shard.others.items():
            tensor.copy_(state[OTHERS][name])
        for part, flat in self.parts().items():
            # Of all parameters, not of this shard's alone, so that every rank raises.
            if missing := [name for name in self.shapes if name not in state[part]]:
                raise KeyError(missing[0])
            spans = held_spans(self.shard, state[part])
            fill(flat, self.shard.segments, self.shard.names, spans)


def held_spans(shard: Shard, tensors: Mapping[str, Tensor]) -> Iterator[Span]:
    """Of the parameters in a rank's segments alone: a checkpoint may be larger than the memory of a
    rank.
    """
    names = shard.names
    for name in dict.fromkeys(names[segment.parameter] for segment in shard.segments):
        yield from spans_of(tensors, name)
