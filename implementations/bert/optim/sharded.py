"""An optimizer whose state is sharded over the ranks (ZeRO stage 1; Rajbhandari et al. 2020, arXiv
1910.02054).

Weights and gradients live in two flat buffers of buckets (layout.py). During the backward pass each
bucket is averaged as soon as its gradients are complete, and each rank receives its shard
(gradients.py). It updates its shard of the fp32 masters; norms over a parameter on several ranks
are summed over them, so the update is that of whole parameters. The new weights are gathered bucket
by bucket during the next forward pass, in the order in which it needs them (weights.py). With
SHARD_GROUP all this happens within groups of ranks, and the shards of the gradients are averaged
across groups (mesh.py). With SHARD_OPTIMIZER=0 every rank has all of the state (WholeOptimizer).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bert.core.dist import World
from bert.optim.flat import FlatLamb, ListRule, Shard
from bert.optim.gradients import GradientBuckets
from bert.optim.layout import fill, layout_of
from bert.optim.mesh import Mesh
from bert.optim.rules import Scalar, Update, squared_norms
from bert.optim.state import ShardState, held_spans
from bert.optim.weights import WeightBuckets

# Few collectives, each long enough for the full bandwidth, against early ones beside the backward
# pass.
BUCKET_BYTES = 64 << 20


class FlatOptimizer(ShardState):
    """Applies a rule to this rank's shard of the parameters.

    ``stages``: modules that together hold all parameters and whose calls make up the forward pass,
    in its order. ``group_size``: ranks that share a copy of the state; None: all.
    ``first_weights``: (name, first number, numbers) of all parameters, if those given are
    placeholders; each rank keeps what is in its shard. ``contiguous_groups``: see Layout.

    The gradient of one micro-batch stays in the weights' type. With ``accumulate`` those of several
    are added in fp32; with ``clip_each`` too, each is clipped in a buffer of its own before that.
    ``communication_dtype``: type in which the sum is sent; None: its own.
    """

    in_place = True  # see GradientBuckets
    averages_clipped_in_fp32 = False  # also that of one micro-batch

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
        first_weights: Iterable[tuple[str, int, Tensor]] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        contiguous_groups: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        named = dict(named_parameters)
        self.parameters, self.accumulates = list(named.values()), accumulate
        dtype = self.parameters[0].dtype
        assert all(p.dtype == dtype for p in self.parameters), (
            "all weights are of one type"
        )
        mesh = Mesh(world, group_size or world.size)
        self.layout = layout_of(
            self.parameters,
            mesh.size,
            bucket_bytes // dtype.itemsize,
            contiguous_groups,
        )
        # A buffer for each role; the masters get the first values, the weights are cast from them.
        self.weights = WeightBuckets(
            self.parameters, stages, self.layout, mesh, filled=first_weights is None
        )
        # Masters in fp32: in bf16, with 8 bits, an update of 1/256 of a weight would be lost.
        master_dtype = torch.promote_types(dtype, torch.float32)
        is_clipped = clip_each and world.size > 1  # by each rank, with another factor
        in_fp32 = accumulate or (is_clipped and self.averages_clipped_in_fp32)
        sum_dtype = master_dtype if in_fp32 else dtype
        self.buckets = GradientBuckets(
            self.parameters,
            self.layout,
            mesh,
            sum_dtype,
            communication_dtype or sum_dtype,
            separate_receive_buffer=accumulate and clip_each,
            in_place=self.in_place,
        )
        size, device = self.layout.shard_total, world.device
        shard = Shard(
            shapes={name: parameter.shape for name, parameter in named.items()},
            segments=self.layout.segments(mesh.rank),
            masters=torch.zeros(size, dtype=master_dtype, device=device),
            gradient=self.buckets.shard,
            weights=self.weights.shard,
        )
        if first_weights is None:
            first_weights = held_spans(shard, masters or named)
        fill(shard.masters, shard.segments, shard.names, first_weights)
        shard.weights.copy_(shard.masters)
        self.rule = make_rule(shard)
        super().__init__(shard, self.rule.num_steps, mesh)
        # Squared norms of the averaged gradient, measured at most once a step.
        self.grad_sq_norms: Tensor | None = None

    # --- gradients and update

    def norm_received(self) -> Tensor:
        """L2 norm of this rank's gradient after the backward pass (0-d, fp32 at least)."""
        return squared_norms([self.buckets.received]).sum().sqrt()

    @torch.no_grad()
    def measure(self) -> Tensor:
        """L2 norm of the averaged gradient (0-d, fp32 at least), the same on every rank. A
        collective.
        """
        self.grad_sq_norms = self.mesh.sum(self.rule.measure())
        return self.grad_sq_norms.sum().sqrt()

    def round_average(self) -> None:
        """Where micro-batches are clipped, and there is one: see WholeOptimizer."""

    @torch.no_grad()
    def step(
        self, lr: Scalar, grad_scale: Scalar = 1.0, apply_update: Tensor | None = None
    ) -> None:
        """One update from the averaged gradient times ``grad_scale``, if ``apply_update`` (bool,
        0-d).

        With tensors as arguments it does not wait for the device.
        """
        # Not measured yet: CLIP=before uses each rank's own norm.
        if self.rule.needs_norms and self.grad_sq_norms is None:
            self.grad_sq_norms = self.mesh.sum(self.rule.measure())
        grad_sq_norms, self.grad_sq_norms = self.grad_sq_norms, None
        self.rule.step(
            Update(lr, grad_scale, apply_update, grad_sq_norms, self.mesh.sum)
        )
        self.weights.mark_stale()

    def gather(self) -> None:
        """Makes all weights current on every rank. A collective, unless they are current."""
        self.weights.gather()

    # --- state

    def state_tensors(self) -> list[Tensor]:
        """Every tensor of this rank that a step changes, weights included."""
        return [
            self.weights.whole,
            self.weights.shard,
            *self.parts().values(),
            *self.shard.others.values(),
            self.num_steps,
        ]

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict()``, weights included; other ranks' weights are gathered when
        needed.
        """
        super().load_state_dict(state)
        # Weights are rounded masters, so that a checkpoint needs none of its own.
        self.weights.shard.copy_(self.shard.masters)
        self.weights.mark_stale()


class WholeOptimizer(FlatOptimizer):
    """A group of one: every rank has all of the state, and the whole average. The norm is that of
    the parameters' norms.
    """

    in_place = False
    averages_clipped_in_fp32 = True

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, group_size=1, **others)

    @torch.no_grad()
    def norm_received(self) -> Tensor:
        return self._norm(self.buckets.received)

    @torch.no_grad()
    def measure(self) -> Tensor:
        # The average, of which every rank has all.
        return self._norm(self.buckets.shard)

    def _norm(self, gradient: Tensor) -> Tensor:
        # In fp32, since squares of fp16 numbers overflow from 256 on.
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        views = self.layout.views(gradient, self.parameters)
        norms = torch._foreach_norm([view.to(dtype) for view in views])
        return torch.stack(norms).norm()

    def round_average(self) -> None:
        """To the weights' type, in which the backward pass produces gradients."""
        if not self.accumulates:
            self.buckets.shard.copy_(self.buckets.shard.to(self.parameters[0].dtype))
