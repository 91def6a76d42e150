"""Gradients on two levels: reduce-scattered within a group of ranks, then averaged across groups
(mesh.py).

The last micro-batch of a step sends each bucket (layout.py) as soon as the backward pass has filled
it. Collectives must be started in the same order on all ranks: buckets are reduced in their own
order, which is about that in which the backward pass fills them, and never by what is ready first.
"""

import contextlib
import enum
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from bert.kernels.support import weight_gradient
from bert.optim.layout import Bucket, Layout, Slice
from bert.optim.mesh import Mesh

# Slices being reduced from a copy at once, such as one in the group and one across groups; each
# costs its memory.
MAX_IN_FLIGHT = 2


class State(enum.Enum):
    """How far a slice is on its way to the shard; a level of one rank or one group is left out."""

    IN_GROUP = "a reduce-scatter over the group is under way"
    ACROSS_GROUPS = "its average over the groups is under way"
    IN_SHARD = "the average is in the shard, for later work of the stream"


class SliceReduction:
    """A slice of the gradient on its way to the shard: IN_GROUP, ACROSS_GROUPS, IN_SHARD.

    sent: the slice, in the type in which it is sent; target: its part of the shard.
    """

    def __init__(self, mesh: Mesh, sent: Tensor, target: Tensor) -> None:
        self.mesh, self.sent, self.target = mesh, sent, target
        self.work: distributed.Work | None = None
        self.in_shard: torch.cuda.Event | None = None  # of a side stream
        # Both levels send in the same type, also where the shard is fp32.
        self.piece = target if target.dtype == sent.dtype else sent
        if mesh.size > 1:
            if self.piece is sent:
                self.piece = torch.empty_like(target, dtype=sent.dtype)
            self.work = mesh.world.reduce_scatter(self.piece, sent, mesh.within)
            self.state = State.IN_GROUP
        else:  # a group of one has its average
            self._go_across_groups()

    def _go_across_groups(self) -> None:
        if self.mesh.groups > 1:
            self.work = self.mesh.world.average(self.piece, self.mesh.across)
        self.state = State.ACROSS_GROUPS

    def start_cross_group(self) -> None:
        """Waits for the group's average, and starts that across groups, unless it was started."""
        if self.state is State.IN_GROUP:
            self._wait()
            self._go_across_groups()

    def finish(self) -> None:
        """Waits for the average and puts it into the shard. On a GPU the stream waits, with gloo
        the host.
        """
        if self.state is State.IN_SHARD:
            # A side stream has done all of it; this stream waits for that one.
            assert self.in_shard is not None
            torch.cuda.current_stream().wait_event(self.in_shard)
            return
        self.start_cross_group()
        self._wait()
        if self.piece is not self.target:
            self.target.copy_(self.piece)
        self.state = State.IN_SHARD

    def finish_on(self, stream: torch.cuda.Stream) -> None:
        """Has ``stream`` wait for one collective to start the next, while the backward pass goes
        on.
        """
        # Not before the backward pass has written the slice.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.finish()
            self.in_shard = stream.record_event()

    def _wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


@dataclass(eq=False)
class Reducer:
    """Averages buckets over the ranks, in their own order.

    whole: this rank's gradient; shard: its part of the average; dtype: in which gradients are sent.
    """

    mesh: Mesh
    buckets: Sequence[Bucket]
    whole: Tensor
    shard: Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        # The second level waits for the first, which on the main stream would stop the pass.
        if self.mesh.groups > 1 and self.shard.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.shard.device)
        self.begin()

    def begin(self) -> None:
        """Of a new gradient nothing has been sent, nor is in flight, even after a capture that
        failed.
        """
        self.num_sent = 0
        self.in_flight: list[SliceReduction] = []  # oldest first

    def send(self, until: int) -> None:
        """Starts reducing the buckets before number ``until``, but for those that were sent."""
        while self.num_sent < until:
            bucket = self.buckets[self.num_sent]
            self.num_sent += 1
            if self.mesh.world.size > 1:
                for part in bucket.slices:
                    self._start(part)

    def finish(self) -> None:
        """Waits for the whole average; on a GPU the stream waits, not the host."""
        # What the backward pass left: all buckets, if a micro-batch is clipped whole first.
        self.send(len(self.buckets))
        while self.in_flight:
            self.in_flight.pop(0).finish()

    def _start(self, part: Slice) -> None:
        """Starts a reduction, and the second level of the one before it while this one is in the
        group.
        """
        is_copy = self.whole.dtype != self.dtype
        # A copy lives until its reduction ends, hence only so many.
        if is_copy and len(self.in_flight) >= MAX_IN_FLIGHT:
            self.in_flight.pop(0).finish()
        sent = part.of_whole(self.whole).to(self.dtype)
        reduction = SliceReduction(self.mesh, sent, part.of_shard(self.shard))
        if self.stream is not None:
            reduction.finish_on(self.stream)
        elif self.mesh.groups > 1 and self.in_flight:
            self.in_flight[-1].start_cross_group()
        self.in_flight.append(reduction)


class GradientBuckets:
    """Collects the gradients of micro-batches, and has each bucket averaged as soon as it is full.

    A gradient goes from its parameter to ``received``, ``whole``, and over the ranks to ``shard``.
    received: what a backward pass leaves, ``whole`` itself unless micro-batches are clipped before
    they are added (separate_receive_buffer), then of the parameters' type. whole: this rank's sum.
    shard: its part of the average, ``whole`` itself in groups of one. All are zero between the
    parameters. in_place: products may write their weights' gradients into ``received``.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        mesh: Mesh,
        dtype: torch.dtype,
        communication_dtype: torch.dtype,
        *,
        separate_receive_buffer: bool,
        in_place: bool = True,
    ) -> None:
        self.parameters, self.layout, self.in_place = parameters, layout, in_place
        device, weight_dtype = parameters[0].device, parameters[0].dtype
        self.shard = self.whole = torch.zeros(layout.total, dtype=dtype, device=device)
        if mesh.size > 1:
            self.shard = torch.zeros(
                layout.shard_total, dtype=dtype, device=mesh.world.device
            )
        self.received = self.whole
        if separate_receive_buffer:
            self.received = torch.zeros(layout.total, dtype=weight_dtype, device=device)
        self.views = layout.views(self.received, parameters)
        self.reducer = Reducer(
            mesh, layout.buckets, self.whole, self.shard, communication_dtype
        )
        # CLIP=bucket.
        self.bucket_clip_factor: Callable[[list[Tensor]], Tensor] | None = None
        # Gradients that a bucket lacks in this backward pass. Outside of one counts fall below 0,
        # and gradients stay with their parameters.
        self.missing = [0] * len(layout.buckets)
        for parameter, number in zip(parameters, layout.bucket_of_each(), strict=True):
            # Called once a backward pass, also for a parameter used twice, as the word embeddings.
            parameter.register_post_accumulate_grad_hook(
                lambda _, number=number: self._gradient_ready(number)
            )

    @contextlib.contextmanager
    def backward_pass(self, *, first: bool, reduce: bool) -> Iterator[None]:
        """Around the backward pass of one micro-batch. reduce: reduce full buckets while it
        runs.
        """
        self.reducer.begin()
        # The first micro-batch overwrites, so that nothing has to be zeroed before it.
        self.adds = self.received is self.whole and not first
        self.reduces = reduce
        self.missing = [len(bucket.parameters) for bucket in self.layout.buckets]
        # A product overwrites, in the type of its weight.
        fits = not self.adds and self.received.dtype == self.parameters[0].dtype
        offered = self.views if self.in_place and fits else ()
        weight_gradient.set_grad_buffers(self.parameters, offered)
        try:
            yield
        finally:
            weight_gradient.set_grad_buffers(self.parameters)
        # Its bucket, and all buckets after it, would never be sent.
        assert not any(self.missing), "a parameter got no gradient"

    @torch.no_grad()
    def _gradient_ready(self, number: int) -> None:
        """Called by autograd when a parameter of bucket ``number`` has its gradient."""
        # Parameters of a bucket finish in an order that autograd decides; the count does not care.
        self.missing[number] -= 1
        if self.missing[number]:
            return
        self._receive(self.layout.buckets[number])
        if self.reduces:
            # A full bucket behind one that is not waits: all ranks send in the same order.
            full = itertools.takewhile(operator.not_, self.missing)
            self.reducer.send(until=len(list(full)))

    def _receive(self, bucket: Bucket) -> None:
        """Takes the gradients of a full bucket, clipped with CLIP=bucket; the parameters lose
        them.
        """
        views = [self.views[index] for index in bucket.parameters]
        gradients: list[Tensor] = [
            self.parameters[index].grad  # type: ignore[misc]
            for index in bucket.parameters
        ]
        if self.bucket_clip_factor is not None:
            dtype = self.received.dtype
            factor = self.bucket_clip_factor(gradients).to(dtype)
            gradients = list(
                torch._foreach_mul(
                    [gradient.to(dtype) for gradient in gradients], factor
                )
            )
        # Memory that the rest of the backward pass can use.
        for index in bucket.parameters:
            self.parameters[index].grad = None
        if self.adds:
            torch._foreach_add_(views, gradients)
            return
        elsewhere = [  # not written in place
            pair
            for pair in zip(views, gradients, strict=True)
            if not weight_gradient.same_memory(*pair)
        ]
        if elsewhere:
            targets, sources = map(list, zip(*elsewhere, strict=True))
            torch._foreach_copy_(targets, sources)

    @torch.no_grad()
    def add_received(self, factor: Tensor, first: bool) -> None:
        """Adds what was received, times ``factor``, to the whole. A factor of nan counts as 1: the
        gradient has the nan already, and the zeros between parameters, which no gradient
        overwrites, must not get any.
        """
        factor = torch.where(torch.isfinite(factor), factor, 1.0).to(self.whole.dtype)
        if self.received is self.whole:
            self.whole.mul_(factor)
            return
        for part in self.layout.slices:  # one at a time, to save memory
            whole = part.of_whole(self.whole)
            clipped = part.of_whole(self.received).to(whole.dtype).mul_(factor)
            if first:
                whole.copy_(clipped)
            else:
                whole.add_(clipped)
