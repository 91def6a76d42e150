"""LAMB as the published MLPerf BERT submissions run it (apex FusedLAMB with use_nvlamb off)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bert.env import env


@dataclass(frozen=True, kw_only=True)
class Config:
    """Hyper-parameters of LAMB."""

    beta1: float = env("OPT_LAMB_BETA_1", 0.9, at_least=0, below=1, doc="decay of the first moment")
    beta2: float = env("OPT_LAMB_BETA_2", 0.999, at_least=0, below=1, doc="decay of the second moment")
    eps: float = env("OPT_EPSILON", 1e-6, above=0, doc="added to the root of the second moment")
    weight_decay: float = env("WEIGHT_DECAY_RATE", 0.01, at_least=0, doc="decay of all but biases and LayerNorm")


def is_decayed(name: str) -> bool:
    """True for a parameter that is decayed and scaled by a trust ratio: all but biases and LayerNorm."""
    return not (name.endswith("bias") or "LayerNorm" in name)


class Lamb:
    """LAMB with bias correction over the named parameters of a model.

    With g the gradient times ``grad_scale`` (which carries clipping and unscaling), per tensor p of step t:
    m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; u = (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) + wd p;
    p -= lr * r * u, with r = ||p|| / ||u|| where weight decay applies and both norms are positive, else 1
    (You et al. 2020, arXiv 1904.00962, algorithm 2, with the trust ratio left out without decay).

    Parameters in low precision get an fp32 master copy: from ``masters`` (fp32 by name), else from themselves.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: Config,
        masters: dict[str, Tensor] | None = None,
    ) -> None:
        named = dict(named_parameters)
        self.config = config
        self.names = list(named)
        self.parameters = list(named.values())
        low_precision = [p.dtype in (torch.float16, torch.bfloat16) for p in self.parameters]
        self.masters: list[Tensor] = [
            (masters[name] if masters else p.detach()).to(p.device, torch.float32, copy=True) if low else p
            for name, p, low in zip(self.names, self.parameters, low_precision, strict=True)
        ]
        self.low_precision = any(low_precision)
        self.first_moments = [torch.zeros_like(master) for master in self.masters]
        self.second_moments = [torch.zeros_like(master) for master in self.masters]
        self.decays = [config.weight_decay if is_decayed(name) else 0.0 for name in self.names]
        self.num_steps = 0

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor | float = 1.0) -> None:
        """One update from the parameters' gradients, each multiplied by ``grad_scale`` first."""
        self.num_steps += 1
        config, t = self.config, self.num_steps
        gradients = [p.grad.to(m.dtype) for p, m in zip(self.parameters, self.masters, strict=True)]  # type: ignore[union-attr]
        gradients = list(torch._foreach_mul(gradients, grad_scale))
        torch._foreach_lerp_(self.first_moments, gradients, 1 - config.beta1)
        torch._foreach_mul_(self.second_moments, config.beta2)
        torch._foreach_addcmul_(self.second_moments, gradients, gradients, 1 - config.beta2)

        denominators = torch._foreach_div(self.second_moments, 1 - config.beta2**t)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, config.eps)
        updates = torch._foreach_div(self.first_moments, 1 - config.beta1**t)
        torch._foreach_div_(updates, denominators)
        for update, master, decay in zip(updates, self.masters, self.decays, strict=True):
            if decay:
                update.add_(master, alpha=decay)
        self._apply(updates, lr)

    def _apply(self, updates: tuple[Tensor, ...], lr: float) -> None:
        decayed = [i for i, decay in enumerate(self.decays) if decay]
        if decayed:
            parameter_norms = torch._foreach_norm([self.masters[i] for i in decayed])
            update_norms = torch._foreach_norm([updates[i] for i in decayed])
            for i, p_norm, u_norm in zip(decayed, parameter_norms, update_norms, strict=True):
                both = (p_norm > 0) & (u_norm > 0)
                updates[i].mul_(torch.where(both, p_norm / u_norm, 1.0))
        torch._foreach_add_(self.masters, updates, alpha=-lr)
        if self.low_precision:
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter is not master:
                    parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """Step count, fp32 masters and moments by parameter name."""
        return {
            "num_steps": self.num_steps,
            "masters": dict(zip(self.names, (m.detach() for m in self.masters), strict=True)),
            "first_moments": dict(zip(self.names, self.first_moments, strict=True)),
            "second_moments": dict(zip(self.names, self.second_moments, strict=True)),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()``, parameters included. Raises KeyError for a name that is missing."""
        self.num_steps = int(state["num_steps"])
        for i, name in enumerate(self.names):
            self.masters[i].copy_(state["masters"][name])
            self.first_moments[i].copy_(state["first_moments"][name])
            self.second_moments[i].copy_(state["second_moments"][name])
            if self.parameters[i] is not self.masters[i]:
                self.parameters[i].copy_(self.masters[i])
