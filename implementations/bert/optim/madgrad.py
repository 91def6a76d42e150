"""MADGRAD (Defazio & Jelassi 2021, arXiv 2101.11075) with decoupled weight decay, as Samsung's BERT ran it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bert.core.env import env
from bert.optim.rule import Pieces, Rule, Scalar, kept, scaled


@dataclass(frozen=True, kw_only=True)
class Config:
    """Hyper-parameters of MADGRAD."""

    momentum: float = env("OPT_MADGRAD_MOMENTUM", 0.9, at_least=0, below=1, doc="MADGRAD: weight of the old weights")
    eps: float = env("OPT_MADGRAD_EPSILON", 1e-6, above=0, doc="MADGRAD: added to the rate and to the denominator")
    weight_decay: float = env("OPT_MADGRAD_WEIGHT_DECAY", 0.0, at_least=0, doc="MADGRAD: decay, as WEIGHT_DECAY_RATE")


class MadgradRule(Rule):
    """With g the gradient times ``scale``, k the steps done before, x the first weights, L = (lr + eps) sqrt(k+1):

    p *= 1 - (lr + eps) wd (not biases and LayerNorm); nu += L g^2; s += L g; z = x - s / (cbrt(nu) + eps);
    p = momentum p + (1 - momentum) z.
    """

    def __init__(self, pieces: Pieces, config: Config) -> None:
        super().__init__(pieces, config.weight_decay)
        self.config = config
        self.squares, self.sums = pieces.state("gradient_squares"), pieces.state("gradient_sums")
        self.first_weights = pieces.state("first_weights", of_weights=True)
        self.gradients: list[Tensor] = []

    def prepare(self, gradients: list[Tensor], scale: Scalar, keep: Tensor | None, squares: Tensor | None) -> None:
        """Needs no sums; the states depend on the rate."""
        self.gradients = scaled(gradients, self.pieces.masters, scale)

    def apply(self, sums: Tensor | None, lr: Scalar, keep: Tensor | None) -> None:
        """The whole update."""
        config, masters = self.config, self.pieces.masters
        gradients, self.gradients = self.gradients, []
        rate = torch.as_tensor(lr, dtype=masters[0].dtype, device=masters[0].device) + config.eps
        weight = rate * (self.num_steps + 1).to(rate.dtype).sqrt()
        with kept([*masters, *self.squares, *self.sums], keep):
            if self.decayed:
                torch._foreach_mul_([masters[i] for i in self.decayed], 1 - rate * config.weight_decay)
            weighted = torch._foreach_mul(gradients, weight)
            torch._foreach_add_(self.sums, weighted)
            torch._foreach_addcmul_(self.squares, weighted, gradients)
            roots = torch._foreach_pow(self.squares, 1 / 3)
            torch._foreach_add_(roots, config.eps)
            targets = torch._foreach_sub(self.first_weights, torch._foreach_div(self.sums, list(roots)))
            torch._foreach_lerp_(masters, list(targets), 1 - config.momentum)
        self.num_steps += 1 if keep is None else keep
