"""A finding that has its place in a log."""

from __future__ import annotations

from review.logs.mllog import Event
from review.logs.output import Finding
from review.results.run import Run


def in_log(
    run: Run, severity: str, message: str, rule: str, hint: str, event: Event | None = None, key: str | None = None
) -> Finding:
    """Of one of our own rules, at an event where there is one."""
    return Finding(
        severity=severity,
        message=message,
        source="rules",
        file=run.path,
        line=event.line if event else None,
        key=key or (event.key if event and isinstance(event.key, str) else None),
        rule=rule,
        hint=hint,
    )
