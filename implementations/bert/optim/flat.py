"""One rank's shard of a model's parameters in flat buffers, and the rules that update it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from bert.kernels import lamb as kernel
from bert.kernels import lans as lans_kernel
from bert.optim import lamb, lans
from bert.optim.layout import Segment
from bert.optim.rule import Pieces, Rule, is_decayed, squared_norms


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Flat buffers of equal length: fp32 masters, averaged gradient, weights as the model computes, the rule's states.

    ``names``: of all parameters of the model; ``segments``: which parts of them lie where. Zeros lie between.
    """

    names: list[str]
    segments: list[Segment]
    masters: Tensor
    gradient: Tensor
    weights: Tensor
    states: dict[str, Tensor] = field(default_factory=dict)

    def state(self, name: str, *, of_weights: bool = False) -> Tensor:
        """A state of the rule: zeros, or a copy of the first weights. It is saved and restored under its name."""
        self.states[name] = self.masters.clone() if of_weights else torch.zeros_like(self.masters)
        return self.states[name]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The segments of one of the buffers."""
        return [flat[segment.begin : segment.begin + segment.size] for segment in self.segments]


@dataclass(frozen=True, kw_only=True)
class ShardPieces(Pieces):
    """The segments of a shard."""

    shard: Shard

    def state(self, name: str, *, of_weights: bool = False) -> list[Tensor]:
        """See Pieces."""
        return self.shard.views(self.shard.state(name, of_weights=of_weights))


class FlatRule(Protocol):
    """A rule over a shard, in two halves: between them the sums are added up over the ranks."""

    num_steps: Tensor
    needs_norms: bool

    def squared_norm(self, flat: Tensor) -> Tensor:
        """Of a flat buffer (0-d, fp32 at least)."""
        ...

    def measure(self) -> Tensor:
        """Squared norms of the shard's gradient: of each parameter where the rule needs them, else of all [1]."""
        ...

    def prepare(self, grad_scale: Tensor | float, keep: Tensor | None, squares: Tensor | None) -> Tensor | None:
        """Updates the states; returns sums [parameters, n], or None. squares: ``measure()``, added up over the ranks.

        They are wanted where the rule needs norms.
        """
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
            ShardPieces(
                names=[shard.names[segment.parameter] for segment in shard.segments],
                masters=shard.views(shard.masters),
                device=shard.masters.device,
                shard=shard,
            )
        )
        self.num_steps, self.needs_norms = self.rule.num_steps, self.rule.needs_norms
        owners = [segment.parameter for segment in shard.segments]
        self.owners = torch.tensor(owners, dtype=torch.int64, device=shard.masters.device)

    def squared_norm(self, flat: Tensor) -> Tensor:
        """See FlatRule."""
        return squared_norms([flat]).sum()

    def measure(self) -> Tensor:
        """See FlatRule."""
        if not self.needs_norms:
            return squared_norms([self.shard.gradient])
        dtype = torch.float64 if self.shard.masters.dtype == torch.float64 else torch.float32
        whole = torch.zeros(len(self.shard.names), dtype=dtype, device=self.shard.masters.device)
        if self.gradients:
            whole.index_copy_(0, self.owners, squared_norms(self.gradients))
        return whole

    def prepare(self, grad_scale: Tensor | float, keep: Tensor | None, squares: Tensor | None) -> Tensor | None:
        """See FlatRule."""
        mine = squares.index_select(0, self.owners) if self.needs_norms and squares is not None else None
        sums = self.rule.prepare(self.gradients, grad_scale, keep, mine)
        if sums is None:
            return None
        whole = torch.zeros(len(self.shard.names), sums.shape[1], dtype=sums.dtype, device=sums.device)
        return whole.index_copy_(0, self.owners, sums)

    def apply(self, sums: Tensor | None, lr: Tensor | float, keep: Tensor | None) -> None:
        """See FlatRule."""
        self.rule.apply(None if sums is None else sums.index_select(0, self.owners), lr, keep)
        self.shard.weights.copy_(self.shard.masters)


class Scalars:
    """What changes from step to step, on the device, as kernels/lamb.py takes it."""

    def __init__(self, beta1: float, beta2: float, device: torch.device) -> None:
        self.betas = beta1, beta2
        self.num_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.values = torch.zeros(4, dtype=torch.float32, device=device)

    def advance(self, grad_scale: Tensor | float, keep: Tensor | None) -> None:
        """To the next step, unless not ``keep``."""
        self.num_steps += 1 if keep is None else keep
        steps = self.num_steps.clamp(min=1).double()
        factor = torch.as_tensor(grad_scale, dtype=torch.float32, device=self.values.device)
        self.values[1] = factor if keep is None else torch.where(keep, factor, float("nan"))
        for place, beta in enumerate(self.betas, start=2):
            self.values[place] = 1 / (1 - torch.pow(beta, steps))

    def with_rate(self, lr: Tensor | float) -> Tensor:
        """All four, with this learning rate."""
        self.values[0] = torch.as_tensor(lr, dtype=torch.float32, device=self.values.device)
        return self.values


class _FlatMoments:
    """Both moments of a shard, with what the kernels of a rule need besides."""

    def __init__(self, shard: Shard, beta1: float, beta2: float, weight_decay: float) -> None:
        self.shard = shard
        self.first, self.second = shard.state("first_moments"), shard.state("second_moments")
        self.scalars = Scalars(beta1, beta2, shard.masters.device)
        self.num_steps = self.scalars.num_steps
        self.layout = _kernel_layout(shard, weight_decay)


class FlatLamb(_FlatMoments):
    """LAMB by the two passes of kernels/lamb.py."""

    needs_norms = False

    def __init__(self, shard: Shard, config: lamb.Config, passes: kernel.Passes) -> None:
        super().__init__(shard, config.beta1, config.beta2, config.weight_decay)
        self.config, self.passes = config, passes

    def squared_norm(self, flat: Tensor) -> Tensor:
        """See FlatRule."""
        return self.passes.squared_norm(flat)

    def measure(self) -> Tensor:
        """See FlatRule."""
        return self.passes.squared_norm(self.shard.gradient).reshape(1)

    def prepare(self, grad_scale: Tensor | float, keep: Tensor | None, squares: Tensor | None) -> Tensor:
        """See FlatRule."""
        shard, config = self.shard, self.config
        self.scalars.advance(grad_scale, keep)
        return self.passes.moments(
            self.layout, shard.gradient, shard.masters, self.first, self.second, self.scalars.values,
            config.beta1, config.beta2, config.eps,
        )  # fmt: skip

    def apply(self, sums: Tensor | None, lr: Tensor | float, keep: Tensor | None) -> None:
        """See FlatRule."""
        shard = self.shard
        self.passes.update(
            self.layout, shard.masters, self.first, self.second, shard.weights, sums, self.scalars.with_rate(lr),
            self.config.eps,
        )  # fmt: skip


class FlatLans(_FlatMoments):
    """LANS by the three passes of kernels/lans.py."""

    needs_norms = True

    def __init__(self, shard: Shard, config: lans.Config) -> None:
        super().__init__(shard, config.beta1, config.beta2, config.weight_decay)
        self.config = config
        self.factors = torch.ones(len(shard.names), device=shard.masters.device)

    def squared_norm(self, flat: Tensor) -> Tensor:
        """See FlatRule."""
        return kernel.fused.squared_norm(flat)

    def measure(self) -> Tensor:
        """See FlatRule."""
        return lans_kernel.squared_norms(self.layout, self.shard.gradient)

    def prepare(self, grad_scale: Tensor | float, keep: Tensor | None, squares: Tensor | None) -> Tensor:
        """See FlatRule."""
        assert squares is not None
        shard, config = self.shard, self.config
        self.scalars.advance(grad_scale, keep)
        scale = torch.as_tensor(grad_scale, dtype=torch.float32, device=self.factors.device)
        norms = squares.sqrt() * scale
        self.factors.copy_(torch.where(norms > 0, scale / (norms + config.eps), scale))
        return lans_kernel.moments(
            self.layout, self.factors, shard.gradient, shard.masters, self.first, self.second, self.scalars.values,
            config.beta1, config.beta2, config.eps,
        )  # fmt: skip

    def apply(self, sums: Tensor | None, lr: Tensor | float, keep: Tensor | None) -> None:
        """See FlatRule."""
        assert sums is not None
        shard, config = self.shard, self.config
        lans_kernel.update(
            self.layout, self.factors, shard.gradient, shard.masters, self.first, self.second, shard.weights, sums,
            self.scalars.with_rate(lr), config.beta1, config.eps,
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
