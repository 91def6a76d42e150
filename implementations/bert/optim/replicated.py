"""An optimizer whose whole state is on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bert.core.dist import World
from bert.kernels.precision import LOW_PRECISION
from bert.optim.gradients import Clipping, Gradients, ReplicatedGradients
from bert.optim.rule import Pieces, Rule, squared_norms


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
        self.pieces = Pieces(names=self.names, masters=copies, device=copies[0].device)
        self.rule = make_rule(self.pieces)
        self.low_precision = [i for i, p in enumerate(self.parameters) if p.dtype in LOW_PRECISION]

    def gradients(self, model: nn.Module, clipping: Clipping, world: World, find_overflow: bool) -> Gradients:
        """See Optimizer."""
        return ReplicatedGradients(model, self.parameters, clipping, world, find_overflow)

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: Tensor | float, grad_scale: Tensor | float = 1.0, keep: Tensor | None = None) -> None:
        """One update from the parameters' gradients, each multiplied by ``grad_scale`` first; none where not ``keep``.

        With tensors as arguments nothing waits for the device.
        """
        gradients: list[Tensor] = [p.grad for p in self.parameters]  # type: ignore[misc]
        squares = squared_norms(gradients) if self.rule.needs_norms else None
        sums = self.rule.prepare(gradients, grad_scale, keep, squares)
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
        states = [tensor for state in self.pieces.states.values() for tensor in state]
        return [*(p.detach() for p in self.parameters), *self.pieces.masters, *states, self.rule.num_steps]

    def state_dict(self) -> dict[str, Any]:
        """Step count, fp32 masters and the rule's states by parameter name."""
        parts = {name: dict(zip(self.names, tensors, strict=True)) for name, tensors in self._parts().items()}
        return {"num_steps": int(self.rule.num_steps), **parts}

    def _parts(self) -> dict[str, list[Tensor]]:
        return {"masters": self.pieces.masters, **self.pieces.states}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()``, parameters included. Raises KeyError for a name that is missing."""
        self.rule.num_steps.fill_(int(state["num_steps"]))
        for key, tensors in self._parts().items():
            for name, tensor in zip(self.names, tensors, strict=True):
                tensor.copy_(state[key][name])
        for i in self.low_precision:
            self.parameters[i].copy_(self.pieces.masters[i])
