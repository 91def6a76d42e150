"""An optimizer whose state is divided over the ranks (ZeRO stage 1; Rajbhandari et al. 2020, arXiv 1910.02054).

Weights and gradients live in two flat buffers of buckets (layout.py). During the backward pass each bucket is averaged
as soon as its gradients are there, and each rank receives its shard. It updates its shard of the fp32 masters; norms
over a parameter that lies on several ranks are summed over them, so the update is that of whole parameters. The new
weights are gathered bucket by bucket while the next forward pass runs, in the order in which it needs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from bert.dist import World
from bert.optim.flat import FlatRule, Shard
from bert.optim.layout import Bucket, Layout

BUCKET_BYTES = 64 << 20
STATE_KEYS = ("masters", "first_moments", "second_moments")


class Sharded:
    """Applies a rule to this rank's shard of the parameters.

    ``stages``: modules that together hold all parameters and whose calls make up the forward pass, in its order.
    ``accumulate``: gradients of several micro-batches are added, which is done in fp32.
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
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        named = dict(named_parameters)
        self.names, self.parameters, self.world, self.overlap = list(named), list(named.values()), world, overlap
        dtype, device = self.parameters[0].dtype, self.parameters[0].device
        assert all(p.dtype == dtype for p in self.parameters), "one type of weights"
        self.layout = Layout([p.numel() for p in self.parameters], world.size, bucket_bytes // dtype.itemsize)
        self.segments = self.layout.segments(world.rank)
        master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.master_shard = torch.zeros(self.layout.shard_total, dtype=master_dtype, device=device)
        self._fill_shard(self.master_shard, [(masters or named)[name].detach() for name in self.names])
        self.weights = torch.zeros(self.layout.total, dtype=dtype, device=device)
        gradient_dtype = master_dtype if accumulate else dtype
        self.gradients = torch.zeros(self.layout.total, dtype=gradient_dtype, device=device)
        if world.size > 1:
            self.weight_shard = torch.zeros(self.layout.shard_total, dtype=dtype, device=device)
            self.gradient_shard = torch.zeros(self.layout.shard_total, dtype=gradient_dtype, device=device)
        else:
            self.weight_shard, self.gradient_shard = self.weights, self.gradients
        self._move_weights()
        self.shard = Shard(
            names=self.names,
            segments=self.segments,
            masters=self.master_shard,
            first_moments=torch.zeros_like(self.master_shard),
            second_moments=torch.zeros_like(self.master_shard),
            gradient=self.gradient_shard,
            weights=self.weight_shard,
        )
        self.rule = make_rule(self.shard)
        self.stale = False
        self._install_hooks(stages)

    # --- layout ------------------------------------------------------------------------------------------------------

    def _view(self, whole: Tensor, parameter: int) -> Tensor:
        begin, size = self.layout.begins[parameter], self.layout.sizes[parameter]
        return whole[begin : begin + size].view(self.parameters[parameter].shape)

    @torch.no_grad()
    def _fill_shard(self, shard: Tensor, tensors: Sequence[Tensor]) -> None:
        for segment in self.segments:
            source = tensors[segment.parameter].reshape(-1)[segment.start : segment.start + segment.size]
            shard[segment.begin : segment.begin + segment.size].copy_(source)

    @torch.no_grad()
    def _move_weights(self) -> None:
        """Makes every parameter a view of the flat buffer."""
        for number, parameter in enumerate(self.parameters):
            view = self._view(self.weights, number)
            view.copy_(parameter)
            parameter.data = view
        self.weight_shard.copy_(self.master_shard)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def _install_hooks(self, stages: Sequence[nn.Module]) -> None:
        bucket_of = {p: bucket for bucket in self.layout.buckets for p in bucket.parameters}
        self.missing = [0] * len(self.layout.buckets)
        self.pending: list[distributed.Work | None] = []
        self.first = self.last = True
        numbers = {bucket.begin: number for number, bucket in enumerate(self.layout.buckets)}
        for index, parameter in enumerate(self.parameters):
            number = numbers[bucket_of[index].begin]
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._gradient_ready(number))
        self.gathers: dict[int, distributed.Work | None] = {}
        self.gather_order: list[int] = []
        index_of = {id(p): i for i, p in enumerate(self.parameters)}
        for stage in stages:
            needed = {numbers[bucket_of[index_of[id(p)]].begin] for p in stage.parameters() if id(p) in index_of}
            self.gather_order += sorted(needed - set(self.gather_order), reverse=True)
            stage.register_forward_pre_hook(lambda _module, _inputs, needed=needed: self._await_weights(needed))
        self.gather_order += [n for n in range(len(self.layout.buckets)) if n not in self.gather_order]
        self.covered = {id(p) for stage in stages for p in stage.parameters()} >= set(index_of)

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @contextlib.contextmanager
    def micro_batch(self, first: bool, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch: collects its gradients, and averages them after the last."""
        self.first, self.last = first, last
        self.missing = [len(bucket.parameters) for bucket in self.layout.buckets]
        if first:
            self.start_gather()
        yield
        assert not any(self.missing), "a parameter got no gradient"
        self._await_weights(set(self.gathers))

    @torch.no_grad()
    def _gradient_ready(self, number: int) -> None:
        self.missing[number] -= 1
        if self.missing[number]:
            return
        bucket = self.layout.buckets[number]
        gradients = [self.parameters[index].grad for index in bucket.parameters]
        views = [self._view(self.gradients, index) for index in bucket.parameters]
        if self.first:
            torch._foreach_copy_(views, gradients)  # type: ignore[arg-type]
        else:
            torch._foreach_add_(views, gradients)  # type: ignore[arg-type]
        for index in bucket.parameters:
            self.parameters[index].grad = None
        # In the order of the buckets, whatever the order of completion: collectives must match over the ranks.
        while self.last and self.overlap and len(self.pending) < len(self.missing):
            if self.missing[len(self.pending)]:
                break
            self._reduce(self.layout.buckets[len(self.pending)])

    def _reduce(self, bucket: Bucket) -> None:
        shard = self.gradient_shard[bucket.shard_begin : bucket.shard_begin + bucket.shard_size]
        whole = self.gradients[bucket.begin : bucket.begin + bucket.size]
        self.pending.append(self.world.reduce_scatter(shard, whole))

    @torch.no_grad()
    def local_norm(self) -> Tensor:
        """L2 norm of this rank's own gradient, before it is averaged (0-d, fp32 at least)."""
        return self.rule.squared_norm([self.gradients]).sqrt()

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor) -> None:
        """Multiplies this rank's own gradient; not by nan, which is in the gradient already.

        It would stay in the zeros between the parameters, which no later gradient overwrites.
        """
        self.gradients.mul_(torch.where(torch.isfinite(factor), factor, 1.0).to(self.gradients.dtype))

    def finish_reduction(self) -> None:
        """Waits until this rank's shard of the averaged gradient is there; on a GPU the stream waits, not the host."""
        if not self.overlap:
            for bucket in self.layout.buckets:
                self._reduce(bucket)
        for work in self.pending:
            if work is not None:
                work.wait()
        self.pending = []

    @torch.no_grad()
    def global_norm(self) -> Tensor:
        """L2 norm of the averaged gradient (0-d, fp32 at least), the same on every rank."""
        return self.world.sum(self.rule.squared_norm([self.gradient_shard])).sqrt()

    # --- update ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, lr: Tensor | float, grad_scale: Tensor | float = 1.0, keep: Tensor | None = None) -> None:
        """One update of this rank's shard, from the averaged gradient times ``grad_scale``; none where not ``keep``."""
        sums = self.rule.prepare(grad_scale, keep)
        self.rule.apply(None if sums is None else self.world.sum(sums), lr, keep)
        self.mark_stale()

    def mark_stale(self) -> None:
        """Notes that the weights of other ranks have changed, as a replayed graph cannot."""
        self.stale = self.world.size > 1

    def start_gather(self) -> None:
        """Starts to collect the new weights of all ranks; the forward pass waits for each bucket as it comes to it."""
        if not self.stale:
            return
        self.stale = False
        for number in self.gather_order:
            bucket = self.layout.buckets[number]
            shard = self.weight_shard[bucket.shard_begin : bucket.shard_begin + bucket.shard_size]
            self.gathers[number] = self.world.all_gather(self.weights[bucket.begin : bucket.begin + bucket.size], shard)
        if not self.covered:
            self.gather()

    def gather(self) -> None:
        """Makes all weights current on every rank. A collective, unless they are."""
        self.start_gather()
        self._await_weights(set(self.gathers))

    def _await_weights(self, buckets: set[int]) -> None:
        for number in buckets:
            work = self.gathers.pop(number, None)
            if work is not None:
                work.wait()

    # --- state -------------------------------------------------------------------------------------------------------

    def state_tensors(self) -> list[Tensor]:
        """Every tensor of this rank that a step changes, weights included."""
        return [self.weights, self.weight_shard, *self._state_shards(), self.rule.num_steps]

    def _state_shards(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.shard.masters, self.shard.first_moments, self.shard.second_moments

    def state_dict(self) -> dict[str, Any]:
        """Step count, fp32 masters and moments by parameter name, whole, on the CPU of rank 0; a collective.

        The same as a replicated optimizer's, so that it can be resumed with any number of ranks, or replicated. Other
        ranks get only the step count.
        """
        wholes = [self._collect(shard) for shard in self._state_shards()]
        state: dict[str, Any] = {"num_steps": int(self.rule.num_steps)}
        if self.world.is_main:
            for key, tensors in zip(STATE_KEYS, wholes, strict=True):
                state[key] = dict(zip(self.names, tensors, strict=True))
        return state

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
        """Restores ``state_dict()`` of any number of ranks, weights included. Raises KeyError for a name missing."""
        self.rule.num_steps.fill_(int(state["num_steps"]))
        for shard, key in zip(self._state_shards(), STATE_KEYS, strict=True):
            self._fill_shard(shard, [state[key][name] for name in self.names])
        for index, name in enumerate(self.names):
            self._view(self.weights, index).copy_(state["masters"][name])
        self.weight_shard.copy_(self.master_shard)
        self.stale = False
