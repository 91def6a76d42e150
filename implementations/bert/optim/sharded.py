"""An optimizer whose state is sharded over the ranks (ZeRO stage 1; Rajbhandari et al. 2020, arXiv 1910.02054).

Weights and gradients live in two flat buffers of buckets (flat.py). During the backward pass each bucket is averaged
as soon as its gradients are complete, and each rank receives its shard. It updates its shard of the fp32 masters; norms
over a parameter on several ranks are summed over them, so the update is that of whole parameters. The new weights are
gathered bucket by bucket during the next forward pass, in the order in which it needs them. With SHARD_GROUP all this
happens within groups of ranks, and the shards of the gradients are averaged across groups (mesh.py).
SHARD_OPTIMIZER=0 is a group of one: every rank has all of the state, and gradients are averaged.

Collectives must be started in the same order on all ranks. Gradients are therefore reduced in the order of the buckets,
which is about that in which the backward pass fills them, and weights gathered in the order in which the forward pass
needs them; neither depends on what is ready first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from bert.checkpoint.sharded import spans_of
from bert.core.dist import World
from bert.kernels.support import weight_gradient
from bert.optim.flat import Bucket, FlatLamb, FlatLans, Layout, Piecewise, Shard, Slice, fill
from bert.optim.mesh import Mesh
from bert.optim.rules import Scalar, squared_norms

BUCKET_BYTES = 64 << 20
MOST_UNDER_WAY = 2  # slices being reduced from a copy at once


class Sharded:
    """Applies a rule to this rank's shard of the parameters.

    ``stages``: modules that together hold all parameters and whose calls make up the forward pass, in its order.
    ``accumulate``: gradients of several micro-batches are added, in fp32. ``clip_each``: each of them is clipped first,
    which takes a separate buffer. ``low_wire``: their sums are sent in the weights' type. ``shard_gradients``: no rank
    keeps a whole gradient (ZeRO stage 2). ``group_size``: ranks that share a copy of the state; None: all.
    ``by_parameter``: compute the norm from those of the parameters; for groups of one. ``first_weights``: (name, first
    number, numbers) of all parameters, if those given are placeholders; each rank keeps what is in its shard.
    ``side_by_side``: groups of parameters, see Layout.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        make_rule: Callable[[Shard], Piecewise | FlatLamb | FlatLans],
        world: World,
        *,
        stages: Sequence[nn.Module] = (),
        masters: dict[str, Tensor] | None = None,
        accumulate: bool = False,
        clip_each: bool = False,
        low_wire: bool = False,
        shard_gradients: bool = False,
        group_size: int | None = None,
        by_parameter: bool = False,
        first_weights: Iterable[tuple[str, int, Tensor]] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        side_by_side: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        named = dict(named_parameters)
        self.names, self.parameters = list(named), list(named.values())
        self.mesh = Mesh(world, group_size or world.size)
        dtype = self.parameters[0].dtype
        assert all(p.dtype == dtype for p in self.parameters), "all weights are of one type"
        self.layout = layout_of(
            self.parameters, self.mesh.size, bucket_bytes // dtype.itemsize, side_by_side
        )
        self.segments = self.layout.segments(self.mesh.rank)
        master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        masters_flat = torch.zeros(self.layout.shard_total, dtype=master_dtype, device=world.device)
        if first_weights is None:
            self._fill_shard(masters_flat, masters or named)
        else:
            fill([(masters_flat, self.segments)], self.names, first_weights)
        self.weights = WeightBuckets(
            self.parameters, stages, self.layout, self.mesh, filled=first_weights is None
        )
        self.weights.shard.copy_(masters_flat)
        self.by_parameter, self.rounds = by_parameter, by_parameter and clip_each and not accumulate
        # fp32 also where each rank clips its gradient by its own factor before the average.
        sum_dtype = (
            master_dtype if accumulate or (by_parameter and clip_each and world.size > 1) else dtype
        )
        assert not (shard_gradients and clip_each), (
            "the norm of a micro-batch needs all of its gradient"
        )
        self.buckets = GradientBuckets(
            self.parameters, self.layout, self.mesh, sum_dtype, dtype if low_wire else sum_dtype,
            keep_whole=not shard_gradients, apart=accumulate and clip_each,
        )  # fmt: skip
        self.shard = Shard(
            names=self.names, segments=self.segments, masters=masters_flat, gradient=self.buckets.shard,
            weights=self.weights.shard,
        )  # fmt: skip
        self.rule = make_rule(self.shard)
        self.squares: Tensor | None = None  # squared norms of the averaged gradient, once measured

    @torch.no_grad()
    def _fill_shard(self, shard: Tensor, tensors: Mapping[str, Tensor]) -> None:
        held = dict.fromkeys(self.names[segment.parameter] for segment in self.segments)
        fill(
            [(shard, self.segments)],
            self.names,
            (span for name in held for span in spans_of(tensors, name)),
        )

    # --- gradients and update ----------------------------------------------------------------------------------------

    def norm_received(self) -> Tensor:
        """L2 norm of this rank's gradient after the backward pass (0-d, fp32 at least)."""
        buckets = self.buckets
        assert buckets.received is not None
        if self.by_parameter:
            dtype = torch.promote_types(buckets.received.dtype, torch.float32)
            return torch.stack(
                torch._foreach_norm([view.to(dtype) for view in buckets.views])
            ).norm()
        return self.rule.squared_norm(buckets.received).sqrt()

    @torch.no_grad()
    def measure(self) -> Tensor:
        """L2 norm of the averaged gradient (0-d, fp32 at least), the same on every rank. A collective."""
        if self.by_parameter:
            return self.norm_received()
        self.squares = self.mesh.sum(self.rule.measure())
        return self.squares.sum().sqrt()

    @torch.no_grad()
    def step(self, lr: Scalar, grad_scale: Scalar = 1.0, keep: Tensor | None = None) -> None:
        """One update from the averaged gradient times ``grad_scale``, if ``keep`` (0-d).

        With tensors as arguments it does not wait for the device.
        """
        if self.rule.needs_norms and self.squares is None:
            self.squares = self.mesh.sum(self.rule.measure())
        squares, self.squares = self.squares, None
        self.rule.step(lr, grad_scale, keep, squares, self.mesh.sum)
        self.weights.mark_stale()

    def gather(self) -> None:
        """Makes all weights current on every rank. A collective, unless they are current."""
        self.weights.gather()

    # --- state -------------------------------------------------------------------------------------------------------

    def state_tensors(self) -> list[Tensor]:
        """Every tensor of this rank that a step changes, weights included."""
        return [
            self.weights.whole,
            self.weights.shard,
            *self._parts().values(),
            self.rule.num_steps,
        ]

    def _parts(self) -> dict[str, Tensor]:
        return {"masters": self.shard.masters, **self.shard.states}

    def state_dict(self) -> dict[str, Any]:
        """Step count, fp32 masters and the rule's states by parameter, gathered on the CPU of rank 0; a collective.

        The same as a replicated optimizer's, so that it can be resumed with any number of ranks, or replicated. Other
        ranks get only the step count.
        """
        state: dict[str, Any] = {"num_steps": int(self.rule.num_steps)}
        for key, shard in self._parts().items() if self.mesh.group == 0 else ():
            tensors = self._collect(shard)
            if self.mesh.world.is_main:
                state[key] = dict(zip(self.names, tensors, strict=True))
        return state

    def shard_state(self) -> dict[str, Any]:
        """This rank's part of ``state_dict()``: its flat buffers, and (name, start, begin, size) of each segment.

        Groups have equal shards, of which each saves a stretch.
        """
        mine = self.mesh.group, self.mesh.group + 1
        low, high = (self.layout.shard_total * group // self.mesh.groups for group in mine)
        segments = [
            (self.names[s.parameter], s.start + begin - s.begin, begin - low, end - begin)
            for s in self.segments
            if (end := min(s.begin + s.size, high)) > (begin := max(s.begin, low))
        ]
        return {
            "parts": {key: flat[low:high] for key, flat in self._parts().items()},
            "segments": segments,
        }

    def index(self) -> dict[str, Any]:
        """State common to all ranks."""
        shapes = {name: tuple(p.shape) for name, p in zip(self.names, self.parameters, strict=True)}
        return {"num_steps": int(self.rule.num_steps), "shapes": shapes}

    def _collect(self, shard: Tensor) -> list[Tensor]:
        """Gathered tensors, in the order of the parameters, on rank 0 only. One bucket at a time is on the device."""
        whole: dict[int, Tensor] = {}
        for bucket in self.layout.buckets:
            flats = [one.of_shard(shard) for one in bucket.slices]
            if self.mesh.size > 1:
                pieces = flats
                flats = [shard.new_empty(one.size) for one in bucket.slices]
                for work in [
                    self.mesh.all_gather(*pair) for pair in zip(flats, pieces, strict=True)
                ]:
                    assert work is not None
                    work.wait()
            if self.mesh.world.is_main:
                flat = torch.cat([flat.cpu() for flat in flats])
                for part in self.layout.parts(
                    bucket, first := bucket.slices[0].begin, first + len(flat)
                ):
                    tensor = flat[part.begin : part.begin + part.size]
                    whole[part.parameter] = tensor.view(
                        self.parameters[part.parameter].shape
                    ).clone()
        return [whole[index] for index in sorted(whole)]

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()`` of any number of ranks, weights included. Raises KeyError for a missing name.

        Only this rank's shard is read; other ranks' weights are gathered when needed.
        """
        self.rule.num_steps.fill_(int(state["num_steps"]))
        for key, shard in self._parts().items():
            if missing := [name for name in self.names if name not in state[key]]:
                raise KeyError(missing[0])
            self._fill_shard(shard, state[key])
        self.weights.shard.copy_(self.shard.masters)
        self.weights.mark_stale()


def layout_of(
    parameters: Sequence[Tensor],
    num_ranks: int,
    bucket_elements: int,
    side_by_side: Sequence[Sequence[Tensor]],
) -> Layout:
    """Layout of parameters over ``num_ranks``; side_by_side: groups of them."""
    places = {id(parameter): number for number, parameter in enumerate(parameters)}
    groups = [[places[id(parameter)] for parameter in group] for group in side_by_side]
    return Layout(
        [parameter.numel() for parameter in parameters], num_ranks, bucket_elements, groups
    )


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """Where gradients are clipped ("before", "after", "bucket"; see Gradients), and to which norm."""

    when: str = "after"
    max_norm: float = 1.0

    def coefficient(self, norm: Tensor) -> Tensor:
        """min(1, max_norm / norm): the factor for a gradient of this norm."""
        return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)


class Gradients:
    """Combines the gradients of micro-batches and ranks, and clips them on the way.

    CLIP=after: the average over micro-batches and ranks is clipped by its norm. CLIP=before: the gradient of each
    micro-batch is clipped by its own norm, then averaged: the rule of the published 8-GPU submissions; the update does
    not depend on how micro-batches are distributed over ranks. CLIP=bucket: each of the K buckets of a micro-batch is
    clipped to a norm of max_norm / sqrt(K), as soon as it is full, so that the whole has at most max_norm: the rule of
    Samsung's 1,024-GPU submission. Micro-batches count equally, whatever their number of tokens.

    Each rank ends up with its shard of the average: reduced during the backward pass (CLIP=after), or after it.
    forward: the model to call; norm: sum over the micro-batches so far; coefficient: of the last one. find_overflow:
    the norm must show an overflow on any rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Sharded,
        clipping: Clipping,
        world: World,
        find_overflow: bool,
    ) -> None:
        self.forward, self.clipping, self.world, self.find_overflow = (
            model,
            clipping,
            world,
            find_overflow,
        )
        self.clips_each = clipping.when == "before"
        self.norm = self.coefficient = torch.ones(())
        self.optimizer, self.buckets = optimizer, optimizer.buckets
        self.factor = torch.ones(())  # of the current micro-batch
        if clipping.when == "bucket":
            each = Clipping(max_norm=clipping.max_norm / math.sqrt(len(optimizer.layout.buckets)))
            self.buckets.factor_of = lambda some: each.coefficient(
                squared_norms(some).sum().sqrt() / self.factor
            )

    @contextlib.contextmanager
    def micro_batch(self, first: bool, last: bool, factor: Tensor) -> Iterator[None]:
        """Around forward and backward of one micro-batch, whose loss is multiplied by ``factor``.

        New weights are gathered during the first one; buckets are reduced in the backward pass of the last one.
        """
        self.factor = factor
        if first:
            self.optimizer.weights.start_gather()
        with self.buckets.backward_pass(first=first, reduce=last and not self.clips_each):
            yield
        self.optimizer.weights.wait()
        if self.clips_each:
            self._clip(first, last, factor)

    @torch.no_grad()
    def _clip(self, first: bool, last: bool, factor: Tensor) -> None:
        """Adds the clipped gradient of a micro-batch to the sum. A single one is clipped in the update instead."""
        buckets, norm = self.buckets, self.optimizer.norm_received()
        self.norm = norm if first else self.norm + norm
        self.coefficient = self.clipping.coefficient(norm / factor)
        if first and last and self.world.size == 1 and buckets.received is buckets.whole:
            return
        buckets.add_received(self.coefficient, first)
        self.coefficient = torch.ones_like(self.coefficient)

    @torch.no_grad()
    def finish(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Averages and clips. Returns a norm that is finite unless a rank overflowed, and the update's grad_scale.

        scale: the sum of the factors. The norm is that of the average before clipping; with CLIP=before, the mean over
        this rank's micro-batches, with loss scaling that of the clipped average, as with CLIP=bucket; all times
        ``scale``.
        """
        self.buckets.finish()
        if self.clips_each:
            if self.optimizer.rounds:  # to the weights' type, as the backward pass produces it
                self.buckets.shard.copy_(self.buckets.shard.to(self.optimizer.parameters[0].dtype))
            several = self.world.size > 1
            return (
                self.optimizer.measure() if several and self.find_overflow else self.norm,
                self.coefficient / scale,
            )
        norm = self.optimizer.measure()
        if self.clipping.when == "bucket":
            return norm, 1 / scale
        return norm, self.clipping.coefficient(norm / scale) / scale


class GradientBuckets:
    """Collects the gradients of micro-batches, and averages them over the ranks, each bucket as soon as it is full.

    shard: this rank's part of the average; wire_dtype: type in which gradients are sent. whole: this rank's gradient
    (the shard itself in groups of one); received: where a backward pass leaves its gradients, ``whole`` itself unless
    micro-batches are clipped before they are added (apart), then of the parameters' type. All are zero between the
    parameters.

    Without ``keep_whole`` there is never a whole gradient (ZeRO stage 2): each slice of each micro-batch is averaged
    over the group and added to the shard, and after the last one averaged over the groups. Rounding differs: averages
    are added, not sums averaged. It makes no difference in groups of one.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], layout: Layout, mesh: Mesh, dtype: torch.dtype,
        wire_dtype: torch.dtype, *, keep_whole: bool, apart: bool,
    ) -> None:  # fmt: skip
        self.parameters, self.layout, self.mesh, self.wire_dtype = (
            parameters,
            layout,
            mesh,
            wire_dtype,
        )
        device = mesh.world.device if mesh.size > 1 else parameters[0].device
        self.shard = torch.zeros(layout.shard_total, dtype=dtype, device=device)
        self.whole: Tensor | None = self.shard
        if mesh.size > 1:
            self.whole = (
                torch.zeros(layout.total, dtype=dtype, device=parameters[0].device)
                if keep_whole
                else None
            )
        self.received = self.whole
        if apart:
            self.received = torch.zeros(
                layout.total, dtype=parameters[0].dtype, device=parameters[0].device
            )
        self.views = layout.views(self.received, parameters) if self.received is not None else []
        self.factor_of: Callable[[list[Tensor]], Tensor] | None = None  # factor for a full bucket
        self.first = self.last = (
            True  # position of the micro-batch; the last one's buckets are sent over the groups
        )
        self.num_sent = (
            0  # buckets sent, since the first micro-batch or, without whole gradients, of this one
        )
        self.under_way: list[Way] = []
        self.stream = (
            torch.cuda.Stream(device) if mesh.groups > 1 and device.type == "cuda" else None
        )
        self.missing = [0] * len(
            layout.buckets
        )  # gradients that each bucket waits for in this backward pass
        for parameter, number in zip(parameters, layout.bucket_of_each(), strict=True):
            parameter.register_post_accumulate_grad_hook(
                lambda _, number=number: self._gradient_ready(number)
            )

    @contextlib.contextmanager
    def backward_pass(self, *, first: bool, reduce: bool) -> Iterator[None]:
        """Around the backward pass of one micro-batch. reduce: reduce full buckets while it runs."""
        self.first, self.last, self.num_sent = first, reduce, 0
        self.missing = [len(bucket.parameters) for bucket in self.layout.buckets]
        # The backward pass may write the gradients in place, unless they are added or of another type.
        alone = first or self.received is not self.whole
        fits = (
            self.received is not None and alone and self.received.dtype == self.parameters[0].dtype
        )
        nowhere = [None] * len(self.parameters)
        weight_gradient.set_grad_buffers(self.parameters, self.views if fits else nowhere)
        try:
            yield
        finally:
            weight_gradient.set_grad_buffers(self.parameters, nowhere)
        assert not any(self.missing), "a parameter got no gradient"

    @torch.no_grad()
    def _gradient_ready(self, number: int) -> None:
        self.missing[number] -= 1
        if self.missing[number]:
            return
        if self.whole is not None:
            self._keep(self.layout.buckets[number])
        if self.last or self.whole is None:
            while self.num_sent < len(self.missing) and not self.missing[self.num_sent]:
                self._send_next()

    def _keep(self, bucket: Bucket) -> None:
        assert self.received is not None
        views, gradients = (
            [self.views[index] for index in bucket.parameters],
            self._take(bucket, self.received.dtype),
        )
        if not self.first and self.received is self.whole:
            torch._foreach_add_(views, gradients)
        elif apart := [
            p for p in zip(views, gradients, strict=True) if not weight_gradient.same_memory(*p)
        ]:
            torch._foreach_copy_([view for view, _ in apart], [gradient for _, gradient in apart])

    def _take(self, bucket: Bucket, dtype: torch.dtype) -> list[Tensor]:
        """The gradients of a full bucket, times the factor in ``dtype`` if any; clears those of the parameters."""
        gradients: list[Tensor] = [self.parameters[index].grad for index in bucket.parameters]  # type: ignore[misc]
        if self.factor_of is not None:
            factor = self.factor_of(gradients).to(dtype)
            gradients = list(
                torch._foreach_mul([gradient.to(dtype) for gradient in gradients], factor)
            )
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
        for one in self.layout.slices:  # one at a time, to save memory
            whole = one.of_whole(self.whole)
            clipped = one.of_whole(self.received).to(whole.dtype).mul_(factor)
            if first:
                whole.copy_(clipped)
            else:
                whole.add_(clipped)

    def finish(self) -> None:
        """Waits for this rank's shard of the average; on a GPU the stream waits, not the host."""
        self.last = True
        while self.num_sent < len(self.layout.buckets):
            self._send_next()
        while self.under_way:
            self._end_oldest()

    def _send_next(self) -> None:
        bucket, whole = self.layout.buckets[self.num_sent], self.whole
        self.num_sent += 1
        if self.mesh.world.size == 1:
            return
        gradients = [] if whole is not None else self._take(bucket, self.shard.dtype)
        for one in bucket.slices:
            copies = whole is None or whole.dtype != self.wire_dtype
            if copies and len(self.under_way) >= MOST_UNDER_WAY:
                self._end_oldest()
            if whole is not None:
                sent = one.of_whole(whole).to(self.wire_dtype)
            else:
                sent = torch.zeros(
                    one.size, dtype=self.wire_dtype, device=self.parameters[0].device
                )
                parts = self.layout.parts(bucket, one.begin, one.begin + one.size)
                flat = dict(zip(bucket.parameters, gradients, strict=True))
                torch._foreach_copy_(
                    [sent[part.begin : part.begin + part.size] for part in parts],
                    [
                        flat[part.parameter].reshape(-1)[part.start : part.start + part.size]
                        for part in parts
                    ],
                )
            way = Way(self, one, sent)
            if self.stream is None and way.last and self.under_way:
                self.under_way[-1].cross()  # while this one is being reduced in the group
            self.under_way.append(way)
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.stream):
                    way.cross()
                    way.arrive()
                    way.arrived = self.stream.record_event()

    def _end_oldest(self) -> None:
        way = self.under_way.pop(0)
        if way.arrived is not None:
            torch.cuda.current_stream().wait_event(way.arrived)
        else:
            way.cross()
            way.arrive()


class Way:
    """A slice of the gradient being reduced: over the group to this rank's piece, over the groups, into the shard.

    On a GPU with several groups a separate stream waits for one collective to start the next, while the backward pass
    goes on. Tensors are kept until the stream of the backward pass has waited for the end, ``arrived``.
    """

    def __init__(self, buckets: GradientBuckets, one: Slice, sent: Tensor) -> None:
        self.mesh, self.wire_dtype, self.target = (
            buckets.mesh,
            buckets.wire_dtype,
            one.of_shard(buckets.shard),
        )
        self.last = buckets.last and self.mesh.groups > 1
        self.add = buckets.whole is None and not buckets.first
        self.arrived: torch.cuda.Event | None = None
        self.crossed, self.piece = False, self.target
        self.work: distributed.Work | None = None
        if self.mesh.size == 1:
            self.cross()
            return
        if self.add or self.target.dtype != self.wire_dtype:
            self.piece = torch.empty(
                one.shard_size, dtype=self.wire_dtype, device=self.target.device
            )
        self.held = sent, self.piece
        self.work = self.mesh.reduce_scatter(self.piece, sent)

    def cross(self) -> None:
        """Waits for the group's average and, in the last micro-batch, starts that over the groups; once."""
        if self.crossed:
            return
        self.crossed = True
        self.wait()
        if self.add:
            self.piece = self.target.add_(self.piece)
        if self.last:
            self.piece = self.piece.to(self.wire_dtype)
            self.work = self.mesh.average(self.piece)

    def arrive(self) -> None:
        """Waits for the last collective and copies its result into the shard."""
        self.wait()
        if self.piece is not self.target:
            self.target.copy_(self.piece)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


class WeightBuckets:
    """The weights of all ranks in a flat buffer, of which the parameters are views, and this rank's shard of them.

    stages: modules whose calls make up the forward pass, in its order; filled: the parameters have values; otherwise
    the caller fills the shards, which are then gathered.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], stages: Sequence[nn.Module], layout: Layout, mesh: Mesh, *,
        filled: bool = True,
    ) -> None:  # fmt: skip
        self.layout, self.mesh = layout, mesh
        dtype, device = parameters[0].dtype, parameters[0].device
        self.shard = self.whole = torch.zeros(layout.total, dtype=dtype, device=device)
        if mesh.size > 1:
            self.shard = torch.zeros(layout.shard_total, dtype=dtype, device=mesh.world.device)
        with torch.no_grad():
            for parameter, view in zip(
                parameters, layout.views(self.whole, parameters), strict=True
            ):
                if filled:
                    view.copy_(parameter)
                parameter.data = view
        self.stale = (
            not filled and mesh.size > 1
        )  # other ranks have other shards since the last gather
        self.under_way: dict[
            int, list[distributed.Work | None]
        ] = {}  # by bucket: the gathers of its slices
        self.order: list[int] = []  # of the gathers
        numbers = {
            id(p): number for p, number in zip(parameters, layout.bucket_of_each(), strict=True)
        }
        staged: set[int] = set()
        for stage in stages:  # waits for its buckets
            members = {id(p) for p in stage.parameters()} & numbers.keys()
            staged |= members
            needed = {numbers[member] for member in members}
            self.order += sorted(needed - set(self.order), reverse=True)
            stage.register_forward_pre_hook(
                lambda _module, _inputs, needed=needed: self.wait(needed)
            )
        self.order += [number for number in range(len(layout.buckets)) if number not in self.order]
        self.covered = staged == numbers.keys()  # no parameter is outside of all stages

    def mark_stale(self) -> None:
        """Notes that ranks have updated their shards."""
        self.stale = self.mesh.size > 1

    def start_gather(self) -> None:
        """Starts gathering the shards of all ranks; the forward pass waits for each bucket when it needs it."""
        if not self.stale:
            return
        self.stale = False
        for number in self.order:
            self.under_way[number] = [
                self.mesh.all_gather(one.of_whole(self.whole), one.of_shard(self.shard))
                for one in self.layout.buckets[number].slices
            ]
        if not self.covered:
            self.wait()

    def gather(self) -> None:
        """Makes all weights current on every rank. A collective, unless they are current."""
        self.start_gather()
        self.wait()

    def wait(self, buckets: set[int] | None = None) -> None:
        """Waits for the gathers of these buckets; None: of all."""
        for number in list(self.under_way) if buckets is None else buckets:
            for work in self.under_way.pop(number, ()):
                if work is not None:
                    work.wait()
