"""An optimizer whose whole state is on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bert.core.dist import World
from bert.kernels.precision import LOW_PRECISION
from bert.optim.gradients import Clipping, Gradients
from bert.optim.rules import Pieces, Rule, Scalar, squared_norms


class Replicated:
    """Applies a rule to whole parameters. Its methods are those of Sharded.

    Parameters in low precision get an fp32 master copy: from ``masters`` (fp32 by name), else from themselves.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        make_rule: Callable[[Pieces], Rule],
        masters: dict[str, Tensor] | None = None,
    ) -> None:
        named = dict(named_parameters)
        self.names, self.parameters = list(named), list(named.values())
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
        return ReplicatedGradients(model, self.parameters, clipping, world, find_overflow)

    @torch.no_grad()
    def step(self, lr: Scalar, grad_scale: Scalar = 1.0, keep: Tensor | None = None) -> None:
        gradients: list[Tensor] = [p.grad for p in self.parameters]  # type: ignore[misc]
        squares = squared_norms(gradients) if self.rule.needs_norms else None
        self.rule.step(gradients, lr, grad_scale, keep, squares, lambda sums: sums)
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

    def _parts(self) -> dict[str, list[Tensor]]:
        return {"masters": self.pieces.masters, **self.pieces.states}

    def state_dict(self) -> dict[str, Any]:
        """Step count, fp32 masters and the rule's states by parameter name."""
        parts = {name: dict(zip(self.names, tensors, strict=True)) for name, tensors in self._parts().items()}
        return {"num_steps": int(self.rule.num_steps), **parts}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()``, parameters included. Raises KeyError for a name that is missing."""
        self.rule.num_steps.fill_(int(state["num_steps"]))
        for key, tensors in self._parts().items():
            for name, tensor in zip(self.names, tensors, strict=True):
                tensor.copy_(state[key][name])
        for i in self.low_precision:
            self.parameters[i].copy_(self.pieces.masters[i])


class ReplicatedGradients(Gradients):
    """Whole gradients on every rank: averaged by DDP during the backward pass (CLIP=after), or after it (before)."""

    def __init__(
        self, model: nn.Module, parameters: list[nn.Parameter], clipping: Clipping, world: World, find_overflow: bool
    ) -> None:
        super().__init__(model, clipping, world, find_overflow)
        self.parameters = parameters
        self.sums: list[Tensor] = []  # of clipped micro-batches
        self.overlap = world.size > 1 and clipping.when == "after"
        if self.overlap:
            devices = [world.device] if world.device.type == "cuda" else None
            self.forward = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    @contextlib.contextmanager
    def micro_batch(self, first: bool, last: bool, factor: Tensor) -> Iterator[None]:
        """DDP averages in the backward pass of the last one only."""
        with contextlib.nullcontext() if last or not self.overlap else self.forward.no_sync():  # type: ignore[operator]
            yield
        if self.clips_each:
            self._clip(first, last, factor)

    @torch.no_grad()
    def _clip(self, first: bool, last: bool, factor: Tensor) -> None:
        """Adds the clipped gradient of a micro-batch to the sum, which is the parameters' gradient after the last.

        A single one is clipped on the way to the update.
        """
        self.take_norm(self._norm(), first, factor)
        if first and last:
            return
        gradients = self._present()
        torch._foreach_mul_(gradients, self.coefficient.to(gradients[0].dtype))
        if first:
            self.sums = gradients
        else:
            torch._foreach_add_(self.sums, gradients)
        for parameter, total in zip(self.parameters, self.sums, strict=True):
            parameter.grad = total if last else None
        self.coefficient = torch.ones_like(self.coefficient)

    @torch.no_grad()
    def finish(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        self.sums = []
        if not self.clips_each:
            norm = self._norm()
            return norm, self.clipping.coefficient(norm / scale) / scale
        if self.world.size == 1:
            return self.norm, self.coefficient / scale
        # A rank that overflowed poisons the sum with inf or nan, so that all ranks see it and skip together.
        gradients = self._present()
        flat = torch.cat([_at_least_fp32(gradient.reshape(-1)) for gradient in gradients])
        flat.mul_(self.coefficient / self.world.size)
        distributed.all_reduce(flat)
        views = [v.view_as(g) for v, g in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)]
        torch._foreach_copy_(gradients, views)
        norm = self._norm() if self.find_overflow else self.norm
        return norm, torch.ones_like(norm) / scale

    def _present(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def _norm(self) -> Tensor:
        return torch.stack(torch._foreach_norm([_at_least_fp32(g) for g in self._present()])).norm()


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor
