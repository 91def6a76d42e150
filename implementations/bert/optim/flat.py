"""Parameters in flat buffers: their layout, a rank's shard, and the rules that update a shard.

Parameters lie end to end in the order in which the backward pass finishes their gradients, and are split into buckets
of whole parameters. Those of a group lie in one bucket, in the group's order, as one product computes their gradients.
Buckets are reduced and gathered one at a time, that of a large parameter in slices of the usual bucket size. Each slice
is divided evenly over the ranks; the shard of a rank is its parts of all slices, end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bert.kernels.operations import lamb as lamb_kernel
from bert.kernels.operations import lans as lans_kernel
from bert.optim.rules import (
    LambConfig,
    LansConfig,
    Maybe,
    Pieces,
    Rule,
    Scalar,
    Total,
    is_decayed,
    squared_norms,
)

ALIGNMENT = (
    128  # elements: every parameter and every shard begins on a full cache line, in any precision
)


class Slice(NamedTuple):
    """Elements [begin, begin + size) of the whole buffer, [shard_begin, shard_begin + shard_size) of each shard."""

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
        return sum(one.size for one in self.slices)


class Segment(NamedTuple):
    """A part of one parameter in a shard: elements [begin, begin + size) of the shard, [start, ...) of it."""

    parameter: int
    begin: int
    size: int
    start: int


class Layout:
    """Layout of parameters of the given ``sizes`` (in elements, in the order of the model) over ``num_ranks``.

    groups: indices of parameters to lie side by side, disjoint; a group lies where its last parameter would.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        num_ranks: int,
        bucket_elements: int,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self.sizes, self.num_ranks, self.bucket_elements = list(sizes), num_ranks, bucket_elements
        self.begins = [0] * len(sizes)
        self.buckets: list[Bucket] = []
        self.total = self.shard_total = 0
        grouped = {parameter: group for group in groups for parameter in group}
        members: list[int] = []
        filled = 0
        for parameter in reversed(range(len(sizes))):
            group = grouped.get(parameter, (parameter,))
            if parameter != max(group):
                continue  # lies with the last parameter of its group
            if members and filled + sum(sizes[member] for member in group) > bucket_elements:
                self._close(members, filled)
                members, filled = [], 0
            for member in group:
                self.begins[member] = self.total + filled
                members.append(member)
                filled += _round_up(sizes[member], ALIGNMENT)
        if members:
            self._close(members, filled)

    def _close(self, members: list[int], filled: int) -> None:
        count = -(-filled // self.bucket_elements)
        size = _round_up(-(-filled // count), ALIGNMENT * self.num_ranks)
        slices = []
        for _ in range(-(-filled // size)):
            slices.append(Slice(self.total, size, self.shard_total, size // self.num_ranks))
            self.total += size
            self.shard_total += size // self.num_ranks
        self.buckets.append(Bucket(tuple(members), tuple(slices)))

    @property
    def slices(self) -> list[Slice]:
        return [one for bucket in self.buckets for one in bucket.slices]

    def segments(self, rank: int) -> list[Segment]:
        """The parts of parameters in the shard of ``rank``, in order; with a single rank whole parameters."""
        found = []
        for bucket in self.buckets:
            whole = bucket.slices[0]._replace(size=bucket.size, shard_size=bucket.size)
            for one in bucket.slices if self.num_ranks > 1 else [whole]:
                low = one.begin + rank * one.shard_size
                parts = self.parts(bucket, low, low + one.shard_size)
                found += [part._replace(begin=one.shard_begin + part.begin) for part in parts]
        return found

    def parts(self, bucket: Bucket, low: int, high: int) -> list[Segment]:
        """The parts of a bucket's parameters in elements [low, high) of the whole buffer; begin: from ``low`` on."""
        found = []
        for parameter in bucket.parameters:
            first = self.begins[parameter]
            begin, end = max(first, low), min(first + self.sizes[parameter], high)
            if end > begin:
                found.append(Segment(parameter, begin - low, end - begin, begin - first))
        return found

    def views(self, flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Each parameter's view of a whole buffer."""
        parts = zip(self.begins, self.sizes, parameters, strict=True)
        return [
            flat[begin : begin + size].view(parameter.shape) for begin, size, parameter in parts
        ]

    def bucket_of_each(self) -> list[int]:
        """Index of each parameter's bucket."""
        found = {p: number for number, bucket in enumerate(self.buckets) for p in bucket.parameters}
        return [found[parameter] for parameter in range(len(self.sizes))]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def fill(
    flats: Iterable[tuple[Tensor, Sequence[Segment]]],
    names: Sequence[str],
    chunks: Iterable[tuple[str, int, Tensor]],
) -> None:
    """Copies parameter chunks, (name, first number, numbers), into the segments of flat buffers that overlap them."""
    places: dict[str, list[tuple[Tensor, Segment]]] = {}
    for flat, segments in flats:
        for segment in segments:
            places.setdefault(names[segment.parameter], []).append((flat, segment))
    for name, start, values in chunks:
        for flat, segment in places.get(name, ()):
            begin = max(start, segment.start)
            end = min(start + len(values), segment.start + segment.size)
            if end > begin:
                place = segment.begin + begin - segment.start
                flat[place : place + end - begin].copy_(values[begin - start : end - start])


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Flat buffers of equal length: fp32 masters, averaged gradient, weights in the model's type, the rule's states.

    ``names``: of all parameters of the model; ``segments``: the parts of them in the buffers, with zeros between.
    """

    names: list[str]
    segments: list[Segment]
    masters: Tensor
    gradient: Tensor
    weights: Tensor
    states: dict[str, Tensor] = field(default_factory=dict)

    def state(self, name: str, *, of_weights: bool = False) -> Tensor:
        """Makes a state of the rule, saved and restored by name: zeros, or a copy of the initial weights."""
        self.states[name] = self.masters.clone() if of_weights else torch.zeros_like(self.masters)
        return self.states[name]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The segments of a buffer."""
        return [flat[segment.begin : segment.begin + segment.size] for segment in self.segments]


class Piecewise:
    """A rule on lists of tensors, applied to the segments; there may be none.

    squared_norm(flat): of a flat buffer (0-d, fp32 at least). measure(): squared norms of the shard's gradient, per
    parameter if the rule needs them, else of all [1]. step(): as a rule's; squares: measure(), summed over the ranks;
    total: sums [parameters, n] over the ranks.
    """

    def __init__(self, shard: Shard, make_rule: Callable[[Pieces], Rule]) -> None:
        self.shard = shard
        self.gradients = shard.views(shard.gradient)
        self.device, self.num_parameters = shard.masters.device, len(shard.names)
        owners = [segment.parameter for segment in shard.segments]
        names, masters = [shard.names[owner] for owner in owners], shard.views(shard.masters)
        self.rule = make_rule(
            Pieces(names=names, masters=masters, device=self.device, state=self._state)
        )
        self.num_steps, self.needs_norms = self.rule.num_steps, self.rule.needs_norms
        self.owners = torch.tensor(owners, dtype=torch.int64, device=self.device)
        # The first segments of all parameters, the second ones, ...: a fixed order of summation.
        turns: dict[int, list[int]] = {}
        for place, owner in enumerate(owners):
            turns.setdefault(owners[:place].count(owner), []).append(place)
        self.turns = [
            torch.tensor(turn, dtype=torch.int64, device=self.device) for turn in turns.values()
        ]

    def _state(self, name: str, *, of_weights: bool = False) -> list[Tensor]:
        return self.shard.views(self.shard.state(name, of_weights=of_weights))

    def _of_parameters(self, sums: Tensor) -> Tensor:
        """Adds up segments' sums [segments, ...] by parameter: [parameters, ...]."""
        whole = torch.zeros(
            self.num_parameters, *sums.shape[1:], dtype=sums.dtype, device=self.device
        )
        for turn in self.turns:
            whole.index_add_(0, self.owners.index_select(0, turn), sums.index_select(0, turn))
        return whole

    def squared_norm(self, flat: Tensor) -> Tensor:
        return squared_norms([flat]).sum()

    def measure(self) -> Tensor:
        if not self.needs_norms:
            return squared_norms([self.shard.gradient])
        dtype = torch.float64 if self.shard.masters.dtype == torch.float64 else torch.float32
        norms = (
            squared_norms(self.gradients)
            if self.gradients
            else torch.zeros(0, dtype=dtype, device=self.device)
        )
        return self._of_parameters(norms)

    def step(self, lr: Scalar, scale: Scalar, keep: Maybe, squares: Maybe, total: Total) -> None:
        def of_parameters(sums: Tensor) -> Tensor:
            return total(self._of_parameters(sums)).index_select(0, self.owners)

        if self.gradients:
            mine = (
                squares.index_select(0, self.owners)
                if self.needs_norms and squares is not None
                else None
            )
            self.rule.step(self.gradients, lr, scale, keep, mine, of_parameters)
        else:  # takes part in the collective
            self.num_steps += 1 if keep is None else keep
            if num_sums := self.rule.num_sums:
                of_parameters(
                    torch.zeros(0, num_sums, dtype=self.shard.masters.dtype, device=self.device)
                )
        self.shard.weights.copy_(self.shard.masters)


class FlatRule:
    """A rule by Triton kernels: both moments of a shard, and the kernels' scalars and layout. Methods: Piecewise's."""

    needs_norms = False

    def __init__(
        self, shard: Shard, config: LambConfig | LansConfig, passes: Any = lamb_kernel
    ) -> None:
        """passes: module with squared_norm, moments and update, as kernels/operations/lamb.py."""
        self.shard, self.config, self.passes = shard, config, passes
        device = shard.masters.device
        self.buffers = (
            shard.gradient,
            shard.masters,
            shard.state("first_moments"),
            shard.state("second_moments"),
        )
        self.num_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.scalars = torch.zeros(
            4, dtype=torch.float32, device=device
        )  # as kernels/operations/lamb.py takes them
        # A span is a segment with the zeros after it.
        spans: list[list[tuple[int, int]]] = [[] for _ in shard.names]
        for segment in shard.segments:
            end = segment.begin + _round_up(segment.size, lamb_kernel.ALIGNMENT)
            spans[segment.parameter].append((segment.begin, end))
        decays = [config.weight_decay if is_decayed(name) else 0.0 for name in shard.names]
        self.layout = lamb_kernel.spans_layout(shard.masters.numel(), spans, decays, device)

    def squared_norm(self, flat: Tensor) -> Tensor:
        return self.passes.squared_norm(flat)

    def begin(self, lr: Scalar, scale: Scalar, keep: Maybe) -> Tensor:
        """Counts the step and sets its scalars; without ``keep`` a nan factor skips it. Returns ``scale`` in fp32."""
        self.num_steps += 1 if keep is None else keep
        steps = self.num_steps.clamp(min=1).double()
        rate, factor = (
            torch.as_tensor(x, dtype=torch.float32, device=self.scalars.device) for x in (lr, scale)
        )
        self.scalars[0] = rate
        self.scalars[1] = factor if keep is None else torch.where(keep, factor, float("nan"))
        self.scalars[2] = 1 / (1 - torch.pow(self.config.beta1, steps))
        self.scalars[3] = 1 / (1 - torch.pow(self.config.beta2, steps))
        return factor


class FlatLamb(FlatRule):
    """LAMB by the two passes of kernels/operations/lamb.py."""

    def measure(self) -> Tensor:
        return self.passes.squared_norm(self.shard.gradient).reshape(1)

    def step(self, lr: Scalar, scale: Scalar, keep: Maybe, squares: Maybe, total: Total) -> None:
        self.begin(lr, scale, keep)
        beta1, beta2, eps = self.config.beta1, self.config.beta2, self.config.eps
        sums = total(
            self.passes.moments(self.layout, *self.buffers, self.scalars, beta1, beta2, eps)
        )
        self.passes.update(
            self.layout, *self.buffers[1:], self.shard.weights, sums, self.scalars, eps
        )


class FlatLans(FlatRule):
    """LANS by the three passes of kernels/operations/lans.py."""

    needs_norms = True

    def __init__(self, shard: Shard, config: LansConfig) -> None:
        super().__init__(shard, config)
        self.factors = torch.ones(len(shard.names), device=shard.masters.device)

    def measure(self) -> Tensor:
        return lans_kernel.squared_norms(self.layout, self.shard.gradient)

    def step(self, lr: Scalar, scale: Scalar, keep: Maybe, squares: Maybe, total: Total) -> None:
        assert squares is not None
        factor, common = self.begin(lr, scale, keep), (self.layout, self.factors, *self.buffers)
        beta1, beta2, eps = self.config.beta1, self.config.beta2, self.config.eps
        norms = squares.sqrt() * factor
        self.factors.copy_(torch.where(norms > 0, factor / (norms + eps), factor))
        sums = total(lans_kernel.moments(*common, self.scalars, beta1, beta2, eps))
        lans_kernel.update(*common, self.shard.weights, sums, self.scalars, beta1, eps)
