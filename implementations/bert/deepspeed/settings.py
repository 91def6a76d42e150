"""ENGINE and DEEPSPEED_CONFIG: DeepSpeed's configuration, from the user's JSON and our
variables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert.deepspeed import ds_config
from bert.deepspeed.step import load
from bert.kernels.precision import Precision
from bert.optim import OptimizerConfig
from common.env import BOOLEANS, ConfigError, env

NEVER = 1 << 62  # steps between DeepSpeed's own progress lines


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sharding engine settings."""

    engine: str = env(
        "ENGINE",
        "own",
        "sharding engine: our own, or DeepSpeed (docs/train.md)",
        choices=("own", "deepspeed"),
    )
    path: Path | None = env(
        "DEEPSPEED_CONFIG", None, "ENGINE=deepspeed: DeepSpeed's JSON"
    )
    own_checkpoints: bool = env(
        "DEEPSPEED_CHECKPOINTS",
        False,
        "1: checkpoints as DeepSpeed's save_checkpoint writes them: global_step<step>, to a shared folder",
    )

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed is the engine."""
        return self.engine == "deepspeed"

    def json(self) -> dict[str, Any]:
        """The parsed file. Raises ConfigError if it is missing or cannot be parsed."""
        if self.path is None:
            raise ConfigError(
                "ENGINE=deepspeed and DEEPSPEED_CONFIG is not set: give DeepSpeed's JSON"
            )
        return ds_config.read(self.path)

    def check(
        self,
        optimizer: OptimizerConfig,
        precision: Precision,
        others: Mapping[str, bool],
    ) -> None:
        """Raises ConfigError for what DeepSpeed cannot do, and if it is absent. others: setting ->
        is it set?
        """
        if not self.is_deepspeed:
            if self.path is not None:
                raise ConfigError(
                    f"DEEPSPEED_CONFIG={self.path} and ENGINE is not deepspeed: set it, or unset this"
                )
            if self.own_checkpoints:
                raise ConfigError(
                    "DEEPSPEED_CHECKPOINTS=1 and ENGINE is not deepspeed: set it, or CHECKPOINT_SHARDS=1"
                )
            return
        zero = self.json().get("zero_optimization", {})
        if "stage" not in zero:
            raise ConfigError(
                f"ENGINE=deepspeed and no zero_optimization.stage in {self.path}: "
                "set 1 or 2; without ZeRO, unset ENGINE"
            )
        elsewhere = {"use_node_local_storage", "writer", "checkpoint_serialization"}
        if self.own_checkpoints and (
            odd := sorted(elsewhere & self.json().get("checkpoint", {}).keys())
        ):
            raise ConfigError(
                f"DEEPSPEED_CHECKPOINTS=1 and checkpoint.{odd[0]} in {self.path}: remove one of them"
            )
        ds_config.validate(load(), zero)
        wrong = {
            **others,
            f"CLIP={optimizer.clip}": optimizer.clip != "after",
            f"ALLREDUCE_DTYPE={optimizer.allreduce_dtype}": optimizer.allreduce_dtype
            != "fp32",
            f"SHARD_GROUP={optimizer.shard_group}": optimizer.shard_group is not None,
            "PRECISION=fp8": precision.fp8,
        }
        if names := sorted(name for name, is_set in wrong.items() if is_set):
            raise ConfigError(
                f"ENGINE=deepspeed: {', '.join(names)}: our own engine does that; unset one of the two"
            )

    def complete(
        self,
        optimizer: OptimizerConfig,
        precision: Precision,
        batch_size: int,
        gradient_steps: int,
    ) -> dict[str, Any]:
        """The JSON with batch, clipping and precision by our variables; rule, rate and log remain
        ours.
        """
        # The first two are done here; the last follows from the two other sizes.
        ours = {"optimizer", "scheduler", "train_batch_size"}
        given = {key: value for key, value in self.json().items() if key not in ours}
        low = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(precision.dtype)
        for name in ("bf16", "fp16"):
            given[name] = {**given.get(name, {}), "enabled": name == low}
        if low == "fp16":
            # DeepSpeed's scale is constant; DeepSpeedStep gives it another after a step.
            given["fp16"]["loss_scale"] = precision.init_loss_scale
        return given | {
            "train_micro_batch_size_per_gpu": batch_size,
            "gradient_accumulation_steps": gradient_steps,
            "gradient_clipping": optimizer.max_grad_norm,
            "steps_per_print": NEVER,
            "zero_allow_untested_optimizer": True,
            # Else DeepSpeed refuses to offload any optimizer but its own.
            "zero_force_ds_cpu_optimizer": False,
        }


def merged(environ: Mapping[str, str]) -> Mapping[str, str]:
    """With ENGINE=deepspeed, the environment completed by DeepSpeed's JSON.

    Raises ConfigError, naming both, if the two contradict each other.
    """

    def number(text: str) -> float | str:
        try:
            # 1, 1.0 and true are the same setting.
            return BOOLEANS[text.lower()] if text.lower() in BOOLEANS else float(text)
        except ValueError:
            return text

    path = environ.get("DEEPSPEED_CONFIG", "").strip()
    if environ.get("ENGINE", "").strip() != "deepspeed" or not path:
        return environ
    world_size = environ.get("WORLD_SIZE", "").strip()
    ranks = int(world_size) if world_size.isdecimal() else 0
    filled = dict(environ)
    for key, name, value, explicit in ds_config.meanings(
        ds_config.read(Path(path)), max(ranks, 1)
    ):
        mine = environ.get(name, "").strip()
        if not mine or mine == "auto":
            filled[name] = value
        elif explicit and number(mine) != number(value):
            raise ConfigError(
                f"{path}: {key} means {name}={value}, and {name}={mine} is set: correct one of them"
            )
    return filled
