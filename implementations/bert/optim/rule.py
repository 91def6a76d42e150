"""What the update rules share: their pieces and states, moments with bias correction, on lists of tensors.

A rule works on whatever pieces of the parameters it is given: whole ones, or the segments in one rank's shard. It never
waits for the device. A step of it has two halves, because a norm over a parameter needs the sums of every rank that
holds a part of it; and a rule that needs the norms of the gradients too has them measured before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Scalar = Tensor | float  # a tensor (0-d) on the device, or a number


def is_decayed(name: str) -> bool:
    """True for a parameter that is decayed and scaled by a trust ratio: all but biases and LayerNorm."""
    return not (name.endswith("bias") or "LayerNorm" in name)


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The tensors that a rule updates: fp32 masters, with their parameters' names, and the states it has asked for."""

    names: list[str]
    masters: list[Tensor]
    device: torch.device
    states: dict[str, list[Tensor]] = field(default_factory=dict)

    def state(self, name: str, *, of_weights: bool = False) -> list[Tensor]:
        """A state of the rule, alike in shape to the masters: zeros, or a copy of the first weights.

        It is saved and restored under its name.
        """
        self.states[name] = [master.clone() if of_weights else torch.zeros_like(master) for master in self.masters]
        return self.states[name]


class Rule:
    """One step in two halves. ``keep`` is a bool tensor (0-d), or None for yes: where it is false nothing changes.

    needs_norms: whether ``prepare`` wants the squared norms of the gradients of whole parameters; num_sums: columns of
    what it returns; decayed: numbers of the pieces that are decayed, none without decay.
    """

    needs_norms = False
    num_sums = 0

    def __init__(self, pieces: Pieces, weight_decay: float) -> None:
        self.pieces, self.weight_decay = pieces, weight_decay
        self.decayed = [i for i, name in enumerate(pieces.names) if weight_decay and is_decayed(name)]
        self.num_steps = torch.zeros((), dtype=torch.int64, device=pieces.device)

    def prepare(
        self, gradients: list[Tensor], scale: Scalar, keep: Tensor | None, squares: Tensor | None
    ) -> Tensor | None:
        """Updates the states; returns sums to be added over all holders of parts [pieces, num_sums], or None.

        squares [pieces]: of the norm of each piece's whole parameter's gradient, before ``scale``.
        """
        raise NotImplementedError

    def apply(self, sums: Tensor | None, lr: Scalar, keep: Tensor | None) -> None:
        """Updates the masters. sums: as from ``prepare``, added over the holders of parts of each parameter."""
        raise NotImplementedError

    def add_decay(self, tensors: list[Tensor]) -> None:
        """Adds wd p to the tensors of parameters that are decayed."""
        if self.decayed:
            masters = [self.pieces.masters[i] for i in self.decayed]
            torch._foreach_add_([tensors[i] for i in self.decayed], masters, alpha=self.weight_decay)


class MomentRule(Rule):
    """A rule on the moments of Adam (Kingma & Ba 2015, arXiv 1412.6980) over the pieces.

    m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; direction = (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps).
    """

    bias_correction = True  # else m and v are taken as they are

    def __init__(self, pieces: Pieces, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
        super().__init__(pieces, weight_decay)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.first, self.second = pieces.state("first_moments"), pieces.state("second_moments")

    def update_moments(self, gradients: list[Tensor], keep: Tensor | None) -> None:
        """Takes in the gradients, of the masters' type, and counts the step."""
        self.num_steps += 1 if keep is None else keep
        with kept([*self.first, *self.second], keep):
            torch._foreach_lerp_(self.first, gradients, 1 - self.beta1)
            torch._foreach_mul_(self.second, self.beta2)
            torch._foreach_addcmul_(self.second, gradients, gradients, 1 - self.beta2)

    def denominators(self) -> list[Tensor]:
        """sqrt(v / (1-b2^t)) + eps, as new tensors."""
        found = torch._foreach_div(self.second, self.correction(self.beta2).to(self.second[0].dtype))
        torch._foreach_sqrt_(found)
        torch._foreach_add_(found, self.eps)
        return list(found)

    def directions(self, denominators: list[Tensor]) -> list[Tensor]:
        """(m / (1-b1^t)) / denominators, as new tensors."""
        found = torch._foreach_div(self.first, self.correction(self.beta1).to(self.first[0].dtype))
        torch._foreach_div_(found, denominators)
        return list(found)

    def descend(self, updates: list[Tensor], lr: Scalar, keep: Tensor | None) -> None:
        """masters -= lr * updates."""
        masters = self.pieces.masters
        if keep is not None:
            updates = [torch.where(keep, update, 0.0) for update in updates]
        torch._foreach_mul_(updates, torch.as_tensor(lr, dtype=masters[0].dtype, device=masters[0].device))
        torch._foreach_sub_(masters, updates)

    def correction(self, beta: float) -> Tensor:
        """1 - beta^t (0-d), or 1 without bias correction."""
        if not self.bias_correction:
            return torch.ones((), dtype=torch.float64, device=self.num_steps.device)
        # In fp64 on the device: 1 - beta^t cancels. A step that was never taken (t = 0) divides by 1 - beta, not by 0.
        return 1 - torch.pow(beta, self.num_steps.clamp(min=1).double())


@contextlib.contextmanager
def kept(tensors: Sequence[Tensor], keep: Tensor | None) -> Iterator[None]:
    """Where not ``keep``, the tensors are afterwards what they were before."""
    before = [] if keep is None else [tensor.clone() for tensor in tensors]
    yield
    if keep is not None:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(keep, tensor, old))


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Of each tensor (in fp32 at least): [tensors]."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype)).square()


def trust_ratios(p_norms: Tensor, u_norms: Tensor) -> Tensor:
    """||p|| / ||u|| where both are positive, else 1."""
    return torch.where((p_norms > 0) & (u_norms > 0), p_norms / u_norms, 1.0)


def scaled(gradients: Sequence[Tensor], masters: Sequence[Tensor], scale: Scalar) -> list[Tensor]:
    """The gradients in the masters' type, times ``scale``, as new tensors."""
    same_type = [g.to(m.dtype) for g, m in zip(gradients, masters, strict=True)]
    if isinstance(scale, Tensor):
        scale = scale.to(same_type[0].dtype)
    return list(torch._foreach_mul(same_type, scale))
