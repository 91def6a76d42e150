"""Where each parameter lies in the flat buffers, and which part of them each rank holds.

    parameters   | b.weight | b.bias | ... |  a large one, a.weight       |
    buckets      | bucket 0                | bucket 1                     | ...
    slices       | slice 0                 | slice 1       | slice 2      | ...
    ranks        | 0   | 1   | 2   | 3     | 0 | 1 | 2 | 3 | 0 | 1 | 2 | 3| ...

1. Parameters lie end to end in the order in which the backward pass finishes their gradients. Those
   of a group are adjacent and in the group's order, as one product computes their gradients.
2. A bucket is as many whole groups as fit: it is reduced and gathered at once, as soon as all of its
   gradients are there.
3. A bucket is one slice, but for that of a large parameter: slices of the usual bucket size bound
   the memory that a collective takes.
4. Each slice is divided evenly over the ranks. A rank's shard is its parts of all slices, end to
   end; what it has of one parameter is a segment.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

# Elements: every parameter and every shard begins on a full cache line, in any precision.
ALIGNMENT = 128


class Slice(NamedTuple):
    """Elements [begin, begin + size) of the whole buffer, of which each rank has [shard_begin,
    shard_begin + shard_size) of its shard.
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
    """A part of one parameter in a shard: elements [begin, begin + size) of the shard are [start,
    start + size) of the parameter.
    """

    parameter: int
    begin: int
    size: int
    start: int


class Layout:
    """Layout of parameters of the given ``sizes`` (in elements, in the order of the model) over
    ``num_ranks``.

    bucket_elements: size of a bucket, which only a larger group exceeds; groups: indices of
    parameters to be adjacent, disjoint.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        num_ranks: int,
        bucket_elements: int,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self.sizes, self.num_ranks = list(sizes), num_ranks
        self.begins = [0] * len(sizes)  # of each parameter in the whole buffer
        self.buckets: list[Bucket] = []
        self.total = self.shard_total = 0
        # In this order the first bucket is full, and sent, while most of the backward pass is still
        # ahead.
        ordered = _backward_order(len(sizes), groups)
        for members in _fill_buckets(ordered, sizes, bucket_elements):
            self._append_bucket(members, bucket_elements)

    def _append_bucket(self, members: Sequence[int], bucket_elements: int) -> None:
        """Lays the parameters behind all earlier ones, and cuts the bucket into as few slices of
        one size as hold it, each divisible by the ranks.
        """
        filled = 0
        for parameter in members:
            self.begins[parameter] = self.total + filled
            filled += _round_up(self.sizes[parameter], ALIGNMENT)
        planned = _divide_up(filled, bucket_elements)
        # Each rank's part of a slice begins aligned, too.
        size = _round_up(_divide_up(filled, planned), ALIGNMENT * self.num_ranks)
        shard_size = size // self.num_ranks
        slices = []
        # Rounded up, the slices may be fewer than planned.
        for _ in range(_divide_up(filled, size)):
            slices.append(Slice(self.total, size, self.shard_total, shard_size))
            self.total += size
            self.shard_total += shard_size
        self.buckets.append(Bucket(tuple(members), tuple(slices)))

    @property
    def slices(self) -> list[Slice]:
        return [part for bucket in self.buckets for part in bucket.slices]

    def segments(self, rank: int) -> list[Segment]:
        """The parts of parameters in the shard of ``rank``, in its order."""
        if self.num_ranks == 1:  # whole parameters, also where slices cut them
            return [
                Segment(parameter, self.begins[parameter], self.sizes[parameter], 0)
                for bucket in self.buckets
                for parameter in bucket.parameters
            ]
        return [
            segment
            for bucket in self.buckets
            for part in bucket.slices
            for segment in self._segments_of_slice(bucket, part, rank)
        ]

    def _segments_of_slice(
        self, bucket: Bucket, part: Slice, rank: int
    ) -> Iterable[Segment]:
        """What ``rank`` has of a slice, by parameter."""
        # In elements of the whole buffer.
        low = part.begin + rank * part.shard_size
        high = low + part.shard_size
        for parameter in bucket.parameters:
            first = self.begins[parameter]
            begin, end = max(first, low), min(first + self.sizes[parameter], high)
            if begin < end:
                in_shard = part.shard_begin + begin - low
                yield Segment(parameter, in_shard, end - begin, begin - first)

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


def _backward_order(
    num_parameters: int, groups: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """All parameters by group, in the order in which the backward pass finishes them: the last of
    the model first.
    """
    # Any other parameter is a group of its own.
    group_of = {parameter: tuple(group) for group in groups for parameter in group}
    parameters = reversed(range(num_parameters))
    ordered = (group_of.get(parameter, (parameter,)) for parameter in parameters)
    return list(dict.fromkeys(ordered))  # each group once, where its first one comes


def _fill_buckets(
    ordered: Iterable[Sequence[int]], sizes: Sequence[int], bucket_elements: int
) -> list[list[int]]:
    """The parameters of each bucket. A group is never divided: its gradients are one product's."""
    buckets: list[list[int]] = []
    filled = 0
    for group in ordered:
        group_size = sum(sizes[parameter] for parameter in group)
        if not buckets or filled + group_size > bucket_elements:
            buckets.append([])
            filled = 0
        buckets[-1] += group
        filled += sum(_round_up(sizes[parameter], ALIGNMENT) for parameter in group)
    return buckets


def layout_of(
    parameters: Sequence[Tensor],
    num_ranks: int,
    bucket_elements: int,
    contiguous_groups: Sequence[Sequence[Tensor]],
) -> Layout:
    """Layout of parameters over ``num_ranks``; contiguous_groups: groups of them."""
    number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
    groups = [
        [number_of[id(parameter)] for parameter in group] for group in contiguous_groups
    ]
    sizes = [parameter.numel() for parameter in parameters]
    return Layout(sizes, num_ranks, bucket_elements, groups)


def fill(
    flat: Tensor,
    segments: Sequence[Segment],
    names: Sequence[str],
    chunks: Iterable[tuple[str, int, Tensor]],
) -> None:
    """Copies parameter chunks, (name, first number, numbers), into the segments of a flat buffer
    that overlap them. ``names``: of all parameters.
    """
    targets: dict[str, list[Segment]] = {}
    for segment in segments:
        targets.setdefault(names[segment.parameter], []).append(segment)
    for name, start, values in chunks:
        for segment in targets.get(name, ()):
            # In elements of the parameter, of which chunk and segment may hold different parts.
            begin = max(start, segment.start)
            end = min(start + len(values), segment.start + segment.size)
            if begin < end:
                target = segment.begin + begin - segment.start
                chunk = values[begin - start : end - start]
                flat[target : target + len(chunk)].copy_(chunk)


def _divide_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _round_up(number: int, multiple: int) -> int:
    return _divide_up(number, multiple) * multiple
