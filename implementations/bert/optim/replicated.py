"""An optimizer whose whole state is on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bert.optim.rule import Pieces, Rule

LOW_PRECISION = (torch.float16, torch.bfloat16)


class Replicated:
    """Applies a rule to whole parameters.

    Parameters in low precision get an fp32 master copy: from ``masters`` (fp32 by name), else from themselves.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        make_rule: Callable[[Pieces], Rule],
        masters: dict[str, Tensor] | None = None,
    ) -> None:
        named = dict(named_parameters)
        self.names = list(named)
        self.parameters = list(named.values())
        copies = [
            (masters[name] if masters else p.detach()).to(p.device, torch.float32, copy=True)
            if p.dtype in LOW_PRECISION
            else p.detach()
            for name, p in named.items()
        ]
        self.pieces = Pieces(
            names=self.names,
            masters=copies,
            first_moments=[torch.zeros_like(master) for master in copies],
            second_moments=[torch.zeros_like(master) for master in copies],
            device=copies[0].device,
        )
        self.rule = make_rule(self.pieces)
        self.low_precision = [i for i, p in enumerate(self.parameters) if p.dtype in LOW_PRECISION]

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: Tensor | float, grad_scale: Tensor | float = 1.0, keep: Tensor | None = None) -> None:
        """One update from the parameters' gradients, each multiplied by ``grad_scale`` first; none where not ``keep``.

        With tensors as arguments nothing waits for the device.
        """
        sums = self.rule.prepare([p.grad for p in self.parameters], grad_scale, keep)  # type: ignore[misc]
        self.rule.apply(sums, lr, keep)
        if self.low_precision:
            weights = [self.parameters[i].detach() for i in self.low_precision]
            torch._foreach_copy_(weights, [self.pieces.masters[i] for i in self.low_precision])

    def gather(self) -> None:
        """Makes all weights current on every rank: here they always are."""

    def mark_stale(self) -> None:
        """Notes that a replayed graph has updated the weights: here nothing follows from that."""

    def state_tensors(self) -> list[Tensor]:
        """Every tensor that a step changes, weights included."""
        return [*(p.detach() for p in self.parameters), *self.pieces.state(), self.rule.num_steps]

    def state_dict(self) -> dict[str, Any]:
        """Step count, fp32 masters and moments by parameter name."""
        pieces = self.pieces
        return {
            "num_steps": int(self.rule.num_steps),
            "masters": dict(zip(self.names, pieces.masters, strict=True)),
            "first_moments": dict(zip(self.names, pieces.first_moments, strict=True)),
            "second_moments": dict(zip(self.names, pieces.second_moments, strict=True)),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()``, parameters included. Raises KeyError for a name that is missing."""
        self.rule.num_steps.fill_(int(state["num_steps"]))
        for i, name in enumerate(self.names):
            self.pieces.masters[i].copy_(state["masters"][name])
            self.pieces.first_moments[i].copy_(state["first_moments"][name])
            self.pieces.second_moments[i].copy_(state["second_moments"][name])
            if i in self.low_precision:
                self.parameters[i].copy_(self.pieces.masters[i])
