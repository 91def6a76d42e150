"""Gradients on two levels: reduce-scattered within a group of ranks, then averaged across groups (mesh.py).

A bucket (flat.py) that the backward pass has filled is treated by the pass's ``Phase``: it stays, or it is reduced
within the group, or over all ranks. Each of its slices that is reduced passes through the states of a SliceReduction:

    IN_GROUP  ->  ACROSS_GROUPS  ->  DONE

Collectives must be started in the same order on all ranks. Buckets are therefore reduced in their own order, which is
about that in which the backward pass fills them, and never by what is ready first.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from bert.kernels.support import weight_gradient
from bert.optim.flat import Bucket, Layout, Slice
from bert.optim.mesh import Mesh

# Slices being reduced from a copy at once, such as one in the group and one across groups; each costs its memory.
MAX_IN_FLIGHT = 2


class Phase(enum.Enum):
    """What becomes of a bucket once a backward pass has filled it."""

    KEEP = "it stays in this rank's gradient, where later micro-batches are added"
    REDUCE_IN_GROUP = "it is added to the group's shards: no rank keeps a whole gradient (ZeRO-2)"
    REDUCE = "it is averaged over all ranks: the last micro-batch of a step"


class SliceState(enum.Enum):
    """Where a slice of the gradient is on its way to the shard."""

    IN_GROUP = "being reduce-scattered over the group; passed at once by groups of one"
    ACROSS_GROUPS = "this rank's piece of it being averaged across groups; nothing with one group"
    DONE = "in the shard"


class SliceReduction:
    """A slice of the gradient on its way to the shard, in the states of SliceState.

    sent: the slice, in the type in which it is sent; target: its part of the shard. adds: to the micro-batches that are
    in the shard already. crosses_groups: whether it is averaged across groups.
    """

    def __init__(
        self, mesh: Mesh, sent: Tensor, target: Tensor, *, adds: bool, crosses_groups: bool
    ) -> None:
        self.mesh, self.target, self.adds, self.crosses_groups = mesh, target, adds, crosses_groups
        self.communication_dtype = sent.dtype
        self.state = SliceState.IN_GROUP
        self.done_on_stream: torch.cuda.Event | None = None
        self.work: distributed.Work | None = None
        self.piece = target
        # A group of one has its average; only the second level is left.
        if mesh.size == 1:
            self.start_cross_group()
            return
        # The collective overwrites what it writes to, so sums and shards of another type need a piece of their own.
        if adds or target.dtype != sent.dtype:
            self.piece = torch.empty_like(target, dtype=sent.dtype)
        # Held until the end: a side stream may use them after the allocator would have given them away.
        self.held = sent, self.piece
        self.work = mesh.reduce_scatter(self.piece, sent)

    def start_cross_group(self) -> None:
        """IN_GROUP -> ACROSS_GROUPS: waits for the group's average, and starts that across groups."""
        if self.state is not SliceState.IN_GROUP:
            return
        self._wait()
        if self.adds:
            self.piece = self.target.add_(self.piece)
        # Both levels send in the same type, also where sums in the shard are fp32.
        if self.crosses_groups:
            self.piece = self.piece.to(self.communication_dtype)
            self.work = self.mesh.average(self.piece)
        self.state = SliceState.ACROSS_GROUPS

    def finish(self) -> None:
        """-> DONE: waits for the average and puts it into the shard. On a GPU the stream waits, with gloo the host."""
        # A side stream does all of it; this stream waits for that one.
        if self.done_on_stream is not None:
            torch.cuda.current_stream().wait_event(self.done_on_stream)
            return
        self.start_cross_group()
        self._wait()
        if self.piece is not self.target:
            self.target.copy_(self.piece)
        self.state = SliceState.DONE

    def finish_on(self, stream: torch.cuda.Stream) -> None:
        """Has ``stream`` wait for one collective to start the next, while the backward pass goes on."""
        # Not before the backward pass has written the slice.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.finish()
            self.done_on_stream = stream.record_event()

    def _wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


class GradientBuckets:
    """Collects the gradients of micro-batches, and averages them over the ranks, each bucket as soon as it is full.

    shard: this rank's part of the average; communication_dtype: type in which gradients are sent. whole: this rank's
    gradient (the shard itself in groups of one). received: where a backward pass leaves its gradients, ``whole`` itself
    unless micro-batches are clipped before they are added (separate_receive_buffer), then of the parameters' type. All
    are zero between the parameters.

    Without ``keep_whole`` there is never a whole gradient (ZeRO stage 2): each slice of each micro-batch is averaged
    over the group and added to the shard, and after the last one averaged over the groups. Rounding differs: averages
    are added, not sums averaged. It makes no difference in groups of one.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        mesh: Mesh,
        dtype: torch.dtype,
        communication_dtype: torch.dtype,
        *,
        keep_whole: bool,
        separate_receive_buffer: bool,
    ) -> None:
        self.parameters, self.layout, self.mesh = parameters, layout, mesh
        self.communication_dtype = communication_dtype
        self.device, weight_dtype = parameters[0].device, parameters[0].dtype
        shard_device = mesh.world.device if mesh.size > 1 else self.device
        self.shard = torch.zeros(layout.shard_total, dtype=dtype, device=shard_device)
        self.whole: Tensor | None = self.shard
        if mesh.size > 1:
            self.whole = None
            if keep_whole:
                self.whole = torch.zeros(layout.total, dtype=dtype, device=self.device)
        self.received = self.whole
        if separate_receive_buffer:
            self.received = torch.zeros(layout.total, dtype=weight_dtype, device=self.device)
        self.views = layout.views(self.received, parameters) if self.received is not None else []
        self.bucket_clip_factor: Callable[[list[Tensor]], Tensor] | None = None  # CLIP=bucket
        self.phase, self.is_first = Phase.REDUCE, True  # of the micro-batch of this backward pass
        self.num_sent = 0  # buckets, in this backward pass and after it
        self.in_flight: list[SliceReduction] = []  # oldest first
        self.stream: torch.cuda.Stream | None = None
        # The second level waits for the first, which on the main stream would stop the pass.
        if mesh.groups > 1 and shard_device.type == "cuda":
            self.stream = torch.cuda.Stream(shard_device)
        self.missing = [0] * len(layout.buckets)  # gradients, by bucket, of this backward pass
        for parameter, number in zip(parameters, layout.bucket_of_each(), strict=True):
            # Called once a backward pass, also for a parameter used twice, as the word embeddings.
            parameter.register_post_accumulate_grad_hook(
                lambda _, number=number: self._gradient_ready(number)
            )

    @contextlib.contextmanager
    def backward_pass(self, *, first: bool, reduce: bool) -> Iterator[None]:
        """Around the backward pass of one micro-batch. reduce: reduce full buckets while it runs."""
        without_reduction = Phase.REDUCE_IN_GROUP if self.whole is None else Phase.KEEP
        self.phase = Phase.REDUCE if reduce else without_reduction
        self.is_first, self.num_sent = first, 0
        self.missing = [len(bucket.parameters) for bucket in self.layout.buckets]
        nowhere = [None] * len(self.parameters)
        in_place = self.received is not None and self._overwrites_received(self.received)
        weight_gradient.set_grad_buffers(self.parameters, self.views if in_place else nowhere)
        try:
            yield
        finally:
            weight_gradient.set_grad_buffers(self.parameters, nowhere)
        # Its bucket, and all buckets after it, would never be sent.
        assert not any(self.missing), "a parameter got no gradient"

    def _overwrites_received(self, received: Tensor) -> bool:
        """Whether the backward pass may write gradients in place: they are not added, and of the same type."""
        is_added = received is self.whole and not self.is_first
        return not is_added and received.dtype == self.parameters[0].dtype

    @torch.no_grad()
    def _gradient_ready(self, number: int) -> None:
        """Called by autograd when a parameter of bucket ``number`` has its gradient."""
        self.missing[number] -= 1
        if self.missing[number]:
            return
        if self.whole is not None:
            self._receive(self.layout.buckets[number])
        if self.phase is Phase.KEEP:
            return
        # A full bucket behind one that is not waits: all ranks send in the same order.
        while self.num_sent < len(self.missing) and not self.missing[self.num_sent]:
            self._send_next()

    def _receive(self, bucket: Bucket) -> None:
        assert self.received is not None
        views = [self.views[index] for index in bucket.parameters]
        gradients = self._pop_gradients(bucket, self.received.dtype)
        # The first micro-batch overwrites, so that nothing has to be zeroed before it.
        if not self.is_first and self.received is self.whole:
            torch._foreach_add_(views, gradients)
            return
        elsewhere = [  # not written in place
            (view, gradient)
            for view, gradient in zip(views, gradients, strict=True)
            if not weight_gradient.same_memory(view, gradient)
        ]
        if elsewhere:
            targets, sources = map(list, zip(*elsewhere, strict=True))
            torch._foreach_copy_(targets, sources)

    def _pop_gradients(self, bucket: Bucket, dtype: torch.dtype) -> list[Tensor]:
        """The gradients of a full bucket, clipped in ``dtype`` with CLIP=bucket; the parameters lose them."""
        gradients: list[Tensor] = [self.parameters[index].grad for index in bucket.parameters]  # type: ignore[misc]
        if self.bucket_clip_factor is not None:
            factor = self.bucket_clip_factor(gradients).to(dtype)
            gradients = list(
                torch._foreach_mul([gradient.to(dtype) for gradient in gradients], factor)
            )
        # Memory that the rest of the backward pass can use.
        for index in bucket.parameters:
            self.parameters[index].grad = None
        return gradients

    @torch.no_grad()
    def add_received(self, factor: Tensor, first: bool) -> None:
        """Adds what was received, times ``factor``, to the whole. A factor of nan counts as 1: the gradient has the nan
        already, and the zeros between parameters, which no gradient overwrites, must not get any.
        """
        assert self.whole is not None
        assert self.received is not None
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

    def finish(self) -> None:
        """Waits for this rank's shard of the average; on a GPU the stream waits, not the host."""
        self.phase = Phase.REDUCE
        # What the backward pass left: all buckets, if a micro-batch is clipped whole first.
        while self.num_sent < len(self.layout.buckets):
            self._send_next()
        while self.in_flight:
            self.in_flight.pop(0).finish()

    def _send_next(self) -> None:
        bucket = self.layout.buckets[self.num_sent]
        self.num_sent += 1
        if self.mesh.world.size == 1:
            return
        gradients: dict[int, Tensor] = {}
        if self.whole is None:
            popped = self._pop_gradients(bucket, self.shard.dtype)
            gradients = dict(zip(bucket.parameters, popped, strict=True))
        for part in bucket.slices:
            is_copy = self.whole is None or self.whole.dtype != self.communication_dtype
            # A copy lives until its reduction ends, hence only so many.
            if is_copy and len(self.in_flight) >= MAX_IN_FLIGHT:
                self.in_flight.pop(0).finish()
            if self.whole is not None:
                sent = part.of_whole(self.whole).to(self.communication_dtype)
            else:
                sent = self._assemble(bucket, part, gradients)
            self._start(part, sent)

    def _assemble(self, bucket: Bucket, part: Slice, gradients: dict[int, Tensor]) -> Tensor:
        """A slice of a bucket, copied from the parameters' gradients, with zeros between them."""
        flat = torch.zeros(part.size, dtype=self.communication_dtype, device=self.device)
        segments = self.layout.parts(bucket, part.begin, part.begin + part.size)
        torch._foreach_copy_(
            [flat[s.begin : s.begin + s.size] for s in segments],
            [gradients[s.parameter].reshape(-1)[s.start : s.start + s.size] for s in segments],
        )
        return flat

    def _start(self, part: Slice, sent: Tensor) -> None:
        """Starts a reduction, and the second level of the one before it while this one is in the group."""
        reduction = SliceReduction(
            self.mesh,
            sent,
            part.of_shard(self.shard),
            adds=self.whole is None and not self.is_first,
            crosses_groups=self.phase is Phase.REDUCE and self.mesh.groups > 1,
        )
        if self.stream is not None:
            reduction.finish_on(self.stream)
        elif reduction.crosses_groups and self.in_flight:
            self.in_flight[-1].start_cross_group()
        self.in_flight.append(reduction)
