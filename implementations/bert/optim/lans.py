"""LANS: LAMB on normalised gradients with Nesterov's momentum (Zheng et al. 2020, arXiv 2006.13484)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bert.core.env import env
from bert.optim.rule import MomentRule, Pieces, Scalar, scaled, squared_norms, trust_ratios


@dataclass(frozen=True, kw_only=True)
class Config:
    """Hyper-parameters of LANS."""

    beta1: float = env("OPT_LANS_BETA_1", 0.9, at_least=0, below=1, doc="LANS: decay of the first moment")
    beta2: float = env("OPT_LANS_BETA_2", 0.999, at_least=0, below=1, doc="LANS: decay of the second moment")
    eps: float = env("OPT_LANS_EPSILON", 1e-6, above=0, doc="LANS: added to norms and to the root of the second moment")
    weight_decay: float = env("OPT_LANS_WEIGHT_DECAY", 0.01, at_least=0, doc="LANS: decay, as WEIGHT_DECAY_RATE")


class LansRule(MomentRule):
    """With g the gradient times ``scale``, per tensor p of step t, n = g / (||g|| + eps), or g where it is 0:

    m = b1 m + (1-b1) n; v = b2 v + (1-b2) n^2; d = sqrt(v / (1-b2^t)) + eps; r = (m / (1-b1^t)) / d + wd p;
    c = n / d + wd p; p -= lr (b1 R(r) r + (1-b1) R(c) c), with R(x) = ||p|| / ||x|| where both are positive, else 1.
    Norms are those of whole parameters. Biases and LayerNorm are not decayed; they have a ratio all the same.
    """

    needs_norms = True
    num_sums = 3

    def __init__(self, pieces: Pieces, config: Config) -> None:
        super().__init__(pieces, config.beta1, config.beta2, config.eps, config.weight_decay)
        self.parts: tuple[list[Tensor], list[Tensor]] = [], []  # r and c

    def prepare(self, gradients: list[Tensor], scale: Scalar, keep: Tensor | None, squares: Tensor | None) -> Tensor:
        """Sums [pieces, 3]: of p^2, r^2 and c^2."""
        assert squares is not None
        masters = self.pieces.masters
        dtype = masters[0].dtype
        norms = squares.to(dtype).sqrt() * torch.as_tensor(scale, dtype=dtype, device=self.pieces.device)
        factors = torch.where(norms > 0, 1 / (norms + self.eps), 1.0)
        normalised = scaled(gradients, masters, scale)
        torch._foreach_mul_(normalised, list(factors.unbind()))
        self.update_moments(normalised, keep)
        denominators = self.denominators()
        momentum, current = self.directions(denominators), list(torch._foreach_div(normalised, denominators))
        self.add_decay(momentum)
        self.add_decay(current)
        self.parts = momentum, current
        return torch.stack([squared_norms(x) for x in (masters, momentum, current)], dim=1)

    def apply(self, sums: Tensor | None, lr: Scalar, keep: Tensor | None) -> None:
        assert sums is not None
        (momentum, current), self.parts = self.parts, ([], [])
        p_norm, r_norm, c_norm = sums.to(momentum[0].dtype).sqrt().unbind(dim=1)
        torch._foreach_mul_(momentum, list((self.beta1 * trust_ratios(p_norm, r_norm)).unbind()))
        torch._foreach_mul_(current, list(((1 - self.beta1) * trust_ratios(p_norm, c_norm)).unbind()))
        torch._foreach_add_(momentum, current)
        self.descend(momentum, lr, keep)
