"""What a ds_config JSON says, in this trainer's variables; for its own engine, and to find what contradicts them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bert.core.env import ConfigError
from bert.deepspeed import ds_zero
from bert.deepspeed.ds_values import flag, integer, number, section, text


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
# How PRECISION=fp16 and bf16 behave, in DeepSpeed's words.
FP16: dict[str, Any] = {
    "hysteresis": 1,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
    "auto_cast": False,
    "fp16_master_weights_and_grads": False,
}
FP16_KEYS = {"enabled", "loss_scale", "initial_scale_power", "loss_scale_window", *FP16}
BF16 = {"bf16_master_weights_and_grads": False, "bf16_optimizer_states": False}
BF16_DEEPSPEED_ONLY = {"immediate_grad_update", "check_grad_overflow"}
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
        if key in rest:
            said += translate(rest.pop(key))
    enabled = [meaning.key for meaning in said if meaning.name == "PRECISION"]
    if len(enabled) > 1:
        raise ConfigError(f"DEEPSPEED_CONFIG: {' and '.join(enabled)} are both true: enable one of them")
    if not enabled:
        said.append(Meaning("neither bf16 nor fp16 is enabled", "PRECISION", "fp32", explicit=False))
    unknown = sorted(rest.keys() - DEEPSPEED_ONLY)
    if unknown:
        raise ConfigError(f"DEEPSPEED_CONFIG: {', '.join(unknown)}: nothing here does that; take it out")
    section(found.get("checkpoint", {}), "checkpoint")
    return _one_rate(said)


def _one_rate(said: list[Meaning]) -> list[Meaning]:
    """The scheduler's rate decides over the optimizer's, also where it is a default, which nobody may have meant."""
    rates = {meaning.key: meaning for meaning in said if meaning.name == "LR"}
    optimizers, schedulers = rates.get("optimizer.params.lr"), rates.get("scheduler.params.warmup_max_lr")
    if optimizers is None or schedulers is None:
        return said
    if not schedulers.explicit and optimizers.value != schedulers.value:
        raise ConfigError(
            f"DEEPSPEED_CONFIG: optimizer.params.lr is {optimizers.value}, and scheduler.params.warmup_max_lr, which "
            f"decides, is not set: DeepSpeed's default is {schedulers.value}: set it"
        )
    return [meaning for meaning in said if meaning is not (optimizers if schedulers.explicit else schedulers)]


def ignored(found: dict[str, Any]) -> list[str]:
    """Entries that only DeepSpeed's engine heeds."""
    zero = [f"{ds_zero.SECTION}.{key}" for key in found.get(ds_zero.SECTION, {}) if key != "stage"]
    bf16 = [f"bf16.{key}" for key in BF16_DEEPSPEED_ONLY & found.get("bf16", {}).keys()]
    return sorted([*(found.keys() & DEEPSPEED_ONLY), *bf16, *zero])


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
    return None if value is None else integer(value, key)


def _quotient(whole: int, part: int, key: str, world_size: int) -> int:
    if whole % part:
        raise ConfigError(
            f"DEEPSPEED_CONFIG: train_batch_size {whole} on {world_size} ranks (WORLD_SIZE) leaves no whole {key}: "
            f"it is no multiple of {part}"
        )
    return whole // part


def _bf16(value: Any) -> Iterator[Meaning]:
    entry = section(value, "bf16", {"enabled", *BF16, *BF16_DEEPSPEED_ONLY})
    if not flag(entry, "bf16", "enabled"):
        return
    yield Meaning("bf16.enabled", "PRECISION", "bf16")
    _expect(entry, "bf16", BF16, "with PRECISION=bf16 masters and states are fp32")


def _fp16(value: Any) -> Iterator[Meaning]:
    entry = section(value, "fp16", FP16_KEYS)
    if not flag(entry, "fp16", "enabled"):
        return
    yield Meaning("fp16.enabled", "PRECISION", "fp16")
    if scale := number(entry.get("loss_scale", 0), "fp16.loss_scale"):
        yield Meaning("fp16.loss_scale", "LOSS_SCALE", text(scale))
    _expect(
        entry, "fp16", FP16,
        "with PRECISION=fp16 masters are fp32, and the loss scale halves at every overflow, down to 1",
    )  # fmt: skip
    power = integer(entry.get("initial_scale_power", 16), "fp16.initial_scale_power", at_least=0, at_most=127)
    yield _of(entry, "fp16", "initial_scale_power", "INIT_LOSS_SCALE", 2.0**power)
    window = integer(entry.get("loss_scale_window", 1000), "fp16.loss_scale_window")
    yield _of(entry, "fp16", "loss_scale_window", "LOSS_SCALE_GROWTH", window)


def _expect(entry: dict[str, Any], where: str, ours: dict[str, Any], why: str) -> None:
    for key, value in ours.items():
        if entry.get(key, value) != value:
            raise ConfigError(
                f"DEEPSPEED_CONFIG: {where}.{key} is {entry[key]!r}: {why}: take it out, or set {json.dumps(value)}"
            )


def _of(entry: dict[str, Any], where: str, key: str, name: str, value: float) -> Meaning:
    """An entry that has a default of DeepSpeed's; value: the one that counts."""
    return Meaning(f"{where}.{key}", name, text(value), explicit=key in entry)


def _clipping(value: Any) -> Iterator[Meaning]:
    norm = number(value, "gradient_clipping") or 1e30  # never reached: DeepSpeed does not clip
    yield Meaning("gradient_clipping", "MAX_GRAD_NORM", text(norm))
    yield Meaning("gradient_clipping", "CLIP", "after", explicit=False)


def _zero(value: Any) -> Iterator[Meaning]:
    stage, key = ds_zero.of({ds_zero.SECTION: value}).get("stage", 0), f"{ds_zero.SECTION}.stage"
    yield Meaning(key, "SHARD_OPTIMIZER", "1" if stage else "0")
    yield Meaning(key, "SHARD_GRADIENTS", "1" if stage > 1 else "0")


def _optimizer(value: Any) -> Iterator[Meaning]:
    entry = section(value, "optimizer", {"type", "params"})
    where = "optimizer.params"
    kind, params = str(entry.get("type", "")), dict(section(entry.get("params", {}), where))
    if kind.lower() in ("adam", "adamw"):
        # DeepSpeed's Adam is AdamW unless the JSON says otherwise.
        decoupled = flag(params, where, "adam_w_mode", True) or kind.lower() == "adamw"
        yield Meaning("optimizer.type", "OPTIMIZER", "adamw" if decoupled else "adam")
        names: dict[str, Any] = ADAM
        if not flag(params, where, "bias_correction", True):
            yield Meaning(f"{where}.bias_correction", "OPT_ADAM_BIAS_CORRECTION", "0")
        flags = {"adam_w_mode", "bias_correction", "torch_adam"}
    elif kind.lower() == "lamb":
        yield Meaning("optimizer.type", "OPTIMIZER", "lamb")
        names, flags = LAMB, set()
    else:
        raise ConfigError(
            f"DEEPSPEED_CONFIG: optimizer.type is {kind!r}: expected Adam, AdamW or Lamb; others by OPTIMIZER"
        )
    if unknown := sorted(params.keys() - names.keys() - flags - {"lr"}):
        raise ConfigError(f"DEEPSPEED_CONFIG: {where} {', '.join(unknown)}: our {kind} has no such setting")
    if "lr" in params:
        yield Meaning(f"{where}.lr", "LR", text(number(params["lr"], f"{where}.lr", above=0)))
    for key in names.keys() & params.keys():
        pair = _pair(params[key], f"{where}.{key}") if key == "betas" else [params[key]]
        for name, found in zip(names[key] if key == "betas" else [names[key]], pair, strict=True):
            yield Meaning(f"{where}.{key}", name, text(number(found, f"{where}.{key}")))


def _pair(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise ConfigError(f"DEEPSPEED_CONFIG: {key} is {value!r}: expected two numbers, in brackets")
    return value


def _scheduler(value: Any) -> Iterator[Meaning]:
    """WarmupDecayLR is ``poly`` with its default degree of 1."""
    entry, where = section(value, "scheduler", {"type", "params"}), "scheduler.params"
    kind = entry.get("type")
    if kind != "WarmupDecayLR":
        raise ConfigError(
            f"DEEPSPEED_CONFIG: scheduler.type is {kind!r}: expected WarmupDecayLR; others by LR_SCHEDULE"
        )
    params = section(entry.get("params", {}), where)
    if params.get("warmup_type", "log") != "linear":
        raise ConfigError('DEEPSPEED_CONFIG: scheduler.params.warmup_type: expected "linear"; its default is "log"')
    if number(params.get("warmup_min_lr", 0), f"{where}.warmup_min_lr"):
        raise ConfigError("DEEPSPEED_CONFIG: scheduler.params.warmup_min_lr: the warm-up here begins at 0")
    known = {"warmup_type", "warmup_min_lr", "total_num_steps", "warmup_max_lr", "warmup_num_steps"}
    for key in sorted(params.keys() - known):
        raise ConfigError(f"DEEPSPEED_CONFIG: scheduler.params.{key}: our poly has no such setting")
    yield Meaning("scheduler.type", "LR_SCHEDULE", "poly")
    if "total_num_steps" in params:
        yield Meaning(
            f"{where}.total_num_steps", "LR_DECAY_STEPS",
            text(integer(params["total_num_steps"], f"{where}.total_num_steps")),
        )  # fmt: skip
    rate = number(params.get("warmup_max_lr", 0.001), f"{where}.warmup_max_lr", above=0)
    yield _of(params, where, "warmup_max_lr", "LR", rate)
    steps = integer(params.get("warmup_num_steps", 1000), f"{where}.warmup_num_steps")
    yield _of(params, where, "warmup_num_steps", "WARMUP_STEPS", steps)


def _activation_checkpointing(value: Any) -> Iterator[Meaning]:
    """It speaks of a function of DeepSpeed's that this model does not call."""
    entry = section(value, "activation_checkpointing")
    for key in sorted(key for key, asked in entry.items() if asked):
        raise ConfigError(
            f"DEEPSPEED_CONFIG: activation_checkpointing.{key}: RECOMPUTE_LAYERS does that here: take this out"
        )
    return iter(())


def _steps_per_print(value: Any) -> Iterator[Meaning]:
    yield Meaning("steps_per_print", "LOG_EVERY_STEPS", text(integer(value, "steps_per_print")))


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
