"""Why a run ends."""

from __future__ import annotations

from dataclasses import dataclass


class TrainingError(RuntimeError):
    """The run itself went wrong, such as a loss that is not a number."""


TARGET, LAST_STEP = "the target was reached", "the last step was reached"


@dataclass(frozen=True)
class Ending:
    """The reason for which a run ended, after which step."""

    reason: str
    step: int

    @property
    def reached(self) -> bool:
        """Whether the target was reached."""
        return self.reason == TARGET
