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

from bert.dist import World
from bert.optim.layout import Bucket, Layout


def parameter_views(flat: Tensor, layout: Layout, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Each parameter's part of a flat buffer, in its shape."""
    parts = zip(layout.begins, layout.sizes, parameters, strict=True)
    return [flat[begin : begin + size].view(parameter.shape) for begin, size, parameter in parts]


def bucket_of_each(layout: Layout) -> list[int]:
    """The number of the bucket in which each parameter lies."""
    found = {p: number for number, bucket in enumerate(layout.buckets) for p in bucket.parameters}
    return [found[parameter] for parameter in range(len(layout.sizes))]


class GradientBuckets:
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
        self.parameters, self.layout, self.world = parameters, layout, world
        self.factor_of: Callable[[list[Tensor]], Tensor] | None = None  # of a full bucket
        device = parameters[0].device
        self.whole = torch.zeros(layout.total, dtype=dtype, device=device)
        self.shard = torch.zeros(layout.shard_total, dtype=dtype, device=device) if world.size > 1 else self.whole
        self.received = torch.zeros(layout.total, dtype=parameters[0].dtype, device=device) if apart else self.whole
        self.views = parameter_views(self.received, layout, parameters)
        self.wire_shard = self.shard
        if world.size > 1 and wire_dtype != dtype:
            self.wire_shard = torch.zeros(layout.shard_total, dtype=wire_dtype, device=device)
        self.add = self.reduce = False  # to what is in the buffer; each bucket as soon as it is full
        self.missing = [0] * len(layout.buckets)  # gradients that each bucket waits for in this backward pass
        self.reductions: list[distributed.Work | None] = []  # under way, of the first buckets
        for parameter, number in zip(parameters, bucket_of_each(layout), strict=True):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._gradient_came(number))

    @contextlib.contextmanager
    def backward_pass(self, *, first: bool, reduce: bool) -> Iterator[None]:
        """Around the backward pass of one micro-batch. reduce: full buckets are reduced at once, while it runs."""
        self.add, self.reduce = not first and self.received is self.whole, reduce
        self.missing = [len(bucket.parameters) for bucket in self.layout.buckets]
        yield
        assert not any(self.missing), "a parameter got no gradient"

    @torch.no_grad()
    def _gradient_came(self, number: int) -> None:
        self.missing[number] -= 1
        if self.missing[number]:
            return
        self._receive(self.layout.buckets[number])
        while self.reduce and len(self.reductions) < len(self.missing) and not self.missing[len(self.reductions)]:
            self._reduce_next()

    def _receive(self, bucket: Bucket) -> None:
        gradients: list[Tensor] = [self.parameters[index].grad for index in bucket.parameters]  # type: ignore[misc]
        views = [self.views[index] for index in bucket.parameters]
        if self.factor_of is not None:
            factor = self.factor_of(gradients).to(self.whole.dtype)
            gradients = list(torch._foreach_mul([gradient.to(self.whole.dtype) for gradient in gradients], factor))
        if self.add:
            torch._foreach_add_(views, gradients)
        else:
            torch._foreach_copy_(views, gradients)
        for index in bucket.parameters:
            self.parameters[index].grad = None

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
        """Waits until this rank's shard of the average is there; on a GPU the stream waits, not the host."""
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


class WeightBuckets:
    """The weights of all ranks in a flat buffer, of which the parameters are views, and this rank's shard of them."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], stages: Sequence[nn.Module], layout: Layout, world: World
    ) -> None:
        """stages: modules whose calls make up the forward pass, in its order."""
        self.layout, self.world = layout, world
        dtype, device = parameters[0].dtype, parameters[0].device
        self.whole = torch.zeros(layout.total, dtype=dtype, device=device)
        self.shard = torch.zeros(layout.shard_total, dtype=dtype, device=device) if world.size > 1 else self.whole
        self.views = parameter_views(self.whole, layout, parameters)
        with torch.no_grad():
            for parameter, view in zip(parameters, self.views, strict=True):
                view.copy_(parameter)
                parameter.data = view
        self.stale = False  # other ranks have updated their shards since the last gather
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
