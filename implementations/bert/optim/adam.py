"""Adam and AdamW with bias correction; for the open division, since the closed one prescribes LAMB."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from bert.core.env import env
from bert.optim.rule import MomentRule, Pieces, Scalar, is_decayed, scaled


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


class AdamRule(MomentRule):
    """p -= lr * (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) (Kingma & Ba 2015, arXiv 1412.6980).

    ``decoupled`` adds wd p to the update (AdamW; Loshchilov & Hutter 2019, arXiv 1711.05101); otherwise wd p is added
    to the gradient. Biases and LayerNorm are not decayed. Without bias correction b1^t and b2^t are taken as 0.
    """

    def __init__(self, pieces: Pieces, config: Config, decoupled: bool) -> None:
        super().__init__(pieces, config.beta1, config.beta2, config.eps, config.weight_decay)
        self.decoupled, self.bias_correction = decoupled, config.bias_correction
        self.updates: list[Tensor] = []

    def prepare(self, gradients: list[Tensor], scale: Scalar, keep: Tensor | None, squares: Tensor | None) -> None:
        """Needs no sums."""
        self.updates = scaled(gradients, self.pieces.masters, scale)
        if self._is_fused(keep):
            return  # PyTorch's kernel does it all in one pass over the memory, in apply
        if not self.decoupled:
            self.add_decay(self.updates)
        self.update_moments(self.updates, keep)
        self.updates = self.directions(self.denominators())
        if self.decoupled:
            self.add_decay(self.updates)

    def apply(self, sums: Tensor | None, lr: Scalar, keep: Tensor | None) -> None:
        """The update itself."""
        updates, self.updates = self.updates, []
        if not self._is_fused(keep):
            self.descend(updates, lr, keep)
            return
        # The whole update by PyTorch's fused kernel for CPUs, 4 times as fast as operation by operation.
        masters, names = self.pieces.masters, self.pieces.names
        for decayed in (True, False):
            chosen = [i for i, name in enumerate(names) if is_decayed(name) is decayed]
            if chosen:
                (adamw if self.decoupled else adam)(
                    [masters[i] for i in chosen], [updates[i] for i in chosen],
                    [self.first[i] for i in chosen], [self.second[i] for i in chosen],
                    [], [self.num_steps.float() for _ in chosen],
                    fused=True, amsgrad=False, maximize=False, lr=float(lr), beta1=self.beta1, beta2=self.beta2,
                    weight_decay=self.weight_decay if decayed else 0.0, eps=self.eps,
                )  # fmt: skip
        self.num_steps += 1

    def _is_fused(self, keep: Tensor | None) -> bool:
        return self.bias_correction and keep is None and self.pieces.device.type == "cpu"
