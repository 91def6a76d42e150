"""The update rules, OPTIMIZER, on lists of tensors.

A rule works on pieces of parameters: whole ones, or the segments in a rank's shard. It never waits for the device. For
a norm over a parameter the caller adds up the sums of all ranks that hold a part of it (``total``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from common.env import env

Tensors = list[Tensor]
Maybe = Tensor | None
Scalar = Tensor | float  # a tensor (0-d) on the device, or a number
Total = Callable[
    [Tensor], Tensor
]  # sums over pieces -> those over the whole parameters; a collective


def is_decayed(name: str) -> bool:
    """True for a parameter that is decayed and scaled by a trust ratio: all but biases and LayerNorm."""
    return not (name.endswith("bias") or "LayerNorm" in name)


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The tensors that a rule updates: fp32 masters, with their parameters' names.

    state(name, of_weights): makes a state of the rule, of the masters' shapes: zeros, or a copy of the initial weights.
    """

    names: list[str]
    masters: list[Tensor]
    device: torch.device
    state: Callable[..., list[Tensor]]


class Rule:
    """needs_norms: a step needs the squared norms of whole gradients; num_sums: columns of its sums over ranks.

    decayed: indices of the pieces with weight decay.
    """

    needs_norms = False
    num_sums = 0

    def __init__(self, pieces: Pieces, weight_decay: float) -> None:
        self.pieces, self.weight_decay = pieces, weight_decay
        self.decayed = [
            i for i, name in enumerate(pieces.names) if weight_decay and is_decayed(name)
        ]
        self.num_steps = torch.zeros((), dtype=torch.int64, device=pieces.device)

    def step(
        self,
        gradients: Tensors,
        lr: Scalar,
        scale: Scalar,
        keep: Maybe,
        squares: Maybe,
        total: Total,
    ) -> None:
        """Updates states and masters by the gradients times ``scale``.

        keep: bool (0-d), if false nothing changes; None: true. squares [pieces]: squared norm of the gradient of each
        piece's whole parameter, before ``scale``. total: takes sums [pieces, num_sums].
        """
        raise NotImplementedError

    def rate(self, lr: Scalar) -> Tensor:
        """The learning rate as a tensor of the masters' type."""
        return torch.as_tensor(lr, dtype=self.pieces.masters[0].dtype, device=self.pieces.device)

    def add_decay(self, tensors: list[Tensor]) -> None:
        """Adds wd p to the tensors of decayed parameters."""
        if self.decayed:
            masters = [self.pieces.masters[i] for i in self.decayed]
            torch._foreach_add_(
                [tensors[i] for i in self.decayed], masters, alpha=self.weight_decay
            )


class MomentRule(Rule):
    """A rule on the moments of Adam (Kingma & Ba 2015, arXiv 1412.6980) over the pieces.

    m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; direction = (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps).
    """

    bias_correction = True  # else m and v are not corrected

    def __init__(
        self, pieces: Pieces, config: LambConfig | LansConfig | AdamConfig | ACClipConfig
    ) -> None:
        super().__init__(pieces, config.weight_decay)
        self.beta1, self.beta2, self.eps = config.beta1, config.beta2, config.eps
        self.first, self.second = pieces.state("first_moments"), pieces.state("second_moments")

    def update_moments(self, gradients: list[Tensor], keep: Tensor | None) -> None:
        """Updates the moments by gradients of the masters' type, and counts the step."""
        self.num_steps += 1 if keep is None else keep
        with kept([*self.first, *self.second], keep):
            torch._foreach_lerp_(self.first, gradients, 1 - self.beta1)
            torch._foreach_mul_(self.second, self.beta2)
            torch._foreach_addcmul_(self.second, gradients, gradients, 1 - self.beta2)

    def denominators(self) -> list[Tensor]:
        """sqrt(v / (1-b2^t)) + eps, as new tensors."""
        found = torch._foreach_div(
            self.second, self.correction(self.beta2).to(self.second[0].dtype)
        )
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
        if keep is not None:
            updates = [torch.where(keep, update, 0.0) for update in updates]
        torch._foreach_mul_(updates, self.rate(lr))
        torch._foreach_sub_(self.pieces.masters, updates)

    def correction(self, beta: float) -> Tensor:
        """1 - beta^t (0-d), or 1 without bias correction."""
        if not self.bias_correction:
            return torch.ones((), dtype=torch.float64, device=self.num_steps.device)
        # In fp64, as 1 - beta^t cancels; t = 0, if no step was taken, counts as 1 to avoid dividing by 0.
        return 1 - torch.pow(beta, self.num_steps.clamp(min=1).double())


@contextlib.contextmanager
def kept(tensors: Sequence[Tensor], keep: Tensor | None) -> Iterator[None]:
    """Restores the tensors on exit unless ``keep``."""
    before = [] if keep is None else [tensor.clone() for tensor in tensors]
    yield
    if keep is not None:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(keep, tensor, old))


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Squared norms of tensors, in fp32 at least: [tensors]."""
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


@dataclass(frozen=True, kw_only=True)
class LambConfig:
    """Hyper-parameters of LAMB."""

    beta1: float = env(
        "OPT_LAMB_BETA_1", 0.9, at_least=0, below=1, doc="LAMB: decay of the first moment"
    )
    beta2: float = env(
        "OPT_LAMB_BETA_2", 0.999, at_least=0, below=1, doc="LAMB: decay of the second moment"
    )
    eps: float = env(
        "OPT_EPSILON", 1e-6, above=0, doc="LAMB: added to the root of the second moment"
    )
    weight_decay: float = env(
        "WEIGHT_DECAY_RATE", 0.01, at_least=0, doc="LAMB: decay of all but biases and LayerNorm"
    )


class LambRule(MomentRule):
    """LAMB of the published MLPerf BERT submissions (apex's FusedLAMB with use_nvlamb off).

    With g the gradient times ``scale`` (which carries clipping and unscaling), per tensor p of step t:
    u = (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) + wd p; p -= lr * r * u, with r = ||p|| / ||u|| where weight decay
    applies and both norms are positive, else 1 (You et al. 2020, arXiv 1904.00962,
    algorithm 2, with the trust ratio left out without decay).
    """

    num_sums = 2  # of p^2 and of u^2; 0 for parameters without a trust ratio

    def __init__(self, pieces: Pieces, config: LambConfig) -> None:
        super().__init__(pieces, config)
        self.decayed_index = torch.tensor(self.decayed, dtype=torch.int64, device=pieces.device)

    def step(
        self,
        gradients: Tensors,
        lr: Scalar,
        scale: Scalar,
        keep: Maybe,
        squares: Maybe,
        total: Total,
    ) -> None:
        masters = self.pieces.masters
        self.update_moments(scaled(gradients, masters, scale), keep)
        updates = self.directions(self.denominators())
        self.add_decay(updates)
        sums = torch.zeros(len(masters), 2, dtype=masters[0].dtype, device=self.pieces.device)
        adapted = [updates[i] for i in self.decayed]
        if adapted:
            parts = [masters[i] for i in self.decayed], adapted
            norms = torch.stack([torch.stack(torch._foreach_norm(x)) for x in parts], dim=1)
            sums.index_copy_(0, self.decayed_index, norms.square())
        sums = total(sums)
        if adapted:
            ratios = trust_ratios(*sums.index_select(0, self.decayed_index).sqrt().unbind(dim=1))
            torch._foreach_mul_(adapted, list(ratios.unbind()))
        self.descend(updates, lr, keep)


@dataclass(frozen=True, kw_only=True)
class LansConfig:
    """Hyper-parameters of LANS: those of Habana's BERT of 1.5B and 5B."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6  # added to norms and to the root of the second moment
    weight_decay: float = 0.01


class LansRule(MomentRule):
    """LANS: LAMB on normalised gradients with Nesterov's momentum (Zheng et al. 2020, arXiv 2006.13484).

    With g the gradient times ``scale``, per tensor p of step t, n = g / (||g|| + eps), or g if it is 0:
    m = b1 m + (1-b1) n; v = b2 v + (1-b2) n^2; d = sqrt(v / (1-b2^t)) + eps; r = (m / (1-b1^t)) / d + wd p;
    c = n / d + wd p; p -= lr (b1 R(r) r + (1-b1) R(c) c), with R(x) = ||p|| / ||x|| where both are positive, else 1.
    Norms are those of whole parameters. Biases and LayerNorm are not decayed, but have a ratio as well.
    """

    needs_norms = True
    num_sums = 3  # of p^2, r^2 and c^2

    def step(
        self,
        gradients: Tensors,
        lr: Scalar,
        scale: Scalar,
        keep: Maybe,
        squares: Maybe,
        total: Total,
    ) -> None:
        assert squares is not None
        masters = self.pieces.masters
        dtype = masters[0].dtype
        norms = squares.to(dtype).sqrt() * torch.as_tensor(
            scale, dtype=dtype, device=self.pieces.device
        )
        factors = torch.where(norms > 0, 1 / (norms + self.eps), 1.0)
        current = scaled(gradients, masters, scale)
        torch._foreach_mul_(current, list(factors.unbind()))
        self.update_moments(current, keep)
        denominators = self.denominators()
        momentum = self.directions(denominators)
        torch._foreach_div_(current, denominators)
        del denominators
        self.add_decay(momentum)
        self.add_decay(current)
        sums = total(torch.stack([squared_norms(x) for x in (masters, momentum, current)], dim=1))
        p_norm, r_norm, c_norm = sums.to(dtype).sqrt().unbind(dim=1)
        torch._foreach_mul_(momentum, list((self.beta1 * trust_ratios(p_norm, r_norm)).unbind()))
        torch._foreach_mul_(
            current, list(((1 - self.beta1) * trust_ratios(p_norm, c_norm)).unbind())
        )
        torch._foreach_add_(momentum, current)
        self.descend(momentum, lr, keep)


@dataclass(frozen=True, kw_only=True)
class AdamConfig:
    """Hyper-parameters of Adam."""

    beta1: float = env(
        "OPT_ADAM_BETA_1", 0.9, at_least=0, below=1, doc="Adam: decay of the first moment"
    )
    beta2: float = env(
        "OPT_ADAM_BETA_2", 0.999, at_least=0, below=1, doc="Adam: decay of the second moment"
    )
    eps: float = env(
        "OPT_ADAM_EPSILON", 1e-8, above=0, doc="Adam: added to the root of the second moment"
    )
    weight_decay: float = env(
        "OPT_ADAM_WEIGHT_DECAY", 0.01, at_least=0, doc="Adam: decay, as WEIGHT_DECAY_RATE"
    )
    bias_correction: bool = env(
        "OPT_ADAM_BIAS_CORRECTION", True, doc="Adam: 0: without it, as BERT's fine-tuning"
    )


class AdamRule(MomentRule):
    """p -= lr * (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) (Kingma & Ba 2015, arXiv 1412.6980).

    ``decoupled`` adds wd p to the update (AdamW; Loshchilov & Hutter 2019, arXiv 1711.05101); otherwise wd p is added
    to the gradient. Biases and LayerNorm are not decayed. Without bias correction b1^t and b2^t are taken as 0.
    """

    def __init__(self, pieces: Pieces, config: AdamConfig, decoupled: bool) -> None:
        super().__init__(pieces, config)
        self.decoupled, self.bias_correction = decoupled, config.bias_correction

    def step(
        self,
        gradients: Tensors,
        lr: Scalar,
        scale: Scalar,
        keep: Maybe,
        squares: Maybe,
        total: Total,
    ) -> None:
        updates = scaled(gradients, self.pieces.masters, scale)
        if self.bias_correction and keep is None and self.pieces.device.type == "cpu":
            self._step_by_pytorch(updates, float(lr))
            return
        if not self.decoupled:
            self.add_decay(updates)
        self.update_moments(updates, keep)
        updates = self.directions(self.denominators())
        if self.decoupled:
            self.add_decay(updates)
        self.descend(updates, lr, keep)

    def _step_by_pytorch(self, gradients: list[Tensor], lr: float) -> None:
        """The whole update by PyTorch's fused CPU kernel, 4 times as fast as separate operations."""
        for decayed in (True, False):
            chosen = [i for i, name in enumerate(self.pieces.names) if is_decayed(name) is decayed]
            if chosen:
                lists = [
                    [x[i] for i in chosen]
                    for x in (self.pieces.masters, gradients, self.first, self.second)
                ]
                step: Callable[..., None] = adamw if self.decoupled else adam
                step(
                    *lists, [], [self.num_steps.float() for _ in chosen],
                    fused=True, amsgrad=False, maximize=False, lr=lr, beta1=self.beta1, beta2=self.beta2,
                    weight_decay=self.weight_decay if decayed else 0.0, eps=self.eps,
                )  # fmt: skip
        self.num_steps += 1


@dataclass(frozen=True, kw_only=True)
class ACClipConfig:
    """Hyper-parameters of ACClip: the defaults of Samsung's BERT of MLPerf Training v1.1."""

    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-5
    weight_decay: float = 1e-5
    alpha: float = 1.0  # moment of the clipping magnitude


class ACClipRule(MomentRule):
    """ACClip: momentum clipped element by element (Zhang et al. 2020, arXiv 1912.03194), as Samsung's BERT ran it.

    With g the gradient times ``scale``, element by element of step t:
    m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; tau = b2 tau + (1-b2) |g|^alpha;
    k = min(tau^(1/alpha) / (|m| + eps), 1) / (sqrt(b2 v / (1-b2^t)) + eps); p -= lr / (1-b1^t) k m; then p *= 1 - lr wd
    (not biases and LayerNorm).
    """

    def __init__(self, pieces: Pieces, config: ACClipConfig) -> None:
        super().__init__(pieces, config)
        self.alpha = config.alpha
        self.magnitudes = pieces.state("magnitudes")

    def step(
        self,
        gradients: Tensors,
        lr: Scalar,
        scale: Scalar,
        keep: Maybe,
        squares: Maybe,
        total: Total,
    ) -> None:
        masters, rate = self.pieces.masters, self.rate(lr)
        values = scaled(gradients, masters, scale)
        self.update_moments(values, keep)
        powers = torch._foreach_pow(torch._foreach_abs(values), self.alpha)
        with kept(self.magnitudes, keep):
            torch._foreach_lerp_(self.magnitudes, list(powers), 1 - self.beta2)
        del values, powers
        limits = list(torch._foreach_pow(self.magnitudes, 1 / self.alpha))
        torch._foreach_div_(limits, torch._foreach_add(torch._foreach_abs(self.first), self.eps))
        torch._foreach_clamp_max_(limits, 1.0)
        denominators = torch._foreach_mul(
            self.second, (self.beta2 / self.correction(self.beta2)).to(rate.dtype)
        )
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, self.eps)
        torch._foreach_div_(limits, denominators)
        torch._foreach_mul_(limits, self.first)
        with kept(masters, keep):
            torch._foreach_mul_(limits, rate / self.correction(self.beta1).to(rate.dtype))
            torch._foreach_sub_(masters, limits)
            if self.decayed:
                torch._foreach_mul_(
                    [masters[i] for i in self.decayed], 1 - rate * self.weight_decay
                )


@dataclass(frozen=True, kw_only=True)
class MadgradConfig:
    """Hyper-parameters of MADGRAD: the defaults of its authors and of Samsung's BERT."""

    momentum: float = 0.9  # weight of the old weights
    eps: float = 1e-6  # added to the rate and to the denominator
    weight_decay: float = 0.0


class MadgradRule(Rule):
    """MADGRAD (Defazio & Jelassi 2021, arXiv 2101.11075) with decoupled weight decay, as Samsung's BERT ran it.

    With g the gradient times ``scale``, k the steps done before, x the first weights, L = (lr + eps) sqrt(k+1):
    p *= 1 - (lr + eps) wd (not biases and LayerNorm); nu += L g^2; s += L g; z = x - s / (cbrt(nu) + eps);
    p = momentum p + (1 - momentum) z.
    """

    def __init__(self, pieces: Pieces, config: MadgradConfig) -> None:
        super().__init__(pieces, config.weight_decay)
        self.config = config
        self.squares, self.sums = pieces.state("gradient_squares"), pieces.state("gradient_sums")
        self.first_weights = pieces.state("first_weights", of_weights=True)

    def step(
        self,
        gradients: Tensors,
        lr: Scalar,
        scale: Scalar,
        keep: Maybe,
        squares: Maybe,
        total: Total,
    ) -> None:
        config, masters = self.config, self.pieces.masters
        gradients = scaled(gradients, masters, scale)
        rate = self.rate(lr) + config.eps
        weight = rate * (self.num_steps + 1).to(rate.dtype).sqrt()
        with kept([*masters, *self.squares, *self.sums], keep):
            if self.decayed:
                torch._foreach_mul_(
                    [masters[i] for i in self.decayed], 1 - rate * config.weight_decay
                )
            weighted = torch._foreach_mul(gradients, weight)
            torch._foreach_add_(self.sums, weighted)
            torch._foreach_addcmul_(self.squares, weighted, gradients)
            roots = torch._foreach_pow(self.squares, 1 / 3)
            torch._foreach_add_(roots, config.eps)
            targets = torch._foreach_sub(
                self.first_weights, torch._foreach_div(self.sums, list(roots))
            )
            torch._foreach_lerp_(masters, list(targets), 1 - config.momentum)
        self.num_steps += 1 if keep is None else keep
