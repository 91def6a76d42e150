"""`watch`: follows the logs of live runs: one with a bar and its figures, several with a row each."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from certify.watch import is_test
from review.logs import output, tree
from review.logs.mllog import parse, text
from review.logs.output import Column, ReviewError, duration, number_text, print_json
from review.results.run import Run
from review.results.score import Result
from review.results.standing import Standing
from review.rulebook.compliance import DEFAULT_RULESET

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_RUNNING = re.compile(r"running_\d+")
NO_LOG = "no result_*.txt here or below"
_IDLE_SECONDS = 60.0  # after the last run ended, until no further trial is waited for
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


Watched: TypeAlias = "tuple[Follower, Standing]"


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
        raise ReviewError(f"{target}: {NO_LOG}; name the log of a run, or its folder")
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
        self._read: object = None  # what the log was when it was read

    def poll(self, now: float) -> Standing:
        """The state at ``now``, Unix seconds, by the whole lines of the log. Raises ReviewError if the log is gone."""
        try:
            stat = self.path.stat()
            found = (self.path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if self._run is None or self._read != found:
                data = self.path.read_bytes()
                whole = data[: data.rfind(b"\n") + 1]  # the last line may be half written
                self._run, self._read = Run(parse(self.path, whole), self.ruleset), found
        except FileNotFoundError:
            folder, name = self.path.parent, self.path.name
            moved = [folder.parent / one for one in (name, name.replace("result_", "failed_", 1))]
            if not _RUNNING.fullmatch(folder.name) or not any(path.is_file() for path in moved):
                raise ReviewError(f"{self.path}: is gone; the run was removed or did not leave a log") from None
            self.path = next(path for path in moved if path.is_file())
            return self.poll(now)
        except OSError as error:
            raise ReviewError(f"{self.path}: {error.strerror}") from None
        result = Result(self.path.parent, (self._run,), ruleset=self.ruleset)
        return Standing(result, 1000 * now, result.target if self.target is None else self.target)

    def broken(self) -> str | None:
        """Why the trial broke, once the launcher has said so."""
        number = re.fullmatch(r"failed_\D*(\d*).*", self.path.name)
        return tree.crashes(self.path.parent).get(int(number[1] or -1), "crashed") if number else None

    def ended(self, standing: Standing) -> bool:
        """Whether the run is over, reached the target or not."""
        return standing.done or self.broken() is not None


class Runs:
    """The runs below some paths: those there are, and those that appear."""

    def __init__(self, targets: Sequence[Path], ruleset: str = DEFAULT_RULESET, target: float | None = None) -> None:
        for path in targets:
            if not path.exists():
                raise ReviewError(f"{path}: no such file or folder")
        self.targets, self.ruleset, self.target = targets, ruleset, target
        self._followers: list[Follower] = []
        self._gone: set[Path] = set()
        self._now, self._idle_since = 0.0, math.inf

    def poll(self, now: float) -> list[Watched]:
        """Every run as it stands; a log that was removed is left out."""
        found: list[Watched] = []

        def look(followers: Sequence[Follower]) -> None:
            for follower in followers:
                try:
                    found.append((follower, follower.poll(now)))
                except ReviewError:
                    self._gone.add(follower.path)

        look(self._followers)  # first: they follow their logs to where they were moved
        known = {follower.path for follower, _ in found} | self._gone
        new = sorted({path for target in self.targets for path in find_logs(target)} - known, key=str)
        look([Follower(path, self.ruleset, self.target) for path in new])
        self._followers = [follower for follower, _ in found]
        idle = found and all(follower.ended(standing) for follower, standing in found)
        self._now, self._idle_since = now, min(self._idle_since, now) if idle else math.inf
        return sorted(found, key=lambda pair: (str(pair[0].path.parent), tree.natural_order(pair[0].path)))

    def ended(self, found: list[Watched]) -> bool:
        """Whether no run is under way, and none has begun for a minute."""
        return self._now - self._idle_since >= _IDLE_SECONDS


def watch(
    poll: Callable[[float], list[Watched]],
    ended: Callable[[list[Watched]], bool],
    interval: float,
    *,
    as_json: bool,
    once: bool,
    named: bool,
) -> int:
    """Shows the runs until they have ended: 0 if all reached the target (or are under way, with ``once``), else 1.

    ``named``: a line of text begins with the run's log.
    """
    shown: dict[Path, object] = {}

    def say(found: list[Watched]) -> None:
        for follower, standing in found:
            news = len(standing.run.evaluations), standing.stalled, standing.phase, follower.broken()
            if shown.get(follower.log) == news:
                continue
            shown[follower.log] = news
            if as_json:
                print_json(standing, indent=None)
            else:
                print(f"{text(str(follower.path))}: " * named + standing.line(), flush=True)

    found = output.show_states(
        output.follow(poll, ended, interval), say, lambda _: object(), render, as_json=as_json, once=once
    )
    for follower, _ in found:
        if (reason := follower.broken()) is not None:
            print(f"review: {text(str(follower.path))}: the trial broke: {text(reason)}", file=sys.stderr)
    return 1 if any(follower.ended(standing) and not standing.run.converged for follower, standing in found) else 0


def render(found: list[Watched], out: Console) -> RenderableType:
    """What a terminal shows: of one run a bar and its figures, of several a row each."""
    from rich.text import Text

    if not found:
        return Text("waiting for the first result_*.txt", "dim")
    return _details(found[0][1], out) if len(found) == 1 else _rows(found, out)


def _details(standing: Standing, out: Console) -> RenderableType:
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
        ("accuracy", accuracy if run.evaluations else "-", ""),
        ("samples", samples, ""),
        ("speed", f"{standing.rate:,.0f} sequences/s" if standing.rate else "-", ""),
        ("time", duration(standing.elapsed), ""),
        ("to go", duration(standing.eta), ""),
        ("RCP margin", standing.margin, ""),
    ]
    if standing.miss is not None:
        causes = [f"{number}. {cause}" for number, cause in enumerate(standing.miss.causes, start=1)]
        rows += [("outside", standing.miss.describe(), "yellow"), *(("", cause, "yellow") for cause in causes)]
    if standing.stalled:
        rows.append(("stalled", f"no new line for {duration(standing.silent)}", "yellow"))
    grid = Table.grid(padding=(0, 2))
    for label, line, style in rows:
        grid.add_row(Text(f"  {label}", f"bold {style}" if style else "dim"), Text(line, style))
    head = Text.assemble((text(str(run.path)), "bold"), "  ", (standing.phase, "green" if run.converged else "cyan"))
    bar = ProgressBar(total=1.0, completed=standing.share or 0.0, width=max(10, min(60, out.width - 10)))
    percent = Table.grid(padding=(0, 1))
    percent.add_row(Text(" "), bar, Text(number_text(standing.share, ".0%")))
    return Group(head, percent, grid)


def _rows(found: list[Watched], out: Console) -> RenderableType:
    rows, styles = [], []
    for follower, standing in found:
        run, broken = standing.run, follower.broken() is not None
        missed = broken or (standing.done and not run.converged)
        styles.append("red" if missed else "green" if standing.done else "")
        row = [text("/".join(follower.path.parts[-2:]))]
        row += ["broken" if broken else "stalled" if standing.stalled else standing.phase]
        row += [number_text(standing.share, ".0%"), number_text(run.final_accuracy, ".4f"), str(len(run.evaluations))]
        row += [number_text(standing.rate or None, ",.0f"), duration(standing.elapsed)]
        rows.append([*row, duration(None if standing.done else standing.eta)])
    return output.table(*output.fit(_COLUMNS, rows, out.width), styles)
