"""LAMB of NVIDIA's apex, if installed (as in NGC images).

``OPTIMIZER=apex_lamb`` is apex.optimizers.FusedMixedPrecisionLamb on the fp32 masters of every rank, with learning
rate, step count and overflow flag on the device, so that it runs in a CUDA graph. We do clipping and reduction: apex
gets the gradient's factor as the inverse of a loss scale, and no bound on the norm.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

import torch
from torch import Tensor

from bert.optim.rules import LambConfig, ParameterShards, Rule, Update, is_decayed
from common.env import ConfigError

NAME = "apex_lamb"


def load() -> Any:
    """apex's class. Raises ConfigError if apex, or its compiled part, is not installed."""
    try:
        fused_lamb = importlib.import_module("apex.optimizers").FusedMixedPrecisionLamb
        # Without its extensions apex can be imported, and would fail in the first step.
        importlib.import_module("amp_C")
        return fused_lamb
    except (
        Exception
    ) as error:  # PyPI's package named apex is another one, and fails in its own ways
        need = f"OPTIMIZER={NAME} needs NVIDIA's apex with its CUDA extensions ({type(error).__name__}: {error})"
        cure = "run in an NGC PyTorch image, build github.com/NVIDIA/apex, or set OPTIMIZER=lamb"
        raise ConfigError(f"{need}: {cure}") from None


class ApexRule(Rule):
    """LambRule's update, by apex, over whole parameters."""

    def __init__(self, shards: ParameterShards, config: LambConfig) -> None:
        super().__init__(shards, config.weight_decay)
        self.no_overflow = torch.zeros(1, dtype=torch.float32, device=shards.device)
        groups = []
        # apex takes weight decay by group of parameters.
        for decayed in (True, False):
            chosen = [
                master
                for name, master in zip(shards.names, shards.masters, strict=True)
                if is_decayed(name) is decayed
            ]
            if chosen:
                weight_decay = config.weight_decay if decayed else 0.0
                groups.append({"params": chosen, "weight_decay": weight_decay})
        self.optimizer = load()(
            groups,
            lr=0.0,  # each step sets it
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            bias_correction=True,
            adam_w_mode=True,
            grad_averaging=True,
            max_grad_norm=float("inf"),  # clipped by the scale
            use_nvlamb=False,
        )
        # apex would make the moments in its first step; it is given ours, which are saved and restored.
        moments = shards.state("first_moments"), shards.state("second_moments")
        for master, first, second in zip(shards.masters, *moments, strict=True):
            self.optimizer.state[master] = {"exp_avg": first, "exp_avg_sq": second}

    def step(self, gradients: list[Tensor], update: Update) -> None:
        """The whole update; overwrites the gradients with the directions. apex computes its sums itself."""
        device = self.shards.device
        for master, gradient in zip(self.shards.masters, gradients, strict=True):
            master.grad = gradient.to(master.dtype)
        for group in self.optimizer.param_groups:
            # In place, where a captured graph reads them.
            group["lr"].copy_(torch.as_tensor(update.lr))
            group["step"].copy_(self.num_steps)
        overflow = self.no_overflow
        if update.apply_update is not None:
            overflow = (~update.apply_update).float().reshape(1)
        scale = torch.as_tensor(update.scale, dtype=torch.float32, device=device)
        loss_scale = scale.reshape(1).reciprocal()
        # The parts of a torch.amp.GradScaler that apex uses: whether a gradient overflowed, and the loss scale.
        scaler = types.SimpleNamespace(
            _check_inf_per_device=lambda optimizer: {device: overflow},
            _get_scale_async=lambda: loss_scale,
        )
        self.optimizer.step(grad_scaler=scaler)
        self.count_step(update.apply_update)
        for master in self.shards.masters:
            master.grad = None
