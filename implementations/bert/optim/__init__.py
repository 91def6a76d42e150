"""Optimizers, one a file, chosen by OPTIMIZER. Each takes named parameters and has step, zero_grad and state_dict."""

from __future__ import annotations

from dataclasses import dataclass, field

from bert.env import env
from bert.optim import lamb


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which optimizer, how gradients are clipped, and the optimizer's own settings."""

    optimizer: str = env("OPTIMIZER", "lamb", choices=("lamb",), doc="optimizer")
    clip: str = env(
        "CLIP", "after", choices=("before", "after"), doc="clip the gradient norm before or after the all-reduce"
    )
    max_grad_norm: float = env("MAX_GRAD_NORM", 1.0, above=0, doc="gradient norm above which gradients are scaled down")
    lamb: lamb.Config = field(default_factory=lamb.Config)
