"""A rank's shard as flat buffers, and the two ways to update it: any rule on lists of tensors, or
LAMB by fused passes.

A shard holds parts of parameters (layout.py), and other ranks the rest of them. A rule thinks of
whole parameters, so each way adds up its norms twice: over the parts in this shard, then over the
ranks, by ``Update.all_reduce_sum``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bert.kernels.operations import lamb as lamb_kernel
from bert.optim.layout import Segment
from bert.optim.rules import (
    LambConfig,
    ParameterShards,
    Rule,
    Update,
    is_decayed,
    squared_norms,
)
from common.env import ConfigError


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Flat buffers of equal length: fp32 masters, averaged gradient, weights in the model's type,
    the rule's states.

    ``shapes``: of all parameters of the model, by name, in its order; ``segments``: the parts of
    them in the buffers, with zeros between. ``others``: state of the rule that is no such buffer.
    """

    shapes: Mapping[str, torch.Size]
    segments: list[Segment]
    masters: Tensor
    gradient: Tensor
    weights: Tensor
    states: dict[str, Tensor] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(self.shapes)

    def state(self, name: str, *, of_weights: bool = False) -> Tensor:
        """Makes a state of the rule, saved and restored by name: zeros, or a copy of the initial
        weights.
        """
        self.states[name] = (
            self.masters.clone() if of_weights else torch.zeros_like(self.masters)
        )
        return self.states[name]

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        """Registers a tensor of the rule's own, saved and restored in place by name."""
        return self.others.setdefault(name, tensor)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The segments of a buffer."""
        return [
            flat[segment.begin : segment.begin + segment.size]
            for segment in self.segments
        ]


class ListRule:
    """A rule on lists of tensors, applied to the segments; there may be none.

    measure(): squared norms of the shard's gradient, per parameter if the rule needs them, else of
    all [1]. step(): as a rule's; of
    the Update, grad_sq_norms is measure() summed over the ranks, and all_reduce_sum takes sums
    [parameters, n].
    """

    def __init__(
        self, shard: Shard, make_rule: Callable[[ParameterShards], Rule]
    ) -> None:
        self.shard = shard
        self.gradients = shard.views(shard.gradient)
        self.device, self.num_parameters = shard.masters.device, len(shard.shapes)
        owners = [segment.parameter for segment in shard.segments]
        names, shapes = shard.names, list(shard.shapes.values())
        low_dtype = shard.masters.dtype != shard.weights.dtype == shard.gradient.dtype
        self.rule = make_rule(
            ParameterShards(
                names=[names[owner] for owner in owners],
                shapes=[shapes[owner] for owner in owners],
                starts=[segment.start for segment in shard.segments],
                masters=shard.views(shard.masters),
                device=self.device,
                state=self._state,
                keep=shard.keep,
                low=shard.views(shard.weights) if low_dtype else None,
            )
        )
        if not (shard.states or shard.others or self.rule.stateless):
            name = type(self.rule).__name__
            raise ConfigError(
                f"{name} registers no state, which a resumed run would lose: "
                "make it by shards.state, take an Adapter, or say stateless = True"
            )
        if self.rule.needs_whole:
            assert all(
                segment.size == shapes[segment.parameter].numel()
                for segment in shard.segments
            ), "a rule on whole parameters got parts"
        self.num_steps, self.needs_norms = self.rule.num_steps, self.rule.needs_norms
        self.owners = self._indices(owners)
        self.turns = [self._indices(turn) for turn in _turns(owners)]

    def _indices(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _state(self, name: str, *, of_weights: bool = False) -> list[Tensor]:
        return self.shard.views(self.shard.state(name, of_weights=of_weights))

    def _of_parameters(self, sums: Tensor) -> Tensor:
        """Adds up segments' sums [segments, ...] by parameter: [parameters, ...]."""
        shape = (self.num_parameters, *sums.shape[1:])
        whole = torch.zeros(shape, dtype=sums.dtype, device=self.device)
        for turn in self.turns:
            owners = self.owners.index_select(0, turn)
            whole.index_add_(0, owners, sums.index_select(0, turn))
        return whole

    def measure(self) -> Tensor:
        if not self.needs_norms:
            return squared_norms([self.shard.gradient])
        if self.gradients:
            return self._of_parameters(squared_norms(self.gradients))
        # Nothing to measure here, but the sum over the ranks is a collective: zeros for it.
        dtype = torch.promote_types(self.shard.masters.dtype, torch.float32)
        return torch.zeros(self.num_parameters, dtype=dtype, device=self.device)

    def step(self, update: Update) -> None:
        def sum_by_parameter(sums: Tensor) -> Tensor:
            # A rule sees segments; what is summed over ranks is by whole parameter.
            whole = update.all_reduce_sum(self._of_parameters(sums))
            return whole.index_select(0, self.owners)

        if self.gradients:
            sq_norms = update.grad_sq_norms if self.needs_norms else None
            if sq_norms is not None:
                sq_norms = sq_norms.index_select(0, self.owners)
            of_segments = update._replace(
                grad_sq_norms=sq_norms, all_reduce_sum=sum_by_parameter
            )
            self.rule.step(self.gradients, of_segments)
        else:
            # A shard of padding alone has nothing to update, but its step count must agree.
            self.rule.count_step(update.apply_update)
            if num_sums := self.rule.num_sums:  # other ranks wait in the collective
                dtype = self.shard.masters.dtype
                sum_by_parameter(
                    torch.zeros(0, num_sums, dtype=dtype, device=self.device)
                )
        # The model's weights are rounded masters every time, so that no rounding adds up.
        self.shard.weights.copy_(self.shard.masters)


def _turns(owners: Sequence[int]) -> list[list[int]]:
    """Indices of segments such that a turn has one of each parameter: the first ones, the second
    ones, ...

    Within a turn index_add_ adds once per parameter, so that the order of summation is fixed; the
    atomics of a GPU would add several in any order.
    """
    turns: list[list[int]] = []
    seen: dict[int, int] = {}
    for number, owner in enumerate(owners):
        turn = seen.get(owner, 0)
        seen[owner] = turn + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(number)
    return turns


class FlatLamb:
    """LAMB by the two passes of kernels/operations/lamb.py over a shard. Methods: ListRule's."""

    needs_norms = False

    def __init__(
        self, shard: Shard, config: LambConfig, passes: Any = lamb_kernel
    ) -> None:
        """passes: module with moments and update, as kernels/operations/lamb.py."""
        self.shard, self.config, self.passes = shard, config, passes
        device = shard.masters.device
        # By the names that LambRule uses: a checkpoint of either can be continued by the other.
        moments = shard.state("first_moments"), shard.state("second_moments")
        self.buffers = (shard.gradient, shard.masters, *moments)
        self.num_steps = torch.zeros((), dtype=torch.int64, device=device)
        # Learning rate, factor of the gradients, and both bias corrections: see
        # kernels/operations/lamb.py.
        self.scalars = torch.zeros(4, dtype=torch.float32, device=device)
        spans: list[list[tuple[int, int]]] = [[] for _ in shard.shapes]
        for segment in shard.segments:
            # The kernels take whole cache lines: a span is a segment with the zeros after it,
            # which stay 0 and add nothing.
            lines = -(-segment.size // lamb_kernel.ALIGNMENT)
            end = segment.begin + lines * lamb_kernel.ALIGNMENT
            spans[segment.parameter].append((segment.begin, end))
        decays = [
            config.weight_decay if is_decayed(name) else 0.0 for name in shard.shapes
        ]
        self.layout = lamb_kernel.spans_layout(
            shard.masters.numel(), spans, decays, device
        )

    def measure(self) -> Tensor:
        return squared_norms([self.shard.gradient])

    def _begin(self, update: Update) -> None:
        """Counts the step and sets its scalars; a skipped step's factor is nan."""
        apply_update, device = update.apply_update, self.scalars.device
        self.num_steps += 1 if apply_update is None else apply_update
        # In fp64, as 1 - beta^t cancels; t = 0, if no step was taken, counts as 1 to avoid dividing
        # by 0.
        steps = self.num_steps.clamp(min=1).double()
        factor = torch.as_tensor(update.scale, dtype=torch.float32, device=device)
        self.scalars[0] = torch.as_tensor(update.lr, dtype=torch.float32, device=device)
        if apply_update is not None:
            factor = torch.where(apply_update, factor, float("nan"))
        self.scalars[1] = factor
        self.scalars[2] = 1 / (1 - torch.pow(self.config.beta1, steps))
        self.scalars[3] = 1 / (1 - torch.pow(self.config.beta2, steps))

    def step(self, update: Update) -> None:
        self._begin(update)
        beta1, beta2, eps = self.config.beta1, self.config.beta2, self.config.eps
        sums = self.passes.moments(
            self.layout, *self.buffers, self.scalars, beta1, beta2, eps
        )
        # Between the passes: a trust ratio needs the norms of whole parameters, which lie on
        # several ranks.
        sums = update.all_reduce_sum(sums)
        weights = self.shard.weights
        self.passes.update(
            self.layout, *self.buffers[1:], weights, sums, self.scalars, eps
        )
