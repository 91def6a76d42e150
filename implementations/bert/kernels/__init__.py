"""Fused operations, one a file, each beside its plain-PyTorch reference.

``select`` binds every operation of the model to its reference or its fused kernel once, before the model is built;
nothing falls back silently afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from bert.core.env import ConfigError, env
from bert.kernels import (
    attention,
    bias_gelu,
    cross_entropy,
    dropout_add_layer_norm,
    embeddings,
    fp8_cast,
    lamb,
    triton_support,
)

# What the model calls; the optimizer's update (lamb) and where fp8 casts are done are chosen by the same variable.
OPERATIONS: dict[str, ModuleType] = {
    "embeddings": embeddings,
    "dropout_add_layer_norm": dropout_add_layer_norm,
    "bias_gelu": bias_gelu,
    "cross_entropy": cross_entropy,
}
FUSABLE: dict[str, ModuleType] = OPERATIONS | {"lamb": lamb, "fp8_cast": fp8_cast}
# The casts to fp8 are done inside the kernels whose results they are.
NEEDED: dict[str, tuple[str, ...]] = {"fp8_cast": ("dropout_add_layer_norm", "bias_gelu")}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which fused kernels and which attention backend a run uses."""

    fused: str = env("FUSED", "auto", doc="auto (what the hardware has), all, none, or names joined by commas")
    attention: str = env("ATTENTION", "auto", doc="attention backend; auto takes the best one of the hardware")
    attention_fallback: str = ""  # steps in where the backend that auto has taken fails; no variable of its own

    def names(self, device: torch.device) -> set[str]:
        """The operations that run fused on ``device``. Raises ConfigError for a name that is unknown or cannot run."""
        if self.fused == "none":
            return set()
        supported = {name for name, module in FUSABLE.items() if module.supported(device)}
        if self.fused == "auto":
            return supported
        wanted = set(FUSABLE) if self.fused == "all" else {name.strip() for name in self.fused.split(",")}
        unknown = sorted(wanted - set(FUSABLE))
        if unknown:
            known = ", ".join(FUSABLE)
            raise ConfigError(f"FUSED names {', '.join(unknown)}: known are all, none, auto, {known}")
        missing = sorted(wanted - supported)
        if missing:
            reason = triton_support.missing(device)
            raise ConfigError(f"FUSED asks for {', '.join(missing)}, but {reason}: set FUSED=auto or FUSED=none")
        for name in wanted & NEEDED.keys():
            if absent := [other for other in NEEDED[name] if other not in wanted]:
                raise ConfigError(f"FUSED={name} requires {' and '.join(absent)}: add that, or drop {name}")
        return wanted

    def describe(self, device: torch.device) -> str:
        """What ``--check`` says of the kernels: which are fused, which are not, and why none is."""
        fused = self.names(device)
        if not fused:
            reason = "FUSED=none" if self.fused == "none" else triton_support.missing(device)
            return f"plain PyTorch ({reason})"
        plain = [name for name in FUSABLE if name not in fused]
        text = f"Triton for {', '.join(name for name in FUSABLE if name in fused)}"
        return f"{text}; plain PyTorch for {', '.join(plain)}" if plain else text


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The operations of one model, bound. Signatures: the ``reference`` of each file.

    fp8_cast: fp8 products get their operands from the kernels that compute them, where the scales are known beforehand.
    """

    embeddings: Callable[..., Tensor]
    dropout_add_layer_norm: Callable[..., tuple[Tensor, Tensor]]
    bias_gelu: Callable[..., Tensor]
    cross_entropy: Callable[..., Tensor]
    attention: attention.Attention
    fp8_cast: bool


def select(config: Config, device: torch.device) -> Kernels:
    """Binds every operation for ``device``. Raises ConfigError for what this hardware cannot run."""
    name, second = config.attention, config.attention_fallback
    if name == "auto":
        name = attention.default_backend(device)
        second = attention.fallback(name, attention.trials(device)) if device.type == "cuda" else ""
    if name not in attention.BACKENDS:
        raise ConfigError(f"ATTENTION={config.attention}: expected auto or one of {', '.join(attention.BACKENDS)}")
    fused = config.names(device)
    bound = {name: module.fused if name in fused else module.reference for name, module in OPERATIONS.items()}
    run = attention.BACKENDS[name]
    if second:
        run = attention.with_fallback(name, second)
    return Kernels(attention=run, fp8_cast="fp8_cast" in fused, **bound)
