"""Optimizers. OPTIMIZER selects the rule (rules.py); SHARD_OPTIMIZER shards its state over the
ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bert.core.dist import World
from bert.model.trainable import Trainable
from bert.optim import apex, rules
from bert.optim.flat import FlatLamb, ListRule, Shard
from bert.optim.rules import ParameterShards, Rule
from bert.optim.sharded import FlatOptimizer, WholeOptimizer
from common.env import ConfigError, env

# The rule of each OPTIMIZER, and the field of OptimizerConfig with its settings ("": it has none).
RULES: dict[str, tuple[type[Rule], str]] = {
    "lamb": (rules.LambRule, "lamb"),
    apex.NAME: (apex.ApexRule, "lamb"),
    "lans": (rules.LansRule, "lans"),
    "adamw": (rules.AdamRule, "adam"),
    "bertadam": (rules.BertAdamRule, "adam"),
    "acclip": (rules.ACClipRule, "acclip"),
    "madgrad": (rules.MadgradRule, "madgrad"),
}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer, how gradients are clipped, and the optimizers' own settings."""

    optimizer: str = env(
        "OPTIMIZER",
        "lamb",
        "optimizer; the closed division prescribes LAMB; apex_lamb: by NVIDIA's apex, with SHARD_OPTIMIZER=0; "
        "bertadam: AdamW without bias correction",
        choices=RULES,
    )
    sharded: bool | None = env(
        "SHARD_OPTIMIZER", None, "1: shard the optimizer state (ZeRO-1); unset: on GPUs"
    )
    shard_group: str | None = env(
        "SHARD_GROUP",
        None,
        "ranks that shard one copy of state and weights: node, all, or a number; across such groups gradients are "
        "averaged, once a step; unset: node, on several nodes with several ranks each",
    )
    clip: str = env(
        "CLIP",
        "after",
        "before: clip each micro-batch's gradient by its own norm, then average; after: clip the average; bucket: "
        "clip each bucket of a micro-batch's gradient, with SHARD_OPTIMIZER=1",
        choices=("before", "after", "bucket"),
    )
    max_grad_norm: float = env(
        "MAX_GRAD_NORM",
        1.0,
        "gradient norm above which gradients are scaled down",
        above=0,
    )
    allreduce_dtype: str = env(
        "ALLREDUCE_DTYPE",
        "fp32",
        "type in which accumulated gradients are sent; weights: that of the weights, half the bytes",
        choices=("fp32", "weights"),
    )
    lamb: rules.LambConfig = rules.LambConfig()
    adam: rules.AdamConfig = rules.AdamConfig()
    lans: rules.LansConfig = rules.LansConfig()
    acclip: rules.ACClipConfig = rules.ACClipConfig()
    madgrad: rules.MadgradConfig = rules.MadgradConfig()

    def check(self, device: torch.device) -> None:
        """Raises ConfigError for an optimizer that cannot run on ``device``, and for conflicting
        settings.
        """
        if self.is_sharded(device):
            if self.rule_class.needs_whole:
                raise ConfigError(
                    f"OPTIMIZER={self.optimizer} updates whole parameters: set SHARD_OPTIMIZER=0"
                )
        else:
            if self.is_apex:
                if device.type != "cuda":
                    raise ConfigError(
                        f"OPTIMIZER={apex.NAME} needs a GPU: set OPTIMIZER=lamb"
                    )
                apex.load()  # a missing package ends the run before anything starts
            for setting, wanted in (
                ("CLIP=bucket", self.clip == "bucket"),
                ("ALLREDUCE_DTYPE=weights", self.allreduce_dtype == "weights"),
                (f"SHARD_GROUP={self.shard_group}", self.shard_group is not None),
            ):
                if wanted:
                    raise ConfigError(
                        f"{setting} needs our own sharded optimizer: set SHARD_OPTIMIZER=1"
                    )

    @property
    def is_apex(self) -> bool:
        return self.optimizer == apex.NAME

    @property
    def has_kernels(self) -> bool:
        """Whether the update has Triton kernels of its own; all others are operations on lists."""
        return self.optimizer == "lamb" and self.lamb.ratio == "decayed"

    def is_sharded(self, device: torch.device) -> bool:
        return self.sharded if self.sharded is not None else device.type == "cuda"

    def group_size(self, num_ranks: int, ranks_per_node: int) -> int:
        """Number of ranks that share a copy of the state. Raises ConfigError for an impossible
        SHARD_GROUP.
        """
        sizes = {"all": num_ranks, "node": min(ranks_per_node or num_ranks, num_ranks)}
        if self.shard_group is None:
            # Not with one rank a node, or a last node not full: then all ranks share a copy.
            fills_nodes = sizes["node"] > 1 and num_ranks % sizes["node"] == 0
            return sizes["node"] if fills_nodes else num_ranks
        number = int(self.shard_group) if self.shard_group.isdecimal() else 0
        size = sizes.get(self.shard_group, number)
        if not size or num_ranks % size:
            raise ConfigError(
                f"SHARD_GROUP={self.shard_group} with {num_ranks} ranks, {sizes['node']} of them on a node: "
                f"give node, all, or a divisor of {num_ranks}"
            )
        return size

    def rule(self, shards: ParameterShards) -> Rule:
        """The update rule over the given parts of parameters."""
        return self.rule_class(shards, self.settings)

    @property
    def rule_class(self) -> type[Rule]:
        return RULES[self.optimizer][0]

    @property
    def settings(self) -> Any:
        """The rule's own settings; None if it has none."""
        return getattr(self, RULES[self.optimizer][1], None)

    def flat_rule(self, shard: Shard, fused: bool) -> ListRule | FlatLamb:
        """The update rule over a shard; ``fused``: by Triton kernels if it has any."""
        if fused and self.has_kernels:
            return FlatLamb(shard, self.lamb)
        return ListRule(shard, self.rule)

    def hyperparameters(self) -> dict[str, Any]:
        """The optimizer's settings for the MLPerf log, by MLLOG key."""
        if self.optimizer in ("lamb", apex.NAME):
            # Two names for eps: the compliance checker requires the first, NVIDIA's logs have both.
            return {
                "opt_name": "lamb",
                "opt_lamb_epsilon": self.lamb.eps,
                "opt_epsilon": self.lamb.eps,
                "opt_lamb_beta_1": self.lamb.beta1,
                "opt_lamb_beta_2": self.lamb.beta2,
                "opt_lamb_weight_decay_rate": self.lamb.weight_decay,
            }
        names = {"eps": "epsilon", "beta1": "beta_1", "beta2": "beta_2"}  # MLLOG's
        settings = vars(self.settings) if self.settings else {}
        return {"opt_name": self.optimizer} | {
            f"opt_{self.optimizer}_{names.get(name, name)}": value
            for name, value in settings.items()
        }


def build(
    config: OptimizerConfig,
    model: Trainable,
    masters: dict[str, Tensor] | None,
    world: World,
    *,
    accumulate: bool,
    fused: bool,
    first_weights: Iterable[tuple[str, int, Tensor]] | None = None,
) -> FlatOptimizer:
    """The optimizer of ``model``, on its device.

    masters, accumulate, first_weights: as in FlatOptimizer.

    Raises ConfigError if SHARD_GROUP=node and ranks are numbered round-robin over the nodes.
    """
    is_sharded, per_node = config.is_sharded(world.device), world.ranks_per_node
    group_size = config.group_size(world.size, per_node) if is_sharded else 1
    # A group is consecutive ranks: numbered round-robin, it would lie across nodes, on slow links.
    if (
        group_size == per_node < world.size
        and world.joined
        and world.rank % per_node != world.local_rank
    ):
        raise ConfigError(
            f"rank {world.rank} is number {world.local_rank} of its node's {per_node}: "
            "number ranks node by node for SHARD_GROUP=node (srun --distribution=block), or set SHARD_GROUP=all"
        )
    # Half the bytes on the network: sums of micro-batches are rounded to the weights' type first.
    sends_low = config.allreduce_dtype == "weights"
    kind: Callable[..., FlatOptimizer] = WholeOptimizer
    if is_sharded:
        kind = partial(FlatOptimizer, group_size=group_size)
    return kind(
        model.named_parameters(),
        lambda shard: config.flat_rule(shard, fused and is_sharded),
        world,
        stages=model.stages(),
        masters=masters,
        accumulate=accumulate,
        clip_each=config.clip == "before",
        communication_dtype=next(model.parameters()).dtype if sends_low else None,
        first_weights=first_weights,
        contiguous_groups=contiguous_groups(model),
    )


def contiguous_groups(model: nn.Module) -> list[Sequence[Tensor]]:
    """Groups of parameters to lie one after the other: ``contiguous_groups()`` of the modules that
    have it.
    """
    return [
        group
        for module in model.modules()
        for group in getattr(module, "contiguous_groups", list)()
    ]
