"""LAMB as the published MLPerf BERT submissions run it (apex FusedLAMB with use_nvlamb off)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bert.core.env import env
from bert.optim.replicated import Replicated
from bert.optim.rule import Moments, Pieces, add_decay, decayed_pieces, scaled, trust_ratios


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


class LambRule:
    """With g the gradient times ``grad_scale`` (which carries clipping and unscaling), per tensor p of step t:

    u = (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) + wd p; p -= lr * r * u, with r = ||p|| / ||u|| where weight decay
    applies (LAMB_RATIO=all: everywhere) and both norms are positive, else 1 (You et al. 2020, arXiv 1904.00962,
    algorithm 2, with the trust ratio left out without decay).
    """

    def __init__(self, pieces: Pieces, config: Config) -> None:
        self.pieces = pieces
        self.moments = Moments(pieces, config.beta1, config.beta2, config.eps)
        self.num_steps, self.needs_norms = self.moments.num_steps, False
        self.weight_decay = config.weight_decay
        decayed = decayed_pieces(pieces, config.weight_decay)
        self.adapted = list(range(len(pieces.names))) if config.ratio == "all" else decayed
        self.adapted_index = torch.tensor(self.adapted, dtype=torch.int64, device=pieces.device)
        self.updates: list[Tensor] = []

    def prepare(
        self, gradients: Sequence[Tensor], grad_scale: Tensor | float, keep: Tensor | None, squares: Tensor | None
    ) -> Tensor:
        """Sums [pieces, 2]: of p^2 and of u^2; 0 for those without a trust ratio."""
        masters = self.pieces.masters
        sums = torch.zeros(len(masters), 2, dtype=_norm_dtype(masters), device=self.pieces.device)
        gradients = scaled(gradients, masters, grad_scale)
        self.updates = self.moments.advance(gradients, keep)
        add_decay(self.updates, self.pieces, self.weight_decay)
        if self.adapted:
            chosen, updates = ([tensors[i] for i in self.adapted] for tensors in (masters, self.updates))
            norms = torch.stack([torch.stack(torch._foreach_norm(x)) for x in (chosen, updates)], dim=1)
            sums.index_copy_(0, self.adapted_index, norms.square())
        return sums

    def apply(self, sums: Tensor | None, lr: Tensor | float, keep: Tensor | None) -> None:
        """``sums`` as from ``prepare``, added over the holders of parts of each parameter."""
        assert sums is not None
        updates, self.updates = self.updates, []
        if self.adapted:
            ratios = trust_ratios(*sums.index_select(0, self.adapted_index).sqrt().unbind(dim=1))
            torch._foreach_mul_([updates[i] for i in self.adapted], list(ratios.unbind()))
        self.moments.descend(updates, lr, keep)


def _norm_dtype(masters: Sequence[Tensor]) -> torch.dtype:
    return masters[0].dtype if masters else torch.float32


class Lamb(Replicated):
    """LAMB on every rank alike, over the named parameters of a model."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: Config,
        masters: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__(named_parameters, lambda pieces: LambRule(pieces, config), masters)
