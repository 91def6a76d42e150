"""Communication of a rank per step of the sharded optimizer, by SHARD_GROUP, computed from the layout.

Bytes are those of ring algorithms: (n-1)/n of a buffer for a reduce-scatter or gather over n ranks, twice that for an
all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bert.optim import Config, contiguous_groups
from bert.optim.flat import Layout
from bert.optim.rules import ParameterShards
from bert.optim.sharded import BUCKET_BYTES, layout_of


class Axis(NamedTuple):
    """Collectives of a step, and bytes that a rank sends in those of the buckets; norms are negligible."""

    collectives: int
    num_bytes: float

    def __str__(self) -> str:
        return f"{self.num_bytes / 1e9:.3g} GB in {self.collectives} collectives"


def axes(
    config: Config, layout: Layout, num_ranks: int, weights: int, wire: int, gradient_steps: int
) -> dict[str, Axis]:
    """Communication within a group and across groups. weights, wire: bytes per weight, per gradient sent."""
    size, num_slices = layout.num_ranks, len(layout.slices)
    groups, by_axis = num_ranks // size, {}
    if size > 1:
        # ZeRO-2 reduces every micro-batch within the group, otherwise only their sum is sent.
        sends = gradient_steps if config.shard_gradients else 1
        placeholder, cpu = [torch.zeros(1)], torch.device("cpu")
        # A rule on one element, only to ask which norms it adds up.
        rule = config.rule(
            ParameterShards(
                names=["weight"],
                masters=placeholder,
                device=cpu,
                state=lambda *_, **__: placeholder,
            )
        )
        # With CLIP=before each rank clips by its own norms, unless the rule needs the average's.
        measures_norms = config.clip != "before" or rule.needs_norms
        norms = measures_norms + bool(rule.num_sums)
        num_bytes = layout.total * (sends * wire + weights) * (size - 1) / size
        by_axis["within"] = Axis(num_slices * (sends + 1) + norms, num_bytes)
    if groups > 1:
        # Across groups an all-reduce, of one shard.
        num_bytes = layout.shard_total * wire * 2 * (groups - 1) / groups
        by_axis["across"] = Axis(num_slices, num_bytes)
    return by_axis


def describe(
    config: Config,
    model: nn.Module,
    dtype: torch.dtype,
    num_ranks: int,
    ranks_per_node: int,
    gradient_steps: int,
) -> str:
    """Bytes and collectives for the chosen SHARD_GROUP and for its named alternatives."""
    parameters: Sequence[Tensor] = list(model.parameters())
    # One micro-batch is not added to any other, and so stays in the weights' type.
    sends_low = gradient_steps == 1 or config.allreduce_dtype == "weights"
    weights, wire = dtype.itemsize, dtype.itemsize if sends_low else max(dtype.itemsize, 4)
    chosen, described = config.group_size(num_ranks, ranks_per_node), {}
    for name in (config.shard_group, "node", "all"):
        size = replace(config, shard_group=name).group_size(num_ranks, ranks_per_node)
        layout = layout_of(parameters, size, BUCKET_BYTES // weights, contiguous_groups(model))
        by_axis = axes(config, layout, num_ranks, weights, wire, gradient_steps)
        described[size] = ", ".join(f"{name} {axis}" for name, axis in by_axis.items())
    parts = [
        f"a rank sends per step, in groups of {chosen} of {num_ranks}: {described.pop(chosen)}"
    ]
    parts += [f"SHARD_GROUP={size}: {text}" for size, text in described.items()]
    parts.append(f"per parameter {wire} bytes of gradient and {weights} of weight")
    return "; ".join(parts) + (
        "" if wire == weights else f" (ALLREDUCE_DTYPE=weights: {weights} and {weights})"
    )
