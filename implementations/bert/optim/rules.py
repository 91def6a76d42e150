"""The update rules, OPTIMIZER, on lists of tensors.

A rule works on parts of parameters, flat: the segments in a rank's shard, whole ones in a group of
one. For a norm over a whole parameter the caller adds up the sums of all ranks that hold a part of
it (``Update.all_reduce_sum``).

A rule never waits for the device, so that a CUDA graph can replay it: what decides at run time,
such as whether a gradient overflowed, is a tensor, and both outcomes are computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from common.env import env

Scalar = Tensor | float  # a tensor (0-d) on the device, or a number


class Update(NamedTuple):
    """What a step takes besides the gradients.

    scale: factor of the gradients, which carries clipping and unscaling. apply_update: bool (0-d),
    if false nothing changes; None: true. grad_sq_norms [parts]: squared norm of the gradient of
    each part's whole parameter, before ``scale``; for rules that need norms. all_reduce_sum: sums
    [parts, num_sums] over the parts -> those over the whole parameters, by a collective.
    """

    lr: Scalar
    scale: Scalar
    apply_update: Tensor | None
    grad_sq_norms: Tensor | None
    all_reduce_sum: Callable[[Tensor], Tensor]


def is_decayed(name: str) -> bool:
    """True for a parameter that is decayed and scaled by a trust ratio: all but biases and
    LayerNorm, as in Google's BERT (optimization.py, exclude_from_weight_decay).
    """
    return not (name.endswith("bias") or "LayerNorm" in name)


@dataclass(frozen=True, kw_only=True)
class ParameterShards:
    """The parts of parameters that a rule updates: fp32 masters, flat, with names and shapes of
    their parameters.

    starts: element i of a part is element start + i of its parameter, flattened. state(name,
    of_weights): makes a state of the rule, of the masters' shapes: zeros, or a copy of the initial
    weights. keep(name, tensor): registers state of another shape or type,
    the same on every rank, as only one rank's is saved. low: the weights, if
    lower than the masters and of the gradients' type.
    """

    names: list[str]
    shapes: list[torch.Size]
    starts: list[int]
    masters: list[Tensor]
    device: torch.device
    state: Callable[..., list[Tensor]]
    keep: Callable[[str, Tensor], Tensor]
    low: list[Tensor] | None = None


class Rule:
    """needs_norms: a step needs the squared norms of whole gradients; needs_whole: the parts must be
    whole parameters, as for products of matrices; num_sums: columns of its sums over ranks.

    stateless: nothing but the masters changes; a rule without state that does not say so is
    refused, as it would be lost on resumption. capturable: a CUDA graph can hold a step.
    num_temporaries: tensors of the masters' size that a step makes at most: counted. decayed:
    indices of the parts with weight decay.
    """

    needs_norms = False
    needs_whole = False
    stateless = False
    capturable = True
    num_sums = 0
    num_temporaries = 3

    def __init__(self, shards: ParameterShards, config: Any = None) -> None:
        """config: settings of the rule, with its ``weight_decay`` if it has one."""
        self.shards = shards
        self.weight_decay = weight_decay = getattr(config, "weight_decay", 0.0)
        self.decayed = [
            i
            for i, name in enumerate(shards.names)
            if weight_decay and is_decayed(name)
        ]
        # On the device: with loss scaling only it knows whether a step counts.
        self.num_steps = torch.zeros((), dtype=torch.int64, device=shards.device)

    def step(self, gradients: list[Tensor], update: Update) -> None:
        """Updates states and masters by the gradients times ``update.scale``."""
        raise NotImplementedError

    def count_step(self, apply_update: Tensor | None) -> None:
        """Counts a step, unless it is skipped."""
        # True adds 1, without the host reading it.
        self.num_steps += 1 if apply_update is None else apply_update

    def rate(self, lr: Scalar) -> Tensor:
        """The learning rate as a tensor of the masters' type."""
        return torch.as_tensor(
            lr, dtype=self.shards.masters[0].dtype, device=self.shards.device
        )

    def add_decay(self, tensors: list[Tensor]) -> None:
        """Adds wd p to the tensors of decayed parameters."""
        if self.decayed:
            masters = [self.shards.masters[i] for i in self.decayed]
            torch._foreach_add_(
                [tensors[i] for i in self.decayed], masters, alpha=self.weight_decay
            )

    def decay_masters(self, rate: Tensor) -> None:
        """p *= 1 - rate wd, for decayed parameters."""
        if self.decayed:
            masters = [self.shards.masters[i] for i in self.decayed]
            torch._foreach_mul_(masters, 1 - rate * self.weight_decay)


class MomentRule(Rule):
    """A rule on the moments of Adam (Kingma & Ba 2015, arXiv 1412.6980).

    m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; direction = (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) +
    eps).
    """

    bias_correction = True  # else m and v are not corrected

    def __init__(
        self,
        shards: ParameterShards,
        config: LambConfig | LansConfig | AdamConfig | ACClipConfig,
    ) -> None:
        super().__init__(shards, config)
        self.beta1, self.beta2, self.eps = config.beta1, config.beta2, config.eps
        self.first = shards.state("first_moments")
        self.second = shards.state("second_moments")

    def update_moments(
        self, gradients: list[Tensor], apply_update: Tensor | None
    ) -> None:
        """Updates the moments by gradients of the masters' type, and counts the step."""
        self.count_step(apply_update)
        # A skipped step's gradients hold inf or nan, and in a moment these would stay.
        with restored_unless([*self.first, *self.second], apply_update):
            # m + (1-b1) (g - m), the form of the fused kernels.
            torch._foreach_lerp_(self.first, gradients, 1 - self.beta1)
            torch._foreach_mul_(self.second, self.beta2)
            torch._foreach_addcmul_(self.second, gradients, gradients, 1 - self.beta2)

    def denominators(self) -> list[Tensor]:
        """sqrt(v / (1-b2^t)) + eps, as new tensors."""
        correction = self.correction(self.beta2).to(self.second[0].dtype)
        roots = torch._foreach_div(self.second, correction)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, self.eps)
        return list(roots)

    def directions(self, denominators: list[Tensor]) -> list[Tensor]:
        """(m / (1-b1^t)) / denominators, as new tensors."""
        correction = self.correction(self.beta1).to(self.first[0].dtype)
        moments = torch._foreach_div(self.first, correction)
        torch._foreach_div_(moments, denominators)
        return list(moments)

    def descend(self, directions: list[Tensor], update: Update) -> None:
        """masters -= lr * directions."""
        if update.apply_update is not None:
            # Replaced, as nan times 0 is nan.
            directions = [torch.where(update.apply_update, d, 0.0) for d in directions]
        torch._foreach_mul_(directions, self.rate(update.lr))
        torch._foreach_sub_(self.shards.masters, directions)

    def correction(self, beta: float) -> Tensor:
        """1 - beta^t (0-d), or 1 without bias correction."""
        if not self.bias_correction:
            return torch.ones((), dtype=torch.float64, device=self.num_steps.device)
        # In fp64, as 1 - beta^t cancels; t = 0, if no step was taken, counts as 1 to avoid dividing
        # by 0.
        return 1 - torch.pow(beta, self.num_steps.clamp(min=1).double())


@contextlib.contextmanager
def restored_unless(
    tensors: Sequence[Tensor], apply_update: Tensor | None
) -> Iterator[None]:
    """Restores the tensors on exit unless ``apply_update``, whose value the host does not know."""
    if apply_update is None:
        yield
        return
    # A copy of the states, but only for fp16: no other precision skips steps.
    before = [tensor.clone() for tensor in tensors]
    yield
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(apply_update, tensor, old))


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Squared norms of tensors, in fp32 at least: [tensors]."""
    # Squares of fp16 numbers overflow from 256 on; in bf16 a long sum loses its addends.
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype)).square()


def trust_ratios(p_norms: Tensor, u_norms: Tensor) -> Tensor:
    """||p|| / ||u|| where both are positive, else 1."""
    return torch.where((p_norms > 0) & (u_norms > 0), p_norms / u_norms, 1.0)


def scaled(
    gradients: Sequence[Tensor], masters: Sequence[Tensor], scale: Scalar
) -> list[Tensor]:
    """The gradients in the masters' type, times ``scale``, as new tensors."""
    # Cast first: divided by the loss scale in fp16, small gradients would become 0.
    same_type = [g.to(m.dtype) for g, m in zip(gradients, masters, strict=True)]
    if isinstance(scale, Tensor):
        scale = scale.to(same_type[0].dtype)
    return list(torch._foreach_mul(same_type, scale))


@dataclass(frozen=True, kw_only=True)
class LambConfig:
    """Hyper-parameters of LAMB."""

    beta1: float = env(
        "OPT_LAMB_BETA_1", 0.9, "LAMB: decay of the first moment", at_least=0, below=1
    )
    beta2: float = env(
        "OPT_LAMB_BETA_2",
        0.999,
        "LAMB: decay of the second moment",
        at_least=0,
        below=1,
    )
    # Added to the root of the second moment; as in all published submissions.
    eps: float = 1e-6
    weight_decay: float = env(
        "WEIGHT_DECAY_RATE",
        0.01,
        "LAMB: decay of all but biases and LayerNorm",
        at_least=0,
    )
    ratio: str = env(
        "LAMB_RATIO",
        "decayed",
        "LAMB: parameters with a trust ratio; all: biases and LayerNorm too, as NVLAMB",
        choices=("decayed", "all"),
    )


class LambRule(MomentRule):
    """LAMB of the published MLPerf BERT submissions (apex's FusedLAMB with use_nvlamb off).

    With g the gradient times ``scale`` (which carries clipping and unscaling), per tensor p of step
    t: u = (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) + wd p; p -= lr * r * u, with r = ||p|| /
    ||u|| where weight decay applies (LAMB_RATIO=all: everywhere) and both norms are positive, else
    1 (You et al. 2020, arXiv 1904.00962, algorithm 2, with the trust ratio left out without decay).
    """

    num_sums = 2  # of p^2 and of u^2; 0 for parameters without a trust ratio
    num_temporaries = 2

    def __init__(self, shards: ParameterShards, config: LambConfig) -> None:
        super().__init__(shards, config)
        # Made once: a list as an index is copied to the device, which no graph captures.
        everywhere = list(range(len(shards.names)))
        self.adapted = everywhere if config.ratio == "all" else self.decayed
        self.adapted_index = torch.tensor(
            self.adapted, dtype=torch.int64, device=shards.device
        )

    def step(self, gradients: list[Tensor], update: Update) -> None:
        masters = self.shards.masters
        # The gradient is scaled before the moments see it: they outlive this step's scale.
        self.update_moments(
            scaled(gradients, masters, update.scale), update.apply_update
        )
        directions = self.directions(self.denominators())
        self.add_decay(directions)
        adapted = [directions[i] for i in self.adapted]
        sums = torch.zeros(
            len(masters), 2, dtype=masters[0].dtype, device=self.shards.device
        )
        if adapted:
            adapted_masters = [masters[i] for i in self.adapted]
            p_norms, u_norms = (
                torch.stack(torch._foreach_norm(tensors))
                for tensors in (adapted_masters, adapted)
            )
            norms = torch.stack([p_norms, u_norms], dim=1)
            sums.index_copy_(0, self.adapted_index, norms.square())
        # A collective: called even by a rank of whose parts none has a ratio.
        sums = update.all_reduce_sum(sums)
        if adapted:
            norms = sums.index_select(0, self.adapted_index).sqrt()
            ratios = trust_ratios(*norms.unbind(dim=1))
            torch._foreach_mul_(adapted, list(ratios.unbind()))
        self.descend(directions, update)


@dataclass(frozen=True, kw_only=True)
class LansConfig:
    """Hyper-parameters of LANS: those of Habana's BERT of 1.5B and 5B."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6  # added to norms and to the root of the second moment
    weight_decay: float = 0.01


class LansRule(MomentRule):
    """LANS: LAMB on normalised gradients with Nesterov's momentum (Zheng et al. 2020, arXiv
    2006.13484).

    With g the gradient times ``scale``, per tensor p of step t, n = g / (||g|| + eps), or g if it
    is 0: m = b1 m + (1-b1) n; v = b2 v + (1-b2) n^2; d = sqrt(v / (1-b2^t)) + eps; r = (m /
    (1-b1^t)) / d + wd p; c = n / d + wd p; p -= lr (b1 R(r) r + (1-b1) R(c) c), with R(x) = ||p|| /
    ||x|| where both are positive, else 1. Norms are those of whole parameters. Biases and LayerNorm
    are not decayed, but have a ratio as well.
    """

    needs_norms = True
    num_sums = 3  # of p^2, r^2 and c^2

    def step(self, gradients: list[Tensor], update: Update) -> None:
        assert update.grad_sq_norms is not None
        masters = self.shards.masters
        dtype = masters[0].dtype
        scale = torch.as_tensor(update.scale, dtype=dtype, device=self.shards.device)
        norms = update.grad_sq_norms.to(dtype).sqrt() * scale
        factors = torch.where(norms > 0, 1 / (norms + self.eps), 1.0)
        current = scaled(gradients, masters, update.scale)
        torch._foreach_mul_(current, list(factors.unbind()))
        self.update_moments(current, update.apply_update)
        denominators = self.denominators()
        momentum = self.directions(denominators)
        torch._foreach_div_(current, denominators)
        del denominators  # as large as the weights
        self.add_decay(momentum)
        self.add_decay(current)
        sq_norms = [squared_norms(tensors) for tensors in (masters, momentum, current)]
        sums = update.all_reduce_sum(torch.stack(sq_norms, dim=1))
        p_norm, r_norm, c_norm = sums.to(dtype).sqrt().unbind(dim=1)
        momentum_weight = self.beta1 * trust_ratios(p_norm, r_norm)
        current_weight = (1 - self.beta1) * trust_ratios(p_norm, c_norm)
        torch._foreach_mul_(momentum, list(momentum_weight.unbind()))
        torch._foreach_mul_(current, list(current_weight.unbind()))
        torch._foreach_add_(momentum, current)
        self.descend(momentum, update)


@dataclass(frozen=True, kw_only=True)
class AdamConfig:
    """Hyper-parameters of Adam."""

    beta1: float = env(
        "OPT_ADAM_BETA_1", 0.9, "Adam: decay of the first moment", at_least=0, below=1
    )
    beta2: float = env(
        "OPT_ADAM_BETA_2",
        0.999,
        "Adam: decay of the second moment",
        at_least=0,
        below=1,
    )
    eps: float = env(
        "OPT_ADAM_EPSILON",
        1e-8,
        "Adam: added to the root of the second moment",
        above=0,
    )
    weight_decay: float = env(
        "OPT_ADAM_WEIGHT_DECAY", 0.01, "Adam: decay, as WEIGHT_DECAY_RATE", at_least=0
    )


class AdamRule(MomentRule):
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101); biases and LayerNorm are not decayed.

    p -= lr * ((m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) + wd p).
    """

    def step(self, gradients: list[Tensor], update: Update) -> None:
        directions = scaled(gradients, self.shards.masters, update.scale)
        on_cpu = self.shards.device.type == "cpu"
        # PyTorch's kernel always corrects the bias, and as called here skips no step.
        if self.bias_correction and update.apply_update is None and on_cpu:
            self._step_by_pytorch(directions, float(update.lr))
            return
        self.update_moments(directions, update.apply_update)
        directions = self.directions(self.denominators())
        self.add_decay(directions)
        self.descend(directions, update)

    def _step_by_pytorch(self, gradients: list[Tensor], lr: float) -> None:
        """The whole update by PyTorch's fused CPU kernel, 4 times as fast as separate
        operations.
        """
        tensors = self.shards.masters, gradients, self.first, self.second
        step: Callable[..., None] = adamw  # its signature has 20 arguments by place
        # Two calls, as one takes a single weight decay for all its tensors.
        for decayed in (True, False):
            chosen = [
                i
                for i, name in enumerate(self.shards.names)
                if is_decayed(name) is decayed
            ]
            if not chosen:
                continue
            step(
                *([each[i] for i in chosen] for each in tensors),
                [],  # of AMSGrad
                # A copy each, in fp32: the kernel adds 1 to every step count that it is given.
                [self.num_steps.float() for _ in chosen],
                fused=True,
                amsgrad=False,
                maximize=False,
                lr=lr,
                beta1=self.beta1,
                beta2=self.beta2,
                weight_decay=self.weight_decay if decayed else 0.0,
                eps=self.eps,
            )
        self.num_steps += 1


class BertAdamRule(AdamRule):
    """AdamW with b1^t and b2^t taken as 0: BERT's own optimizer, with which it was published and
    fine-tuned (google-research/bert, optimization.py).
    """

    bias_correction = False


@dataclass(frozen=True, kw_only=True)
class ACClipConfig:
    """Hyper-parameters of ACClip: the defaults of Samsung's BERT of MLPerf Training v1.1."""

    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-5
    weight_decay: float = 1e-5
    alpha: float = 1.0  # moment of the clipping magnitude


class ACClipRule(MomentRule):
    """ACClip: momentum clipped element by element (Zhang et al. 2020, arXiv 1912.03194), as
    Samsung's BERT ran it.

    With g the gradient times ``scale``, element by element of step t: m = b1 m + (1-b1) g; v = b2 v
    + (1-b2) g^2; tau = b2 tau + (1-b2) |g|^alpha; k = min(tau^(1/alpha) / (|m| + eps), 1) /
    (sqrt(b2 v / (1-b2^t)) + eps); p -= lr / (1-b1^t) k m; then p *= 1 - lr wd (not biases and
    LayerNorm).
    """

    def __init__(self, shards: ParameterShards, config: ACClipConfig) -> None:
        super().__init__(shards, config)
        self.alpha = config.alpha
        self.magnitudes = shards.state("magnitudes")

    def step(self, gradients: list[Tensor], update: Update) -> None:
        masters, rate = self.shards.masters, self.rate(update.lr)
        values = scaled(gradients, masters, update.scale)
        self.update_moments(values, update.apply_update)
        powers = torch._foreach_pow(torch._foreach_abs(values), self.alpha)
        # Decayed by b2, as the second moment: Samsung's form.
        with restored_unless(self.magnitudes, update.apply_update):
            torch._foreach_lerp_(self.magnitudes, list(powers), 1 - self.beta2)
        del values, powers
        # k m of the formula, in place.
        steps = list(torch._foreach_pow(self.magnitudes, 1 / self.alpha))
        torch._foreach_div_(
            steps, torch._foreach_add(torch._foreach_abs(self.first), self.eps)
        )
        torch._foreach_clamp_max_(steps, 1.0)
        # b2 v and not v under the root, also Samsung's.
        correction = (self.beta2 / self.correction(self.beta2)).to(rate.dtype)
        denominators = torch._foreach_mul(self.second, correction)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, self.eps)
        torch._foreach_div_(steps, denominators)
        torch._foreach_mul_(steps, self.first)
        with restored_unless(masters, update.apply_update):
            torch._foreach_mul_(
                steps, rate / self.correction(self.beta1).to(rate.dtype)
            )
            torch._foreach_sub_(masters, steps)
            self.decay_masters(rate)


@dataclass(frozen=True, kw_only=True)
class MadgradConfig:
    """Hyper-parameters of MADGRAD: the defaults of its authors and of Samsung's BERT."""

    momentum: float = 0.9  # weight of the old weights
    eps: float = 1e-6  # added to the rate and to the denominator
    weight_decay: float = 0.0


class MadgradRule(Rule):
    """MADGRAD (Defazio & Jelassi 2021, arXiv 2101.11075) with decoupled weight decay, as Samsung's
    BERT ran it.

    With g the gradient times ``scale``, k the steps done before, x the first weights, L = (lr +
    eps) sqrt(k+1): p *= 1 - (lr + eps) wd (not biases and LayerNorm); nu += L g^2; s += L g; z = x
    - s / (cbrt(nu) + eps); p = momentum p + (1 - momentum) z.
    """

    num_temporaries = 5

    def __init__(self, shards: ParameterShards, config: MadgradConfig) -> None:
        super().__init__(shards, config)
        self.config = config
        self.squares = shards.state("gradient_squares")
        self.sums = shards.state("gradient_sums")
        self.first_weights = shards.state("first_weights", of_weights=True)

    def step(self, gradients: list[Tensor], update: Update) -> None:
        masters = self.shards.masters
        gradients = scaled(gradients, masters, update.scale)
        # eps is added to the rate as well, as in the authors' code.
        rate = self.rate(update.lr) + self.config.eps
        # k of the formula, the steps done, is on the device.
        weight = rate * (self.num_steps + 1).to(rate.dtype).sqrt()
        with restored_unless(
            [*masters, *self.squares, *self.sums], update.apply_update
        ):
            self.decay_masters(rate)
            weighted = torch._foreach_mul(gradients, weight)
            torch._foreach_add_(self.sums, weighted)
            torch._foreach_addcmul_(self.squares, weighted, gradients)
            # A sum of squares is never negative, so that this power is the cube root.
            roots = torch._foreach_pow(self.squares, 1 / 3)
            torch._foreach_add_(roots, self.config.eps)
            distances = torch._foreach_div(self.sums, list(roots))
            targets = torch._foreach_sub(self.first_weights, distances)
            torch._foreach_lerp_(masters, list(targets), 1 - self.config.momentum)
        self.count_step(update.apply_update)
