"""Numeric precision: what the weights are computed in, and the loss scale that fp16 needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bert.env import env

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Weights and activations are of this precision; the optimizer keeps fp32 masters."""

    precision: str = env("PRECISION", "auto", choices=("auto", *DTYPES), doc="auto is bf16 on a GPU, fp32 on a CPU")
    init_loss_scale: float = env("INIT_LOSS_SCALE", 65536.0, above=0, doc="first loss scale of fp16")
    growth_interval: int = env("LOSS_SCALE_GROWTH", 2000, at_least=1, doc="good fp16 steps before the scale doubles")

    def dtype(self, device: torch.device) -> torch.dtype:
        """The type of weights and activations on ``device``."""
        if self.precision == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return DTYPES[self.precision]


def cast_with_masters(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Casts the model in place; returns its former fp32 parameters by name, or None where it is fp32 already.

    The masters come from before the cast, so that a checkpoint's full precision reaches the optimizer.
    """
    if dtype == torch.float32:
        return None
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.to(dtype)
    return masters


class LossScaler:
    """Dynamic loss scale: halved when a gradient overflows (the step is then skipped), doubled after a quiet spell."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        self.enabled = dtype == torch.float16
        self.scale = config.init_loss_scale if self.enabled else 1.0
        self.growth_interval = config.growth_interval
        self.num_good_steps = 0
        self.num_skipped_steps = 0

    def update(self, overflow: bool) -> None:
        """Records whether the last step's gradients overflowed."""
        if not self.enabled:
            return
        if overflow:
            self.scale = max(self.scale / 2, 1.0)
            self.num_good_steps = 0
            self.num_skipped_steps += 1
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.scale *= 2
            self.num_good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"scale": self.scale, "num_good_steps": self.num_good_steps, "num_skipped_steps": self.num_skipped_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores ``state_dict()``."""
        self.scale = state["scale"]
        self.num_good_steps = int(state["num_good_steps"])
        self.num_skipped_steps = int(state["num_skipped_steps"])
