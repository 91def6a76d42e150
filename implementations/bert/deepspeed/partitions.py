"""One of our update rules as the optimizer that DeepSpeed's ZeRO drives.

ZeRO cuts fp32 masters, gradients and the rule's states into flat partitions, one or several a rank, and calls ``step``
on them. Here they are a Shard of our own (optim/flat.py): it knows which part of which parameter lies where, so a norm
is that of whole parameters, summed over the ranks that hold their parts, whatever the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bert.core.dist import World
from bert.optim.flat import Piecewise, Segment, Shard
from bert.optim.rule import Pieces, Rule

MASTERS = "masters"
STEPS = "step"  # DeepSpeed's tools look for the step count under this name


class Partition(NamedTuple):
    """A flat fp32 buffer of ZeRO's, and the parts of parameters in it."""

    flat: Tensor
    segments: list[Segment]


class ZeroRule(torch.optim.Optimizer):
    """A rule over partitions. Until ``bind`` a step does nothing: ZeRO takes one while it allocates memory."""

    def __init__(self, parameters: Iterable[nn.Parameter], make_rule: Callable[[Pieces], Rule], world: World) -> None:
        super().__init__(list(parameters), {"lr": 0.0})
        self.make_rule, self.world = make_rule, world
        self.rules: dict[int, Piecewise] = {}  # by the identity of the flat buffer

    def bind(self, names: list[str], partitions: Sequence[Partition]) -> None:
        """Says what lies in the partitions. ``names``: of all parameters, which the segments number."""
        for flat, segments in partitions:
            masters = flat.detach()
            shard = Shard(
                names=names,
                segments=segments,
                masters=masters,
                gradient=torch.zeros(0, dtype=masters.dtype, device=masters.device),  # ZeRO brings one at each step
                weights=masters,  # ZeRO casts and gathers
                states=self.state[flat],
            )
            rule = Piecewise(shard, self.make_rule)
            self.state[flat][STEPS] = rule.num_steps
            self.rules[id(flat)] = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of the partitions that ZeRO has put into the parameter groups, at the groups' rates."""
        for group in self.param_groups:
            for flat in group["params"]:
                if id(flat) in self.rules and flat.grad is not None:
                    self._update(self.rules[id(flat)], flat.grad, group["lr"])

    def _update(self, rule: Piecewise, gradient: Tensor, lr: Tensor | float) -> None:
        rule.gradients = rule.shard.views(gradient)
        squares = self._sum(rule.measure()) if rule.needs_norms else None
        sums = rule.prepare(1.0, None, squares)
        rate = lr.to(gradient.device) if isinstance(lr, Tensor) else lr
        rule.apply(None if sums is None else self._sum(sums), rate, None)
        rule.gradients = []

    def _sum(self, values: Tensor) -> Tensor:
        """Over the ranks; offloaded partitions are on the CPU, where the ranks may not reach each other."""
        return self.world.sum(values.to(self.world.device)).to(values.device)

    @property
    def num_steps(self) -> int:
        """Updates so far."""
        return int(next(iter(self.rules.values())).num_steps)

    def set_num_steps(self, value: int) -> None:
        """Counts on from ``value``."""
        for rule in self.rules.values():
            rule.num_steps.fill_(value)

    def shards(self) -> list[Shard]:
        """The partitions of this rank."""
        return [rule.shard for rule in self.rules.values()]

    def parts(self) -> list[str]:
        """What is saved of every parameter: the masters and the rule's states, by name."""
        names = [name for name in self.shards()[0].states if name != STEPS]
        return [MASTERS, *names]


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """Of the whole parameter, also where ZeRO-3 has left this rank a part of it."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def buffer(shard: Shard, part: str) -> Tensor:
    """The flat buffer of the masters or of a state."""
    return shard.masters if part == MASTERS else shard.states[part]


def partitions_of(optimizer: Any, parameters: Sequence[nn.Parameter], rank: int) -> list[Partition]:
    """What ZeRO's ``optimizer`` (stage 1, 2 or 3) has put where on this rank, of parameters in the model's order."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _stage_3(optimizer, parameters, rank)
    partitions = [Partition(group["params"][0], []) for group in optimizer.optimizer.param_groups]
    for number, parameter in enumerate(parameters):
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]  # None where this rank has nothing of it
        if mapping is not None:
            place, within = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
            segment = Segment(parameter=number, begin=place.start, size=place.numel, start=within.start)
            partitions[mapping.param_group_index].segments.append(segment)
    return partitions


def _stage_3(optimizer: Any, parameters: Sequence[nn.Parameter], rank: int) -> list[Partition]:
    """Every parameter is cut evenly over the ranks, the last part filled up with zeros; sub-groups hold the parts."""
    partitions = [Partition(flat, []) for flat in optimizer.fp32_partitioned_groups_flat]
    for number, parameter in enumerate(parameters):
        group, begin, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = rank * size
        real = min(size, parameter.ds_numel - start)  # type: ignore[attr-defined]
        if real > 0:
            partitions[group].segments.append(Segment(parameter=number, begin=begin, size=real, start=start))
    return partitions
