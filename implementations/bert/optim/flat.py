"""One rank's shard of a model's parameters in flat buffers, and the rules that update it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bert.kernels import lamb as kernel
from bert.optim import lamb
from bert.optim.layout import Segment
from bert.optim.rule import Pieces, Rule, is_decayed


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Flat buffers of equal length: fp32 masters and moments, averaged gradient, weights as the model computes.

    ``names``: of all parameters of the model; ``segments``: which parts of them lie where. Zeros lie between.
    """

    names: list[str]
    segments: list[Segment]
    masters: Tensor
    first_moments: Tensor
    second_moments: Tensor
    gradient: Tensor
    weights: Tensor

    def views(self, flat: Tensor) -> list[Tensor]:
        """The segments of one of the buffers."""
        return [flat[segment.begin : segment.begin + segment.size] for segment in self.segments]


class FlatRule(Protocol):
    """A rule over a shard, in two halves: between them the sums are added up over the ranks."""

    num_steps: Tensor

    def squared_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Of several buffers together (0-d, fp32 at least)."""
        ...

    def prepare(self, grad_scale: Tensor | float, keep: Tensor | None) -> Tensor | None:
        """Updates the moments; returns sums [parameters, n], or None."""
        ...

    def apply(self, sums: Tensor | None, lr: Tensor | float, keep: Tensor | None) -> None:
        """Updates masters and weights."""
        ...


class Piecewise:
    """A rule on lists of tensors, applied to the segments."""

    def __init__(self, shard: Shard, make_rule: Callable[[Pieces], Rule]) -> None:
        self.shard = shard
        self.gradients = shard.views(shard.gradient)
        self.rule = make_rule(
            Pieces(
                names=[shard.names[segment.parameter] for segment in shard.segments],
                masters=shard.views(shard.masters),
                first_moments=shard.views(shard.first_moments),
                second_moments=shard.views(shard.second_moments),
                device=shard.masters.device,
            )
        )
        self.num_steps = self.rule.num_steps
        self.owners = torch.tensor([segment.parameter for segment in shard.segments], device=shard.masters.device)

    def squared_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """See FlatRule."""
        dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype)).square().sum()

    def prepare(self, grad_scale: Tensor | float, keep: Tensor | None) -> Tensor | None:
        """See FlatRule."""
        sums = self.rule.prepare(self.gradients, grad_scale, keep)
        if sums is None:
            return None
        whole = torch.zeros(len(self.shard.names), sums.shape[1], dtype=sums.dtype, device=sums.device)
        return whole.index_copy_(0, self.owners, sums)

    def apply(self, sums: Tensor | None, lr: Tensor | float, keep: Tensor | None) -> None:
        """See FlatRule."""
        self.rule.apply(None if sums is None else sums.index_select(0, self.owners), lr, keep)
        self.shard.weights.copy_(self.shard.masters)


class FlatLamb:
    """LAMB by the two passes of kernels/lamb.py."""

    def __init__(self, shard: Shard, config: lamb.Config, passes: kernel.Passes) -> None:
        self.shard, self.config, self.passes = shard, config, passes
        device = shard.masters.device
        self.num_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.scalars = torch.zeros(4, dtype=torch.float32, device=device)
        self.layout = _kernel_layout(shard, config.weight_decay)

    def squared_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """See FlatRule."""
        return torch.stack([self.passes.squared_norm(tensor) for tensor in tensors]).sum()

    def prepare(self, grad_scale: Tensor | float, keep: Tensor | None) -> Tensor:
        """See FlatRule."""
        shard, config = self.shard, self.config
        self.num_steps += 1 if keep is None else keep
        steps = self.num_steps.clamp(min=1).double()
        factor = torch.as_tensor(grad_scale, dtype=torch.float32, device=self.scalars.device)
        self.scalars[1] = factor if keep is None else torch.where(keep, factor, float("nan"))
        self.scalars[2] = 1 / (1 - torch.pow(config.beta1, steps))
        self.scalars[3] = 1 / (1 - torch.pow(config.beta2, steps))
        return self.passes.moments(
            self.layout, shard.gradient, shard.masters, shard.first_moments, shard.second_moments, self.scalars,
            config.beta1, config.beta2, config.eps,
        )  # fmt: skip

    def apply(self, sums: Tensor | None, lr: Tensor | float, keep: Tensor | None) -> None:
        """See FlatRule."""
        shard = self.shard
        self.scalars[0] = torch.as_tensor(lr, dtype=torch.float32, device=self.scalars.device)
        self.passes.update(
            self.layout, shard.masters, shard.first_moments, shard.second_moments, shard.weights, sums, self.scalars,
            self.config.eps,
        )  # fmt: skip


def _kernel_layout(shard: Shard, weight_decay: float) -> kernel.Layout:
    """The kernel's table of chunks: a parameter's part with the zeros behind it; an empty span where there is none."""
    parts = {segment.parameter: segment for segment in shard.segments}
    spans = []
    for number in range(len(shard.names)):
        part = parts.get(number)
        begin = part.begin if part else 0
        size = part.size if part else 0
        spans.append((begin, begin + -(-size // kernel.ALIGNMENT) * kernel.ALIGNMENT))
    decays = [weight_decay if is_decayed(name) else 0.0 for name in shard.names]
    return kernel.spans_layout(shard.masters.numel(), spans, decays, shard.masters.device)
