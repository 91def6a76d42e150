"""ACClip: momentum clipped element by element (Zhang et al. 2020, arXiv 1912.03194), as Samsung's BERT ran it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bert.core.env import env
from bert.optim.rule import MomentRule, Pieces, Scalar, kept, scaled


@dataclass(frozen=True, kw_only=True)
class Config:
    """Hyper-parameters of ACClip."""

    beta1: float = env("OPT_ACCLIP_BETA_1", 0.9, at_least=0, below=1, doc="ACClip: decay of the first moment")
    beta2: float = env("OPT_ACCLIP_BETA_2", 0.99, at_least=0, below=1, doc="ACClip: decay of the other states")
    eps: float = env("OPT_ACCLIP_EPSILON", 1e-5, above=0, doc="ACClip: added to denominators")
    weight_decay: float = env("OPT_ACCLIP_WEIGHT_DECAY", 1e-5, at_least=0, doc="ACClip: decay, as WEIGHT_DECAY_RATE")
    alpha: float = env(
        "OPT_ACCLIP_ALPHA", 1.0, at_least=1, at_most=2, doc="ACClip: moment of the magnitudes that clips"
    )


class ACClipRule(MomentRule):
    """With g the gradient times ``scale``, element by element of step t:

    m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; tau = b2 tau + (1-b2) |g|^alpha;
    k = min(tau^(1/alpha) / (|m| + eps), 1) / (sqrt(b2 v / (1-b2^t)) + eps); p -= lr / (1-b1^t) k m; then p *= 1 - lr wd
    (not biases and LayerNorm).
    """

    def __init__(self, pieces: Pieces, config: Config) -> None:
        super().__init__(pieces, config.beta1, config.beta2, config.eps, config.weight_decay)
        self.alpha = config.alpha
        self.magnitudes = pieces.state("magnitudes")

    def prepare(self, gradients: list[Tensor], scale: Scalar, keep: Tensor | None, squares: Tensor | None) -> None:
        """Needs no sums."""
        values = scaled(gradients, self.pieces.masters, scale)
        self.update_moments(values, keep)
        powers = torch._foreach_pow(torch._foreach_abs(values), self.alpha)
        with kept(self.magnitudes, keep):
            torch._foreach_lerp_(self.magnitudes, list(powers), 1 - self.beta2)

    def apply(self, sums: Tensor | None, lr: Scalar, keep: Tensor | None) -> None:
        """The update itself."""
        masters = self.pieces.masters
        dtype = masters[0].dtype
        limits = list(torch._foreach_pow(self.magnitudes, 1 / self.alpha))
        torch._foreach_div_(limits, torch._foreach_add(torch._foreach_abs(self.first), self.eps))
        torch._foreach_clamp_max_(limits, 1.0)
        denominators = torch._foreach_mul(self.second, (self.beta2 / self.correction(self.beta2)).to(dtype))
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, self.eps)
        torch._foreach_div_(limits, denominators)
        torch._foreach_mul_(limits, self.first)
        rate = torch.as_tensor(lr, dtype=dtype, device=masters[0].device)
        with kept(masters, keep):
            torch._foreach_mul_(limits, rate / self.correction(self.beta1).to(dtype))
            torch._foreach_sub_(masters, limits)
            if self.decayed:
                torch._foreach_mul_([masters[i] for i in self.decayed], 1 - rate * self.weight_decay)
