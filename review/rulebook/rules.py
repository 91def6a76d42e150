"""Access to rules.yaml, and findings by its rules."""

import functools
import re
import sys
from pathlib import Path
from typing import Any

from common.tables import read_table
from review.logs.output import ERROR, Finding


# Read once: a check of ten logs asks for hundreds of texts.
@functools.cache
def _rules() -> dict[str, dict[str, Any]]:
    return read_table(__file__, "rules.yaml")


def official() -> dict[str, dict[str, str]]:
    """Texts for the compliance checker's rules: ``hints`` by log key, ``words`` for its snippets of
    Python.
    """
    return _rules()["official"]


def finding_ids() -> dict[str, tuple[str, str, str]]:
    """Of every finding, by id: the check that finds it, its severity unless that depends, the rule."""
    ids = {
        name: ("compliance", ERROR, rule) for name, rule in official()["ids"].items()
    }
    for name, rule in _rules().items():
        if "rule" in rule:
            found = rule.get("source", "rules"), rule.get("severity", ERROR)
            ids[name] = (*found, re.sub(r"{(\w+)[^}]*}", r"_\1_", rule["rule"]))
    return ids


def markdown() -> str:
    """The table of findings in docs/review.md."""
    rows = ["|id|check|severity|rule|", "|---|---|---|---|"]
    for name, about in finding_ids().items():
        rows.append(f"|{'|'.join((f'`{name}`', *about))}|")
    return "\n".join(rows) + "\n"


def table(name: str) -> Any:
    """An entry of ``tables`` in rules.yaml."""
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
    """A finding by the rule ``name``. ``values``: placeholders of its texts. ``severity``:
    overrides the rule's.
    """
    rule = _rules()[name]
    requirement = rule["rule"].format(**values)
    hint = rule["hint"].format(**values)
    severity = severity or rule.get("severity", ERROR)
    return Finding(
        name,
        severity,
        message,
        rule.get("source", "rules"),
        file,
        line,
        key,
        requirement,
        hint,
        unofficial=rule.get("unofficial", False),
    )


if __name__ == "__main__":
    sys.stdout.write(markdown())
