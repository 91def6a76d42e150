"""`watch` on several runs at once: a sweep, or the trials of a submission, each a row, and one chart of all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from review.logs import tree
from review.logs.findings import ReviewError
from review.logs.mllog import text
from review.logs.output import print_json
from review.results import live
from review.results.accuracy_chart import MARKS, accuracy_chart
from review.results.display import duration
from review.results.standing import Standing
from review.watch import CHART_ROWS, Follower, find_logs

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_COLUMNS = (  # heading, the least width of a terminal that has it
    ("", 0),
    ("run", 0),
    ("phase", 0),
    ("done", 70),
    ("accuracy", 0),
    ("evals", 100),
    ("seq/s", 90),
    ("time", 80),
    ("to go", 0),
)
_IDLE_SECONDS = 60.0  # after the last run ended, until no further trial is waited for


class Runs:
    """The runs below some paths: those there are, and those that appear."""

    def __init__(self, targets: Sequence[Path], ruleset: str, target: float | None = None) -> None:
        for path in targets:
            if not path.exists():
                raise ReviewError(f"{path}: no such file or folder")
        self.targets, self.ruleset, self.target = targets, ruleset, target
        self.followers: list[Follower] = []
        self._gone: set[Path] = set()

    def poll(self, now_ms: float) -> list[tuple[Follower, Standing]]:
        """Every run as it stands; a log that was removed is left out."""
        standings: list[tuple[Follower, Standing]] = []
        for follower in [*self.followers]:
            self._look(follower, now_ms, standings)
        known = {follower.path for follower in self.followers} | self._gone
        for path in sorted({path for target in self.targets for path in find_logs(target)}, key=str):
            if path not in known:
                self.followers.append(Follower(path, self.ruleset, self.target))
                self._look(self.followers[-1], now_ms, standings)
        return sorted(standings, key=lambda pair: (str(pair[0].path.parent), tree.natural_order(pair[0].path)))

    def _look(self, follower: Follower, now_ms: float, into: list[tuple[Follower, Standing]]) -> None:
        try:
            into.append((follower, follower.poll(now_ms)))
        except ReviewError:
            self.followers.remove(follower)
            self._gone.add(follower.path)


def ended(follower: Follower, standing: Standing) -> bool:
    """Whether a run is over, reached the target or not."""
    return standing.done or follower.broken() is not None


def follow(
    runs: Runs,
    interval: float,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[list[tuple[Follower, Standing]]]:
    """The state every ``interval`` seconds, until no run is under way and none has begun for a minute."""
    idle: float | None = None
    while True:
        found = runs.poll(1000 * clock())
        yield found
        under_way = not found or not all(ended(*pair) for pair in found)
        idle = None if under_way else clock() if idle is None else idle
        if idle is not None and clock() - idle >= _IDLE_SECONDS:
            return
        sleep(interval)


def watch_many(runs: Runs, interval: float, as_json: bool, once: bool) -> int:
    """Shows the runs until they have ended: 0 if all reached the target (or are under way, with ``once``), else 1."""
    states = follow(runs, interval)
    found = next(states)
    if once:
        if not found:
            raise ReviewError(
                f"{runs.targets[0]}: no result_*.txt here or below; name the logs of runs, or their folder"
            )
        _print(found, as_json, {})
    elif as_json or not sys.stdout.isatty():
        shown: dict[Path, Any] = {}
        _print(found, as_json, shown)
        for found in states:
            _print(found, as_json, shown)
    else:
        found = live.draw(found, states, render)
    return 1 if any(ended(*pair) and not pair[1].run.converged for pair in found) else 0


def _print(found: list[tuple[Follower, Standing]], as_json: bool, shown: dict[Path, Any]) -> None:
    """A line for each run that has a new evaluation or phase since it was last shown."""
    for follower, standing in found:
        key = (len(standing.run.evaluations), standing.stalled, standing.phase, follower.broken())
        if shown.get(follower.log) != key:
            shown[follower.log] = key
            if as_json:
                print_json(standing.as_dict(), indent=None)
            else:
                print(f"{text(str(follower.path))}: {standing.line()}", flush=True)


def render(found: list[tuple[Follower, Standing]], out: Console) -> RenderableType:
    """What a terminal shows: a row for each run, and the accuracies of all on one chart."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    shown = [i for i, (_, least) in enumerate(_COLUMNS) if out.width >= least]
    for index in shown:
        name = _COLUMNS[index][0]
        table.add_column(name, justify="left" if index < 3 else "right", no_wrap=name != "run", overflow="fold")
    for index, (follower, standing) in enumerate(found):
        broken = follower.broken()
        style = "red" if broken or (standing.done and not standing.run.converged) else "green" if standing.done else ""
        cells = _cells(index, follower, standing)
        table.add_row(*(Text(cells[i]) for i in shown), style=style)
    series = [standing.run.evaluations for _, standing in found]
    projected = [standing.projection[0] for _, standing in found if standing.projection]
    target = max((standing.target for _, standing in found), default=0.0)
    room = min(CHART_ROWS, out.height - len(found) - 6)
    end, width = max(projected, default=None), min(out.width - 2, 100)
    chart = accuracy_chart(series, target, width, room, end) if room >= 6 else []
    if not found:
        return Text("waiting for the first result_*.txt", "dim")
    return Group(table, *(Text(f" {line}", "dim") for line in chart))


def _cells(index: int, follower: Follower, standing: Standing) -> list[str]:
    last = standing.run.evaluations[-1] if standing.run.evaluations else None
    return [
        MARKS[index % len(MARKS)],
        text("/".join(follower.path.parts[-2:])),
        "broken" if follower.broken() else "stalled" if standing.stalled else standing.phase,
        "-" if standing.share is None else f"{100 * standing.share:.0f}%",
        "-" if last is None else f"{last.accuracy:.4f}",
        str(len(standing.run.evaluations)),
        "-" if not standing.rate else f"{standing.rate:,.0f}",
        "-" if standing.elapsed is None else duration(standing.elapsed),
        "-" if standing.eta is None or standing.done else duration(standing.eta),
    ]
