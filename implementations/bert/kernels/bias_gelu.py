"""GELU(x + bias), exact (erf) or by the tanh formula."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """x [..., F], bias [F]; approximate: "none" or "tanh". Returns [..., F]."""
    return F.gelu(x + bias, approximate=approximate)


def supported(device: torch.device) -> bool:
    """True where the fused kernel runs."""
    return False
