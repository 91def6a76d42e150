"""Our update rules as the optimizer of DeepSpeed's ZeRO, and its state by parameter name.

ZeRO splits fp32 masters, gradients and the rule's states into flat partitions, one or several per rank, and calls
``step`` on them. We wrap them in our own Shard (optim/flat.py), which knows where the parameters' parts lie, so
that norms are those of whole parameters, summed over ranks, in any stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bert.checkpoint.sharded import spans_of
from bert.core.dist import World
from bert.deepspeed.zero import Partition, Zero
from bert.model.init import Chunk
from bert.optim.flat import ListRule, Segment, Shard, fill
from bert.optim.rules import ParameterShards, Rule, Update

MASTERS = "masters"
STEPS = "step"  # DeepSpeed's tools look for the step count under this name


class ZeroRule(torch.optim.Optimizer):
    """A rule over partitions. Until ``bind`` a step does nothing: ZeRO takes one while it allocates memory."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make_rule: Callable[[ParameterShards], Rule],
        world: World,
    ) -> None:
        super().__init__(list(parameters), {"lr": 0.0})
        self.make_rule, self.world = make_rule, world
        self.rules: dict[int, ListRule] = {}  # by the identity of the flat buffer

    def bind(self, names: list[str], partitions: Sequence[Partition]) -> None:
        """Registers the partitions. ``names``: of all parameters, by the segments' numbers."""
        for flat, segments in partitions:
            masters = flat.detach()
            shard = Shard(
                names=names,
                segments=segments,
                masters=masters,
                gradient=masters.new_zeros(0),  # ZeRO passes one at each step
                weights=masters,  # ZeRO casts and gathers them
                # torch.optim's own dict, from which DeepSpeed writes its checkpoints.
                states=self.state[flat],
            )
            rule = ListRule(shard, self.make_rule)
            self.state[flat][STEPS] = rule.num_steps
            self.rules[id(flat)] = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of the partitions in ZeRO's parameter groups, at the groups' rates."""
        for group in self.param_groups:
            for flat in group["params"]:
                if id(flat) not in self.rules or flat.grad is None:
                    continue
                rule, lr = self.rules[id(flat)], group["lr"]
                if isinstance(lr, Tensor):
                    lr = lr.to(flat.grad.device)  # the CPU's, if offloaded
                rule.gradients = rule.shard.views(flat.grad)
                sq_norms = self._sum(rule.measure()) if rule.needs_norms else None
                # ZeRO has unscaled and clipped, and calls no step after an overflow.
                rule.step(Update(lr, 1.0, None, sq_norms, self._sum))
                rule.gradients = []

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks; by way of the device, as offloaded partitions are on the CPU, without collectives."""
        return self.world.sum(values.to(self.world.device)).to(values.device)

    def shards(self) -> list[Shard]:
        """The partitions of this rank."""
        return [rule.shard for rule in self.rules.values()]

    def parts(self) -> list[str]:
        """Names of the parts of the saved state: the masters and the rule's states."""
        return [MASTERS, *(name for name in self.shards()[0].states if name != STEPS)]


class ZeroState:
    """State of ``zero``, which drives ``update``, on this rank; shapes: of all parameters.

    Gathers it for our checkpoints, and loads it into the partitions.
    """

    def __init__(
        self, zero: Zero, update: ZeroRule, shapes: Mapping[str, torch.Size], world: World
    ) -> None:
        self.zero, self.update, self.shapes, self.world = zero, update, shapes, world
        self.names = list(shapes)

    def flats(self, part: str) -> list[tuple[Tensor, list[Segment]]]:
        """The flat buffers of the masters or of a state, and their segments."""
        return [
            (shard.masters if part == MASTERS else shard.states[part], shard.segments)
            for shard in self.update.shards()
        ]

    def num_steps(self) -> int:
        """Updates so far."""
        return int(next(iter(self.update.rules.values())).num_steps)

    def state_dict(self) -> dict[str, Any]:
        """As our own optimizers': gathered, by name, on the CPU of rank 0. A collective.

        One parameter at a time is on the device.
        """
        state: dict[str, Any] = {"num_steps": self.num_steps()}
        for part in self.update.parts():
            tensors = {}
            for number, (name, shape) in enumerate(self.shapes.items()):
                # In fp32, as masters and states are.
                gathered = torch.zeros(shape.numel(), device=self.world.device)
                for flat, segments in self.flats(part):
                    for segment in segments:
                        if segment.parameter == number:
                            mine = flat[segment.begin : segment.begin + segment.size]
                            gathered[segment.start : segment.start + segment.size].copy_(mine)
                self.world.sum(gathered)  # each number is on one rank, and 0 on the others
                if self.world.is_main:
                    tensors[name] = gathered.cpu().view(shape)
            if self.world.is_main:
                state[part] = tensors
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict()`` of any engine and number of ranks. A collective.

        Reads only tensors of which this rank holds a part. Raises KeyError if one is missing.
        """
        for rule in self.update.rules.values():
            rule.num_steps.fill_(int(state["num_steps"]))
        for part in self.update.parts():
            flats = self.flats(part)
            # By this rank's names alone: a checkpoint may be larger than the memory of a rank.
            names = {self.names[segment.parameter] for _, segments in flats for segment in segments}
            spans = (span for name in names for span in spans_of(state[part], name))
            fill(flats, self.names, spans)
        self.zero.publish()

    @torch.no_grad()
    def begin(self, partitions: Sequence[Partition], chunks: Iterable[Chunk]) -> None:
        """Sets the masters to the weights before a cast to low precision. Before ``update`` is bound. A collective."""
        fill(partitions, self.names, chunks)
        self.zero.publish()
