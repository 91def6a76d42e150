"""Our update rules as the optimizer of DeepSpeed's ZeRO (stages 1 and 2), and its state by
parameter name.

ZeRO splits fp32 masters, gradients and the rule's states into one flat partition per rank, and
calls ``step`` on it. We wrap it in our own Shard (optim/flat.py), which knows where the parameters'
parts lie, so that norms are those of whole parameters, summed over ranks.

DeepSpeed's public functions (deepspeed.utils.safe_get_full_fp32_param, ...) tell neither where a
part lies in the partition nor how to refresh the weights from the masters. What is used beyond them
is in this file, and is that of the version in requirements/deepspeed.txt: of ZeRO's optimizer
``optimizer.param_groups``, ``update_lp_params`` and ``loss_scaler.cur_scale``; of a parameter
``_hp_mapping`` ("hp": the fp32 partition, "lp": the weights).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bert.core.dist import World
from bert.optim.flat import ListRule, Shard
from bert.optim.layout import Segment
from bert.optim.mesh import Mesh
from bert.optim.rules import ParameterShards, Rule, Update
from bert.optim.state import ShardState


def partition_of(
    zero: Any, parameters: Iterable[nn.Parameter]
) -> tuple[Tensor, list[Segment]]:
    """This rank's flat fp32 buffer, and the parts of parameters in it; parameters: in the model's
    order.

    They lie end to end, cut where a partition ends.
    """
    (group,) = zero.optimizer.param_groups
    segments = []
    for number, parameter in enumerate(parameters):
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:  # this rank has nothing of it
            continue
        # Its place in the partition; lp_fragment_address is that in the parameter.
        fragment = mapping.get_hp_fragment_address()
        start = mapping.lp_fragment_address.start
        segments.append(
            Segment(number, begin=fragment.start, size=fragment.numel, start=start)
        )
    return group["params"][0].detach(), segments


class ZeroRule(torch.optim.Optimizer):
    """A rule over a partition. Until ``bind`` a step does nothing: ZeRO takes one while it
    allocates memory.
    """

    rule: ListRule | None = None

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make_rule: Callable[[ParameterShards], Rule],
        world: World,
    ) -> None:
        super().__init__(list(parameters), {"lr": 0.0})
        self.make_rule, self.world = make_rule, world

    def bind(
        self, shapes: Mapping[str, torch.Size], masters: Tensor, segments: list[Segment]
    ) -> ListRule:
        """Registers the partition and returns its rule. ``shapes``: of all parameters, in the order
        of the segments' numbers.
        """
        shard = Shard(
            shapes=shapes,
            segments=segments,
            masters=masters,
            gradient=masters.new_zeros(0),  # ZeRO passes one at each step
            weights=masters,  # ZeRO casts and gathers them
        )
        self.rule = ListRule(shard, self.make_rule)
        # Where DeepSpeed's own checkpoints look for it.
        self.state[self.param_groups[0]["params"][0]] = dict(shard.states)
        return self.rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of the partition, at the rate of ZeRO's parameter group."""
        (group,) = self.param_groups
        (flat,) = group["params"]
        rule, lr = self.rule, group["lr"]
        if rule is None:
            return
        if isinstance(lr, Tensor):
            lr = lr.to(flat.grad.device)  # the CPU's, if offloaded
        rule.gradients = rule.shard.views(flat.grad)
        sq_norms = self._sum(rule.measure()) if rule.needs_norms else None
        # ZeRO has unscaled and clipped, and calls no step after an overflow.
        rule.step(Update(lr, 1.0, None, sq_norms, self._sum))
        rule.gradients = []

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks; by way of the device, as an offloaded partition is on the CPU,
        without collectives.
        """
        return self.world.sum(values.to(self.world.device)).to(values.device)


class ZeroState(ShardState):
    """State of the rule that ``zero``, DeepSpeed's optimizer, drives."""

    def __init__(self, zero: Any, rule: ListRule, world: World) -> None:
        super().__init__(rule.shard, rule.num_steps, Mesh(world, world.size))
        self.zero = zero

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict()``, and the weights of all ranks, as at the end of ZeRO's step. A
        collective.
        """
        super().load_state_dict(state)
        self.zero.update_lp_params()
