"""Typed configuration fields from environment variables: one hop from ``export LR=0.00096`` to ``config.lr``.

A component declares its settings once, in a frozen keyword-only dataclass::

    @dataclass(frozen=True, kw_only=True)
    class Config:
        lr: float = env("LR", above=0)                          # required
        max_steps: int = env("MAX_STEPS", 1000, at_least=1)     # with its only default

and ``from_env(Config, os.environ)`` builds it, or stops with one line that names the variable, its value and what was
expected. This is the only module of the package that reads the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

ConfigT = TypeVar("ConfigT")

BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class ConfigError(ValueError):
    """A setting that is missing, malformed, out of range or in conflict with another. The message is for the user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variable:
    """An environment variable and what it may hold; None: no limit."""

    name: str
    doc: str = ""
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None

    @property
    def meaning(self) -> str:
        """The documentation, with the choices."""
        return f"{self.doc} ({', '.join(self.choices)})" if self.choices else self.doc

    def expectation(self, kind: type) -> str:
        """What is accepted, such as ``an integer, at least 1``."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = {int: "an integer", float: "a number", bool: "0 or 1", Path: "a path", str: "text"}[kind]
        limits = [("at least", self.at_least), ("at most", self.at_most), ("above", self.above), ("below", self.below)]
        return ", ".join([words, *(f"{word} {limit:g}" for word, limit in limits if limit is not None)])

    def meant(self, text: str) -> str:
        """The choice that is most like a text, whatever its case and punctuation; none: empty."""
        plain = {"".join(filter(str.isalnum, choice)).lower(): choice for choice in self.choices}
        near = difflib.get_close_matches("".join(filter(str.isalnum, text)).lower(), plain, n=1)
        return plain[near[0]] if near else ""

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type is one of the choices and within the limits."""
        if self.choices and value not in self.choices:
            return False
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


def env(name: str, default: Any = dataclasses.MISSING, **limits: Any) -> Any:
    """Declares a dataclass field that is read from the environment variable ``name``; limits: the fields of Variable.

    Without a default the variable is required. An empty value counts as unset, so that ``export SEED=`` means "none".
    """
    return dataclasses.field(default=default, metadata={"env": Variable(name=name, **limits)})


def variables(config_class: type) -> Iterator[tuple[dataclasses.Field[Any], Variable, type, bool]]:
    """Yields (field, variable, plain type, optional?) for every variable a Config class and its nested Configs read."""
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from variables(typing.cast(type, kind))
        elif "env" in field.metadata:
            plain, optional = _plain_type(kind)
            yield field, field.metadata["env"], plain, optional


def from_env(config_class: type[ConfigT], environ: Mapping[str, str]) -> ConfigT:
    """Builds a Config and its nested Configs from ``environ``.

    Raises ConfigError for a required variable that is unset, a value of the wrong type and one out of range.
    """
    hints = typing.get_type_hints(config_class)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):  # type: ignore[arg-type]
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            values[field.name] = from_env(typing.cast(type, kind), environ)
        elif "env" in field.metadata:
            values[field.name] = _read(field, kind, environ)
    return config_class(**values)


def values(config: Any) -> dict[str, Any]:
    """The value of every variable of a Config and its nested Configs, by the variable's name; paths as text."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= values(value)
        elif "env" in field.metadata:
            found[field.metadata["env"].name] = str(value) if isinstance(value, Path) else value
    return found


def announce(name: str, value: str) -> None:
    """Sets a variable of this process that a library insists on reading, unless it is set."""
    os.environ.setdefault(name, value)


def _plain_type(hint: Any) -> tuple[type, bool]:
    """Splits ``int | None`` into (int, True) and ``int`` into (int, False)."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        assert len(inner) == 1, f"unsupported field type {hint}"
        return inner[0], True
    return hint, False


def _read(field: dataclasses.Field[Any], hint: Any, environ: Mapping[str, str]) -> Any:
    variable: Variable = field.metadata["env"]
    kind, _ = _plain_type(hint)
    text = environ.get(variable.name, "").strip()
    if not text:
        if field.default is dataclasses.MISSING:
            cure = f"export {variable.name}=..., or source a config that has it"
            raise ConfigError(f"{variable.name} is not set: expected {variable.expectation(kind)}; {cure}")
        return field.default
    try:
        value = _parse(text, kind)
        allowed = variable.allows(value)
    except (KeyError, ValueError, OverflowError):
        allowed = False
    if not allowed:
        meant = variable.meant(text)
        hint = f"; did you mean {meant}?" if meant else ""
        raise ConfigError(f"{variable.name}={text!r}: expected {variable.expectation(kind)}{hint}")
    return value


def _parse(text: str, kind: type) -> Any:
    if kind is bool:
        return BOOLEANS[text.lower()]
    if kind is float and not math.isfinite(float(text)):
        raise ValueError
    if kind is int and any(c in text for c in ".eE"):
        number = float(text)  # "1e6" is how people write sample counts; "1.5" is not a count
        if number != int(number):
            raise ValueError
        return int(number)
    return kind(text)
