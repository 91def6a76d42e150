"""The flat buffers of a sharded optimizer at work: gradients are reduced, and weights collected, bucket by bucket.

Collectives must come in the same order on all ranks. Gradients are therefore reduced in the order of the buckets, which
is about that in which the backward pass fills them, and weights collected in the order in which the forward pass needs
them; neither depends on what is ready first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from bert.core.dist import World
from bert.kernels import weight_gradient
from bert.optim.layout import Bucket, Layout


def parameter_views(flat: Tensor, layout: Layout, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Each parameter's part of a flat buffer, in its shape."""
    parts = zip(layout.begins, layout.sizes, parameters, strict=True)
    return [flat[begin : begin + size].view(parameter.shape) for begin, size, parameter in parts]


def bucket_of_each(layout: Layout) -> list[int]:
    """The number of the bucket in which each parameter lies."""
    found = {p: number for number, bucket in enumerate(layout.buckets) for p in bucket.parameters}
    return [found[parameter] for parameter in range(len(layout.sizes))]


class Arrivals:
    """Notes the gradients of a backward pass as they come, and hands on each bucket that is full."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, world: World) -> None:
        self.parameters, self.layout, self.world = parameters, layout, world
        self.factor_of: Callable[[list[Tensor]], Tensor] | None = None  # of a full bucket
        self.missing = [0] * len(layout.buckets)  # gradients that each bucket waits for in this backward pass
        for parameter, number in zip(parameters, bucket_of_each(layout), strict=True):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._gradient_came(number))

    @contextlib.contextmanager
    def backward_pass(self, *, first: bool, reduce: bool) -> Iterator[None]:
        """Around the backward pass of one micro-batch. reduce: full buckets are reduced at once, while it runs."""
        self.begin(first, reduce)
        self.missing = [len(bucket.parameters) for bucket in self.layout.buckets]
        weight_gradient.offer(self.parameters, self.places())
        try:
            yield
        finally:
            weight_gradient.offer(self.parameters, [None] * len(self.parameters))
        assert not any(self.missing), "a parameter got no gradient"

    def begin(self, first: bool, reduce: bool) -> None:
        """Before the backward pass."""
        raise NotImplementedError

    def places(self) -> Sequence[Tensor | None]:
        """Where the backward pass may write the parameters' gradients itself; None where it may not."""
        return [None] * len(self.parameters)

    def full(self, number: int) -> None:
        """All gradients of a bucket are there."""
        raise NotImplementedError

    @torch.no_grad()
    def _gradient_came(self, number: int) -> None:
        self.missing[number] -= 1
        if not self.missing[number]:
            self.full(number)

    def taken(self, bucket: Bucket, dtype: torch.dtype) -> list[Tensor]:
        """The gradients of a full bucket, with their factor in ``dtype``; the parameters have none afterwards."""
        gradients: list[Tensor] = [self.parameters[index].grad for index in bucket.parameters]  # type: ignore[misc]
        if self.factor_of is not None:
            factor = self.factor_of(gradients).to(dtype)
            gradients = list(torch._foreach_mul([gradient.to(dtype) for gradient in gradients], factor))
        for index in bucket.parameters:
            self.parameters[index].grad = None
        return gradients

    def finish(self) -> None:
        """Waits until this rank's shard of the average is there; on a GPU the stream waits, not the host."""
        raise NotImplementedError


class GradientBuckets(Arrivals):
    """Collects the gradients of micro-batches in a flat buffer, and averages it over the ranks.

    whole: this rank's gradient; shard: its part of the average (the same memory with one rank); received: where a
    backward pass leaves its gradients, which is ``whole`` itself unless micro-batches are clipped before they are
    added. All are zero between the parameters.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        world: World,
        dtype: torch.dtype,
        *,
        apart: bool,
        wire_dtype: torch.dtype,
    ) -> None:
        """dtype: of the sum; apart: micro-batches are received in a buffer of their own, of the parameters' type.

        wire_dtype: in which the sums are sent to other ranks.
        """
        super().__init__(parameters, layout, world)
        device = parameters[0].device
        self.whole = torch.zeros(layout.total, dtype=dtype, device=device)
        self.shard = self.whole
        if world.size > 1:
            self.shard = torch.zeros(layout.shard_total, dtype=dtype, device=world.device)
        self.received = torch.zeros(layout.total, dtype=parameters[0].dtype, device=device) if apart else self.whole
        self.views = parameter_views(self.received, layout, parameters)
        self.wire_shard = self.shard
        if world.size > 1 and wire_dtype != dtype:
            self.wire_shard = torch.zeros(layout.shard_total, dtype=wire_dtype, device=world.device)
        self.add = self.reduce = False  # to what is in the buffer; each bucket as soon as it is full
        self.reductions: list[distributed.Work | None] = []  # under way, of the first buckets

    def begin(self, first: bool, reduce: bool) -> None:
        """See Arrivals."""
        self.add, self.reduce = not first and self.received is self.whole, reduce

    def places(self) -> Sequence[Tensor | None]:
        """See Arrivals: not where gradients are added, or of another type."""
        fits = not self.add and self.received.dtype == self.parameters[0].dtype
        return self.views if fits else super().places()

    def full(self, number: int) -> None:
        """See Arrivals."""
        bucket = self.layout.buckets[number]
        views = [self.views[index] for index in bucket.parameters]
        gradients = self.taken(bucket, self.whole.dtype)
        if self.add:
            torch._foreach_add_(views, gradients)
        elif apart := [p for p in zip(views, gradients, strict=True) if not weight_gradient.same_memory(*p)]:
            torch._foreach_copy_([view for view, _ in apart], [gradient for _, gradient in apart])
        while self.reduce and len(self.reductions) < len(self.missing) and not self.missing[len(self.reductions)]:
            self._reduce_next()

    @torch.no_grad()
    def add_received(self, factor: Tensor, first: bool) -> None:
        """Adds what was received, times ``factor``, to the whole; not times nan, which is in the gradient already.

        It would stay in the zeros between the parameters, which no later gradient overwrites.
        """
        factor = torch.where(torch.isfinite(factor), factor, 1.0).to(self.whole.dtype)
        if self.received is self.whole:
            self.whole.mul_(factor)
            return
        for bucket in self.layout.buckets:  # one at a time, for the sake of memory
            part = slice(bucket.begin, bucket.begin + bucket.size)
            clipped = self.received[part].to(self.whole.dtype).mul_(factor)
            self.whole[part] = clipped if first else self.whole[part].add_(clipped)

    def finish(self) -> None:
        """See Arrivals."""
        while len(self.reductions) < len(self.layout.buckets):
            self._reduce_next()
        for work in self.reductions:
            if work is not None:
                work.wait()
        self.reductions = []
        if self.wire_shard is not self.shard:
            self.shard.copy_(self.wire_shard)

    def _reduce_next(self) -> None:
        bucket = self.layout.buckets[len(self.reductions)]
        shard = self.wire_shard[bucket.shard_begin : bucket.shard_begin + bucket.shard_size]
        whole = self.whole[bucket.begin : bucket.begin + bucket.size]
        self.reductions.append(self.world.reduce_scatter(shard, whole.to(self.wire_shard.dtype)))


MOST_UNDER_WAY = 2  # reductions of buckets at once, each with a copy of the bucket


class GradientShard(Arrivals):
    """This rank's part of the average alone (ZeRO stage 2): no whole gradient is ever there.

    Each bucket of each micro-batch is averaged over the ranks as soon as it is full, and added to the shard; of several
    micro-batches that is as many times the communication of GradientBuckets, and other roundings: averages are added,
    not sums averaged. With one rank use GradientBuckets.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        world: World,
        dtype: torch.dtype,
        *,
        wire_dtype: torch.dtype,
    ) -> None:
        """dtype: of the sum; wire_dtype: in which gradients are sent to other ranks."""
        super().__init__(parameters, layout, world)
        self.shard = torch.zeros(layout.shard_total, dtype=dtype, device=world.device)
        self.wire_dtype = wire_dtype
        self.add = False  # to what is in the shard
        self.num_started = 0  # buckets of this backward pass
        self.under_way: list[tuple[Bucket, Tensor, Tensor, distributed.Work | None]] = []

    def begin(self, first: bool, reduce: bool) -> None:
        """See Arrivals; every micro-batch is reduced."""
        self.add, self.num_started = not first, 0

    def full(self, number: int) -> None:
        """See Arrivals."""
        while self.num_started < len(self.missing) and not self.missing[self.num_started]:
            if len(self.under_way) == MOST_UNDER_WAY:
                self._settle()
            self._start(self.layout.buckets[self.num_started])
            self.num_started += 1
        if self.num_started == len(self.missing):
            self.finish()

    def _start(self, bucket: Bucket) -> None:
        whole = torch.zeros(bucket.size, dtype=self.wire_dtype, device=self.parameters[0].device)
        begins = [self.layout.begins[index] - bucket.begin for index in bucket.parameters]
        gradients = self.taken(bucket, self.shard.dtype)
        views = [whole[begin : begin + g.numel()].view_as(g) for begin, g in zip(begins, gradients, strict=True)]
        torch._foreach_copy_(views, gradients)
        part = torch.empty(bucket.shard_size, dtype=self.wire_dtype, device=self.shard.device)
        self.under_way.append((bucket, whole, part, self.world.reduce_scatter(part, whole)))

    def _settle(self) -> None:
        """Adds the oldest of the reductions to the shard."""
        bucket, _, part, work = self.under_way.pop(0)
        if work is not None:
            work.wait()
        target = self.shard[bucket.shard_begin : bucket.shard_begin + bucket.shard_size]
        if self.add:
            target.add_(part)
        else:
            target.copy_(part)

    def finish(self) -> None:
        """See Arrivals."""
        while self.under_way:
            self._settle()


class WeightBuckets:
    """The weights of all ranks in a flat buffer, of which the parameters are views, and this rank's shard of them."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        stages: Sequence[nn.Module],
        layout: Layout,
        world: World,
        *,
        filled: bool = True,
    ) -> None:
        """stages: modules whose calls make up the forward pass, in its order; filled: the parameters have their values.

        Else the shards of all ranks, which the caller fills, are gathered.
        """
        self.layout, self.world = layout, world
        dtype, device = parameters[0].dtype, parameters[0].device
        self.whole = torch.zeros(layout.total, dtype=dtype, device=device)
        self.shard = self.whole
        if world.size > 1:
            self.shard = torch.zeros(layout.shard_total, dtype=dtype, device=world.device)
        self.views = parameter_views(self.whole, layout, parameters)
        with torch.no_grad():
            for parameter, view in zip(parameters, self.views, strict=True):
                if filled:
                    view.copy_(parameter)
                parameter.data = view
        self.stale = not filled and world.size > 1  # other ranks have other shards since the last gather
        self.under_way: dict[int, distributed.Work | None] = {}  # by bucket: its gather
        self.order: list[int] = []  # of the gathers
        self.covered = self._await_in_forward(parameters, stages)

    def _await_in_forward(self, parameters: Sequence[nn.Parameter], stages: Sequence[nn.Module]) -> bool:
        """Makes each stage wait for its buckets; whether no parameter is outside of all stages."""
        numbers = {id(p): number for p, number in zip(parameters, bucket_of_each(self.layout), strict=True)}
        staged: set[int] = set()
        for stage in stages:
            members = {id(p) for p in stage.parameters()} & numbers.keys()
            staged |= members
            needed = {numbers[member] for member in members}
            self.order += sorted(needed - set(self.order), reverse=True)
            stage.register_forward_pre_hook(lambda _module, _inputs, needed=needed: self.wait(needed))
        self.order += [number for number in range(len(self.layout.buckets)) if number not in self.order]
        return staged == numbers.keys()

    def mark_stale(self) -> None:
        """Notes that ranks have updated their shards."""
        self.stale = self.world.size > 1

    def start_gather(self) -> None:
        """Starts to collect the shards of all ranks; the forward pass waits for each bucket as it comes to it."""
        if not self.stale:
            return
        self.stale = False
        for number in self.order:
            bucket = self.layout.buckets[number]
            shard = self.shard[bucket.shard_begin : bucket.shard_begin + bucket.shard_size]
            whole = self.whole[bucket.begin : bucket.begin + bucket.size]
            self.under_way[number] = self.world.all_gather(whole, shard)
        if not self.covered:
            self.wait()

    def gather(self) -> None:
        """Makes all weights current on every rank. A collective, unless they are."""
        self.start_gather()
        self.wait()

    def wait(self, buckets: set[int] | None = None) -> None:
        """Until the gathers of these buckets are done; None: of all."""
        for number in list(self.under_way) if buckets is None else buckets:
            work = self.under_way.pop(number, None)
            if work is not None:
                work.wait()
