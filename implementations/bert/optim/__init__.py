"""Optimizers. OPTIMIZER chooses the rule (lamb.py, adam.py, apex*.py); SHARD_OPTIMIZER, if its state is divided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bert.core.dist import World
from bert.core.env import ConfigError, env
from bert.kernels import lamb as lamb_kernel
from bert.optim import acclip, adam, apex, apex_distributed, lamb, lans, madgrad
from bert.optim.apex_distributed import DistributedLamb
from bert.optim.flat import FlatLamb, FlatLans, FlatRule, Piecewise, Shard
from bert.optim.gradients import Clipping, Gradients
from bert.optim.replicated import Replicated
from bert.optim.rule import Pieces, Rule
from bert.optim.sharded import Sharded


class Optimizer(Protocol):
    """What trains the weights of a model."""

    def gradients(self, model: nn.Module, clipping: Clipping, world: World, find_overflow: bool) -> Gradients:
        """How the gradients of micro-batches and ranks become one. find_overflow: say so on all ranks alike."""
        ...

    def zero_grad(self) -> None:
        """Drops the gradients."""
        ...

    def step(self, lr: Tensor | float, grad_scale: Tensor | float = 1.0, keep: Tensor | None = None) -> None:
        """One update from the gradients, each multiplied by ``grad_scale`` first; none where not ``keep`` (bool, 0-d).

        With tensors as arguments nothing waits for the device.
        """
        ...

    def gather(self) -> None:
        """Makes all weights current on every rank. A collective, unless they are."""
        ...

    def mark_stale(self) -> None:
        """Notes that a replayed graph has updated the weights."""
        ...

    def state_tensors(self) -> list[Tensor]:
        """Every tensor of this rank that a step changes, weights included."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Step count, fp32 masters and states by parameter name, whole, on rank 0 at least. A collective."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()`` of any optimizer with the same rule. Raises KeyError for a name missing."""
        ...


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which optimizer, how gradients are clipped, and the optimizers' own settings."""

    optimizer: str = env(
        "OPTIMIZER",
        "lamb",
        choices=("lamb", "apex_lamb", "apex_distributed_lamb", "lans", "adamw", "adam", "acclip", "madgrad"),
        doc="optimizer; the closed division prescribes LAMB, ours or that of NVIDIA's apex, where it is installed; "
        "apex_distributed_lamb is experimental",
    )
    sharded: bool | None = env(
        "SHARD_OPTIMIZER", None, doc="1 divides the optimizer's state over the ranks (ZeRO-1); unset: on GPUs"
    )
    shard_gradients: bool = env(
        "SHARD_GRADIENTS",
        False,
        doc="1 divides the gradients over the ranks too (ZeRO-2): less memory, GRADIENT_STEPS times the communication",
    )
    clip: str = env(
        "CLIP",
        "after",
        choices=("before", "after", "bucket"),
        doc="before: clip each micro-batch's gradient by its own norm, then average; after: clip the average; bucket: "
        "clip each bucket of a micro-batch's gradient, with SHARD_OPTIMIZER=1",
    )
    max_grad_norm: float = env("MAX_GRAD_NORM", 1.0, above=0, doc="gradient norm above which gradients are scaled down")
    allreduce_dtype: str = env(
        "ALLREDUCE_DTYPE",
        "fp32",
        choices=("fp32", "weights"),
        doc="precision in which accumulated gradients are sent to other ranks; weights: of the weights, half the bytes",
    )
    lamb: lamb.Config = field(default_factory=lamb.Config)
    adam: adam.Config = field(default_factory=adam.Config)
    lans: lans.Config = field(default_factory=lans.Config)
    acclip: acclip.Config = field(default_factory=acclip.Config)
    madgrad: madgrad.Config = field(default_factory=madgrad.Config)

    def check(self, device: torch.device, dtype: torch.dtype, world_size: int) -> None:
        """Raises ConfigError for an optimizer that cannot train weights of ``dtype`` on so many of ``device``."""
        if self.is_apex:
            if self.sharded:
                raise ConfigError(f"OPTIMIZER={self.optimizer} with SHARD_OPTIMIZER=1: leave SHARD_OPTIMIZER unset")
            apex.check(self.optimizer, device)
        if self.optimizer == apex_distributed.NAME:
            apex_distributed.check(dtype, world_size)
        if not self.is_sharded(device):
            for setting, wanted in (
                ("CLIP=bucket", self.clip == "bucket"),
                ("ALLREDUCE_DTYPE=weights", self.allreduce_dtype == "weights"),
                ("SHARD_GRADIENTS=1", self.shard_gradients),
            ):
                if wanted:
                    raise ConfigError(f"{setting} needs a sharded optimizer of ours: set SHARD_OPTIMIZER=1")
        if self.shard_gradients and self.clip == "before":
            raise ConfigError("SHARD_GRADIENTS=1 with CLIP=before, which needs whole gradients: set CLIP=after")

    @property
    def clipping(self) -> Clipping:
        """How gradients are clipped."""
        return Clipping(when=self.clip, max_norm=self.max_grad_norm)

    @property
    def is_apex(self) -> bool:
        """Whether NVIDIA's apex does the update."""
        return self.optimizer in apex.CLASSES

    @property
    def is_lamb(self) -> bool:
        """Whether the rule is LAMB, whoever computes it."""
        return self.optimizer == "lamb" or self.is_apex

    def rule(self, pieces: Pieces) -> Rule:
        """The update rule over the given pieces."""
        return RULES[self.optimizer](pieces, self)

    def flat_rule(self, shard: Shard, fused: bool) -> FlatRule:
        """The update rule over a shard; ``fused``: by Triton kernels where there are some for it."""
        if fused and self.has_fused_update:
            is_lans = self.optimizer == "lans"
            return FlatLans(shard, self.lans) if is_lans else FlatLamb(shard, self.lamb, lamb_kernel.fused)
        return Piecewise(shard, self.rule)

    @property
    def has_fused_update(self) -> bool:
        """Whether there are Triton kernels for the rule."""
        return self.optimizer == "lans" or (self.optimizer == "lamb" and self.lamb.ratio == "decayed")

    def hyperparameters(self) -> dict[str, Any]:
        """What the MLPerf log says of the optimizer, by MLLOG key."""
        if self.is_lamb:
            return {
                "opt_name": "lamb",
                "opt_lamb_epsilon": self.lamb.eps,
                "opt_epsilon": self.lamb.eps,
                "opt_lamb_beta_1": self.lamb.beta1,
                "opt_lamb_beta_2": self.lamb.beta2,
                "opt_lamb_weight_decay_rate": self.lamb.weight_decay,
            }
        settings = vars(getattr(self, self.optimizer.removesuffix("w")))
        named = {_LOGGED_NAMES.get(name, name): value for name, value in settings.items()}
        return {"opt_name": self.optimizer, **{f"opt_{self.optimizer}_{name}": value for name, value in named.items()}}

    def is_sharded(self, device: torch.device) -> bool:
        """Whether the state is divided over the ranks."""
        if self.is_apex:
            return False
        return self.sharded if self.sharded is not None else device.type == "cuda"


RULES: dict[str, Callable[[Pieces, Config], Rule]] = {
    "lamb": lambda pieces, config: lamb.LambRule(pieces, config.lamb),
    "apex_lamb": lambda pieces, config: apex.ApexRule(pieces, config.lamb),
    "lans": lambda pieces, config: lans.LansRule(pieces, config.lans),
    "adamw": lambda pieces, config: adam.AdamRule(pieces, config.adam, decoupled=True),
    "adam": lambda pieces, config: adam.AdamRule(pieces, config.adam, decoupled=False),
    "acclip": lambda pieces, config: acclip.ACClipRule(pieces, config.acclip),
    "madgrad": lambda pieces, config: madgrad.MadgradRule(pieces, config.madgrad),
}
_LOGGED_NAMES = {"eps": "epsilon", "beta1": "beta_1", "beta2": "beta_2"}  # MLLOG's names


def build(
    config: Config,
    model: nn.Module,
    stages: Sequence[nn.Module],
    masters: dict[str, Tensor] | None,
    world: World,
    *,
    accumulate: bool,
    fused: bool,
    first_weights: Iterable[tuple[str, int, Tensor]] | None = None,
) -> Optimizer:
    """The optimizer of ``model``, on its device. stages, masters, accumulate, first_weights: as in Sharded."""
    assert first_weights is None or config.is_sharded(world.device)
    if config.optimizer == apex_distributed.NAME:
        return DistributedLamb(
            model, model.named_parameters(), config.lamb, world,
            clipping=config.clipping, masters=masters,
            node_size=min(world.size, torch.cuda.device_count() or world.size),
        )  # fmt: skip
    if not config.is_sharded(world.device):
        return Replicated(model.named_parameters(), config.rule, masters)
    return Sharded(
        model.named_parameters(),
        lambda shard: config.flat_rule(shard, fused),
        world,
        stages=stages,
        masters=masters,
        accumulate=accumulate,
        clip_each=config.clip == "before",
        low_wire=config.allreduce_dtype == "weights",
        shard_gradients=config.shard_gradients,
        first_weights=first_weights,
        side_by_side=side_by_side(model),
    )


def side_by_side(model: nn.Module) -> list[Sequence[Tensor]]:
    """The groups of parameters that the modules want one after the other: ``side_by_side()`` of those that have it."""
    return [group for module in model.modules() for group in getattr(module, "side_by_side", list)()]
