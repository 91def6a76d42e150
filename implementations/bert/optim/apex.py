"""LAMB by NVIDIA's apex, where it is installed (the NGC images have it); nothing else needs it.

``OPTIMIZER=apex_lamb`` is apex.optimizers.FusedMixedPrecisionLamb on the fp32 masters of every rank, its learning rate,
step count and overflow flag on the device, so that it runs in a CUDA graph. Clipping and the sum over the ranks stay
ours: apex gets the gradient's factor as the inverse of a loss scale, and a bound that no norm reaches.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bert.core.env import ConfigError
from bert.optim import lamb
from bert.optim.rule import Pieces, is_decayed

CLASSES = {
    "apex_lamb": ("apex.optimizers", "FusedMixedPrecisionLamb"),
    "apex_distributed_lamb": ("apex.contrib.optimizers.distributed_fused_lamb", "DistributedFusedLAMB"),
}


def load(name: str) -> Any:
    """The class behind OPTIMIZER=``name``. Raises ConfigError where apex, or its compiled part, is not installed."""
    module, attribute = CLASSES[name]
    try:
        found = getattr(importlib.import_module(module), attribute)
        importlib.import_module("amp_C")
        return found
    except Exception as error:  # PyPI's package named apex is another one, and fails in its own ways
        raise ConfigError(
            f"OPTIMIZER={name} needs NVIDIA's apex with its CUDA extensions ({type(error).__name__}: {error}): run in "
            "an NGC PyTorch image, build github.com/NVIDIA/apex, or set OPTIMIZER=lamb"
        ) from None


def check(name: str, device: torch.device) -> None:
    """Raises ConfigError where OPTIMIZER=``name`` cannot run."""
    if device.type != "cuda":
        raise ConfigError(f"OPTIMIZER={name} needs a GPU: set OPTIMIZER=lamb")
    load(name)


def decay_groups(names: Sequence[str], tensors: Sequence[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """PyTorch's groups of parameters: those that are decayed, and biases and LayerNorm, which are not."""
    found = []
    for decayed in (True, False):
        chosen = [tensor for name, tensor in zip(names, tensors, strict=True) if is_decayed(name) == decayed]
        if chosen:
            found.append({"params": chosen, "weight_decay": weight_decay if decayed else 0.0})
    return found


class ApexRule:
    """LambRule's update, by apex, over whole parameters."""

    def __init__(self, pieces: Pieces, config: lamb.Config) -> None:
        self.pieces, self.needs_norms = pieces, False
        self.num_steps = torch.zeros((), dtype=torch.int64, device=pieces.device)
        self.no_overflow = torch.zeros(1, dtype=torch.float32, device=pieces.device)
        self.grad_scale: Tensor | float = 1.0
        self.optimizer = load("apex_lamb")(
            decay_groups(pieces.names, pieces.masters, config.weight_decay),
            lr=0.0,
            bias_correction=True,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            adam_w_mode=True,
            grad_averaging=True,
            max_grad_norm=float("inf"),
            use_nvlamb=config.ratio == "all",
        )
        # apex makes the moments in its first step, unless they are there; ours are those that are saved and restored.
        moments = pieces.state("first_moments"), pieces.state("second_moments")
        for master, first, second in zip(pieces.masters, *moments, strict=True):
            self.optimizer.state[master] = {"exp_avg": first, "exp_avg_sq": second}

    def prepare(
        self, gradients: Sequence[Tensor], grad_scale: Tensor | float, keep: Tensor | None, squares: Tensor | None
    ) -> None:
        """Hands over the gradients. apex takes its sums itself."""
        self.grad_scale = grad_scale
        for master, gradient in zip(self.pieces.masters, gradients, strict=True):
            master.grad = gradient.to(master.dtype)

    def apply(self, sums: Tensor | None, lr: Tensor | float, keep: Tensor | None) -> None:
        """The whole update; it leaves its directions in the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"].copy_(torch.as_tensor(lr))
            group["step"].copy_(self.num_steps)
        overflow = self.no_overflow if keep is None else (~keep).float().reshape(1)
        factor = torch.as_tensor(self.grad_scale, dtype=torch.float32, device=self.pieces.device).reshape(1)
        self.optimizer.step(grad_scaler=_Scale(self.pieces.device, overflow, factor.reciprocal()))
        self.num_steps += 1 if keep is None else keep
        for master in self.pieces.masters:
            master.grad = None


class _Scale:
    """What apex asks of a torch.amp.GradScaler: the loss scale, and whether a gradient overflowed."""

    def __init__(self, device: torch.device, overflow: Tensor, scale: Tensor) -> None:
        self.device, self.overflow, self.scale = device, overflow, scale

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Mapping[torch.device, Tensor]:
        return {self.device: self.overflow}

    def _get_scale_async(self) -> Tensor:
        return self.scale
