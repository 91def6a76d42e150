"""What a check says: one finding, with the place, the rule and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ERROR, WARNING, NOTE = "error", "warning", "note"


class ReviewError(Exception):
    """Wrong input of the user; the message is one line: what, where, what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One finding. ``rule`` is the rule's own text or its name; ``hint`` says what to do.

    ``crash``: the official checker stops with a traceback, which fails a result where one failing run would not.
    """

    severity: str
    message: str
    source: str  # which check found it, such as "compliance"
    file: Path | None = None
    line: int | None = None
    key: str | None = None
    rule: str | None = None
    hint: str | None = None
    crash: bool = False

    @property
    def place(self) -> str:
        """file:line, as far as known."""
        if self.file is None:
            return ""
        return str(self.file) if self.line is None else f"{self.file}:{self.line}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"file": None if self.file is None else str(self.file)}


def failed(findings: list[Finding]) -> bool:
    """Whether any finding is an error."""
    return any(finding.severity == ERROR for finding in findings)
