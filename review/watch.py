"""`watch`: follows live runs and acceptance tests, one row each; a single one also has a bar and
all its figures.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from review.acceptance.journal import EXIT
from review.acceptance.live import AcceptanceState, AcceptanceTail, is_test
from review.logs import output, tree
from review.logs.mllog import parse, text
from review.logs.output import Column, ReviewError, print_json
from review.results.folder import run_folder
from review.results.run import Run
from review.results.run_state import RunState
from review.rulebook.compliance import DEFAULT_RULESET

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Folders of live trials; the launcher moves the log up one level when the trial ends.
_RUNNING = re.compile(r"running_\d+(_\d+)?")
NO_LOG = "no result_*.txt here or below"
_IDLE_SECONDS = 60.0  # to wait for another trial after the last run ended


State: TypeAlias = RunState | AcceptanceState


def find_logs(target: Path) -> list[Path]:
    """Every log at or below a path, including those of running trials; the folder of an acceptance
    test itself.
    """
    if target.is_file() or is_test(target):
        return [target]
    below = [
        Path(folder) / name for folder, _, names in os.walk(target) for name in names
    ]
    return [
        path
        for path in below
        if tree.RESULT_NAME.fullmatch(path.name) and path.is_file()
    ]


def find_log(target: Path) -> Path:
    """What to follow: the newest of ``find_logs``, running trials first. Raises ReviewError."""
    if not target.exists():
        raise ReviewError(f"{target}: no such file or folder")
    # Tuples compare in this order: live trials first, then the newest.
    logs = []
    for path in find_logs(target):
        running = bool(_RUNNING.fullmatch(path.parent.name))
        with contextlib.suppress(OSError):  # removed meanwhile
            logs.append((running, path.stat().st_mtime, str(path)))
    if not logs:
        raise ReviewError(f"{target}: {NO_LOG}; give the log of a run, or its folder")
    return Path(max(logs)[2])


def wait_for_log(
    target: Path, interval: float, sleep: Callable[[float], None] = time.sleep
) -> Path:
    """Waits until there is a log to follow: a run may write its first line after minutes. Raises
    ReviewError.
    """
    announced = False
    while True:
        try:
            return find_log(target)
        except ReviewError:
            # In a folder a log may still appear; a missing file will not.
            if not target.is_dir():
                raise
        if not announced:
            waits = f"review: waiting for the first result_*.txt below {target}"
            print(waits, file=sys.stderr, flush=True)
            announced = True
        sleep(interval)


class LogTail:
    """Reads a growing log, and follows it to where the launcher moves it when the trial ends."""

    def __init__(self, path: Path, ruleset: str = DEFAULT_RULESET) -> None:
        self.path, self.ruleset = path, ruleset
        self._run: Run | None = None
        self._read: object = None  # path and stamp of the log when it was last read

    def poll(self, now: float) -> RunState:
        """State at ``now``, Unix seconds, from the log's complete lines. Raises ReviewError if the
        log is gone.
        """
        try:
            stat = self.path.stat()
            # With the inode: another trial's log may have the same name and size.
            stamp = (self.path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if self._run is None or self._read != stamp:
                data = self.path.read_bytes()
                # The last line may be half written.
                whole = data[: data.rfind(b"\n") + 1]
                self._run, self._read = (
                    Run(parse(self.path, whole), self.ruleset),
                    stamp,
                )
        except FileNotFoundError:
            folder, name = self.path.parent, self.path.name
            # One level up, and renamed if the trial failed.
            moved = [
                folder.parent / new_name
                for new_name in (name, name.replace("result_", "failed_", 1))
            ]
            if not _RUNNING.fullmatch(folder.name) or not any(
                path.is_file() for path in moved
            ):
                raise ReviewError(
                    f"{self.path}: is gone; the run was removed or left no log"
                ) from None
            self.path = next(path for path in moved if path.is_file())
            return self.poll(now)
        except OSError as error:
            raise ReviewError(f"{self.path}: {error.strerror}") from None
        found = run_folder(self.path.parent, (self._run,), self.ruleset)
        return RunState(found, 1000 * now)


class Runs:
    """Runs and tests at or below some paths, including those that appear later; for a single one,
    just that.
    """

    def __init__(self, targets: Sequence[Path], ruleset: str = DEFAULT_RULESET) -> None:
        for path in targets:
            if not path.exists():
                raise ReviewError(f"{path}: no such file or folder")
        self.targets, self.ruleset = targets, ruleset
        self.alone = len(targets) == 1 and find_logs(targets[0]) == list(targets)
        # By the path at first sight, as logs move when their trials end.
        self._tails: dict[Path, LogTail | AcceptanceTail] = {}
        self._now, self._idle_since = 0.0, math.inf

    def poll(self, now: float) -> dict[Path, State]:
        """States by the path at first sight. Skips removed logs, but raises ReviewError for a
        single one.
        """
        # First, since moved logs are known by their new paths afterwards.
        states = self._look(self._tails, now)
        # A log that has moved is not another one.
        known = {state.path for state in states.values()}
        new: dict[Path, LogTail | AcceptanceTail] = {
            path: AcceptanceTail(path) if path.is_dir() else LogTail(path, self.ruleset)
            for target in self.targets
            for path in find_logs(target)
            if path not in known
        }
        states |= self._look(new, now)
        everyone = self._tails | new
        self._tails = {path: everyone[path] for path in states}
        # No log yet is not idle: the first trial is still to come.
        idle = states and all(
            state.done or state.broken is not None for state in states.values()
        )
        self._now, self._idle_since = (
            now,
            min(self._idle_since, now) if idle else math.inf,
        )
        order = {
            path: (str(state.path.parent), tree.natural_order(state.path))
            for path, state in states.items()
        }
        return {
            path: states[path] for path in sorted(states, key=lambda path: order[path])
        }

    def _look(
        self, tails: Mapping[Path, LogTail | AcceptanceTail], now: float
    ) -> dict[Path, State]:
        states: dict[Path, State] = {}
        for path, tail in tails.items():
            with (
                contextlib.nullcontext()
                if self.alone
                else contextlib.suppress(ReviewError)
            ):
                states[path] = tail.poll(now)
        return states

    def ended(self, states: Mapping[Path, State]) -> bool:
        """Whether none is active and no further one has started for a minute."""
        return self._now - self._idle_since >= (0 if self.alone else _IDLE_SECONDS)


def watch(runs: Runs, interval: float, *, as_json: bool, once: bool) -> int:
    """Shows the runs until they have ended. Returns the first exit status that is not 0."""
    shown: dict[Path, object] = {}

    def report(states: Mapping[Path, State]) -> None:
        for path, state in states.items():
            if shown.get(path) == state.news:
                continue
            shown[path] = state.news
            if as_json:
                print_json(state, indent=None)
            else:
                name = "" if runs.alone else f"{text(str(state.path))}: "
                print(name, ", ".join(state.parts()), sep="", flush=True)

    states = output.follow(runs.poll, runs.ended, interval)
    # Every state is news to show_states(); report() decides run by run.
    last = output.show_states(
        states, report, lambda _: object(), render, as_json=as_json, once=once
    )
    for state in last.values():
        if state.broken is not None:
            reason = f"{text(str(state.path))}: did not run: {text(state.broken.splitlines()[0])}"
            print(f"review: {reason}", file=sys.stderr)
    return next((state.status for state in last.values() if state.status), 0)


_COLUMNS = (
    Column("run", wraps=True),
    Column("phase"),
    Column("done", right=True, drop=4),
    Column("accuracy", right=True),
    Column("evals", right=True, drop=1),
    Column("seq/s", right=True, drop=2),
    Column("time", right=True, drop=3),
    Column("to go", right=True),
)


def render(by_path: Mapping[Path, State], out: Console) -> RenderableType:
    """Terminal view: a row per run; a single run also gets a progress bar and all its figures."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    states = [*by_path.values()]
    if not states:
        return Text("waiting for the first result_*.txt", "dim")
    rows = []
    for state in states:
        phase = "stalled" if state.stalled else state.phase
        phase = "broken" if state.broken is not None else phase
        rows.append([text("/".join(state.path.parts[-2:])), phase, *state.cells()])
    colours = {0: "green", EXIT["warn"]: "yellow"}
    ended = [state.done or state.broken is not None for state in states]
    styles = [
        colours.get(state.status, "red") if over else ""
        for state, over in zip(states, ended, strict=True)
    ]
    table = output.table(*output.fit(list(_COLUMNS), rows, out.width), styles)
    if len(states) > 1:
        return table
    bar = ProgressBar(
        total=1.0, completed=states[0].share or 0.0, width=min(60, out.width)
    )
    # "": the bar does not end its line
    return Group(table, bar, Text("\n".join(["", *states[0].parts()])))
