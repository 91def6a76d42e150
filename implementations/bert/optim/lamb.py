"""LAMB as the published MLPerf BERT submissions run it (apex FusedLAMB with use_nvlamb off)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bert.core.env import env
from bert.optim.rule import MomentRule, Pieces, Scalar, scaled, trust_ratios


@dataclass(frozen=True, kw_only=True)
class Config:
    """Hyper-parameters of LAMB."""

    beta1: float = env("OPT_LAMB_BETA_1", 0.9, at_least=0, below=1, doc="LAMB: decay of the first moment")
    beta2: float = env("OPT_LAMB_BETA_2", 0.999, at_least=0, below=1, doc="LAMB: decay of the second moment")
    eps: float = env("OPT_EPSILON", 1e-6, above=0, doc="LAMB: added to the root of the second moment")
    weight_decay: float = env("WEIGHT_DECAY_RATE", 0.01, at_least=0, doc="LAMB: decay of all but biases and LayerNorm")
    ratio: str = env(
        "LAMB_RATIO",
        "decayed",
        choices=("decayed", "all"),
        doc="LAMB: which parameters have a trust ratio: those that are decayed, or biases and LayerNorm too (NVLAMB)",
    )


class LambRule(MomentRule):
    """With g the gradient times ``scale`` (which carries clipping and unscaling), per tensor p of step t:

    u = (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) + wd p; p -= lr * r * u, with r = ||p|| / ||u|| where weight decay
    applies (LAMB_RATIO=all: everywhere) and both norms are positive, else 1 (You et al. 2020, arXiv 1904.00962,
    algorithm 2, with the trust ratio left out without decay).
    """

    num_sums = 2

    def __init__(self, pieces: Pieces, config: Config) -> None:
        super().__init__(pieces, config.beta1, config.beta2, config.eps, config.weight_decay)
        self.adapted = list(range(len(pieces.names))) if config.ratio == "all" else self.decayed
        self.adapted_index = torch.tensor(self.adapted, dtype=torch.int64, device=pieces.device)
        self.updates: list[Tensor] = []

    def prepare(self, gradients: list[Tensor], scale: Scalar, keep: Tensor | None, squares: Tensor | None) -> Tensor:
        """Sums [pieces, 2]: of p^2 and of u^2; 0 for those without a trust ratio."""
        masters = self.pieces.masters
        self.update_moments(scaled(gradients, masters, scale), keep)
        self.updates = self.directions(self.denominators())
        self.add_decay(self.updates)
        sums = torch.zeros(len(masters), 2, dtype=masters[0].dtype, device=self.pieces.device)
        if self.adapted:
            chosen, updates = ([tensors[i] for i in self.adapted] for tensors in (masters, self.updates))
            norms = torch.stack([torch.stack(torch._foreach_norm(x)) for x in (chosen, updates)], dim=1)
            sums.index_copy_(0, self.adapted_index, norms.square())
        return sums

    def apply(self, sums: Tensor | None, lr: Scalar, keep: Tensor | None) -> None:
        assert sums is not None
        updates, self.updates = self.updates, []
        if self.adapted:
            ratios = trust_ratios(*sums.index_select(0, self.adapted_index).sqrt().unbind(dim=1))
            torch._foreach_mul_([updates[i] for i in self.adapted], list(ratios.unbind()))
        self.descend(updates, lr, keep)
