"""fp8 numbers: their formats, the scales of a model's products, and the product itself.

Activations and weights are cast to e4m3, gradients to e5m2 (Micikevicius et al. 2022, arXiv
2209.05433). A tensor is multiplied by its scale, cast with saturation, and the product is divided
by both scales. The scale brings the largest magnitude of the step before to the largest number of
the format, so that a tensor is read once; the first step measures each tensor itself. In the
forward pass the tensor cores keep partial sums at lower precision, in the backward pass not.

What is not a number must not be hidden by the saturation: NaN stays NaN, and a largest magnitude
that is inf or NaN makes the step count as not finite, which stops the run.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bert.core.dist import World

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
INPUT, WEIGHT, GRADIENT = 0, 1, 2  # which tensor of a product
FORMATS = (FORWARD, FORWARD, BACKWARD)
# Of a tensor of tiny numbers, whose scale would be inf and its product NaN; has a normal inverse.
LARGEST_SCALE = 2.0**126
ROW_MULTIPLE = 16  # what the hardware's product wants of every dimension


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where and how a kernel casts a tensor to fp8.

    scale: what it is multiplied by; inverse: what undoes that; largest: raised to its largest
    magnitude; None if not tracked. fp32, 0-d.
    """

    dtype: torch.dtype
    scale: Tensor
    inverse: Tensor
    largest: Tensor | None

    @property
    def maximum(self) -> float:
        """The format's largest number."""
        return float(torch.finfo(self.dtype).max)


class Scaling:
    """Scales of all fp8 products of a model, and the largest magnitudes seen in the step in
    progress.

    scales, inverses, largest: fp32 [products, 3] on the device, by INPUT, WEIGHT and GRADIENT.
    ``calibrated``: a step has measured them, so that a scale is known before its tensor is
    computed. ``evaluates``: an evaluation in fp8 is under way, which changes nothing here. Both are
    known on the host, because they decide which kernels run. fast_backward: partial sums at lower
    precision in the backward pass, too.
    """

    def __init__(
        self, num_products: int, device: torch.device, *, fast_backward: bool = False
    ) -> None:
        self.calibrated = self.evaluates = False
        self.fast_backward = fast_backward
        self.scales, self.inverses = torch.ones(2, num_products, 3, device=device)
        self.largest = torch.zeros(num_products, 3, device=device)
        self.maxima = torch.tensor(
            [torch.finfo(dtype).max for dtype in FORMATS], device=device
        )

    def target(self, number: int, which: int) -> Target:
        """Cast target of one tensor of a product, with the scale known in advance."""
        scale, inverse, largest = (
            t[number, which] for t in (self.scales, self.inverses, self.largest)
        )
        return Target(
            dtype=FORMATS[which],
            scale=scale,
            inverse=inverse,
            # An evaluation must leave the scales of training as they are.
            largest=None if self.evaluates else largest,
        )

    @contextlib.contextmanager
    def evaluation(self, calibrated: bool = False) -> Iterator[None]:
        """Inside, products without a backward pass are in fp8 if a step has measured scales.

        calibrated: as if one had, with the scales that are there, for a graph that is recorded
        before the first step.
        """
        before = self.calibrated
        self.calibrated = before or calibrated
        self.evaluates = self.calibrated
        try:
            yield
        finally:
            self.calibrated, self.evaluates = before, False

    def target_for(self, x: Tensor, number: int, which: int) -> Target:
        """Cast target of x, which before the first step is read for its scale."""
        target = self.target(number, which)
        if self.calibrated:
            return target
        # The infinity norm is the largest magnitude, without a copy of abs(x).
        seen = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
        # Zeros alone, or an inf, give no scale: 1.
        scale = _scale(self.maxima[which], seen, torch.ones_like(seen))
        return Target(
            dtype=target.dtype, scale=scale, inverse=1 / scale, largest=target.largest
        )

    @torch.no_grad()
    def update(self, world: World) -> Tensor:
        """After a step: scales from the largest magnitudes seen in it. A tensor with none, or with
        inf, keeps its.

        The magnitudes are those of all ranks (a collective): equal scales everywhere, so that the
        ranks' gradients have the same resolution, and the checkpoint of rank 0 holds what every
        rank needs to resume exactly. 72 x 3 numbers for BERT-large are as quick as the smallest
        message, some ten microseconds of a step; to collect the scales of every rank only for a
        checkpoint would save that, at the price of a checkpoint that depends on the ranks' order.

        Returns whether all magnitudes were finite (bool, 0-d).
        """
        # As integers: the order of magnitudes is that of their bits, with NaN on top, which a
        # maximum might drop.
        world.max(self.largest.view(torch.int32))
        seen = self.largest
        finite = torch.isfinite(seen)
        self.scales.copy_(_scale(self.maxima, seen, self.scales))
        self.inverses.copy_(1 / self.scales)
        # In place: captured kernels raise the numbers in this memory.
        self.largest.zero_()
        self.calibrated = True
        return finite.all()

    def state_tensors(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        return [self.scales, self.inverses, self.largest]

    def state_dict(self) -> dict[str, Any]:
        """State for resuming, equal on all ranks."""
        return {"scales": self.scales.clone(), "calibrated": self.calibrated}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()``; of other products (FP8_TRIALS) the next step measures the
        scales.
        """
        if state["scales"].shape != self.scales.shape:
            return
        self.scales.copy_(state["scales"])
        self.inverses.copy_(1 / self.scales)
        self.calibrated = bool(state["calibrated"])


def _scale(maxima: Tensor, seen: Tensor, otherwise: Tensor) -> Tensor:
    """What brings the largest magnitudes seen to the formats' largest numbers; ``otherwise`` for 0,
    inf and NaN.
    """
    known = (seen > 0) & torch.isfinite(seen)
    return torch.where(known, (maxima / seen).clamp(max=LARGEST_SCALE), otherwise)


def product(
    a: Tensor,
    b: Tensor,
    a_inverse: Tensor,
    b_inverse: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast: bool,
    out: Tensor | None = None,
) -> Tensor:
    """a [M, K] row-major times b [K, N] column-major, both fp8, times both factors, plus bias [N]
    -> [M, N].

    ``fast`` lets the tensor cores keep their partial sums at lower precision. out: of ``dtype``,
    written where given.
    """
    # cuBLAS on the hardware; elsewhere the exact product of the same fp8 numbers, in fp32.
    if a.is_cuda:
        return torch._scaled_mm(
            a,
            b,
            a_inverse,
            b_inverse,
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=fast,
            out=out,
        )
    y = (a.float() @ b.float()) * (a_inverse * b_inverse)
    y = (y if bias is None else y + bias).to(dtype)
    return y if out is None else out.copy_(y)
