"""Where each parameter lies in the flat buffers of a sharded optimizer.

Parameters are laid end to end in the order in which the backward pass finishes their gradients, and cut into buckets of
whole parameters. Those of a group lie one after the other in its own order, in one bucket: one product computes their
gradients. Each bucket is divided evenly over the ranks, so that it can be reduced and gathered on its own. The
shard of a rank is its part of every bucket, end to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

ALIGNMENT = 128  # elements: every parameter and every shard begins on a full cache line, in any precision


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Elements [begin, begin + size) of the whole buffer, [shard_begin, shard_begin + shard_size) of each shard."""

    begin: int
    size: int
    shard_begin: int
    shard_size: int
    parameters: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The part of one parameter in one shard: elements [begin, begin + size) of the shard, [start, ...) of it."""

    parameter: int
    begin: int
    size: int
    start: int


class Layout:
    """The layout of parameters of the given ``sizes`` (in elements, in the order of the model) over some ranks.

    groups: numbers of parameters that belong side by side, no parameter in two; each lies where its last one would.
    """

    def __init__(
        self, sizes: Sequence[int], num_ranks: int, bucket_elements: int, groups: Sequence[Sequence[int]] = ()
    ) -> None:
        self.sizes, self.num_ranks = list(sizes), num_ranks
        self.begins = [0] * len(sizes)
        self.buckets: list[Bucket] = []
        self.total = self.shard_total = 0
        members: list[int] = []
        filled = 0
        for unit in _units(len(sizes), groups):
            if members and filled + sum(sizes[parameter] for parameter in unit) > bucket_elements:
                self._close(members, filled)
                members, filled = [], 0
            for parameter in unit:
                self.begins[parameter] = self.total + filled
                members.append(parameter)
                filled += _round_up(sizes[parameter], ALIGNMENT)
        if members:
            self._close(members, filled)

    def _close(self, members: list[int], filled: int) -> None:
        size = _round_up(filled, ALIGNMENT * self.num_ranks)
        shard_size = size // self.num_ranks
        self.buckets.append(
            Bucket(
                begin=self.total,
                size=size,
                shard_begin=self.shard_total,
                shard_size=shard_size,
                parameters=tuple(members),
            )
        )
        self.total += size
        self.shard_total += shard_size

    def segments(self, rank: int) -> list[Segment]:
        """The parts of parameters in the shard of ``rank``, by place. A parameter has at most one part in a shard."""
        found = []
        for bucket in self.buckets:
            low = bucket.begin + rank * bucket.shard_size
            for parameter in bucket.parameters:
                begin = max(self.begins[parameter], low)
                end = min(self.begins[parameter] + self.sizes[parameter], low + bucket.shard_size)
                if end > begin:
                    found.append(
                        Segment(
                            parameter=parameter,
                            begin=bucket.shard_begin + begin - low,
                            size=end - begin,
                            start=begin - self.begins[parameter],
                        )
                    )
        return found


def _units(count: int, groups: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Groups and single parameters, from the last one of the model to the first."""
    grouped = {max(group): group for group in groups}
    inside = {parameter for group in groups for parameter in group}
    return [
        grouped.get(parameter, (parameter,))
        for parameter in reversed(range(count))
        if parameter not in inside or parameter in grouped
    ]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def fill(
    flats: Iterable[tuple[Tensor, Sequence[Segment]]], names: Sequence[str], pieces: Iterable[tuple[str, int, Tensor]]
) -> None:
    """Copies into flat buffers what their segments have of the pieces: (name, first number, numbers)."""
    places: dict[str, list[tuple[Tensor, Segment]]] = {}
    for flat, segments in flats:
        for segment in segments:
            places.setdefault(names[segment.parameter], []).append((flat, segment))
    for name, start, values in pieces:
        for flat, segment in places.get(name, ()):
            begin = max(start, segment.start)
            end = min(start + len(values), segment.start + segment.size)
            if end > begin:
                place = segment.begin + begin - segment.start
                flat[place : place + end - begin].copy_(values[begin - start : end - start])
