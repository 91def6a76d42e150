"""Why a test does not pass. Imports nothing that takes time, as `watch` needs it at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

EXIT = {"pass": 0, "warn": 3, "fail": 1}
STATES = ("pass", "warn", "fail")


def worst(states: Iterable[str]) -> str:
    """The verdict over several states."""
    return max(states, key=STATES.index, default="pass")


@dataclass(frozen=True)
class Reason:
    """One line of a verdict, and a row of its page. state: fail or warn."""

    name: str
    what: str
    state: str = "fail"
    stage: str = ""
    sure: str = ""
    evidence: str = ""

    def text(self) -> str:
        where = "; ".join(filter(None, (self.stage, self.sure)))
        return f"{self.name}: {self.what}{where and f' ({where})'}{self.evidence and f'; {self.evidence}'}"
