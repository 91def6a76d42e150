"""Adam and AdamW with bias correction; for the open division, since the closed one prescribes LAMB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bert.env import env
from bert.optim.rule import Moments, Pieces, add_decay, scaled


@dataclass(frozen=True, kw_only=True)
class Config:
    """Hyper-parameters of Adam."""

    beta1: float = env("OPT_ADAM_BETA_1", 0.9, at_least=0, below=1, doc="Adam: decay of the first moment")
    beta2: float = env("OPT_ADAM_BETA_2", 0.999, at_least=0, below=1, doc="Adam: decay of the second moment")
    eps: float = env("OPT_ADAM_EPSILON", 1e-8, above=0, doc="Adam: added to the root of the second moment")
    weight_decay: float = env("OPT_ADAM_WEIGHT_DECAY", 0.01, at_least=0, doc="Adam: decay, as WEIGHT_DECAY_RATE")
    bias_correction: bool = env(
        "OPT_ADAM_BIAS_CORRECTION", True, doc="Adam: 0 takes the moments as they are, as BERT's fine-tuning does"
    )


class AdamRule:
    """p -= lr * (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) (Kingma & Ba 2015, arXiv 1412.6980).

    ``decoupled`` adds wd p to the update (AdamW; Loshchilov & Hutter 2019, arXiv 1711.05101); otherwise wd p is added
    to the gradient. Biases and LayerNorm are not decayed. Without bias correction b1^t and b2^t are taken as 0.
    """

    def __init__(self, pieces: Pieces, config: Config, decoupled: bool) -> None:
        self.pieces, self.weight_decay, self.decoupled = pieces, config.weight_decay, decoupled
        self.moments = Moments(pieces, config.beta1, config.beta2, config.eps, bias_correction=config.bias_correction)
        self.num_steps, self.needs_norms = self.moments.num_steps, False
        self.updates: list[Tensor] = []

    def prepare(
        self, gradients: Sequence[Tensor], grad_scale: Tensor | float, keep: Tensor | None, squares: Tensor | None
    ) -> None:
        """Needs no sums."""
        gradients = scaled(gradients, self.pieces.masters, grad_scale)
        if not self.decoupled:
            add_decay(gradients, self.pieces, self.weight_decay)
        self.updates = self.moments.advance(gradients, keep)
        if self.decoupled:
            add_decay(self.updates, self.pieces, self.weight_decay)

    def apply(self, sums: Tensor | None, lr: Tensor | float, keep: Tensor | None) -> None:
        """The update itself."""
        updates, self.updates = self.updates, []
        self.moments.descend(updates, lr, keep)
