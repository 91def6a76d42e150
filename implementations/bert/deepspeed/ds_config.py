"""A ds_config JSON in terms of this trainer's variables: for its own engine, and to find
contradictions.

DeepSpeed validates zero_optimization itself (``validate``). This module checks entries that have a
variable, that would change the arithmetic, or that DeepSpeed would silently ignore.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bert.optim.rules import LambConfig
from common.env import ConfigError
from common.process import one_line
from common.tables import read_table


class Meaning(NamedTuple):
    """An entry of the JSON and the equivalent variable. explicit: another value of the variable
    contradicts it; else it is a default, which the variable overrides.
    """

    key: str
    name: str
    value: str
    explicit: bool = True


_TABLE = read_table(__file__, "ds_config.yaml")
# Kind and equivalent variable, if there is one, of the entries that are used here.
ENTRIES: dict[str, tuple[str, str | None]] = {
    key: (kind, name)
    for kind, names in _TABLE["entries"].items()
    for key, name in names.items()
}
_UNUSED = "", None
_TYPES = {"object": dict, "flag": bool, "name": str}
BATCH = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
ADAM = (
    "OPT_ADAM_BETA_1",
    "OPT_ADAM_BETA_2",
    "OPT_ADAM_EPSILON",
    "OPT_ADAM_WEIGHT_DECAY",
)
LAMB_EPSILON = LambConfig.eps
LAMB = ("OPT_LAMB_BETA_1", "OPT_LAMB_BETA_2", "", "WEIGHT_DECAY_RATE")
FIXED: dict[str, dict[str, list[Any]]] = _TABLE["fixed"]
ZERO = "zero_optimization."  # validated by DeepSpeed itself
CHECKPOINTING = "activation_checkpointing."


def read(path: Path) -> dict[str, Any]:
    """The JSON without "auto" entries, which mean unset. Raises ConfigError for an unreadable
    file.
    """

    def without_auto(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: without_auto(item) for key, item in value.items() if item != "auto"
            }
        return value

    try:
        given = without_auto(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(
            f"DEEPSPEED_CONFIG={path}: {error.strerror}: give DeepSpeed's JSON"
        ) from None
    except ValueError as error:
        raise ConfigError(f"DEEPSPEED_CONFIG={path}: no JSON ({error})") from None
    if not isinstance(given, dict):
        raise ConfigError(f"DEEPSPEED_CONFIG={path}: expected an object, in braces")
    return given


def _is(kind: str, value: Any) -> bool:
    """Whether a value is of a kind of the table's."""
    if kind in ("count", "number"):  # 1e5 is an integer
        is_number = type(value) in (int, float) and math.isfinite(value)
        is_count = is_number and value == int(value) >= 1
        return is_count if kind == "count" else is_number and value >= 0
    if kind == "pair":
        is_pair = isinstance(value, list) and len(value) == 2
        return is_pair and all(_is("number", number) for number in value)
    return isinstance(value, _TYPES.get(kind, object))


def flat(section: dict[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """(key with dots, value) of the entries in all sections. Raises ConfigError for a value of the
    wrong type.
    """
    for name, value in section.items():
        key = f"{within}{name}"
        kind, _ = ENTRIES.get(key, _UNUSED)
        # null is DeepSpeed's word for no offload; no other section may be null.
        if (value is None and "offload_" in key) or (
            kind != "object" and _is(kind, value)
        ):
            yield key, value
        elif _is(kind, value):
            yield from flat(value, f"{key}.")
        else:
            raise ConfigError(
                f"DEEPSPEED_CONFIG: {key} is {json.dumps(value):.60}: expected {_TABLE['kinds'][kind]}"
            )


def meanings(given: dict[str, Any], world_size: int) -> list[Meaning]:
    """The JSON as variables, for ``world_size`` ranks. Raises ConfigError naming an unsupported
    entry.
    """
    entries = _checked(given)
    settings = [*_batch(entries, world_size)]
    precision = next(
        (name for name in ("bf16", "fp16") if f"{name}.enabled" in entries), ""
    )
    key = f"{precision}.enabled" if precision else "neither bf16 nor fp16 is enabled"
    settings.append(
        Meaning(key, "PRECISION", precision or "fp32", explicit=bool(precision))
    )
    if "zero_optimization" in given:
        settings.append(Meaning("zero_optimization.stage", "SHARD_OPTIMIZER", "1"))
    if "optimizer" in given:
        settings += _optimizer(entries)
    if "scheduler" in given:  # poly with its default degree of 1
        settings.append(Meaning("scheduler.type", "LR_SCHEDULE", "poly"))
        entries.pop("optimizer.params.lr", None)  # the scheduler's wins
    for key, value in entries.items():
        if key == "gradient_clipping":
            value = value or 1e30  # never reached: 0 means no clipping in DeepSpeed
        elif key == "fp16.initial_scale_power":
            if value > 127:
                raise ConfigError(
                    f"DEEPSPEED_CONFIG: {key} is {value}: expected an integer, at most 127"
                )
            value = 2.0**value
        if name := ENTRIES.get(key, _UNUSED)[1]:
            # Its progress lines and ours are two outputs, each as often as it likes.
            settings.append(
                Meaning(key, name, _text(value), explicit=key != "steps_per_print")
            )
    # DeepSpeed's section says how activations are checkpointed, and the model whether: every layer,
    # as its users' scripts do, unless RECOMPUTE_LAYERS says otherwise.
    if any(value for key, value in entries.items() if key.startswith(CHECKPOINTING)):
        settings.append(
            Meaning("activation_checkpointing", "RECOMPUTE_LAYERS", "1", explicit=False)
        )
    return settings


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """The entries by key, without those of bf16 and fp16 where these are not enabled."""
    entries = dict(flat(given))
    known = {*_TABLE["deepspeed_only"]}.union(ENTRIES, *FIXED.values())
    if str(entries.get("optimizer.type")).lower() == "lamb":
        known -= {*_TABLE["adam_only"]}
    free = (CHECKPOINTING, ZERO)
    if strange := sorted(
        key for key in entries if key not in known and not key.startswith(free)
    ):
        raise ConfigError(
            f"DEEPSPEED_CONFIG: {', '.join(strange)}: unsupported key: fix or remove it"
        )
    if entries.get("bf16.enabled") and entries.get("fp16.enabled"):
        raise ConfigError(
            "DEEPSPEED_CONFIG: bf16.enabled and fp16.enabled are both true: enable one of them"
        )
    # Settings of a precision that is off say nothing about the run.
    off = tuple(
        f"{name}." for name in ("bf16", "fp16") if not entries.get(f"{name}.enabled")
    )
    entries = {key: value for key, value in entries.items() if not key.startswith(off)}
    if "scheduler" in given:
        if (kind := entries.get("scheduler.type")) != "WarmupDecayLR":
            raise ConfigError(
                f"DEEPSPEED_CONFIG: scheduler.type is {kind!r}: expected WarmupDecayLR; others by LR_SCHEDULE"
            )
        for name in _TABLE["scheduler"]:
            if f"scheduler.params.{name}" not in entries:
                raise ConfigError(
                    f"DEEPSPEED_CONFIG: scheduler.params.{name} is not set: set it"
                )
    for why, fixed in FIXED.items():
        for key in fixed:
            if key in entries and entries[key] not in fixed[key]:
                is_set, wanted = json.dumps(entries[key]), json.dumps(fixed[key][0])
                raise ConfigError(
                    f"DEEPSPEED_CONFIG: {key} is {is_set}: {why}: set {wanted}"
                )
    return entries


def _batch(entries: dict[str, Any], world_size: int) -> Iterator[Meaning]:
    """Derives the third of the three batch sizes from two; checks all three for consistency."""
    whole, micro, steps = (entries.get(key) for key in BATCH)
    if whole is not None:
        # Divided with remainder: the product below finds sizes that do not fit.
        micro = micro or whole // ((steps or 1) * world_size)
        steps = steps or (whole // (micro * world_size) if micro else 1)
        if whole != micro * steps * world_size:
            sizes = f"train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps}"
            raise ConfigError(
                f"DEEPSPEED_CONFIG: train_batch_size {whole} is not {sizes} x {world_size} ranks (WORLD_SIZE): "
                "correct one of them"
            )
    if micro is not None:
        yield Meaning(BATCH[1], "BATCHSIZE", _text(micro))
    if micro is not None or steps is not None:
        yield Meaning(
            BATCH[2], "GRADIENT_STEPS", _text(steps or 1), explicit=steps is not None
        )


def _optimizer(entries: dict[str, Any]) -> Iterator[Meaning]:
    kind = str(entries.get("optimizer.type", ""))
    if kind.lower() in ("adam", "adamw"):
        # DeepSpeed's Adam is AdamW too, unless the JSON says otherwise (FIXED).
        is_corrected = entries.get("optimizer.params.bias_correction", True)
        rule, names = "adamw" if is_corrected else "bertadam", ADAM
    elif kind.lower() == "lamb":
        rule, names = "lamb", LAMB
        if (eps := entries.get("optimizer.params.eps", LAMB_EPSILON)) != LAMB_EPSILON:
            raise ConfigError(
                f"DEEPSPEED_CONFIG: optimizer.params.eps is {eps}: it is {LAMB_EPSILON} with OPTIMIZER=lamb: set that"
            )
    else:
        raise ConfigError(
            f"DEEPSPEED_CONFIG: optimizer.type is {kind!r}: expected Adam, AdamW or Lamb; others by OPTIMIZER"
        )
    yield Meaning("optimizer.type", "OPTIMIZER", rule)
    betas = entries.get("optimizer.params.betas", (None, None))
    given = {
        name: entries.get(f"optimizer.params.{name}")
        for name in ("eps", "weight_decay")
    }
    for key, name, value in zip(
        ("betas", "betas", *given), names, (*betas, *given.values()), strict=True
    ):
        if name and value is not None:
            yield Meaning(f"optimizer.params.{key}", name, _text(value))


def _text(value: float) -> str:
    """A number as the value of a variable, without loss of digits."""
    # Up to 2^53 every integer is exact in fp64.
    return (
        str(int(value))
        if value == int(value) and abs(value) < 2**53
        else repr(float(value))
    )


def validate(deepspeed: Any, zero: dict[str, Any]) -> None:
    """Raises ConfigError if the installed version of DeepSpeed would refuse zero_optimization."""
    try:
        deepspeed.runtime.zero.config.DeepSpeedZeroConfig(**zero)
    except (ValueError, AssertionError) as error:
        reason = str(error)
        if errors := getattr(error, "errors", None):  # pydantic's
            first = errors()[0]
            reason = first["msg"]
            if first["loc"]:
                key = ".".join(map(str, ("zero_optimization", *first["loc"])))
                reason = f"{key}: {reason}, and it is {first['input']!r}"
        raise ConfigError(
            f"DEEPSPEED_CONFIG: DeepSpeed refuses {one_line(reason)}"
        ) from None
