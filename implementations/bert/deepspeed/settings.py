"""ENGINE and DEEPSPEED_CONFIG: what DeepSpeed is given, of its users' JSON and of our variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert import optim
from bert.core.env import ConfigError, env
from bert.deepspeed import ds_config, ds_zero
from bert.deepspeed.ds_values import section
from bert.deepspeed.step import check_fp16, load
from bert.kernels.precision import Precision

INSTEAD = {"WARMUP_STEPS": "WARMUP_PROPORTION"}  # the variable that says the same in another unit
NEVER = 1 << 62  # steps between DeepSpeed's own progress lines
WRITE_ELSEWHERE = {"use_node_local_storage", "writer"}  # entries by which files lie on several nodes, or come later


@dataclass(frozen=True, kw_only=True)
class Config:
    """Who shards and steps."""

    engine: str = env(
        "ENGINE",
        "own",
        choices=("own", "deepspeed"),
        doc="what divides weights, gradients and states over the ranks: this trainer, or DeepSpeed (docs/train.md)",
    )
    path: Path | None = env("DEEPSPEED_CONFIG", None, doc="ENGINE=deepspeed: DeepSpeed's JSON")

    checkpoints: bool = env(
        "DEEPSPEED_CHECKPOINTS",
        False,
        doc="1 with ENGINE=deepspeed: DeepSpeed's checkpoints, a shard a rank on a folder that all nodes see",
    )

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed is the engine."""
        return self.engine == "deepspeed"

    def json(self) -> dict[str, Any]:
        """What the file says. Raises ConfigError for one that is not there or is none."""
        if self.path is None:
            raise ConfigError("ENGINE=deepspeed and DEEPSPEED_CONFIG is not set: give DeepSpeed's JSON")
        return ds_config.read(self.path)

    def check(
        self, optimizer: optim.Config, precision: Precision, device: torch.device, others: Mapping[str, bool]
    ) -> None:
        """Raises ConfigError for what DeepSpeed cannot do, and where it is absent. others: setting -> is it made?"""
        if not self.is_deepspeed:
            if self.checkpoints:
                raise ConfigError("DEEPSPEED_CHECKPOINTS=1 and ENGINE is not deepspeed: set it, or unset this")
            if self.path is not None:
                raise ConfigError(f"DEEPSPEED_CONFIG={self.path} and ENGINE is not deepspeed: set it, or unset this")
            return
        found = self.json()
        zero = ds_zero.of(found)
        deepspeed = load()
        if self.checkpoints and (
            elsewhere := sorted(WRITE_ELSEWHERE & section(found.get("checkpoint", {}), "checkpoint").keys())
        ):
            raise ConfigError(
                f"DEEPSPEED_CHECKPOINTS=1 and checkpoint.{elsewhere[0]} in {self.path}: it would get its name "
                "before it is whole: take the entry out"
            )
        if zero.get("stage", 0) == 0:
            raise ConfigError(
                f"ENGINE=deepspeed and zero_optimization.stage is 0 in {self.path}: set 1, 2 or 3; without ZeRO, unset "
                "ENGINE"
            )
        for key, offload in ds_zero.offloads(zero).items():
            if offload["device"] == "nvme" or offload.get("ratio", 1) != 1 or offload.get("super_offload"):
                raise ConfigError(
                    f"ENGINE=deepspeed: {self.path}: {key}: device nvme, a ratio and super_offload are not supported: "
                    "set cpu alone"
                )
        ds_zero.validate(deepspeed, zero)
        wrong = {name for name, is_set in others.items() if is_set}
        if optimizer.is_apex:
            wrong.add(f"OPTIMIZER={optimizer.optimizer}")
        if optimizer.clip != "after":
            wrong.add(f"CLIP={optimizer.clip}")
        if optimizer.allreduce_dtype != "fp32":
            wrong.add(f"ALLREDUCE_DTYPE={optimizer.allreduce_dtype}")
        if precision.fp8 is not None:
            wrong.add("PRECISION=fp8")
        if wrong:
            raise ConfigError(
                f"ENGINE=deepspeed: {', '.join(sorted(wrong))}: our own engine does that; unset one of the two"
            )

        if precision.scales_loss:
            check_fp16(deepspeed, device)

    def complete(
        self, optimizer: optim.Config, precision: Precision, batch_size: int, gradient_steps: int
    ) -> dict[str, Any]:
        """The JSON with what our variables say: batch, clipping and precision; rule, rate and log stay ours."""
        ours = {"optimizer", "scheduler", "train_batch_size"}
        found = {key: value for key, value in self.json().items() if key not in ours}
        low = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(str(precision.dtype))
        found |= {name: {**found.get(name, {}), "enabled": name == low} for name in ("bf16", "fp16")}
        if low == "fp16":  # DeepSpeed's scale is constant; DeepSpeedStep gives it another after a step
            found["fp16"]["loss_scale"] = precision.init_loss_scale
        return found | {
            "train_micro_batch_size_per_gpu": batch_size,
            "gradient_accumulation_steps": gradient_steps,
            "gradient_clipping": optimizer.max_grad_norm,
            "steps_per_print": NEVER,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }


def merged(environ: Mapping[str, str]) -> Mapping[str, str]:
    """With ENGINE=deepspeed, the environment with what its JSON says where the environment says nothing.

    Raises ConfigError, naming both, where the two contradict each other.
    """
    if environ.get("ENGINE", "").strip() != "deepspeed" or not environ.get("DEEPSPEED_CONFIG", "").strip():
        return environ
    path = environ["DEEPSPEED_CONFIG"].strip()
    world_size = environ.get("WORLD_SIZE", "").strip()
    said = ds_config.meanings(
        ds_config.read(Path(path)), int(world_size) if world_size.isdecimal() and int(world_size) else 1
    )
    filled = dict(environ)
    for key, name, value, explicit in said:
        mine = environ.get(name, "").strip()
        if not mine or mine == "auto":
            if explicit or not environ.get(INSTEAD.get(name, ""), "").strip():
                filled[name] = value
        elif explicit and not _alike(mine, value):
            raise ConfigError(f"{path}: {key} means {name}={value}, and {name}={mine} is set: correct one of them")
    return filled


def _alike(mine: str, value: str) -> bool:
    if mine == value:
        return True
    try:
        return float(mine) == float(value)
    except ValueError:
        return {mine.lower(), value} in (
            {"true", "1"},
            {"yes", "1"},
            {"on", "1"},
            {"false", "0"},
            {"no", "0"},
            {"off", "0"},
        )
