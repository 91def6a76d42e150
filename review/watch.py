"""`watch`: follows the logs of live runs: one with a bar and its figures, several with a row each and one chart."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from certify.watch import is_test
from review.logs import output, tree
from review.logs.mllog import LogParser, text
from review.logs.output import Column, ReviewError, duration, number_text, print_json
from review.results.run import Evaluation, Run
from review.results.score import Result
from review.results.standing import Standing
from review.rulebook.compliance import DEFAULT_RULESET

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_HEAD = 4096  # bytes
_CHART_ROWS, _LEAST_CHART_ROWS = 14, 6
_MARKS = "•x+o*#@%&$"  # of the first ten runs on a chart; of more, from the first again
_ABOVE = 0.02  # share of the accuracies' range that a chart leaves above the target
_RUNNING = re.compile(r"running_\d+(_\d+)?")
_NO_LOG = "no result_*.txt here or below"
_IDLE_SECONDS = 60.0  # after the last run ended, until no further trial is waited for
_COLUMNS = (
    Column(""),
    Column("run", wraps=True),
    Column("phase"),
    Column("done", right=True, drop=4),
    Column("accuracy", right=True),
    Column("evals", right=True, drop=1),
    Column("seq/s", right=True, drop=2),
    Column("time", right=True, drop=3),
    Column("to go", right=True),
)


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

    logs = []
    for path in find_logs(target):
        with contextlib.suppress(OSError):  # removed a moment ago
            logs.append((bool(_RUNNING.fullmatch(path.parent.name)), path.stat().st_mtime, str(path)))
    if not logs and not is_test(target):
        raise ReviewError(f"{target}: {_NO_LOG}; name the log of a run, or its folder")
    return Path(max(logs)[2]) if logs else target


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


class Follower:
    """Reads a log as it grows, and where the launcher moves it when the trial ends."""

    def __init__(self, path: Path, ruleset: str = DEFAULT_RULESET, target: float | None = None) -> None:
        self.path, self.ruleset, self.target = path, ruleset, target
        self.log = path  # its first place; the launcher moves it
        self._run: Run | None = None
        self._parser, self._read_bytes = LogParser(path), 0
        self._head = b""  # what the log began with

    def poll(self, now: float) -> Standing:
        """The state at ``now``, Unix seconds, by the whole lines of the log. Raises ReviewError if the log is gone."""
        run = self._read()  # first: it follows the log to where it was moved
        result = Result(self.path.parent, (run,), ruleset=self.ruleset)
        return Standing(result, 1000 * now, result.target if self.target is None else self.target)

    def _read(self) -> Run:
        """The run by what the log holds now; only what was added since the last time is read."""
        try:
            with open(self.path, "rb") as file:
                head, size = file.read(_HEAD), os.fstat(file.fileno()).st_size
                if size < self._read_bytes or not head.startswith(self._head):  # another log by this name
                    self._parser, self._read_bytes, self._run = LogParser(self.path), 0, None
                self._head = head
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            folder, name = self.path.parent, self.path.name
            moved = [folder.parent / one for one in (name, name.replace("result_", "failed_", 1))]
            if not _RUNNING.fullmatch(folder.name) or not any(path.is_file() for path in moved):
                raise ReviewError(f"{self.path}: is gone; the run was removed or did not leave a log") from None
            self.path = next(path for path in moved if path.is_file())
            return self._read()
        except OSError as error:
            raise ReviewError(f"{self.path}: {error.strerror}") from None
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be half written
        if self._run is None or whole or self._run.path != self.path:
            self._parser.path = self.path
            self._parser.feed(whole)
            self._read_bytes += len(whole)
            self._run = Run(self._parser.log(), self.ruleset)
        return self._run

    def broken(self) -> str | None:
        """Why the trial broke, once the launcher has said so."""
        number = re.fullmatch(r"failed_\D*(\d*).*", self.path.name)
        return tree.crashes(self.path.parent).get(int(number[1] or -1), "crashed") if number else None

    def ended(self, standing: Standing) -> bool:
        """Whether the run is over, reached the target or not."""
        return standing.done or self.broken() is not None


Watched: TypeAlias = "tuple[Follower, Standing]"


class Runs:
    """The runs below some paths: those there are, and those that appear."""

    def __init__(self, targets: Sequence[Path], ruleset: str, target: float | None = None) -> None:
        for path in targets:
            if not path.exists():
                raise ReviewError(f"{path}: no such file or folder")
        self.targets, self.ruleset, self.target = targets, ruleset, target
        self._followers: list[Follower] = []
        self._gone: set[Path] = set()
        self._now, self._idle_since = 0.0, math.inf

    def poll(self, now: float) -> list[Watched]:
        """Every run as it stands; a log that was removed is left out."""
        found = self._look(self._followers, now)
        known = {follower.path for follower, _ in found} | self._gone
        paths = sorted({path for target in self.targets for path in find_logs(target)} - known, key=str)
        found += self._look([Follower(path, self.ruleset, self.target) for path in paths], now)
        self._followers = [follower for follower, _ in found]
        idle = found and all(follower.ended(standing) for follower, standing in found)
        self._now, self._idle_since = now, min(self._idle_since, now) if idle else math.inf
        return sorted(found, key=lambda pair: (str(pair[0].path.parent), tree.natural_order(pair[0].path)))

    def _look(self, followers: list[Follower], now: float) -> list[Watched]:
        found = []
        for follower in followers:
            try:
                found.append((follower, follower.poll(now)))
            except ReviewError:
                self._gone.add(follower.path)
        return found

    def ended(self, found: list[Watched]) -> bool:
        """Whether no run is under way, and none has begun for a minute."""
        return self._now - self._idle_since >= _IDLE_SECONDS


def _print(standing: Standing, as_json: bool, about: str = "") -> None:
    if as_json:
        print_json(standing, indent=None)
    else:
        print(f"{about}{standing.line()}", flush=True)


def _news(standing: Standing) -> tuple[object, ...]:
    """What makes a new line: an evaluation, or a phase."""
    return len(standing.run.evaluations), standing.stalled, standing.phase


def watch(follower: Follower, interval: float, as_json: bool, once: bool) -> int:
    """Shows the run until it ends: 0 if it reached the target (or is under way, with ``once``), else 1."""
    states = output.follow(follower.poll, follower.ended, interval)
    standing = output.show_states(states, partial(_print, as_json=as_json), _news, render, as_json=as_json, once=once)
    reason = follower.broken()
    if reason is not None:
        print(f"review: the trial broke: {text(reason)}", file=sys.stderr)
        return 1
    return 0 if standing.run.converged or not standing.done else 1


def watch_many(runs: Runs, interval: float, as_json: bool, once: bool) -> int:
    """Shows the runs until they have ended: 0 if all reached the target (or are under way, with ``once``), else 1."""
    shown: dict[Path, object] = {}

    def say(found: list[Watched]) -> None:
        for follower, standing in found:
            news = (*_news(standing), follower.broken())
            if shown.get(follower.log) != news:
                shown[follower.log] = news
                _print(standing, as_json, f"{text(str(follower.path))}: ")
        if once and not found:
            raise ReviewError(f"{runs.targets[0]}: {_NO_LOG}; name the logs of runs, or their folder")

    states = output.follow(runs.poll, runs.ended, interval)
    found = output.show_states(states, say, lambda _: object(), render_many, as_json=as_json, once=once)
    return 1 if any(follower.ended(standing) and not standing.run.converged for follower, standing in found) else 0


def render(standing: Standing, out: Console) -> RenderableType:
    """What a terminal shows: a bar, the figures beneath it, and the accuracies so far."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    run = standing.run
    samples = number_text(standing.samples, ",.0f")
    if standing.samples is not None and standing.projection is not None and not standing.done:
        samples += " of about {:,.0f} +- {:,.0f}".format(*standing.projection)
    accuracy = f"{number_text(run.final_accuracy, '.4f')} of {standing.target:g}, evaluation {len(run.evaluations)}"
    rows = [
        ("accuracy", accuracy if run.evaluations else "-"),
        ("samples", samples),
        ("speed", f"{standing.rate:,.0f} sequences/s" if standing.rate else "-"),
        ("time", duration(standing.elapsed)),
        ("to go", duration(standing.eta)),
        ("RCP margin", standing.margin),
    ]
    warnings = []
    if standing.miss is not None:
        causes = [f"{number}. {cause}" for number, cause in enumerate(standing.miss.causes, start=1)]
        warnings = [("outside", standing.miss.describe()), *(("", cause) for cause in causes)]
    if standing.stalled:
        warnings.append(("stalled", f"no new line for {duration(standing.silent)}"))
    grid = Table.grid(padding=(0, 2))
    for label, line in rows:
        grid.add_row(Text(f"  {label}", "dim"), Text(line))
    for label, line in warnings:
        grid.add_row(Text(f"  {label}", "bold yellow"), Text(line, "yellow"))
    head = Text.assemble((text(str(run.path)), "bold"), "  ", (standing.phase, "green" if run.converged else "cyan"))
    bar = ProgressBar(total=1.0, completed=standing.share or 0.0, width=max(10, min(60, out.width - 10)))
    percent = Table.grid(padding=(0, 1))
    percent.add_row(Text(" "), bar, Text(number_text(standing.share, ".0%")))
    return Group(head, percent, grid, *_chart([standing], out, len(rows) + 8))


def render_many(found: list[Watched], out: Console) -> RenderableType:
    """What a terminal shows of several runs: a row for each, and the accuracies of all on one chart."""
    from rich.console import Group
    from rich.text import Text

    if not found:
        return Text("waiting for the first result_*.txt", "dim")
    rows, styles = [], []
    for index, (follower, standing) in enumerate(found):
        run, broken = standing.run, follower.broken() is not None
        missed = broken or (standing.done and not run.converged)
        styles.append("red" if missed else "green" if standing.done else "")
        rows.append(
            [
                _MARKS[index % len(_MARKS)],
                text("/".join(follower.path.parts[-2:])),
                "broken" if broken else "stalled" if standing.stalled else standing.phase,
                number_text(standing.share, ".0%"),
                number_text(run.final_accuracy, ".4f"),
                str(len(run.evaluations)),
                number_text(standing.rate or None, ",.0f"),
                duration(standing.elapsed),
                duration(None if standing.done else standing.eta),
            ]
        )
    table = output.table(*output.fit(_COLUMNS, rows, out.width), styles)
    return Group(table, *_chart([standing for _, standing in found], out, len(found) + 6))


def _chart(standings: Sequence[Standing], out: Console, taken: int) -> list[RenderableType]:
    """The lines of the chart; none where the terminal has no rows left for it."""
    from rich.text import Text

    rows = min(_CHART_ROWS, out.height - taken)
    if rows < _LEAST_CHART_ROWS:
        return []
    end = max((one.projection[0] for one in standings if one.projection), default=None)
    target = max(one.target for one in standings)
    series = [one.run.evaluations for one in standings]
    return [Text(f" {line}", "dim") for line in accuracy_chart(series, target, min(out.width - 2, 100), rows, end)]


def accuracy_chart(
    series: Sequence[Sequence[Evaluation]], target: float, width: int, height: int, samples: float | None = None
) -> list[str]:
    """Lines of text, ``width`` x ``height``: accuracy over samples with a line at the target; none without two points.

    Args: series: the evaluations of each run. samples: where the x axis is to end at least, such as a projection.
    """
    points = [[(e.samples, e.accuracy) for e in run if e.samples is not None] for run in series]
    known = [point for run in points for point in run]
    if len(known) < 2:
        return []
    left = len(f"{target:.3f}") + 2
    columns, rows = max(width - left, 10), max(height - 2, 4)
    right = max([samples or 0.0, *(x for x, _ in known)])
    low = min(min(y for _, y in known), target)
    high = max(max(y for _, y in known), target)
    high += max(_ABOVE * (high - low), 1e-6)

    def row(accuracy: float) -> int:
        return min(rows - 1, max(0, int((high - accuracy) / (high - low) * rows)))

    grid = [[" "] * columns for _ in range(rows)]
    grid[row(target)] = ["-"] * columns
    for index, run in enumerate(points):
        for x, y in run:
            grid[row(y)][min(columns - 1, int(x / right * columns))] = _MARKS[index % len(_MARKS)]
    labels = {row(target): f"{target:.3f}", rows - 1: f"{low:.3f}"}
    lines = [f"{labels.get(number, ''):>{left - 2}} |{''.join(cells)}" for number, cells in enumerate(grid)]
    end = f"{right:,.0f} samples"
    return [*lines, " " * (left - 1) + "+" + "-" * columns, " " * left + "0" + f"{end:>{columns - 1}}"]
