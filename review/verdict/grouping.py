"""Findings of one rule together, with every place that breaks it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from review.logs.mllog import text
from review.logs.output import Finding

_MOST_PLACES = 6
_LONGEST_RULE = 300  # some official rules are lists of hundreds of names


def groups(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings of one rule together, in the order of the first."""
    found: dict[tuple[str | None, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.severity, finding.source, finding.message, finding.rule, finding.hint)
        found.setdefault(key, []).append(finding)
    return list(found.values())


def subject(group: Sequence[Finding], base: Path) -> str:
    """Which keys or files, and what about them."""
    names = [finding.key for finding in group if finding.key]
    if not names:
        names = [place for finding in group if (place := _file(finding, base))]
    names = list(dict.fromkeys(names))
    prefix = f"{', '.join(names[:_MOST_PLACES])}{_more(names)} " if names else ""
    return text(prefix + group[0].message)


def shortened(rule: str) -> str:
    """A rule at a length for reading."""
    return rule if len(rule) <= _LONGEST_RULE else f"{' '.join(rule[:_LONGEST_RULE].split())} ..."


def places(group: Sequence[Finding], base: Path) -> str:
    """Files with the lines of each."""
    files: dict[str, list[str]] = {}
    for finding in group:
        lines = files.setdefault(_file(finding, base), [])
        if finding.line is not None and str(finding.line) not in lines:
            lines.append(str(finding.line))
    found = [f"{name}:{','.join(lines)}" if lines else name for name, lines in files.items() if name]
    return ", ".join(found[:_MOST_PLACES]) + _more(found)


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - _MOST_PLACES} more" if len(names) > _MOST_PLACES else ""


def _file(finding: Finding, base: Path) -> str:
    """The file, relative to the checked folder where that is shorter; empty for that folder itself."""
    if finding.file is None or finding.file == base:
        return ""
    name = str(finding.file)
    with contextlib.suppress(ValueError):  # other drives
        name = min(name, os.path.relpath(finding.file, base if base.is_dir() else base.parent), key=len)
    return name


def with_places(group: Sequence[Finding], base: Path) -> str:
    """``subject`` and the files it is about."""
    files = places(group, base)
    return f"{subject(group, base)}, in {text(files)}" if files and group[0].key else subject(group, base)
