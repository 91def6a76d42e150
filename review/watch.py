"""`watch`: follows the log of a live run."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from certify.watch import is_test
from review.logs import tree
from review.logs.findings import ReviewError
from review.logs.mllog import LogParser, text
from review.logs.output import print_json
from review.results import live
from review.results.accuracy_chart import accuracy_chart
from review.results.display import duration
from review.results.run import Run
from review.results.score import Result
from review.results.standing import Standing, margin
from review.rulebook.compliance import DEFAULT_RULESET

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_HEAD = 4096  # bytes
CHART_ROWS = 14  # of the accuracy's chart, where the terminal has them
_RUNNING = re.compile(r"running_\d+")


def find_logs(target: Path) -> list[Path]:
    """Every log at or below a path, those of trials under way included."""
    if target.is_file():
        return [target]
    below = [Path(folder) / name for folder, _, names in os.walk(target) for name in names]
    return [path for path in below if tree.RESULT_NAME.fullmatch(path.name) and path.is_file()]


def find_log(target: Path) -> Path:
    """The log to follow: the file itself, or of a folder the newest, trials under way first. Raises ReviewError.

    The folder of an acceptance test has none, and is followed itself.
    """
    if not target.exists():
        raise ReviewError(f"{target}: no such file or folder")

    def age(path: Path) -> tuple[bool, float, str]:
        return bool(_RUNNING.fullmatch(path.parent.name)), _modified(path), str(path)

    newest = max(find_logs(target), key=age, default=None)
    if newest is None and is_test(target):
        return target
    if newest is None:
        raise ReviewError(f"{target}: no result_*.txt here or below; name the log of a run, or its folder")
    return newest


def wait_for_log(target: Path, interval: float, sleep: Callable[[float], None] = time.sleep) -> Path:
    """The log to follow, once there is one: a run may write its first line after minutes. Raises ReviewError."""
    said = False
    while True:
        try:
            return find_log(target)
        except ReviewError:
            if not target.is_dir():
                raise
        if not said:
            print(f"review: waiting for the first result_*.txt below {target}", file=sys.stderr, flush=True)
            said = True
        sleep(interval)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class Follower:
    """Reads a log as it grows, and where the launcher moves it when the trial ends."""

    def __init__(self, path: Path, ruleset: str = DEFAULT_RULESET, target: float | None = None) -> None:
        self.path, self.ruleset, self.target = path, ruleset, target
        self.log = path  # where it was first, whatever it is moved to
        self._run: Run | None = None
        self._parser = LogParser(path)
        self._seen: tuple[Path, int, int] | None = None
        self._head = b""  # what the log began with
        self._read_bytes = 0

    def poll(self, now_ms: float) -> Standing:
        """The state by the whole lines of the log. Raises ReviewError where the log is gone."""
        run = self._read()
        result = Result(self.path.parent, (run,), ruleset=self.ruleset)
        target = result.target if self.target is None else self.target
        return Standing(result, now_ms, target)

    def _read(self) -> Run:
        """The run by what the log holds now; only what was added since the last time is read."""
        try:
            status = self.path.stat()
            seen = (self.path, status.st_size, status.st_mtime_ns)
            if self._run is not None and seen == self._seen:
                return self._run
            with open(self.path, "rb") as file:
                head = file.read(_HEAD)
                if status.st_size < self._read_bytes or not head.startswith(self._head):  # another log by this name
                    self._parser, self._read_bytes = LogParser(self.path), 0
                self._head = head
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            self._follow_move()
            return self._read()
        except OSError as error:
            raise ReviewError(f"{self.path}: {error.strerror}") from None
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be half written
        self._seen, self._parser.path = seen, self.path
        self._parser.feed(whole)
        self._read_bytes += len(whole)
        self._run = Run(self._parser.log(), self.ruleset)
        return self._run

    def _follow_move(self) -> None:
        folder = self.path.parent
        if _RUNNING.fullmatch(folder.name):
            for name in (self.path.name, self.path.name.replace("result_", "failed_", 1)):
                if (folder.parent / name).is_file():
                    self.path = folder.parent / name
                    return
        raise ReviewError(f"{self.path}: is gone; the run was removed or did not leave a log")

    def broken(self) -> str | None:
        """Why the trial broke, once the launcher has said so."""
        if not self.path.name.startswith("failed_"):
            return None
        number = re.search(r"\d+", self.path.name)
        return tree.crashes(self.path.parent).get(int(number[0]), "crashed") if number else "crashed"


def follow(
    follower: Follower,
    interval: float,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Standing]:
    """The state every ``interval`` seconds until the run has ended."""
    return live.follow(
        lambda now: follower.poll(1000 * now),
        lambda standing: standing.done or follower.broken() is not None,
        interval, clock, sleep,
    )  # fmt: skip


def watch(follower: Follower, interval: float, as_json: bool, once: bool) -> int:
    """Shows the run until it ends: 0 if it reached the target (or is under way, with ``once``), else 1."""
    say = partial(_print, as_json=as_json)
    standing = live.show(follow(follower, interval), as_json, once, say, _news, render)
    reason = follower.broken()
    if reason is not None:
        print(f"review: the trial broke: {text(reason)}", file=sys.stderr)
        return 1
    return 0 if standing.run.converged or not standing.done else 1


def _print(standing: Standing, as_json: bool) -> None:
    if as_json:
        print_json(standing.as_dict(), indent=None)
    else:
        print(standing.line(), flush=True)


def _news(standing: Standing) -> object:
    """What makes a new line: an evaluation, or a phase."""
    return len(standing.run.evaluations), standing.stalled, standing.phase


def render(standing: Standing, out: Console) -> RenderableType:
    """What a terminal shows: a bar, and the figures beneath it."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    run, share = standing.run, standing.share
    accuracies = [evaluation.accuracy for evaluation in run.evaluations]
    grid = Table.grid(padding=(0, 2))
    rows = {
        "accuracy": f"{accuracies[-1]:.4f} of {standing.target:g}, evaluation {len(accuracies)}" if accuracies else "-",
        "samples": _samples(standing),
        "speed": f"{standing.rate:,.0f} sequences/s" if standing.rate else "-",
        "time": duration(standing.elapsed) if standing.elapsed is not None else "-",
        "to go": duration(standing.eta) if standing.eta is not None else "-",
        "RCP margin": margin(standing.rcp_margin) if standing.rcp_margin else "-",
    }
    for label, cell in rows.items():
        grid.add_row(Text(f"  {label}", "dim"), Text(cell))
    if standing.miss is not None:
        grid.add_row(Text("  outside", "bold yellow"), Text(standing.miss.describe(), "yellow"))
        for number, cause in enumerate(standing.miss.causes, start=1):
            grid.add_row(Text(""), Text(f"{number}. {cause}", "yellow"))
    if standing.stalled and standing.silent is not None:
        grid.add_row(Text("  stalled", "bold yellow"), Text(f"no new line for {duration(standing.silent)}", "yellow"))
    head = Text.assemble((text(str(run.path)), "bold"), "  ", (standing.phase, "green" if run.converged else "cyan"))
    bar = ProgressBar(total=1.0, completed=share or 0.0, width=max(10, min(60, out.width - 10)))
    percent = Table.grid(padding=(0, 1))
    percent.add_row(Text(" "), bar, Text("-" if share is None else f"{100 * share:.0f}%"))
    room = min(CHART_ROWS, out.height - len(rows) - 8)
    end = standing.projection[0] if standing.projection else None
    chart = accuracy_chart([run.evaluations], standing.target, min(out.width - 2, 100), room, end) if room >= 6 else []
    return Group(head, percent, grid, *(Text(f" {line}", "dim") for line in chart))


def _samples(standing: Standing) -> str:
    if standing.samples is None:
        return "-"
    if standing.projection is None or standing.done:
        return f"{standing.samples:,.0f}"
    projected, error = standing.projection
    return f"{standing.samples:,.0f} of about {projected:,.0f} +- {error:,.0f}"
