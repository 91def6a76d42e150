"""Fused operations of the model, one a file, each beside its plain-PyTorch reference.

``select`` binds every operation to its reference or its fused kernel once, before the model is built; nothing falls
back silently afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from bert.env import ConfigError, env
from bert.kernels import attention, bias_gelu, cross_entropy, dropout_add_layer_norm, embeddings

FUSABLE: dict[str, ModuleType] = {
    "embeddings": embeddings,
    "dropout_add_layer_norm": dropout_add_layer_norm,
    "bias_gelu": bias_gelu,
    "cross_entropy": cross_entropy,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which fused kernels and which attention backend a run uses."""

    fused: str = env("FUSED", "auto", doc="auto (what the hardware has), all, none, or names joined by commas")
    attention: str = env("ATTENTION", "auto", doc="attention backend; auto takes the best one of the hardware")

    def names(self, device: torch.device) -> set[str]:
        """The operations that run fused on ``device``. Raises ConfigError for a name that is unknown or cannot run."""
        if self.fused == "none":
            return set()
        supported = {name for name, module in FUSABLE.items() if module.supported(device)}
        if self.fused == "auto":
            return supported
        wanted = set(FUSABLE) if self.fused == "all" else {name.strip() for name in self.fused.split(",")}
        unknown = wanted - set(FUSABLE)
        if unknown:
            known = ", ".join(FUSABLE)
            raise ConfigError(f"FUSED names {', '.join(sorted(unknown))}: known are all, none, auto, {known}")
        missing = wanted - supported
        if missing:
            raise ConfigError(
                f"FUSED asks for {', '.join(sorted(missing))}, which cannot run on {device}: use FUSED=auto or none"
            )
        return wanted


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The operations of one model, bound. Signatures: the ``reference`` of each file."""

    embeddings: Callable[..., Tensor]
    dropout_add_layer_norm: Callable[..., Tensor]
    bias_gelu: Callable[..., Tensor]
    cross_entropy: Callable[..., Tensor]
    attention: attention.Attention


def select(config: Config, device: torch.device) -> Kernels:
    """Binds every operation for ``device``. Raises ConfigError for what this hardware cannot run."""
    name = config.attention if config.attention != "auto" else attention.default_backend(device)
    if name not in attention.BACKENDS:
        raise ConfigError(f"ATTENTION={config.attention}: expected auto or one of {', '.join(attention.BACKENDS)}")
    fused = config.names(device)
    operations = {
        operation: module.fused if operation in fused else module.reference for operation, module in FUSABLE.items()
    }
    return Kernels(attention=attention.BACKENDS[name], **operations)
