"""`watch` for an acceptance test: its stage, then the progress of the burn-in and the verdict so far."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.durations import duration
from common.files import text_of
from review.acceptance.journal import EXIT, BurnIn, Journal
from review.logs import output
from review.logs.mllog import text
from review.logs.output import ReviewError, print_json
from review.logs.tree import read_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from review.acceptance.verdict import Certificate

BROKEN = 2
SILENT_SECONDS, SILENT_REPEATS = 60.0, 10  # a burn-in without news for longer than both has stalled
# The load prints such a line as a stage begins; the last one is where it is.
_STAGE = re.compile(r"certify: ([\w, ]+):")


@dataclass(frozen=True)
class State:
    """State of a test. stage: what it does now; found: the verdict so far, None before the stages are over."""

    stage: str
    found: Certificate | None
    burn: BurnIn | None
    silent: float
    broken: str | None
    done: bool

    @property
    def verdict(self) -> str:
        """Verdict if the test ended now; empty before there is one."""
        return self.found.state if self.found else ""

    @property
    def reasons(self) -> list[str]:
        return self.found.reasons() if self.found else []

    @property
    def stands_still(self) -> bool:
        """Whether a burn-in has been silent for far longer than a repeat takes."""
        repeat = self.burn.elapsed / self.burn.repeats if self.burn and self.burn.repeats else 0.0
        return (
            self.burn is not None
            and not self.done
            and self.silent > max(SILENT_SECONDS, SILENT_REPEATS * repeat)
        )

    def lines(self) -> list[str]:
        parts = [self.burn.text() if self.burn else f"certify: {self.stage}"]
        if self.stands_still:
            parts.append(f"no new repeat for {duration(self.silent)}")
        if self.found is not None:
            parts.append(self.verdict if self.done else f"so far: {self.verdict}")
        return ["; ".join(parts), *(f"  {reason}" for reason in self.reasons)]

    def as_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "state": self.verdict or None,
            "reasons": self.reasons,
            "burn_in": self.burn,
            "stands_still": self.stands_still,
            "broken": self.broken,
            "done": self.done,
        }


class Watched:
    """A test's folder; its records are judged whenever they change, in a burn-in every few minutes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: Certificate | None = None
        self._judged: list[tuple[str, int]] = []
        self._journal = Journal(folder)

    def poll(self, now: float) -> State:
        """State at ``now`` (seconds since the epoch). Raises ReviewError for invalid files."""
        # Late, as it imports scipy, and `watch` should start at once.
        from review.acceptance.verdict import certify

        config = read_json(self.folder / "config.json")
        records = sorted([*self.folder.glob("certify_*.npz"), *self.folder.glob("burn_in_*.npz")])
        judged = [(path.name, path.stat().st_mtime_ns) for path in records]
        if judged != self._judged:
            try:
                self._found = certify(self.folder)
            except ReviewError:  # files of other nodes are still to come
                self._found = None
            # Without a verdict, another attempt at the next poll.
            self._judged = judged if self._found else []
        burn = self._journal.read(self._found.records.places if self._found else {})
        seconds = float(config.get("burn_in_seconds", burn.duration if burn else 0.0))
        if burn is not None:
            burn = replace(burn, duration=seconds)
        found = replace(self._found, burn_in=burn) if self._found else None
        changed = [path.stat().st_mtime for path in self.folder.glob("burn_in_*.jsonl")]
        error = text_of(self.folder / "error_0.txt")
        done = found is not None and (burn.elapsed >= seconds if burn is not None else not seconds)
        stage = "burn-in" if burn else "over" if done else "starting"
        if stage == "starting":  # not during a burn-in: the load's output grows with each repeat
            stage = [stage, *_STAGE.findall(text_of(self.folder / "output.txt"))][-1]
        state = State(stage, found, burn, now - max(changed, default=now), error or None, done)
        # As long as it moves, a burn-in has not ended early.
        if found is not None and burn is not None and not state.stands_still:
            state = replace(state, found=replace(found, burn_in=replace(burn, running=True)))
        return state


def is_test(folder: Path) -> bool:
    """Whether this is the folder of an acceptance test."""
    begun = any(folder.glob("certify_*.npz")) or (folder / "burn_in.json").exists()
    return begun or "expected" in read_json(folder / "config.json")


def watch(watched: Watched, interval: float, as_json: bool, once: bool) -> int:
    """Shows the test until it ends; returns the exit status of `certify`, or 2 if the load did not run."""

    def say(state: State) -> None:
        if as_json:
            print_json(state, indent=None)
        else:
            print(*state.lines(), sep="\n", flush=True)

    def news(state: State) -> object:
        """A line is printed when any of these changes."""
        percent = (
            int(100 * state.burn.elapsed / state.burn.duration)
            if state.burn and state.burn.duration
            else 0
        )
        return (
            state.stage,
            state.verdict,
            len(state.reasons),
            percent,
            state.stands_still,
            state.done,
        )

    def render(state: State, _: Console) -> RenderableType:
        from rich.text import Text

        return Text(
            "\n".join(state.lines()),
            {"pass": "green", "warn": "yellow", "fail": "red"}.get(state.verdict, ""),
        )

    states = output.follow(
        watched.poll, lambda state: state.done or state.broken is not None, interval
    )
    state = output.show_states(states, say, news, render, as_json=as_json, once=once)
    if state.broken is not None:
        print(
            f"review: the load did not run: {text(state.broken.splitlines()[0])}", file=sys.stderr
        )
    return BROKEN if state.broken is not None else EXIT[state.verdict or "pass"]
