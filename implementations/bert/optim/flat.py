"""Parameters in flat buffers: their layout, a rank's shard, and the rules that update a shard.

Parameters lie end to end in the order in which the backward pass finishes their gradients, and are
split into buckets of whole parameters. Those of a group lie in one bucket, in the group's order, as
one product computes their gradients. Buckets are reduced and gathered one at a time, that of a
large parameter in slices of the usual bucket size. Each slice is divided evenly over the ranks; the
shard of a rank is its parts of all slices, end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bert.kernels.operations import lamb as lamb_kernel
from bert.optim.rules import (
    LambConfig,
    ParameterShards,
    Rule,
    Update,
    is_decayed,
    squared_norms,
)

# Elements: every parameter and every shard begins on a full cache line, in any precision.
ALIGNMENT = 128


class Slice(NamedTuple):
    """Elements [begin, begin + size) of the whole buffer, [shard_begin, shard_begin + shard_size)
    of each shard.
    """

    begin: int
    size: int
    shard_begin: int
    shard_size: int

    def of_whole(self, flat: Tensor) -> Tensor:
        """Its part of a whole buffer."""
        return flat[self.begin : self.begin + self.size]

    def of_shard(self, flat: Tensor) -> Tensor:
        """Its part of a rank's shard."""
        return flat[self.shard_begin : self.shard_begin + self.shard_size]


class Bucket(NamedTuple):
    """Parameters whose gradients are reduced together, and the slices in which they lie."""

    parameters: tuple[int, ...]
    slices: tuple[Slice, ...]

    @property
    def size(self) -> int:
        """Elements in all slices."""
        return sum(part.size for part in self.slices)


class Segment(NamedTuple):
    """A part of one parameter in a shard: elements [begin, begin + size) of the shard, [start, ...)
    of it.
    """

    parameter: int
    begin: int
    size: int
    start: int


class Layout:
    """Layout of parameters of the given ``sizes`` (in elements, in the order of the model) over
    ``num_ranks``.

    groups: indices of parameters to be contiguous, disjoint; a group lies where its last parameter
    would.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        num_ranks: int,
        bucket_elements: int,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self.sizes, self.num_ranks, self.bucket_elements = (
            list(sizes),
            num_ranks,
            bucket_elements,
        )
        self.begins = [0] * len(sizes)
        self.buckets: list[Bucket] = []
        self.total = self.shard_total = 0
        group_of = {parameter: group for group in groups for parameter in group}
        members: list[int] = []
        filled = 0
        # The backward pass finishes the last parameter's gradient first.
        for parameter in reversed(range(len(sizes))):
            group = group_of.get(parameter, (parameter,))
            if parameter != max(group):
                continue  # lies with the last parameter of its group
            # Before a whole group, never within one: its parameters must be in one bucket.
            if (
                members
                and filled + sum(sizes[member] for member in group) > bucket_elements
            ):
                self._close(members, filled)
                members, filled = [], 0
            for member in group:
                self.begins[member] = self.total + filled
                members.append(member)
                filled += _round_up(sizes[member], ALIGNMENT)
        if members:
            self._close(members, filled)

    def _close(self, members: list[int], filled: int) -> None:
        """Ends a bucket: as few slices of one size as hold it, each divisible by the ranks."""
        num_slices = -(-filled // self.bucket_elements)
        # Each rank's part of a slice begins aligned, too.
        size = _round_up(-(-filled // num_slices), ALIGNMENT * self.num_ranks)
        shard_size = size // self.num_ranks
        slices = []
        # Rounded up, the slices may be fewer than planned.
        for _ in range(-(-filled // size)):
            slices.append(Slice(self.total, size, self.shard_total, shard_size))
            self.total += size
            self.shard_total += shard_size
        self.buckets.append(Bucket(tuple(members), tuple(slices)))

    @property
    def slices(self) -> list[Slice]:
        return [part for bucket in self.buckets for part in bucket.slices]

    def segments(self, rank: int) -> list[Segment]:
        """The parts of parameters in the shard of ``rank``, in order; with a single rank whole
        parameters.
        """
        segments = []
        for bucket in self.buckets:
            slices = list(bucket.slices)
            if self.num_ranks == 1:  # as one, so that no parameter is cut
                slices = [slices[0]._replace(size=bucket.size, shard_size=bucket.size)]
            for part in slices:
                low = part.begin + rank * part.shard_size
                segments += [
                    segment._replace(begin=part.shard_begin + segment.begin)
                    for segment in self.parts(bucket, low, low + part.shard_size)
                ]
        return segments

    def parts(self, bucket: Bucket, low: int, high: int) -> list[Segment]:
        """The parts of a bucket's parameters in elements [low, high) of the whole buffer; begin:
        from ``low`` on.
        """
        segments = []
        for parameter in bucket.parameters:
            first = self.begins[parameter]
            begin, end = max(first, low), min(first + self.sizes[parameter], high)
            if end > begin:
                segments.append(
                    Segment(parameter, begin - low, end - begin, begin - first)
                )
        return segments

    def views(self, flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Each parameter's view of a whole buffer."""
        parts = zip(self.begins, self.sizes, parameters, strict=True)
        return [
            flat[begin : begin + size].view(parameter.shape)
            for begin, size, parameter in parts
        ]

    def bucket_of_each(self) -> list[int]:
        """Index of each parameter's bucket."""
        number_of = {
            p: i for i, bucket in enumerate(self.buckets) for p in bucket.parameters
        }
        return [number_of[parameter] for parameter in range(len(self.sizes))]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def fill(
    flat: Tensor,
    segments: Sequence[Segment],
    names: Sequence[str],
    chunks: Iterable[tuple[str, int, Tensor]],
) -> None:
    """Copies parameter chunks, (name, first number, numbers), into the segments of a flat buffer
    that overlap them.
    """
    targets: dict[str, list[Segment]] = {}
    for segment in segments:
        targets.setdefault(names[segment.parameter], []).append(segment)
    for name, start, values in chunks:
        for segment in targets.get(name, ()):
            # In elements of the parameter, of which chunk and segment may hold different parts.
            begin = max(start, segment.start)
            end = min(start + len(values), segment.start + segment.size)
            if end > begin:
                target = segment.begin + begin - segment.start
                flat[target : target + end - begin].copy_(
                    values[begin - start : end - start]
                )


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Flat buffers of equal length: fp32 masters, averaged gradient, weights in the model's type,
    the rule's states.

    ``names``: of all parameters of the model; ``segments``: the parts of them in the buffers, with
    zeros between.
    """

    names: list[str]
    segments: list[Segment]
    masters: Tensor
    gradient: Tensor
    weights: Tensor
    states: dict[str, Tensor] = field(default_factory=dict)

    def state(self, name: str, *, of_weights: bool = False) -> Tensor:
        """Makes a state of the rule, saved and restored by name: zeros, or a copy of the initial
        weights.
        """
        self.states[name] = (
            self.masters.clone() if of_weights else torch.zeros_like(self.masters)
        )
        return self.states[name]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The segments of a buffer."""
        return [
            flat[segment.begin : segment.begin + segment.size]
            for segment in self.segments
        ]


class ListRule:
    """A rule on lists of tensors, applied to the segments; there may be none.

    squared_norm(flat): of a flat buffer (0-d, fp32 at least). measure(): squared norms of the
    shard's gradient, per parameter if the rule needs them, else of all [1]. step(): as a rule's; of
    the Update, grad_sq_norms is measure() summed over the ranks, and all_reduce_sum takes sums
    [parameters, n].
    """

    def __init__(
        self, shard: Shard, make_rule: Callable[[ParameterShards], Rule]
    ) -> None:
        self.shard = shard
        self.gradients = shard.views(shard.gradient)
        self.device, self.num_parameters = shard.masters.device, len(shard.names)
        owners = [segment.parameter for segment in shard.segments]
        self.rule = make_rule(
            ParameterShards(
                names=[shard.names[owner] for owner in owners],
                masters=shard.views(shard.masters),
                device=self.device,
                state=self._state,
            )
        )
        self.num_steps, self.needs_norms = self.rule.num_steps, self.rule.needs_norms
        self.owners = torch.tensor(owners, dtype=torch.int64, device=self.device)
        # The first segments of all parameters, the second ones, ...: within a turn index_add_ adds
        # once per parameter, so the order of summation is fixed, where atomics of a GPU would add
        # in any order.
        turns: dict[int, list[int]] = {}
        for number, owner in enumerate(owners):
            turns.setdefault(owners[:number].count(owner), []).append(number)
        self.turns = [
            torch.tensor(turn, dtype=torch.int64, device=self.device)
            for turn in turns.values()
        ]

    def _state(self, name: str, *, of_weights: bool = False) -> list[Tensor]:
        return self.shard.views(self.shard.state(name, of_weights=of_weights))

    def _of_parameters(self, sums: Tensor) -> Tensor:
        """Adds up segments' sums [segments, ...] by parameter: [parameters, ...]."""
        shape = (self.num_parameters, *sums.shape[1:])
        whole = torch.zeros(shape, dtype=sums.dtype, device=self.device)
        for turn in self.turns:
            whole.index_add_(
                0, self.owners.index_select(0, turn), sums.index_select(0, turn)
            )
        return whole

    def squared_norm(self, flat: Tensor) -> Tensor:
        return squared_norms([flat]).sum()

    def measure(self) -> Tensor:
        if not self.needs_norms:
            return squared_norms([self.shard.gradient])
        if self.gradients:
            return self._of_parameters(squared_norms(self.gradients))
        # Nothing to measure here, but the sum over the ranks is a collective: zeros for it.
        dtype = (
            torch.float64
            if self.shard.masters.dtype == torch.float64
            else torch.float32
        )
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


class FlatLamb:
    """LAMB by the two passes of kernels/operations/lamb.py over a shard. Methods: ListRule's."""

    needs_norms = False

    def __init__(
        self, shard: Shard, config: LambConfig, passes: Any = lamb_kernel
    ) -> None:
        """passes: module with squared_norm, moments and update, as kernels/operations/lamb.py."""
        self.shard, self.config, self.passes = shard, config, passes
        device = shard.masters.device
        moments = shard.state("first_moments"), shard.state("second_moments")
        self.buffers = (shard.gradient, shard.masters, *moments)
        self.num_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.scalars = torch.zeros(
            4, dtype=torch.float32, device=device
        )  # see kernels/operations/lamb.py
        # A span is a segment with the zeros after it.
        spans: list[list[tuple[int, int]]] = [[] for _ in shard.names]
        for segment in shard.segments:
            # Whole cache lines, as the kernels take them; zeros stay 0 and add nothing.
            end = segment.begin + _round_up(segment.size, lamb_kernel.ALIGNMENT)
            spans[segment.parameter].append((segment.begin, end))
        decays = [
            config.weight_decay if is_decayed(name) else 0.0 for name in shard.names
        ]
        self.layout = lamb_kernel.spans_layout(
            shard.masters.numel(), spans, decays, device
        )

    def squared_norm(self, flat: Tensor) -> Tensor:
        return self.passes.squared_norm(flat)

    def measure(self) -> Tensor:
        return self.passes.squared_norm(self.shard.gradient).reshape(1)

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
        sums = update.all_reduce_sum(sums)
        weights = self.shard.weights
        self.passes.update(
            self.layout, *self.buffers[1:], weights, sums, self.scalars, eps
        )
