"""The table of rules in our words, rules.yaml, and findings of it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from review.logs.output import ERROR, Finding
from review.logs.tree import read_table


@functools.cache
def _rules() -> dict[str, dict[str, Any]]:
    return read_table(__file__, "rules.yaml")


def official() -> dict[str, dict[str, str]]:
    """The compliance checker's rules: ``hints`` by key of a log, ``words`` for its snippets of Python."""
    return _rules()["official"]


def table(name: str) -> Any:
    """One of the tables of hyper-parameters: optimization, recipe, borrowed, closed_values."""
    return _rules()["tables"][name]


def broken(
    name: str,
    message: str,
    /,
    file: Path | None = None,
    line: int | None = None,
    key: str | None = None,
    severity: str | None = None,
    **values: Any,
) -> Finding:
    """A finding by a rule of the table. ``values``: what its texts leave open. ``severity``: instead of the table's."""
    rule = _rules()[name]
    said, hint = rule["rule"].format(**values), rule["hint"].format(**values)
    severity = severity or rule.get("severity", ERROR)
    return Finding(severity, message, rule.get("source", "rules"), file, line, key, said, hint)
