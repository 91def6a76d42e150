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

from bert.optim.rules import LambConfig, Maybe, Pieces, Rule, Scalar, Tensors, Total, is_decayed
from common.env import ConfigError

NAME = "apex_lamb"


def load() -> Any:
    """apex's class. Raises ConfigError if apex, or its compiled part, is not installed."""
    try:
        found = importlib.import_module("apex.optimizers").FusedMixedPrecisionLamb
        importlib.import_module("amp_C")
        return found
    except (
        Exception
    ) as error:  # PyPI's package named apex is another one, and fails in its own ways
        need = f"OPTIMIZER={NAME} needs NVIDIA's apex with its CUDA extensions ({type(error).__name__}: {error})"
        cure = "run in an NGC PyTorch image, build github.com/NVIDIA/apex, or set OPTIMIZER=lamb"
        raise ConfigError(f"{need}: {cure}") from None


class ApexRule(Rule):
    """LambRule's update, by apex, over whole parameters."""

    def __init__(self, pieces: Pieces, config: LambConfig) -> None:
        super().__init__(pieces, config.weight_decay)
        self.no_overflow = torch.zeros(1, dtype=torch.float32, device=pieces.device)
        groups = []
        for decayed in (True, False):
            chosen = [
                m
                for name, m in zip(pieces.names, pieces.masters, strict=True)
                if is_decayed(name) is decayed
            ]
            if chosen:
                groups.append(
                    {"params": chosen, "weight_decay": config.weight_decay if decayed else 0.0}
                )
        self.optimizer = load()(
            groups, lr=0.0, betas=(config.beta1, config.beta2), eps=config.eps, bias_correction=True,
            adam_w_mode=True, grad_averaging=True, max_grad_norm=float("inf"), use_nvlamb=False,
        )  # fmt: skip
        # apex would make the moments in its first step; it is given ours, which are saved and restored.
        moments = pieces.state("first_moments"), pieces.state("second_moments")
        for master, first, second in zip(pieces.masters, *moments, strict=True):
            self.optimizer.state[master] = {"exp_avg": first, "exp_avg_sq": second}

    def step(
        self,
        gradients: Tensors,
        lr: Scalar,
        scale: Scalar,
        keep: Maybe,
        squares: Maybe,
        total: Total,
    ) -> None:
        """The whole update; overwrites the gradients with the directions. apex computes its sums itself."""
        device = self.pieces.device
        for master, gradient in zip(self.pieces.masters, gradients, strict=True):
            master.grad = gradient.to(master.dtype)
        for group in self.optimizer.param_groups:
            group["lr"].copy_(torch.as_tensor(lr))
            group["step"].copy_(self.num_steps)
        overflow = self.no_overflow if keep is None else (~keep).float().reshape(1)
        loss_scale = (
            torch.as_tensor(scale, dtype=torch.float32, device=device).reshape(1).reciprocal()
        )
        # The parts of a torch.amp.GradScaler that apex uses: whether a gradient overflowed, and the loss scale.
        scaler = types.SimpleNamespace(
            _check_inf_per_device=lambda optimizer: {device: overflow},
            _get_scale_async=lambda: loss_scale,
        )
        self.optimizer.step(grad_scaler=scaler)
        self.num_steps += 1 if keep is None else keep
        for master in self.pieces.masters:
            master.grad = None
