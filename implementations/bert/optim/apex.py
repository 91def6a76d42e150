"""LAMB of NVIDIA's apex, which NGC's images have.

``OPTIMIZER=apex_lamb`` is apex.optimizers.FusedMixedPrecisionLamb on whole parameters of every
rank: its weights are the model's, in 16 bits, and its fp32 masters ours; without accumulation it
reads the gradients in 16 bits, too, and rounds the directions to them. Rate, step count and
overflow stay on the device, so that a CUDA graph can hold it. Clipping and reduction are ours: apex
gets the gradient's factor as the inverse of a loss scale, and no bound on the norm.
"""

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
    except Exception as error:  # PyPI's package of that name fails in ways of its own
        reason = f"{type(error).__name__}: {error}"
        cure = "NGC's PyTorch image has it, and github.com/NVIDIA/apex builds it; PyPI's apex is another project"
        raise ConfigError(
            f"OPTIMIZER={NAME} needs NVIDIA's apex with its CUDA extensions ({reason}): {cure}; or set OPTIMIZER=lamb"
        ) from None
    return fused_lamb


class ApexRule(Rule):
    """LambRule's update by apex; a checkpoint of either is continued by the other."""

    needs_whole = True
    num_temporaries = 1

    def __init__(self, shards: ParameterShards, config: LambConfig) -> None:
        super().__init__(shards, config)
        self.targets = shards.masters if shards.low is None else shards.low
        # apex takes weight decay by group of parameters.
        numbers = range(len(shards.names))
        decayed = [i for i in numbers if is_decayed(shards.names[i])]
        parts = [(decayed, config.weight_decay)]
        parts.append(([i for i in numbers if i not in decayed], 0.0))
        parts = [part for part in parts if part[0]]
        self.optimizer = load()(
            [
                {"params": [self.targets[i] for i in part], "weight_decay": decay}
                for part, decay in parts
            ],
            lr=0.0,  # each step sets it
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            max_grad_norm=float("inf"),
            use_nvlamb=config.ratio == "all",
            reduced_precision_dtype=None if shards.low is None else shards.low[0].dtype,
        )
        # It would make masters and moments in its first step. It is given ours, which are saved.
        if shards.low is not None:
            self.optimizer.param_groups_full_precision = [
                {"params": [shards.masters[i] for i in part]} for part, _ in parts
            ]
        moments = shards.state("first_moments"), shards.state("second_moments")
        for target, first, second in zip(self.targets, *moments, strict=True):
            self.optimizer.state[target] = {"exp_avg": first, "exp_avg_sq": second}
        self.no_overflow = torch.zeros(1, device=shards.device)

    def step(self, gradients: list[Tensor], update: Update) -> None:
        """Overwrites gradients of the targets' type with the directions."""
        device = self.shards.device
        for target, gradient in zip(self.targets, gradients, strict=True):
            target.grad = gradient.to(target.dtype)
        for group in self.optimizer.param_groups:
            # In place, where a captured graph reads them.
            group["lr"].copy_(torch.as_tensor(update.lr))
            group["step"].copy_(self.num_steps)
        overflow = self.no_overflow
        if update.apply_update is not None:
            overflow = (~update.apply_update).float().reshape(1)
        scale = torch.as_tensor(update.scale, dtype=torch.float32, device=device)
        loss_scale = scale.reshape(1).reciprocal()
        # The parts of a torch.amp.GradScaler that apex uses.
        scaler = types.SimpleNamespace(
            _check_inf_per_device=lambda optimizer: {device: overflow},
            _get_scale_async=lambda: loss_scale,
        )
        self.optimizer.step(grad_scaler=scaler)
        self.count_step(update.apply_update)
        for target in self.targets:
            target.grad = None
