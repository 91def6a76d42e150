"""Numeric precision of weights and activations, and the loss scale that fp16 needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.env import ConfigError, env

LOW_PRECISION = (torch.float16, torch.bfloat16)
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision of weights and activations; the optimizer keeps fp32 masters."""

    precision: str = env(
        "PRECISION",
        "auto",
        "auto: bf16 on a GPU, fp16 on one below compute capability 8.0, fp32 on a CPU; fp8: bf16 with QKV and "
        "feed-forward products in fp8; tf32: fp32 with matrix products in tf32",
        choices=("auto", *DTYPES),
    )
    fp8_trials: str = env(
        "FP8_TRIALS",
        "none",
        "with PRECISION=fp8, unmeasured: projection (attention's output projection in fp8, too), fast_backward "
        "(fast sums in the backward pass)",
        choices=("none", "projection", "fast_backward", "projection,fast_backward"),
    )
    init_loss_scale: float = env(
        "INIT_LOSS_SCALE", 65536.0, "initial loss scale of fp16", above=0
    )
    loss_scale: float = env(
        "LOSS_SCALE", 0.0, "constant loss scale of fp16; 0: dynamic", at_least=0
    )

    def check(self, device: torch.device) -> None:
        """Raises ConfigError if the hardware does not support the precision."""
        name, on_gpu = self.precision, device.type == "cuda"
        if self.loss_scale and DTYPES[resolved(name, device)] != torch.float16:
            raise ConfigError(
                f"LOSS_SCALE={self.loss_scale:g} is for fp16: set PRECISION=fp16, or leave it unset"
            )
        if self.fp8_trials != "none" and name != "fp8":
            raise ConfigError(
                f"FP8_TRIALS={self.fp8_trials} does nothing without PRECISION=fp8"
            )
        if name not in ("fp8", "tf32"):
            return
        if on_gpu and torch.version.hip:
            raise ConfigError(
                f"PRECISION={name} is for NVIDIA GPUs; AMD's fp8 has other formats: use bf16"
            )
        if (
            name == "fp8"
            and on_gpu
            and torch.cuda.get_device_capability(device) < (8, 9)
        ):
            raise ConfigError(
                "PRECISION=fp8 needs compute capability 8.9 (Ada, Hopper) or later: use bf16"
            )
        if name == "tf32" and not (on_gpu and _is_ampere(device)):
            raise ConfigError(
                "PRECISION=tf32 needs a GPU of compute capability 8.0 (Ampere) or later: use fp32"
            )

    def resolve(self, device: torch.device) -> Precision:
        """Resolves the settings for ``device``."""
        name = resolved(self.precision, device)
        dtype = DTYPES[name]
        # bf16 has fp32's exponents, so that only gradients in fp16 underflow.
        first = self.loss_scale or self.init_loss_scale
        return Precision(
            dtype=dtype,
            fp8=name == "fp8",
            fp8_trials=frozenset(self.fp8_trials.split(",")),
            tf32=name == "tf32",
            init_loss_scale=first if dtype == torch.float16 else None,
            constant_loss_scale=self.loss_scale > 0,
        )


def resolved(name: str, device: torch.device) -> str:
    """PRECISION=name with ``auto`` resolved for ``device``."""
    if name != "auto":
        return name
    return "fp32" if device.type != "cuda" else "bf16" if _is_ampere(device) else "fp16"


def _is_ampere(device: torch.device) -> bool:
    """Whether the hardware has matrix products in bf16 and tf32: Ampere and later, not V100 and T4;
    AMD has bf16.
    """
    return torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The numeric precision of a run on its device.

    dtype: of weights and activations; tf32: for products of fp32 matrices; fp8: for the encoder's
    products; fp8_trials: of FP8_TRIALS; init_loss_scale: None without loss scaling;
    constant_loss_scale: it never changes.
    """

    dtype: torch.dtype
    tf32: bool = False
    fp8: bool = False
    fp8_trials: frozenset[str] = frozenset()
    init_loss_scale: float | None = None
    constant_loss_scale: bool = False
    # Good steps before the scale doubles: the default of torch.amp and of apex.
    growth_interval: int = 2000

    def apply(self) -> None:
        """Enables tf32 in cuBLAS if configured; else the default of PyTorch or the image
        remains.
        """
        if self.tf32:
            torch.backends.cuda.matmul.allow_tf32 = True

    @property
    def is_low(self) -> bool:
        """Whether weights are of lower precision than the optimizer's masters."""
        return self.dtype in LOW_PRECISION


def cast_with_masters(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Casts the model's parameters in place; returns the fp32 originals by name, or None if it is
    fp32 already.

    The optimizer's masters thus have a checkpoint's full precision.
    """
    if dtype == torch.float32:
        return None
    masters = {
        name: parameter.detach().clone() for name, parameter in model.named_parameters()
    }
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return masters


class LossScaler:
    """Loss scale: halved when a gradient overflows (the step is skipped), doubled after
    growth_interval good steps.

    All state is on the device, so that the host need not wait to know whether a step overflowed.
    """

    def __init__(
        self, precision: Precision, device: torch.device | None = None
    ) -> None:
        first = precision.init_loss_scale
        self.enabled, self.constant = first is not None, precision.constant_loss_scale
        # 1.0 without loss scaling, so that a step need not distinguish the two.
        self.scale = torch.tensor(1.0 if first is None else first, device=device)
        self.growth_interval = precision.growth_interval
        self.num_good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.num_skipped_steps = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Records whether the last step's gradients were finite (bool, 0-d)."""
        if not self.enabled:
            return
        # An overflow begins the count anew.
        self.num_good_steps.add_(1).mul_(finite)
        self.num_skipped_steps.add_(~finite)
        if self.constant:
            return
        grow = self.num_good_steps == self.growth_interval
        self.num_good_steps.mul_(~grow)
        # Not below 1: what still overflows there is a failure, which StepCounter.resolve reports.
        self.scale.mul_(torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5)).clamp_(
            min=1.0
        )

    def state_tensors(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        return [self.scale, self.num_good_steps, self.num_skipped_steps]

    def state_dict(self) -> dict[str, float]:
        """State for resuming."""
        counts = {
            "num_good_steps": int(self.num_good_steps),
            "num_skipped_steps": int(self.num_skipped_steps),
        }
        return {"scale": float(self.scale), **counts}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores ``state_dict()``."""
        self.scale.fill_(state["scale"])
        self.num_good_steps.fill_(int(state["num_good_steps"]))
        self.num_skipped_steps.fill_(int(state["num_skipped_steps"]))
