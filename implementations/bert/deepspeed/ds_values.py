"""Values of a ds_config JSON, of the type that they must have. What has another is one line that names the entry."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from bert.core.env import ConfigError


def section(value: Any, key: str, known: Iterable[str] | None = None) -> dict[str, Any]:
    """An object. known: all entries that it may have; None: any. Raises ConfigError, as all functions here."""
    if not isinstance(value, dict):
        raise _wrong(value, key, "an object, in braces")
    if known is not None and (unknown := sorted(value.keys() - set(known))):
        names = ", ".join(f"{key}.{name}" for name in unknown)
        raise ConfigError(f"DEEPSPEED_CONFIG: {names}: nothing heeds that; correct the name or take it out")
    return value


def flag(entry: dict[str, Any], where: str, key: str, default: bool = False) -> bool:
    """true or false, of the entry ``key`` of the section ``where``."""
    value = entry.get(key, default)
    if not isinstance(value, bool):
        raise _wrong(value, f"{where}.{key}", "true or false")
    return value


def number(value: Any, key: str, *, at_least: float = 0.0, above: float | None = None) -> float:
    """A finite number, not below at_least, or above ``above``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (value < at_least if above is None else value <= above):
        raise _wrong(value, key, f"a number, at least {at_least:g}" if above is None else f"a number above {above:g}")
    return float(value)


def integer(value: Any, key: str, *, at_least: int = 1, at_most: int = 2**53) -> int:
    """A whole number; 1e5 is one, as people write them."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or int(value) != value or not at_least <= value <= at_most:
        limits = f"at least {at_least}" if at_most == 2**53 else f"{at_least} to {at_most}"
        raise _wrong(value, key, f"an integer, {limits}")
    return int(value)


def text(value: float) -> str:
    """The number as our variables have it, no digit lost."""
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def _wrong(value: Any, key: str, expected: str) -> ConfigError:
    said = json.dumps(value)
    said = said if len(said) <= 60 else f"{said[:57]}..."
    return ConfigError(f"DEEPSPEED_CONFIG: {key} is {said}: expected {expected}")
