"""A live acceptance test: what it does now, and the verdict so far."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.durations import duration
from common.files import text_of
from review.acceptance.journal import EXIT, BurnIn, Journal
from review.logs import tree
from review.logs.mllog import text
from review.logs.output import ReviewError, number_text, pick
from review.results.run_state import STALLED_SECONDS

if TYPE_CHECKING:
    from review.acceptance.verdict import Certificate

# The load prints such a line as a stage begins; the last one is where it is.
_STAGE = re.compile(r"certify: ([\w, ]+):")
# A burn-in that is silent for as many repeats, and STALLED_SECONDS, has stalled.
_SILENT_REPEATS = 10


@dataclass(frozen=True)
class AcceptanceState:
    """State of an acceptance test. phase: what it does now; certificate: the verdict so far, None before
    the stages are over.

    silent: seconds since the last repeat; broken: why the load did not run.
    """

    path: Path
    phase: str
    certificate: Certificate | None
    burn: BurnIn | None
    silent: float
    broken: str | None
    done: bool

    @property
    def verdict(self) -> str:
        """Verdict if the test ended now; empty before there is one."""
        return self.certificate.state if self.certificate else ""

    @property
    def reasons(self) -> list[str]:
        return self.certificate.reasons() if self.certificate else []

    @property
    def stalled(self) -> bool:
        """Whether a burn-in has been silent for far longer than a repeat takes."""
        if self.burn is None or self.done:
            return False
        # Mean so far; nothing is known before the first has ended.
        repeat = self.burn.elapsed / max(self.burn.repeats, 1)
        return self.silent > max(STALLED_SECONDS, _SILENT_REPEATS * repeat)

    @property
    def share(self) -> float | None:
        """Share of the burn-in that is done."""
        if self.burn is None or not self.burn.duration:
            return None
        return min(1.0, self.burn.elapsed / self.burn.duration)

    @property
    def status(self) -> int:
        """Exit status: that of `certify`, or 2 if the load did not run."""
        return 2 if self.broken is not None else EXIT[self.verdict or "pass"]

    @property
    def news(self) -> object:
        percent = int(100 * (self.share or 0))
        return (
            self.phase,
            self.verdict,
            len(self.reasons),
            percent,
            self.stalled,
            self.done,
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            **pick(
                self,
                "stage=phase reasons burn_in=burn stands_still=stalled broken done",
            ),
            "state": self.verdict or None,
        }

    def parts(self) -> list[str]:
        """Everything known, one phrase per item."""
        parts = [
            self.burn.text() if self.burn else f"certify: {self.phase}",
            f"no new repeat for {duration(self.silent)}" if self.stalled else "",
            self.verdict
            if self.done or not self.verdict
            else f"so far: {self.verdict}",
            *self.reasons,
        ]
        return [text(part) for part in parts if part]

    def cells(self) -> list[str]:
        """What _COLUMNS show from the third on."""
        elapsed = self.burn.elapsed if self.burn else None
        left = (
            self.burn.duration - self.burn.elapsed
            if self.burn and not self.stalled
            else None
        )
        share = number_text(self.share, ".0%")
        return [share, "", "", "", duration(elapsed), duration(left and max(left, 0.0))]


def is_test(folder: Path) -> bool:
    """Whether this is the folder of an acceptance test, which writes no log."""
    begun = any(folder.glob("certify_*.npz")) or (folder / "burn_in.json").exists()
    return begun or "expected" in tree.read_json(folder / "config.json")


class AcceptanceTail:
    """Reads a test's folder; its records are judged whenever they change, in a burn-in every few
    minutes.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._found: Certificate | None = None
        self._judged: list[tuple[str, int]] = []
        self._journal = Journal(folder)

    def poll(self, now: float) -> AcceptanceState:
        """State at ``now``, Unix seconds. Raises ReviewError for invalid files."""
        # Late, as it imports scipy, and `watch` should start at once.
        from review.acceptance.verdict import certify

        records = sorted(
            [*self.path.glob("certify_*.npz"), *self.path.glob("burn_in_*.npz")]
        )
        judged = [(path.name, path.stat().st_mtime_ns) for path in records]
        if judged != self._judged:
            self._found = None
            # Files of other nodes are still to come.
            with contextlib.suppress(ReviewError):
                self._found = certify(self.path)
            # Without a verdict, another attempt at the next poll.
            self._judged = judged if self._found else []
        certificate = self._found
        burn = self._journal.read(certificate.records.ranks if certificate else {})
        config = tree.read_json(self.path / "config.json")
        seconds = float(config.get("burn_in_seconds", burn.duration if burn else 0.0))
        if burn is not None:
            burn = replace(burn, duration=seconds)
        done = certificate is not None and (
            burn.elapsed >= seconds and not burn.behind
            if burn is not None
            else not seconds
        )
        stage = "burn-in" if burn else "over" if done else "starting"
        # Not during a burn-in: the load's output grows with each repeat.
        if stage == "starting":
            stage = [stage, *_STAGE.findall(text_of(self.path / "output.txt"))][-1]
        changed = [path.stat().st_mtime for path in self.path.glob("burn_in_*.jsonl")]
        silent, error = (
            now - max(changed, default=now),
            text_of(self.path / "error_0.txt"),
        )
        state = AcceptanceState(
            self.path, stage, certificate, burn, silent, error or None, done
        )
        if certificate is None:
            return state
        # As long as it moves, a burn-in has not ended early.
        running = burn and replace(burn, running=not state.stalled)
        return replace(state, certificate=replace(certificate, burn_in=running))
