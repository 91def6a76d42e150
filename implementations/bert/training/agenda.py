"""What is due after a step. It is said here once, so that the host waits for the device at no other."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Due:
    """What follows a step: a report, then an evaluation, then a checkpoint, then the end."""

    report: bool = False
    evaluate: bool = False
    checkpoint: bool = False
    end: bool = False

    def __bool__(self) -> bool:
        return self.report or self.evaluate or self.checkpoint or self.end


@dataclass(frozen=True, kw_only=True)
class Agenda:
    """The steps of a run at which something is due.

    last: step at which the run ends; report_every: steps between reports; evaluations: steps (0: before the first one);
    checkpoint_every: steps between checkpoints, 0 for none.
    """

    last: int
    report_every: int
    evaluations: Collection[int] = ()
    checkpoint_every: int = 0

    def after(self, step: int) -> Due:
        """What is due after ``step`` (1 is the first). An evaluation and the end are preceded by a report."""
        evaluate, end = step in self.evaluations, step >= self.last
        return Due(
            report=evaluate or end or step % self.report_every == 0,
            evaluate=evaluate,
            checkpoint=self.checkpoint_every > 0 and step % self.checkpoint_every == 0,
            end=end,
        )
