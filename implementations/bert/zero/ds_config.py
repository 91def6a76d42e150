"""What a ds_config JSON says, in this trainer's variables; for its own engine, and to find what contradicts them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bert.env import ConfigError


class Meaning(NamedTuple):
    """An entry of the JSON and the variable that says the same. explicit: it stands there; else it is a default."""

    key: str
    name: str
    value: str
    explicit: bool = True


MEASURING = {"wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler", "comms_logger"}
MONITORS = {"tensorboard", "wandb", "csv_monitor", "comet"}
TRANSPORT = {"communication_data_type", "data_types", "prescale_gradients", "gradient_predivide_factor", "aio"}
CHECKS = {"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "checkpoint"}
# What has no variable here: DeepSpeed's engine heeds it, our own does without.
DEEPSPEED_ONLY = MEASURING | MONITORS | TRANSPORT | CHECKS
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Entries of zero_optimization that cut what our rules run on in other ways than partitions.py knows.
FOREIGN_PARTITIONS = ("zenflow", "zero_hpz_partition_size", "mics_shard_size", "elastic_checkpoint", "autoep")
# How PRECISION=fp16 behaves, in DeepSpeed's words.
FP16 = {
    "hysteresis": 1,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
    "auto_cast": False,
    "fp16_master_weights_and_grads": False,
}
ADAM = {
    "betas": ("OPT_ADAM_BETA_1", "OPT_ADAM_BETA_2"),
    "eps": "OPT_ADAM_EPSILON",
    "weight_decay": "OPT_ADAM_WEIGHT_DECAY",
}
LAMB = {"betas": ("OPT_LAMB_BETA_1", "OPT_LAMB_BETA_2"), "eps": "OPT_EPSILON", "weight_decay": "WEIGHT_DECAY_RATE"}


def read(path: Path) -> dict[str, Any]:
    """The JSON without what is "auto", which its users mean as unset. Raises ConfigError for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"DEEPSPEED_CONFIG={path}: {error.strerror}: give DeepSpeed's JSON") from None
    except ValueError as error:
        raise ConfigError(f"DEEPSPEED_CONFIG={path}: no JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"DEEPSPEED_CONFIG={path}: expected an object, in braces")
    kept: dict[str, Any] = _settled(found)
    return kept


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _settled(item) for key, item in value.items() if item != "auto"}
    return value


def meanings(found: dict[str, Any], world_size: int) -> list[Meaning]:
    """What the JSON says for so many ranks. Raises ConfigError, naming the entry, for what has no meaning here."""
    rest = dict(found)
    said = [*_batch(rest, world_size)]
    for key, translate in _TRANSLATIONS.items():
        if key in rest or key in ("fp16", "bf16"):
            said += translate(rest.pop(key, {}))
    if not any(meaning.name == "PRECISION" for meaning in said):
        said.append(Meaning("neither bf16 nor fp16 is enabled", "PRECISION", "fp32", explicit=False))
    if "scheduler" in found:  # it decides over the optimizer's own rate
        said = [meaning for meaning in said if meaning.key != "optimizer.params.lr"]
    unknown = sorted(rest.keys() - DEEPSPEED_ONLY)
    if unknown:
        raise ConfigError(f"DEEPSPEED_CONFIG: {', '.join(unknown)}: nothing here does that; take it out")
    return said


def _batch(rest: dict[str, Any], world_size: int) -> Iterator[Meaning]:
    """Two of the three sizes give the third; three must multiply out."""
    whole, micro, steps = (_count(rest.pop(key, None), key) for key in BATCH_KEYS)
    if whole is not None and micro is None and steps is not None:
        micro = _quotient(whole, steps * world_size, "train_micro_batch_size_per_gpu", world_size)
    elif whole is not None and micro is not None and steps is None:
        steps = _quotient(whole, micro * world_size, "gradient_accumulation_steps", world_size)
    elif whole is not None and micro is None and steps is None:
        micro, steps = _quotient(whole, world_size, "train_micro_batch_size_per_gpu", world_size), 1
    if whole is not None and micro is not None and steps is not None and whole != micro * steps * world_size:
        raise ConfigError(
            f"DEEPSPEED_CONFIG: train_batch_size {whole} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {world_size} ranks (WORLD_SIZE): correct one of them"
        )
    if micro is not None:
        yield Meaning("train_micro_batch_size_per_gpu", "BATCHSIZE", str(micro))
        yield Meaning("gradient_accumulation_steps", "GRADIENT_STEPS", str(steps or 1), explicit=steps is not None)
    elif steps is not None:
        yield Meaning("gradient_accumulation_steps", "GRADIENT_STEPS", str(steps))


def _count(value: Any, key: str) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"DEEPSPEED_CONFIG: {key} is {value!r}: expected an integer, at least 1")
    return value


def _quotient(whole: int, part: int, key: str, world_size: int) -> int:
    if whole % part:
        raise ConfigError(
            f"DEEPSPEED_CONFIG: train_batch_size {whole} on {world_size} ranks (WORLD_SIZE) leaves no whole {key}: "
            f"it is no multiple of {part}"
        )
    return whole // part


def _bf16(entry: dict[str, Any]) -> Iterator[Meaning]:
    if entry.get("enabled"):
        yield Meaning("bf16.enabled", "PRECISION", "bf16")


def _fp16(entry: dict[str, Any]) -> Iterator[Meaning]:
    if not entry.get("enabled"):
        return
    yield Meaning("fp16.enabled", "PRECISION", "fp16")
    if entry.get("loss_scale"):
        yield Meaning("fp16.loss_scale", "LOSS_SCALE", _number(entry["loss_scale"]))
    for key, ours in FP16.items():
        if entry.get(key, ours) != ours:
            raise ConfigError(
                f"DEEPSPEED_CONFIG: fp16.{key} is {entry[key]!r}: with PRECISION=fp16 masters are fp32, and the loss "
                f"scale halves at every overflow, down to 1: take it out, or set {json.dumps(ours)}"
            )
    yield _of(entry, "fp16", "initial_scale_power", "INIT_LOSS_SCALE", 16, lambda power: _number(2.0**power))
    yield _of(entry, "fp16", "loss_scale_window", "LOSS_SCALE_GROWTH", 1000, _number)


def _of(entry: dict[str, Any], section: str, key: str, name: str, default: Any, shown: Callable[[Any], str]) -> Meaning:
    """What an entry means, or DeepSpeed's default where it does not stand there."""
    return Meaning(f"{section}.{key}", name, shown(entry.get(key, default)), explicit=key in entry)


def _number(value: float) -> str:
    return f"{value:.10g}"


def _clipping(value: float) -> Iterator[Meaning]:
    if value:
        yield Meaning("gradient_clipping", "MAX_GRAD_NORM", _number(value))
    else:
        yield Meaning("gradient_clipping", "MAX_GRAD_NORM", "1e+30")  # never reached: DeepSpeed does not clip
    yield Meaning("gradient_clipping", "CLIP", "after", explicit=False)


def _zero(entry: dict[str, Any]) -> Iterator[Meaning]:
    stage = entry.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"DEEPSPEED_CONFIG: zero_optimization.stage is {stage!r}: expected 0, 1, 2 or 3")
    yield Meaning("zero_optimization.stage", "SHARD_OPTIMIZER", "1" if stage else "0")
    for key in FOREIGN_PARTITIONS:
        if entry.get(key) and entry[key] not in (-1, 1):
            raise ConfigError(f"DEEPSPEED_CONFIG: zero_optimization.{key} is not supported here: take it out")


def _optimizer(entry: dict[str, Any]) -> Iterator[Meaning]:
    kind, params = str(entry.get("type", "")), dict(entry.get("params", {}))
    if kind.lower() in ("adam", "adamw"):
        decoupled = params.pop("adam_w_mode", True) or kind.lower() == "adamw"  # DeepSpeed's Adam is AdamW unless told
        yield Meaning("optimizer.type", "OPTIMIZER", "adamw" if decoupled else "adam")
        names: dict[str, Any] = ADAM
        if not params.pop("bias_correction", True):
            yield Meaning("optimizer.params.bias_correction", "OPT_ADAM_BIAS_CORRECTION", "0")
    elif kind.lower() == "lamb":
        yield Meaning("optimizer.type", "OPTIMIZER", "lamb")
        names = LAMB
    else:
        raise ConfigError(
            f"DEEPSPEED_CONFIG: optimizer.type is {kind!r}: expected Adam, AdamW or Lamb; others by OPTIMIZER"
        )
    params.pop("torch_adam", None)
    if "lr" in params:
        yield Meaning("optimizer.params.lr", "LR", _number(params.pop("lr")))
    for key in names.keys() & params.keys():
        values = params.pop(key)
        for name, value in zip(names[key], values, strict=True) if key == "betas" else [(names[key], values)]:
            yield Meaning(f"optimizer.params.{key}", name, _number(value))
    if params:
        raise ConfigError(
            f"DEEPSPEED_CONFIG: optimizer.params {', '.join(sorted(params))}: our {kind} has no such setting"
        )


def _scheduler(entry: dict[str, Any]) -> Iterator[Meaning]:
    """WarmupDecayLR is ``poly`` with its default degree of 1."""
    kind, params = entry.get("type"), dict(entry.get("params", {}))
    if kind != "WarmupDecayLR":
        raise ConfigError(
            f"DEEPSPEED_CONFIG: scheduler.type is {kind!r}: expected WarmupDecayLR; others by LR_SCHEDULE"
        )
    if params.pop("warmup_type", "log") != "linear":
        raise ConfigError('DEEPSPEED_CONFIG: scheduler.params.warmup_type: expected "linear"; its default is "log"')
    if params.pop("warmup_min_lr", 0):
        raise ConfigError("DEEPSPEED_CONFIG: scheduler.params.warmup_min_lr: the warm-up here begins at 0")
    yield Meaning("scheduler.type", "LR_SCHEDULE", "poly")
    names = {"total_num_steps": "LR_DECAY_STEPS", "warmup_max_lr": "LR", "warmup_num_steps": "WARMUP_STEPS"}
    for key, value in params.items():
        if key not in names:
            raise ConfigError(f"DEEPSPEED_CONFIG: scheduler.params.{key}: our poly has no such setting")
        yield Meaning(f"scheduler.params.{key}", names[key], _number(value))


def _activation_checkpointing(entry: dict[str, Any]) -> Iterator[Meaning]:
    """It speaks of a function of DeepSpeed's that this model does not call."""
    for key in sorted(key for key, value in entry.items() if value):
        raise ConfigError(
            f"DEEPSPEED_CONFIG: activation_checkpointing.{key}: RECOMPUTE_LAYERS does that here: take this out"
        )
    return iter(())


def _steps_per_print(value: int) -> Iterator[Meaning]:
    yield Meaning("steps_per_print", "LOG_EVERY_STEPS", str(value))


_TRANSLATIONS: dict[str, Callable[[Any], Iterator[Meaning]]] = {
    "activation_checkpointing": _activation_checkpointing,
    "bf16": _bf16,
    "fp16": _fp16,
    "gradient_clipping": _clipping,
    "zero_optimization": _zero,
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "steps_per_print": _steps_per_print,
}
