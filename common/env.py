"""Typed configuration fields from environment variables: one hop from ``export LR=0.00096`` to
``config.lr``.

A component declares its settings once, in a frozen keyword-only dataclass::

    @dataclass(frozen=True, kw_only=True)
    class ScheduleConfig:
        lr: float = env("LR", above=0, doc="base rate")                 # required
        max_steps: int = env("MAX_STEPS", 1000, "steps", at_least=1)    # with its only default

and ``from_env(ScheduleConfig, os.environ)`` builds it, or stops with one line that names the
variable, its value and what was expected. This is the only module of the package that reads the
environment.
"""

import contextlib
import dataclasses
import difflib
import functools
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

ConfigT = TypeVar("ConfigT")

BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


class ConfigError(ValueError):
    """A setting that is missing, malformed, out of range or in conflict with another. The message
    is for the user.
    """

    exit_status = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variable:
    """An environment variable and what it may hold; None: no limit."""

    name: str
    doc: str = ""
    # A table of what is registered stays one: what is added later is a choice, too.
    choices: Collection[str] = ()
    # Others' words for a choice, to be suggested.
    synonyms: tuple[tuple[str, str], ...] = ()
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None

    @property
    def meaning(self) -> str:
        """The documentation, with the choices."""
        return f"{self.doc} ({', '.join(self.choices)})" if self.choices else self.doc

    def expectation(self, kind: type) -> str:
        """Description of accepted values, such as ``an integer, at least 1``."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = {
            int: "an integer",
            float: "a number",
            bool: "0 or 1",
            Path: "a path",
            str: "text",
        }[kind]
        limits = [
            f"{name.replace('_', ' ')} {limit:g}" for name, _, limit in self._limits()
        ]
        return ", ".join([words, *limits])

    def suggestion(self, text: str) -> str:
        """The choice closest to ``text``, ignoring case and punctuation; empty if none is close."""
        # Case and punctuation aside: sdpa-loop and SDPA_LOOP are one word.
        plain = {
            "".join(filter(str.isalnum, choice)).lower(): choice
            for choice in self.choices
        }
        plain |= dict(self.synonyms)
        near = difflib.get_close_matches(
            "".join(filter(str.isalnum, text)).lower(), plain, n=1
        )
        return plain[near[0]] if near else ""

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type is one of the choices and within the limits."""
        return (not self.choices or value in self.choices) and all(
            is_within(value, limit) for _, is_within, limit in self._limits()
        )

    def _limits(self) -> list[tuple[str, Callable[[Any, Any], bool], float]]:
        limits = (
            ("at_least", operator.ge),
            ("at_most", operator.le),
            ("above", operator.gt),
            ("below", operator.lt),
        )
        return [
            (name, test, getattr(self, name))
            for name, test in limits
            if getattr(self, name) is not None
        ]


def env(
    name: str, default: Any = dataclasses.MISSING, doc: str = "", **limits: Any
) -> Any:
    """Declares a dataclass field that is read from the environment variable ``name``; limits: the
    other fields of Variable.

    Without a default the variable is required. An empty value counts as unset, so that ``export
    SEED=`` means "none".
    """
    # The variable rides in the field's metadata: one declaration gives its name, type, default,
    # limits and its line in docs/variables.md.
    return dataclasses.field(
        default=default, metadata={"env": Variable(name=name, doc=doc, **limits)}
    )


# The types of a class by field, kept: they stand in texts, which take milliseconds to evaluate.
_hints: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)


def variables(
    config_class: type,
) -> Iterator[tuple[dataclasses.Field[Any], Variable, type]]:
    """Yields (field, variable, plain type) for every variable a Config class and its nested Configs
    read.
    """
    hints = _hints(config_class)
    for field in dataclasses.fields(config_class):
        # hints, as with postponed annotations field.type is a string.
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from variables(typing.cast(type, kind))
        elif "env" in field.metadata:
            yield field, field.metadata["env"], _plain_type(kind)


def from_env(config_class: type[ConfigT], environ: Mapping[str, str]) -> ConfigT:
    """Builds a Config and its nested Configs from ``environ``.

    Raises ConfigError for a required variable that is unset, a value of the wrong type and one out
    of range.
    """
    hints = _hints(config_class)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):  # type: ignore[arg-type]
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            # Nested Configs read the same flat environment: there are no prefixes to know.
            values[field.name] = from_env(typing.cast(type, kind), environ)
        elif "env" in field.metadata:
            values[field.name] = _read(field, kind, environ)
    return config_class(**values)


def settings(config: Any) -> dict[str, Any]:
    """Values of a Config and its nested Configs by variable, except paths, which may move."""
    values: dict[str, Any] = {}
    paths = {
        variable.name for _, variable, kind in variables(type(config)) if kind is Path
    }
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            values |= settings(value)
        elif (
            "env" in field.metadata
            and (name := field.metadata["env"].name) not in paths
        ):
            values[name] = value
    return values


def beginning_with(*prefixes: str) -> dict[str, str]:
    """This process's variables whose names begin so, by which libraries are steered."""
    return {
        name: text
        for name, text in sorted(os.environ.items())
        if name.startswith(prefixes)
    }


def announce(name: str, value: str) -> None:
    """Sets a variable of this process that a library insists on reading, unless it is set."""
    os.environ.setdefault(name, value)


def _plain_type(hint: Any) -> type:
    """int of ``int | None``, and of ``int``."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        # Only None beside one type: a union of two has no single way to be read.
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        assert len(inner) == 1, f"unsupported field type {hint}"
        return typing.cast(type, inner[0])
    return typing.cast(type, hint)


def _read(field: dataclasses.Field[Any], hint: Any, environ: Mapping[str, str]) -> Any:
    variable: Variable = field.metadata["env"]
    kind = _plain_type(hint)
    text = environ.get(variable.name, "").strip()
    if not text:
        if field.default is dataclasses.MISSING:
            cure = f"export {variable.name}=..., or source a config that has it"
            raise ConfigError(
                f"{variable.name} is not set: expected {variable.expectation(kind)}; {cure}"
            )
        # Not held to the limits: a default may lie outside of them, as None does for "unset".
        return field.default
    # KeyError: no word for a boolean; OverflowError: int() of 1e999.
    with contextlib.suppress(KeyError, ValueError, OverflowError):
        value = _parse(text, kind)
        if variable.allows(value):
            return value
    hint = f"; did you mean {near}?" if (near := variable.suggestion(text)) else ""
    raise ConfigError(
        f"{variable.name}={text!r}: expected {variable.expectation(kind)}{hint}"
    )


def _parse(text: str, kind: type) -> Any:
    if kind is bool:
        return BOOLEANS[text.lower()]
    # float() reads nan and inf too, which only a limit would catch.
    if kind is float and not math.isfinite(float(text)):
        raise ValueError
    if kind is int and any(c in text for c in ".eE"):
        # "1e6" is how people write sample counts; "1.5" is not a count.
        number = float(text)
        if number != int(number):
            raise ValueError
        return int(number)
    return kind(text)
