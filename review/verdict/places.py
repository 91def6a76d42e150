"""Findings in a few words: those of one rule together, with their files and lines."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from review.logs.mllog import text
from review.logs.output import Finding

_MOST_PLACES = 6
_LONGEST_RULE = 300  # some official rules are lists of hundreds of names


def groups(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings grouped by rule and message, in order of first occurrence."""
    by_kind: dict[tuple[str | None, ...], list[Finding]] = {}
    for finding in findings:
        # Ten logs with one fault make one entry with ten places.
        kind = (finding.id, finding.severity, finding.message, finding.rule)
        by_kind.setdefault((*kind, finding.hint), []).append(finding)
    return list(by_kind.values())


def subject(group: Sequence[Finding], base: Path) -> str:
    """The keys or files, and the message about them."""
    keys = dict.fromkeys(finding.key for finding in group if finding.key)
    files = [_file(finding, base) for finding in group]
    names = _listed(keys or dict.fromkeys(filter(None, files)))
    return text(f"{names} {group[0].message}" if names else group[0].message)


def shortened(rule: str) -> str:
    """A rule cut to a readable length."""
    return (
        rule
        if len(rule) <= _LONGEST_RULE
        else f"{' '.join(rule[:_LONGEST_RULE].split())} ..."
    )


def places(group: Sequence[Finding], base: Path) -> str:
    """Files with line numbers; empty if the findings are about whole files."""
    if not any(finding.line or finding.key for finding in group):
        return ""
    files: dict[str, dict[str, None]] = {}
    for finding in group:
        files.setdefault(_file(finding, base), {}).update(
            {} if finding.line is None else {str(finding.line): None}
        )
    return _listed(
        f"{name}:{','.join(lines)}" if lines else name
        for name, lines in files.items()
        if name
    )


def _listed(names: Iterable[str]) -> str:
    """The first names and the number of others."""
    every = list(names)
    more = f" and {len(every) - _MOST_PLACES} more" if len(every) > _MOST_PLACES else ""
    return ", ".join(every[:_MOST_PLACES]) + more


def _file(finding: Finding, base: Path) -> str:
    """The file relative to the checked folder or its organisation's; empty for that folder
    itself.
    """
    if finding.file is None or finding.file == base:
        return ""
    file, base = finding.file.absolute(), base.absolute()
    # Three levels above BENCHMARK is ORG, in which the description and the README lie.
    for above in (base, *base.parents[:3]):
        if above.is_dir() and file.is_relative_to(above):
            return str(file.relative_to(above))
    return str(finding.file)


def with_places(group: Sequence[Finding], base: Path) -> str:
    """``subject`` and its files."""
    files = places(group, base)
    return (
        f"{subject(group, base)}, in {text(files)}"
        if files and group[0].key
        else subject(group, base)
    )
