"""`watch`: follows live runs, one row each; a single one also has all its figures in words."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from review.logs import output, tree
from review.logs.mllog import parse, text
from review.logs.output import Column, ReviewError
from review.results.folder import run_folder
from review.results.run import Run, run_of
from review.results.run_state import RunState
from review.rulebook.compliance import DEFAULT_RULESET

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Folders of live trials; the launcher moves the log up one level when the trial ends, and renames
# it if the trial failed.
_RUNNING = re.compile(r"running_\d+(_\d+)?")
_IDLE_SECONDS = 60.0  # to wait for another trial after the last run ended

States = dict[Path, RunState]  # by where the log of a good trial ends


def check(target: Path) -> None:
    """Raises ReviewError for what no run will ever be below."""
    if not target.exists():
        raise ReviewError(f"{target}: no such file or folder")
    if "burn_in_seconds" in tree.read_json(target / "config.json"):
        instead = f"see {target / 'output.txt'}, or python -m review certify {target}"
        raise ReviewError(f"{target}: is an acceptance test, not a run: {instead}")


def _is_running(path: Path) -> bool:
    return bool(_RUNNING.fullmatch(path.parent.name))


def _end_of(path: Path) -> Path:
    """Where the log of a trial ends if all goes well."""
    folder = path.parent.parent if _is_running(path) else path.parent
    return folder / path.name.replace("failed_", "result_", 1)


def find_logs(target: Path) -> list[Path]:
    """Every log at or below a path, including those of running trials. One that is moved is found
    where it ends.
    """
    if not target.is_dir():
        end = _end_of(target)
        failed = end.with_name(end.name.replace("result_", "failed_", 1))
        places = (target, end, failed) if _is_running(target) else (target,)
        return [path for path in places if path.is_file()][:1]
    return [
        Path(folder) / name
        for folder, _, names in os.walk(target)
        for name in names
        if tree.RESULT_NAME.fullmatch(name) or name.startswith("failed_")
    ]


def _newest(logs: Sequence[Path]) -> list[Path]:
    """The log to follow: of a live trial first, then the newest."""
    known = []
    for path in logs:
        with contextlib.suppress(OSError):  # removed meanwhile
            known.append((_is_running(path), path.stat().st_mtime, path))
    return [max(known)[2]] if known else []


def read_run(path: Path, ruleset: str = DEFAULT_RULESET) -> Run:
    """The run by the log's complete lines. Raises OSError."""
    data = path.read_bytes()
    # The last line may be half written.
    return run_of(parse(path, data[: data.rfind(b"\n") + 1]), ruleset)


def state_of(run: Run, now: float, ruleset: str = DEFAULT_RULESET) -> RunState:
    """State at ``now``, Unix seconds."""
    return RunState(run_folder(run.path.parent, (run,), ruleset), 1000 * now)


class Runs:
    """Runs at or below some paths, including those that appear later. ``newest``: just the newest log
    there.
    """

    def __init__(
        self,
        targets: Sequence[Path],
        ruleset: str = DEFAULT_RULESET,
        newest: bool = False,
    ) -> None:
        self.targets, self.ruleset, self.newest = targets, ruleset, newest
        for path in targets:
            check(path)
        self.file = targets[0] if len(targets) == 1 and targets[0].is_file() else None
        self.alone = newest or self.file is not None
        self._read: dict[Path, tuple[object, Run]] = {}  # with the stamp of each log

    def poll(self, now: float) -> States:
        """Reads those that have changed. Raises ReviewError if the only log is gone."""
        logs = [path for target in self.targets for path in find_logs(target)]
        states = {}
        logs = _newest(logs) if self.newest else logs
        logs.sort(key=lambda path: (str(path.parent), tree.natural_order(path)))
        for path in logs:
            with contextlib.suppress(FileNotFoundError):  # moved meanwhile
                states[_end_of(path)] = state_of(self._run(path), now, self.ruleset)
        if self.file and not states:
            why = "is gone; the run was removed or left no log"
            raise ReviewError(f"{self.file}: {why}")
        return states

    def _run(self, path: Path) -> Run:
        stat = path.stat()
        # With the inode: another trial's log may have the same name and size.
        stamp = stat.st_ino, stat.st_size, stat.st_mtime_ns
        if path not in self._read or self._read[path][0] != stamp:
            self._read[path] = stamp, read_run(path, self.ruleset)
        return self._read[path][1]


def follow(
    runs: Runs,
    interval: float,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[States]:
    """The states every ``interval`` seconds, the last one included, until none is active and no
    further one has started for a minute.
    """
    idle_since = math.inf
    while True:
        now = clock()
        states = runs.poll(now)
        yield states
        # No log yet is not idle: the first trial is still to come.
        idle = states and all(state.over for state in states.values())
        idle_since = min(idle_since, now) if idle else math.inf
        if now - idle_since >= (0 if runs.alone else _IDLE_SECONDS):
            return
        sleep(interval)


def watch(runs: Runs, interval: float, *, as_json: bool, once: bool) -> int:
    """Shows the runs until they have ended. Returns the first exit status that is not 0."""
    looks = follow(runs, interval)
    states = next(looks)
    live = not once and not as_json and sys.stdout.isatty()
    if once and not states:
        how = "give the log of a run, or its folder"
        raise ReviewError(f"{runs.targets[0]}: no result_*.txt here or below; {how}")
    if not states and not live:
        waits = f"review: waiting for the first result_*.txt below {runs.targets[0]}"
        print(waits, file=sys.stderr, flush=True)
    # A pipe gets a line per change; cursor movements would spoil a log file.
    if live:
        from rich.live import Live

        out = output.console()
        # Drawn when a state arrives, not ten times a second: nothing changes in between.
        with Live(render(states, out), console=out, auto_refresh=False) as drawn:
            for states in looks:
                drawn.update(render(states, out), refresh=True)
    else:
        shown: dict[Path, object] = {}
        while True:
            for path, state in states.items():
                if shown.get(path) != state.news:
                    _report(state, runs.alone, as_json)
                shown[path] = state.news
            if once or (following := next(looks, None)) is None:
                break
            states = following
    for state in states.values():
        if state.failure is not None:
            reason = f"{text(str(state.path))}: did not run: {text(state.failure)}"
            print(f"review: {reason}", file=sys.stderr)
    return next((state.status for state in states.values() if state.status), 0)


def _report(state: RunState, alone: bool, as_json: bool) -> None:
    if as_json:
        output.print_json(state, indent=None)
    else:
        name = "" if alone else f"{text(str(state.path))}: "
        print(name, ", ".join(state.parts()), sep="", flush=True)


_COLUMNS = (
    Column("run", wraps=True),
    Column("phase"),
    Column("samples", right=True, drop=4),
    Column("at most", right=True, drop=1),
    Column("accuracy", right=True),
    Column("evals", right=True, drop=2),
    Column("seq/s", right=True, drop=3),
    Column("time", right=True, drop=5),
)


def render(by_path: States, out: Console) -> RenderableType:
    """Terminal view: a row per run; a single run also gets all its figures."""
    from rich.console import Group
    from rich.text import Text

    states = [*by_path.values()]
    if not states:
        return Text("waiting for the first result_*.txt", "dim")
    rows, styles = [], []
    for state in states:
        phase = "stalled" if state.stalled else state.phase
        phase = "broken" if state.failure is not None else phase
        rows.append([text("/".join(state.path.parts[-2:])), phase, *state.cells()])
        styles.append(("red" if state.status else "green") if state.over else "")
    table = output.table(*output.fit(_COLUMNS, rows, out.width), styles)
    details = "\n".join(states[0].parts()) if len(states) == 1 else ""
    return Group(table, Text(details))
