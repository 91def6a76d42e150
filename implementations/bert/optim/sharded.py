"""An optimizer whose state is sharded over the ranks (ZeRO stage 1; Rajbhandari et al. 2020, arXiv 1910.02054).

Weights and gradients live in two flat buffers of buckets (flat.py). During the backward pass each bucket is averaged
as soon as its gradients are complete, and each rank receives its shard (gradients.py). It updates its shard of the fp32
masters; norms over a parameter on several ranks are summed over them, so the update is that of whole parameters. The
new weights are gathered bucket by bucket during the next forward pass, in the order in which it needs them
(weights.py). With SHARD_GROUP all this happens within groups of ranks, and the shards of the gradients are averaged
across groups (mesh.py). SHARD_OPTIMIZER=0 is a group of one: every rank has all of the state, and gradients are
averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bert.checkpoint.sharded import spans_of
from bert.core.dist import World
from bert.optim.flat import FlatLamb, Layout, ListRule, Shard, fill
from bert.optim.gradients import GradientBuckets
from bert.optim.mesh import Mesh
from bert.optim.rules import Scalar, Update
from bert.optim.weights import WeightBuckets

# Few collectives, each long enough for the full bandwidth, against early ones beside the backward pass.
BUCKET_BYTES = 64 << 20


class Sharded:
    """Applies a rule to this rank's shard of the parameters.

    ``stages``: modules that together hold all parameters and whose calls make up the forward pass, in its order.
    ``accumulate``: gradients of several micro-batches are added, in fp32. ``clip_each``: each of them is clipped first,
    which takes a separate buffer. ``communication_dtype``: type in which gradients are sent; None: that of their sum.
    ``group_size``: ranks that share a copy of the
    state; None: all. ``norm_per_parameter``: compute the norm from those of the parameters; for groups of one.
    ``first_weights``: (name, first number, numbers) of all parameters, if those given are placeholders; each rank keeps
    what is in its shard. ``contiguous_groups``: groups of parameters, see Layout.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        make_rule: Callable[[Shard], ListRule | FlatLamb],
        world: World,
        *,
        stages: Sequence[nn.Module] = (),
        masters: dict[str, Tensor] | None = None,
        accumulate: bool = False,
        clip_each: bool = False,
        communication_dtype: torch.dtype | None = None,
        group_size: int | None = None,
        norm_per_parameter: bool = False,
        first_weights: Iterable[tuple[str, int, Tensor]] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        contiguous_groups: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        named = dict(named_parameters)
        self.names, self.parameters = list(named), list(named.values())
        self.mesh = Mesh(world, group_size or world.size)
        dtype = self.parameters[0].dtype
        assert all(p.dtype == dtype for p in self.parameters), "all weights are of one type"
        bucket_elements = bucket_bytes // dtype.itemsize
        self.layout = layout_of(self.parameters, self.mesh.size, bucket_elements, contiguous_groups)
        self.segments = self.layout.segments(self.mesh.rank)

        # Masters in fp32: in bf16, with 8 bits, an update of 1/256 of a weight would be lost.
        master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        masters_flat = torch.zeros(self.layout.shard_total, dtype=master_dtype, device=world.device)
        if first_weights is None:
            self._fill_shard(masters_flat, masters or named)
        else:
            fill([(masters_flat, self.segments)], self.names, first_weights)
        # Placeholders have no values: each rank's weights come from its shard, and are gathered.
        filled = first_weights is None
        self.weights = WeightBuckets(self.parameters, stages, self.layout, self.mesh, filled=filled)
        self.weights.shard.copy_(masters_flat)

        self.norm_per_parameter = norm_per_parameter
        self.rounds_to_weight_dtype = norm_per_parameter and clip_each and not accumulate
        # fp32 also where each rank clips its gradient by its own factor before the average.
        clips_before_average = norm_per_parameter and clip_each and world.size > 1
        sum_dtype = master_dtype if accumulate or clips_before_average else dtype
        self.buckets = GradientBuckets(
            self.parameters,
            self.layout,
            self.mesh,
            sum_dtype,
            communication_dtype or sum_dtype,
            separate_receive_buffer=accumulate and clip_each,
        )
        self.shard = Shard(
            names=self.names,
            segments=self.segments,
            masters=masters_flat,
            gradient=self.buckets.shard,
            weights=self.weights.shard,
        )
        self.rule = make_rule(self.shard)
        # Squared norms of the averaged gradient, measured at most once a step.
        self.grad_sq_norms: Tensor | None = None

    @torch.no_grad()
    def _fill_shard(self, shard: Tensor, tensors: Mapping[str, Tensor]) -> None:
        names_in_shard = dict.fromkeys(self.names[s.parameter] for s in self.segments)
        spans = (span for name in names_in_shard for span in spans_of(tensors, name))
        fill([(shard, self.segments)], self.names, spans)

    # --- gradients and update ----------------------------------------------------------------------------------------

    def norm_received(self) -> Tensor:
        """L2 norm of this rank's gradient after the backward pass (0-d, fp32 at least)."""
        buckets = self.buckets
        assert buckets.received is not None
        if not self.norm_per_parameter:
            return self.rule.squared_norm(buckets.received).sqrt()
        # By parameter and in fp32, since squares of fp16 numbers overflow from 256 on.
        dtype = torch.promote_types(buckets.received.dtype, torch.float32)
        norms = torch._foreach_norm([view.to(dtype) for view in buckets.views])
        return torch.stack(norms).norm()

    @torch.no_grad()
    def measure(self) -> Tensor:
        """L2 norm of the averaged gradient (0-d, fp32 at least), the same on every rank. A collective."""
        # A group of one has the whole average, so there is nothing to sum.
        if self.norm_per_parameter:
            return self.norm_received()
        self.grad_sq_norms = self.mesh.sum(self.rule.measure())
        return self.grad_sq_norms.sum().sqrt()

    def round_gradient(self) -> None:
        """With one micro-batch clipped: to the weights' type, in which the backward pass produces gradients."""
        if self.rounds_to_weight_dtype:
            self.buckets.shard.copy_(self.buckets.shard.to(self.parameters[0].dtype))

    @torch.no_grad()
    def step(
        self, lr: Scalar, grad_scale: Scalar = 1.0, apply_update: Tensor | None = None
    ) -> None:
        """One update from the averaged gradient times ``grad_scale``, if ``apply_update`` (bool, 0-d).

        With tensors as arguments it does not wait for the device.
        """
        # Not measured yet: CLIP=before uses each rank's own norm.
        if self.rule.needs_norms and self.grad_sq_norms is None:
            self.grad_sq_norms = self.mesh.sum(self.rule.measure())
        grad_sq_norms, self.grad_sq_norms = self.grad_sq_norms, None
        self.rule.step(Update(lr, grad_scale, apply_update, grad_sq_norms, self.mesh.sum))
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
        # int() waits for the device.
        state: dict[str, Any] = {"num_steps": int(self.rule.num_steps)}
        # Every group has a full copy: that of one is enough.
        for key, shard in self._parts().items() if self.mesh.group == 0 else ():
            tensors = self._collect(shard)
            if self.mesh.world.is_main:
                state[key] = dict(zip(self.names, tensors, strict=True))
        return state

    def shard_state(self) -> dict[str, Any]:
        """This rank's part of ``state_dict()``: its flat buffers, and (name, start, begin, size) of each segment.

        Groups have equal shards, of which each saves a stretch [low, high).
        """
        group, groups, size = self.mesh.group, self.mesh.groups, self.layout.shard_total
        low, high = size * group // groups, size * (group + 1) // groups
        segments = []
        for segment in self.segments:
            begin = max(segment.begin, low)
            end = min(segment.begin + segment.size, high)
            if end > begin:
                start = segment.start + begin - segment.begin
                segments.append((self.names[segment.parameter], start, begin - low, end - begin))
        parts = {key: flat[low:high] for key, flat in self._parts().items()}
        return {"parts": parts, "segments": segments}

    def index(self) -> dict[str, Any]:
        """State common to all ranks."""
        shapes = {name: tuple(p.shape) for name, p in zip(self.names, self.parameters, strict=True)}
        return {"num_steps": int(self.rule.num_steps), "shapes": shapes}

    def _collect(self, shard: Tensor) -> list[Tensor]:
        """Gathered tensors, in the order of the parameters, on rank 0 only. One bucket at a time is on the device."""
        whole: dict[int, Tensor] = {}
        for bucket in self.layout.buckets:
            flats = [part.of_shard(shard) for part in bucket.slices]
            if self.mesh.size > 1:
                flats = self._gathered(flats)
            # All take part in the gather, rank 0 alone keeps the result.
            if not self.mesh.world.is_main:
                continue
            flat = torch.cat([flat.cpu() for flat in flats])
            begin = bucket.slices[0].begin
            for segment in self.layout.parts(bucket, begin, begin + len(flat)):
                tensor = flat[segment.begin : segment.begin + segment.size]
                shape = self.parameters[segment.parameter].shape
                # Cloned: a view would keep all of the bucket in memory.
                whole[segment.parameter] = tensor.view(shape).clone()
        return [whole[index] for index in sorted(whole)]

    def _gathered(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """All ranks' pieces of each slice. A collective; its gathers run at the same time."""
        wholes = [piece.new_empty(self.mesh.size * piece.numel()) for piece in pieces]
        started = [self.mesh.all_gather(*pair) for pair in zip(wholes, pieces, strict=True)]
        for work in started:
            assert work is not None
            work.wait()
        return wholes

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()`` of any number of ranks, weights included. Raises KeyError for a missing name.

        Only this rank's shard is read; other ranks' weights are gathered when needed.
        """
        # In place: rules and captured graphs hold this tensor.
        self.rule.num_steps.fill_(int(state["num_steps"]))
        for key, shard in self._parts().items():
            # Of all parameters, not of this shard's alone, so that every rank raises.
            if missing := [name for name in self.names if name not in state[key]]:
                raise KeyError(missing[0])
            self._fill_shard(shard, state[key])
        # Weights are rounded masters, so that a checkpoint needs none of its own.
        self.weights.shard.copy_(self.shard.masters)
        self.weights.mark_stale()


def layout_of(
    parameters: Sequence[Tensor],
    num_ranks: int,
    bucket_elements: int,
    contiguous_groups: Sequence[Sequence[Tensor]],
) -> Layout:
    """Layout of parameters over ``num_ranks``; contiguous_groups: groups of them."""
    number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
    groups = [[number_of[id(parameter)] for parameter in group] for group in contiguous_groups]
    sizes = [parameter.numel() for parameter in parameters]
    return Layout(sizes, num_ranks, bucket_elements, groups)
