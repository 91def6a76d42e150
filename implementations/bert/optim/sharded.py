"""An optimizer whose state is divided over the ranks (ZeRO stage 1; Rajbhandari et al. 2020, arXiv 1910.02054).

Weights and gradients live in two flat buffers of buckets (flat.py). During the backward pass each bucket is averaged
as soon as its gradients are there, and each rank receives its shard. It updates its shard of the fp32 masters; norms
over a parameter that lies on several ranks are summed over them, so the update is that of whole parameters. The new
weights are gathered bucket by bucket while the next forward pass runs, in the order in which it needs them.

Collectives must come in the same order on all ranks. Gradients are therefore reduced in the order of the buckets, which
is about that in which the backward pass fills them, and weights collected in the order in which the forward pass needs
them; neither depends on what is ready first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from bert.checkpoint.sharded import spans_of
from bert.core.dist import World
from bert.kernels import weight_gradient
from bert.optim.flat import Bucket, FlatLamb, FlatLans, Layout, Piecewise, Shard, fill
from bert.optim.gradients import Clipping, Gradients
from bert.optim.rules import Scalar, squared_norms

BUCKET_BYTES = 64 << 20
MOST_UNDER_WAY = 2  # reductions of buckets at once, each with a copy of the bucket


class Sharded:
    """Applies a rule to this rank's shard of the parameters.

    ``stages``: modules that together hold all parameters and whose calls make up the forward pass, in its order.
    ``accumulate``: gradients of several micro-batches are added, which is done in fp32. ``clip_each``: each of them is
    clipped before that, so that it needs a buffer of its own. ``low_wire``: their sums are sent in the weights' type.
    ``shard_gradients``: no rank keeps a whole gradient (ZeRO stage 2). ``first_weights``: (name, first number, numbers)
    of all parameters, where those given are placeholders; each rank keeps what is in its shard. ``side_by_side``:
    groups of parameters, see Layout.
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
        first_weights: Iterable[tuple[str, int, Tensor]] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        side_by_side: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        named = dict(named_parameters)
        self.names, self.parameters, self.world = list(named), list(named.values()), world
        dtype = self.parameters[0].dtype
        assert all(p.dtype == dtype for p in self.parameters), "one type of weights"
        places = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        groups = [[places[id(parameter)] for parameter in group] for group in side_by_side]
        sizes = [parameter.numel() for parameter in self.parameters]
        self.layout = Layout(sizes, world.size, bucket_bytes // dtype.itemsize, groups)
        self.segments = self.layout.segments(world.rank)
        master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        masters_flat = torch.zeros(self.layout.shard_total, dtype=master_dtype, device=world.device)
        if first_weights is None:
            self._fill_shard(masters_flat, masters or named)
        else:
            fill([(masters_flat, self.segments)], self.names, first_weights)
        self.weights = WeightBuckets(self.parameters, stages, self.layout, world, filled=first_weights is None)
        self.weights.shard.copy_(masters_flat)
        sum_dtype = master_dtype if accumulate else dtype
        wire_dtype = dtype if low_wire else sum_dtype
        self.buckets: GradientBuckets | GradientShard
        if shard_gradients and world.size > 1:
            assert not clip_each, "the norm of a micro-batch needs all of its gradient"
            self.buckets = GradientShard(self.parameters, self.layout, world, sum_dtype, wire_dtype)
        else:
            apart = accumulate and clip_each
            self.buckets = GradientBuckets(self.parameters, self.layout, world, sum_dtype, wire_dtype, apart=apart)
        self.shard = Shard(
            names=self.names, segments=self.segments, masters=masters_flat, gradient=self.buckets.shard,
            weights=self.weights.shard,
        )  # fmt: skip
        self.rule = make_rule(self.shard)
        self.squares: Tensor | None = None  # of the norms of the averaged gradient, where they have been measured

    @torch.no_grad()
    def _fill_shard(self, shard: Tensor, tensors: Mapping[str, Tensor]) -> None:
        held = dict.fromkeys(self.names[segment.parameter] for segment in self.segments)
        fill([(shard, self.segments)], self.names, (span for name in held for span in spans_of(tensors, name)))

    # --- gradients and update ----------------------------------------------------------------------------------------

    def gradients(self, model: nn.Module, clipping: Clipping, world: World, find_overflow: bool) -> Gradients:
        """How the gradients of micro-batches and ranks become one. find_overflow: say so on all ranks alike."""
        return ShardedGradients(model, self, clipping, world, find_overflow)

    @torch.no_grad()
    def measure(self) -> Tensor:
        """L2 norm of the averaged gradient (0-d, fp32 at least), the same on every rank. A collective.

        One vector of squares is added up over the ranks: it holds those of each parameter where the rule needs them.
        """
        self.squares = self.world.sum(self.rule.measure())
        return self.squares.sum().sqrt()

    @torch.no_grad()
    def step(self, lr: Scalar, grad_scale: Scalar = 1.0, keep: Tensor | None = None) -> None:
        """One update from the averaged gradient, multiplied by ``grad_scale`` first; none where not ``keep`` (0-d).

        With tensors as arguments nothing waits for the device.
        """
        if self.rule.needs_norms and self.squares is None:
            self.measure()
        squares, self.squares = self.squares, None
        self.rule.step(lr, grad_scale, keep, squares, self.world.sum)
        self.weights.mark_stale()

    def mark_stale(self) -> None:
        """Notes that a replayed graph has updated the weights."""
        self.weights.mark_stale()

    def gather(self) -> None:
        """Makes all weights current on every rank. A collective, unless they are."""
        self.weights.gather()

    # --- state -------------------------------------------------------------------------------------------------------

    def state_tensors(self) -> list[Tensor]:
        """Every tensor of this rank that a step changes, weights included."""
        return [self.weights.whole, self.weights.shard, *self._parts().values(), self.rule.num_steps]

    def _parts(self) -> dict[str, Tensor]:
        return {"masters": self.shard.masters, **self.shard.states}

    def state_dict(self) -> dict[str, Any]:
        """Step count, fp32 masters and the rule's states by parameter name, whole, on the CPU of rank 0; a collective.

        The same as a replicated optimizer's, so that it can be resumed with any number of ranks, or replicated. Other
        ranks get only the step count.
        """
        state: dict[str, Any] = {"num_steps": int(self.rule.num_steps)}
        for key, shard in self._parts().items():
            tensors = self._collect(shard)
            if self.world.is_main:
                state[key] = dict(zip(self.names, tensors, strict=True))
        return state

    def shard_state(self) -> dict[str, Any]:
        """This rank's part of ``state_dict()``: its flat buffers, and of each segment name, start, begin and size."""
        segments = [(self.names[s.parameter], s.start, s.begin, s.size) for s in self.segments]
        return {"parts": self._parts(), "segments": segments}

    def index(self) -> dict[str, Any]:
        """What the parts of all ranks have in common."""
        shapes = {name: tuple(p.shape) for name, p in zip(self.names, self.parameters, strict=True)}
        return {"num_steps": int(self.rule.num_steps), "shapes": shapes}

    def _collect(self, shard: Tensor) -> list[Tensor]:
        """Whole tensors, in the order of the parameters; none but on rank 0. One bucket at a time is on the device."""
        whole: dict[int, Tensor] = {}
        for bucket in self.layout.buckets:
            flat = piece = bucket.of_shard(shard)
            if self.world.size > 1:
                flat = torch.empty(bucket.size, dtype=shard.dtype, device=shard.device)
                work = self.world.all_gather(flat, piece)
                assert work is not None
                work.wait()
            if self.world.is_main:
                flat = flat.cpu()
                for index in bucket.parameters:
                    begin, size = self.layout.begins[index] - bucket.begin, self.layout.sizes[index]
                    whole[index] = flat[begin : begin + size].view(self.parameters[index].shape).clone()
        return [whole[index] for index in sorted(whole)]

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()`` of any number of ranks, weights included. Raises KeyError for a name missing.

        Only what is in this rank's shard is read; the weights of the other ranks are gathered when they are needed.
        """
        self.rule.num_steps.fill_(int(state["num_steps"]))
        for key, shard in self._parts().items():
            if missing := [name for name in self.names if name not in state[key]]:
                raise KeyError(missing[0])
            self._fill_shard(shard, state[key])
        self.weights.shard.copy_(self.shard.masters)
        self.weights.mark_stale()


class ShardedGradients(Gradients):
    """Each rank ends up with its shard of the average: reduced during the backward pass (CLIP=after), or after it."""

    def __init__(
        self, model: nn.Module, optimizer: Sharded, clipping: Clipping, world: World, find_overflow: bool
    ) -> None:
        super().__init__(model, clipping, world, find_overflow)
        self.optimizer, self.buckets = optimizer, optimizer.buckets
        self.factor = torch.ones(())  # of the micro-batch that is under way
        if clipping.when == "bucket":
            self.bucket_clipping = Clipping(max_norm=clipping.max_norm / math.sqrt(len(optimizer.layout.buckets)))
            self.buckets.factor_of = self._bucket_coefficient

    def _bucket_coefficient(self, gradients: list[Tensor]) -> Tensor:
        return self.bucket_clipping.coefficient(squared_norms(gradients).sum().sqrt() / self.factor)

    @contextlib.contextmanager
    def micro_batch(self, first: bool, last: bool, factor: Tensor) -> Iterator[None]:
        """The new weights arrive in the first one; the buckets are reduced in the backward pass of the last one."""
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
        """Adds the clipped gradient of a micro-batch to the sum. A single one is clipped on the way to the update."""
        buckets = self.buckets
        assert isinstance(buckets, GradientBuckets)
        self.take_norm(self.optimizer.rule.squared_norm(buckets.received).sqrt(), first, factor)
        if first and last and self.world.size == 1 and buckets.received is buckets.whole:
            return
        buckets.add_received(self.coefficient, first)
        self.coefficient = torch.ones_like(self.coefficient)

    @torch.no_grad()
    def finish(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        self.buckets.finish()
        if self.clips_each:
            several = self.world.size > 1
            return self.optimizer.measure() if several and self.find_overflow else self.norm, self.coefficient / scale
        norm = self.optimizer.measure()
        if self.clipping.when == "bucket":
            return norm, 1 / scale
        return norm, self.clipping.coefficient(norm / scale) / scale


class GradientReducer:
    """Notes the gradients of a backward pass as they come, and hands on each bucket that is full.

    shard: this rank's part of their average, zero between the parameters; wire_dtype: in which gradients are sent to
    other ranks; add: to what is there already.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], layout: Layout, world: World, dtype: torch.dtype,
        wire_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.parameters, self.layout, self.world, self.wire_dtype = parameters, layout, world, wire_dtype
        device = world.device if world.size > 1 else parameters[0].device
        self.shard = torch.zeros(layout.shard_total, dtype=dtype, device=device)
        self.add = False
        self.factor_of: Callable[[list[Tensor]], Tensor] | None = None  # of a full bucket
        self.missing = [0] * len(layout.buckets)  # gradients that each bucket waits for in this backward pass
        for parameter, number in zip(parameters, layout.bucket_of_each(), strict=True):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._gradient_ready(number))

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

    def bucket_ready(self, number: int) -> None:
        """All gradients of a bucket are there."""
        raise NotImplementedError

    @torch.no_grad()
    def _gradient_ready(self, number: int) -> None:
        self.missing[number] -= 1
        if not self.missing[number]:
            self.bucket_ready(number)

    def take_gradients(self, bucket: Bucket, dtype: torch.dtype) -> list[Tensor]:
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


class GradientBuckets(GradientReducer):
    """Collects the gradients of micro-batches in a flat buffer, and averages it over the ranks.

    whole: this rank's gradient (the same memory as the shard with one rank); received: where a backward pass leaves its
    gradients, which is ``whole`` itself unless micro-batches are clipped before they are added (apart), then of the
    parameters' type. All are zero between the parameters.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], layout: Layout, world: World, dtype: torch.dtype,
        wire_dtype: torch.dtype, *, apart: bool,
    ) -> None:  # fmt: skip
        super().__init__(parameters, layout, world, dtype, wire_dtype)
        device = parameters[0].device
        self.whole = torch.zeros(layout.total, dtype=dtype, device=device) if world.size > 1 else self.shard
        self.received = torch.zeros(layout.total, dtype=parameters[0].dtype, device=device) if apart else self.whole
        self.views = layout.views(self.received, parameters)
        self.wire_shard = self.shard
        if world.size > 1 and wire_dtype != dtype:
            self.wire_shard = torch.zeros(layout.shard_total, dtype=wire_dtype, device=world.device)
        self.reduce = False  # each bucket as soon as it is full
        self.reductions: list[distributed.Work | None] = []  # under way, of the first buckets

    def begin(self, first: bool, reduce: bool) -> None:
        self.add, self.reduce = not first and self.received is self.whole, reduce

    def places(self) -> Sequence[Tensor | None]:
        """Not where gradients are added, or of another type."""
        fits = not self.add and self.received.dtype == self.parameters[0].dtype
        return self.views if fits else super().places()

    def bucket_ready(self, number: int) -> None:
        bucket = self.layout.buckets[number]
        views = [self.views[index] for index in bucket.parameters]
        gradients = self.take_gradients(bucket, self.whole.dtype)
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
            whole = bucket.of_whole(self.whole)
            clipped = bucket.of_whole(self.received).to(whole.dtype).mul_(factor)
            if first:
                whole.copy_(clipped)
            else:
                whole.add_(clipped)

    def finish(self) -> None:
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
        whole = bucket.of_whole(self.whole).to(self.wire_shard.dtype)
        self.reductions.append(self.world.reduce_scatter(bucket.of_shard(self.wire_shard), whole))


class GradientShard(GradientReducer):
    """This rank's part of the average alone (ZeRO stage 2): no whole gradient is ever there.

    Each bucket of each micro-batch is averaged over the ranks as soon as it is full, and added to the shard; of several
    micro-batches that is as many times the communication of GradientBuckets, and other roundings: averages are added,
    not sums averaged. With one rank use GradientBuckets.
    """

    def begin(self, first: bool, reduce: bool) -> None:
        """Every micro-batch is reduced."""
        self.add, self.num_started = not first, 0  # buckets of this backward pass
        self.under_way: list[tuple[Bucket, Tensor, Tensor, distributed.Work | None]] = []

    def bucket_ready(self, number: int) -> None:
        while self.num_started < len(self.missing) and not self.missing[self.num_started]:
            if len(self.under_way) == MOST_UNDER_WAY:
                self._add_oldest()
            bucket = self.layout.buckets[self.num_started]
            whole = torch.zeros(bucket.size, dtype=self.wire_dtype, device=self.parameters[0].device)
            begins = [self.layout.begins[index] - bucket.begin for index in bucket.parameters]
            gradients = self.take_gradients(bucket, self.shard.dtype)
            views = [whole[begin : begin + g.numel()].view_as(g) for begin, g in zip(begins, gradients, strict=True)]
            torch._foreach_copy_(views, gradients)
            part = torch.empty(bucket.shard_size, dtype=self.wire_dtype, device=self.shard.device)
            self.under_way.append((bucket, whole, part, self.world.reduce_scatter(part, whole)))
            self.num_started += 1
        if self.num_started == len(self.missing):
            self.finish()

    def _add_oldest(self) -> None:
        bucket, _, part, work = self.under_way.pop(0)
        if work is not None:
            work.wait()
        target = bucket.of_shard(self.shard)
        if self.add:
            target.add_(part)
        else:
            target.copy_(part)

    def finish(self) -> None:
        while self.under_way:
            self._add_oldest()


class WeightBuckets:
    """The weights of all ranks in a flat buffer, of which the parameters are views, and this rank's shard of them.

    stages: modules whose calls make up the forward pass, in its order; filled: the parameters have their values, else
    the shards of all ranks, which the caller fills, are gathered.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], stages: Sequence[nn.Module], layout: Layout, world: World, *,
        filled: bool = True,
    ) -> None:  # fmt: skip
        self.layout, self.world = layout, world
        dtype, device = parameters[0].dtype, parameters[0].device
        self.shard = self.whole = torch.zeros(layout.total, dtype=dtype, device=device)
        if world.size > 1:
            self.shard = torch.zeros(layout.shard_total, dtype=dtype, device=world.device)
        with torch.no_grad():
            for parameter, view in zip(parameters, layout.views(self.whole, parameters), strict=True):
                if filled:
                    view.copy_(parameter)
                parameter.data = view
        self.stale = not filled and world.size > 1  # other ranks have other shards since the last gather
        self.under_way: dict[int, distributed.Work | None] = {}  # by bucket: its gather
        self.order: list[int] = []  # of the gathers
        numbers = {id(p): number for p, number in zip(parameters, layout.bucket_of_each(), strict=True)}
        staged: set[int] = set()
        for stage in stages:  # waits for its buckets
            members = {id(p) for p in stage.parameters()} & numbers.keys()
            staged |= members
            needed = {numbers[member] for member in members}
            self.order += sorted(needed - set(self.order), reverse=True)
            stage.register_forward_pre_hook(lambda _module, _inputs, needed=needed: self.wait(needed))
        self.order += [number for number in range(len(layout.buckets)) if number not in self.order]
        self.covered = staged == numbers.keys()  # no parameter is outside of all stages

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
            self.under_way[number] = self.world.all_gather(bucket.of_whole(self.whole), bucket.of_shard(self.shard))
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
