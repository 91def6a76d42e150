"""An optimizer whose state is divided over the ranks (ZeRO stage 1; Rajbhandari et al. 2020, arXiv 1910.02054).

Weights and gradients live in two flat buffers of buckets (layout.py). During the backward pass each bucket is averaged
as soon as its gradients are there, and each rank receives its shard. It updates its shard of the fp32 masters; norms
over a parameter that lies on several ranks are summed over them, so the update is that of whole parameters. The new
weights are gathered bucket by bucket while the next forward pass runs, in the order in which it needs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bert.checkpoint.sharded import ShardedTensors
from bert.core.dist import World
from bert.optim.buckets import GradientBuckets, GradientShard, WeightBuckets
from bert.optim.flat import FlatRule, Shard
from bert.optim.gradients import Clipping, Gradients, ShardedGradients
from bert.optim.layout import Layout, fill

BUCKET_BYTES = 64 << 20


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
        make_rule: Callable[[Shard], FlatRule],
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
            self.buckets = GradientShard(self.parameters, self.layout, world, sum_dtype, wire_dtype=wire_dtype)
        else:
            self.buckets = GradientBuckets(
                self.parameters, self.layout, world, sum_dtype, apart=accumulate and clip_each, wire_dtype=wire_dtype
            )
        self.shard = Shard(
            names=self.names,
            segments=self.segments,
            masters=masters_flat,
            gradient=self.buckets.shard,
            weights=self.weights.shard,
        )
        self.rule = make_rule(self.shard)
        self.squared_norm = self.rule.squared_norm
        self.squares: Tensor | None = None  # of the norms of the averaged gradient, where they have been measured

    @torch.no_grad()
    def _fill_shard(self, shard: Tensor, tensors: Mapping[str, Tensor]) -> None:
        for segment in self.segments:
            name = self.names[segment.parameter]
            if isinstance(tensors, ShardedTensors):
                source = tensors.part(name, segment.start, segment.size)
            else:
                source = tensors[name].detach().reshape(-1)[segment.start : segment.start + segment.size]
            shard[segment.begin : segment.begin + segment.size].copy_(source)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def gradients(self, model: nn.Module, clipping: Clipping, world: World, find_overflow: bool) -> Gradients:
        """See Optimizer."""
        return ShardedGradients(model, self, clipping, world, find_overflow)

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @contextlib.contextmanager
    def forward_pass(self, first: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch; in the first one the new weights arrive."""
        if first:
            self.weights.start_gather()
        yield
        self.weights.wait()

    @torch.no_grad()
    def measure(self) -> Tensor:
        """L2 norm of the averaged gradient (0-d, fp32 at least), the same on every rank. A collective.

        One vector of squares is added up over the ranks: it holds those of each parameter where the rule needs them.
        """
        self.squares = self.world.sum(self.rule.measure())
        return self.squares.sum().sqrt()

    # --- update ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, lr: Tensor | float, grad_scale: Tensor | float = 1.0, keep: Tensor | None = None) -> None:
        """One update of this rank's shard, from the averaged gradient times ``grad_scale``; none where not ``keep``."""
        if self.rule.needs_norms and self.squares is None:
            self.measure()
        sums = self.rule.prepare(grad_scale, keep, self.squares)
        self.squares = None
        self.rule.apply(None if sums is None else self.world.sum(sums), lr, keep)
        self.weights.mark_stale()

    def mark_stale(self) -> None:
        """Notes that the weights of other ranks have changed, as a replayed graph cannot."""
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
            piece = shard[bucket.shard_begin : bucket.shard_begin + bucket.shard_size]
            flat = piece
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
