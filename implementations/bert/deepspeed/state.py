"""The state of a ZeRO optimizer by parameter name: whole for our checkpoints, and back into the partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bert.core.dist import World
from bert.deepspeed.partitions import Partition, ZeroRule, buffer
from bert.model.init import Chunk
from bert.optim.flat import fill


class ZeroState:
    """What ``zero``, DeepSpeed's optimizer around ``update``, holds on this rank; shapes: of all parameters."""

    def __init__(self, zero: Any, update: ZeroRule, shapes: Mapping[str, torch.Size], world: World) -> None:
        self.zero, self.update, self.shapes, self.world = zero, update, shapes, world
        self.names = list(shapes)

    def set_rate(self, lr: Tensor | float) -> None:
        """The learning rate of the next step."""
        for group in self.update.param_groups:
            group["lr"] = lr

    def set_loss_scale(self, scale: Tensor) -> None:
        """What losses are multiplied by from now on, in fp16."""
        self.zero.loss_scaler.cur_scale = float(scale)

    def state_dict(self) -> dict[str, Any]:
        """As that of our own optimizers: whole, by name, on the CPU of rank 0. A collective.

        One parameter at a time is whole on the device.
        """
        state: dict[str, Any] = {"num_steps": self.update.num_steps}
        for part in self.update.parts():
            tensors = {name: self._collect(number, part) for number, name in enumerate(self.names)}
            if self.world.is_main:
                state[part] = tensors
        return state

    def _collect(self, number: int, part: str) -> Tensor | None:
        shape = self.shapes[self.names[number]]
        whole = torch.zeros(shape.numel(), device=self.world.device)
        for shard in self.update.shards():
            for segment in shard.segments:
                if segment.parameter == number:
                    mine = buffer(shard, part)[segment.begin : segment.begin + segment.size]
                    whole[segment.start : segment.start + segment.size].copy_(mine)
        self.world.sum(whole)
        return whole.cpu().view(shape) if self.world.is_main else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict()`` of any engine and number of ranks. Raises KeyError for a name missing."""
        self.update.set_num_steps(int(state["num_steps"]))
        self.fill({part: state[part] for part in self.update.parts()})

    @torch.no_grad()
    def fill(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copies this rank's share of masters and states, by name, then the weights follow. A collective."""
        for shard in self.update.shards():
            for part, tensors in state.items():
                flat = buffer(shard, part)
                for segment in shard.segments:
                    source = tensors[self.names[segment.parameter]].reshape(-1)
                    flat[segment.begin : segment.begin + segment.size].copy_(
                        source[segment.start : segment.start + segment.size]
                    )
        self._publish()

    @torch.no_grad()
    def begin(self, partitions: Sequence[Partition], pieces: Iterable[Chunk]) -> None:
        """Gives the masters the weights before a cast to low precision. Before ``update`` is bound. A collective."""
        fill(partitions, self.names, pieces)
        self._publish()

    def _publish(self) -> None:
        """The weights on every rank become those of the masters, as at the end of a step of ZeRO's."""
        if hasattr(self.zero, "update_lp_params"):  # stages 1 and 2
            self.zero.update_lp_params()
            return
        self.zero._partition_all_parameters()
        for number in range(len(self.zero.fp32_partitioned_groups_flat)):
            self.zero._reassign_or_swap_out_partitioned_parameters(number)
        self.gather_persistent()

    def gather_persistent(self) -> None:
        """Stage 3 keeps small parameters whole; it expects so of every step, also of one that did not come to its end.

        A collective.
        """
        if persistent := getattr(self.zero, "persistent_parameters", []):
            persistent[0].all_gather(persistent)
