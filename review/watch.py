"""`watch`: follows the logs of live runs, one row each; a single run also gets a progress bar and all its figures.

Samples to the target are projected from two estimates, weighted by inverse variance. One is the RCP mean. The other is
the accuracy of the last two evaluations, which follows a curve of fixed shape over the share of the total samples
(_ACCURACIES). On the 20 runs behind the curve, projections at 50, 60, 70 and 90% of the run are off by 13, 10, 6 and 4%
(RMS). It also fits published runs of other rounds with batches of 448 and 3,072; at 6,912, where accuracy rises later,
it overestimates by 10 to 20%.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from common.durations import duration
from review.acceptance.watch import is_test
from review.logs import output, tree
from review.logs.mllog import number, parse, text
from review.logs.output import Column, ReviewError, number_text, pick, print_json
from review.results.published_curves import Deviation, first_deviation
from review.results.run import TARGET_ACCURACY, Run
from review.results.score import Result
from review.rulebook.compliance import DEFAULT_RULESET

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Folders of live trials; the launcher moves the log up one level when the trial ends.
_RUNNING = re.compile(r"running_\d+(_\d+)?")
NO_LOG = "no result_*.txt here or below"
_IDLE_SECONDS = 60.0  # to wait for another trial after the last run ended
# Accuracies at 10, 15, ... 100% of the samples to the target: medians of the 20 runs of two published 5.0 results.
# fmt: off
_ACCURACIES = (
    0.3966, 0.4452, 0.5472, 0.6544, 0.7015, 0.7079, 0.7105, 0.7125, 0.7136, 0.7146,
    0.7155, 0.7163, 0.7170, 0.7177, 0.7181, 0.7187, 0.7192, 0.7197, 0.7201,
)
# fmt: on
_SHARES = [(index + 2) / 20 for index in range(len(_ACCURACIES))]
# Relative standard error of a projection by the curve at a share of the run; larger than on the runs it was fitted to.
_KNOWN_SHARES, _CURVE_ERRORS = (
    (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    (1.0, 0.4, 0.22, 0.14, 0.10, 0.07, 0.05, 0.04),
)
_RCP_ERROR = 0.17  # relative standard error of the RCP mean as a projection for a single run
_FITTED = 4  # latest evaluations, for projections to a target other than 0.720
_STALLED_SECONDS = 60.0


def curve_share(accuracy: float) -> float:
    """Share of its samples at which a run to 0.720 has this accuracy, by interpolation; 0 below the curve."""
    return float(np.interp(accuracy, _ACCURACIES, _SHARES, left=0.0))


@dataclass(frozen=True)
class Standing:
    """State of a run at ``now_ms``, a Unix time in milliseconds. None: not known yet."""

    result: Result
    now_ms: float
    target: float = TARGET_ACCURACY

    @property
    def run(self) -> Run:
        return self.result.runs[0]

    @functools.cached_property
    def phase(self) -> str:
        """starting, initialising, training, evaluating, finishing, or how the run ended: success, aborted, ..."""
        if self.done:
            return self.run.status
        if self.run.run_start is None:
            return "initialising" if self.run.log.events else "starting"
        if self.reached:
            return "finishing"
        marks = [
            event.key for event in self.run.log.events if event.key in ("eval_start", "eval_stop")
        ]
        return "evaluating" if marks[-1:] == ["eval_start"] else "training"

    @property
    def reached(self) -> bool:
        return not self.result.pretrains and (self.run.final_accuracy or 0) >= self.target

    @property
    def done(self) -> bool:
        return self.run.run_stop is not None

    @functools.cached_property
    def elapsed(self) -> float | None:
        """Seconds since run_start."""
        start, stop = self.run.run_start, self.run.run_stop
        if start is None:
            return None
        # The clocks of the cluster and of this machine may differ: time does not run backwards.
        return number(
            ((stop.time_ms if stop else max(self.now_ms, start.time_ms)) - start.time_ms) / 1000
        )

    @functools.cached_property
    def silent(self) -> float | None:
        """Seconds since the last event of a run that has not ended."""
        events = self.run.log.events
        silent = (
            None if self.done or not events else number((self.now_ms - events[-1].time_ms) / 1000)
        )
        return None if silent is None else max(0.0, silent)

    @functools.cached_property
    def stalled(self) -> bool:
        """Whether the log has been silent for more than a minute and three times its longest silence so far."""
        times = [event.time_ms for event in self.run.log.events]
        # Logs are silent during an evaluation; how long, the log's past tells.
        longest = max((b - a for a, b in itertools.pairwise(times)), default=0.0) / 1000
        return self.silent is not None and self.silent > max(_STALLED_SECONDS, 3 * longest)

    @functools.cached_property
    def rate(self) -> float | None:
        """Sequences per second of the last measured training span."""
        return self.run.throughput[-1][1] if self.run.throughput else None

    @functools.cached_property
    def _counted(self) -> list[tuple[float, float]]:
        """(samples, accuracy) of every evaluation with a sample count."""
        return [(e.samples, e.accuracy) for e in self.run.evaluations if e.samples]

    @functools.cached_property
    def interval(self) -> float | None:
        """Samples between evaluations."""
        # The mean, as an evaluation comes at the first whole step after its count.
        return self._counted[-1][0] / len(self._counted) if self._counted else None

    @functools.cached_property
    def samples(self) -> float | None:
        """Samples trained by now: the last logged count, extrapolated by the rate while training."""
        if self.done:
            return self.run.samples
        counted = [e.samples for e in self.run.evaluations if e.samples is not None]
        since = self.run.run_start.time_ms if self.run.run_start else 0.0
        for event in self.run.log.events:
            if event.key == "tracked_stats" and self.run.counts_samples:
                counted.append(event.meta("epoch_num", "samples_count") or 0.0)
            if event.key in ("tracked_stats", "eval_stop", "eval_accuracy"):
                since = max(since, event.time_ms)  # training continues from here
        if not counted:
            return 0.0 if self.run.run_start else None
        if self.rate is None or self.phase != "training":
            return max(counted)
        ahead = max(0.0, (self.now_ms - since) / 1000) * self.rate
        return max(counted) + min(
            ahead, self.interval or math.inf
        )  # the next evaluation would have been logged

    @functools.cached_property
    def projection(self) -> tuple[float, float] | None:
        """(samples to the target, standard error), from the accuracies so far and the RCP mean.

        Without a target: samples to the last step.
        """
        if self.result.pretrains:
            steps = number(
                tree.read_json(self.result.folder / "config.json", "schedule").get("max_steps")
            )
            return (steps * self.run.batch_size, 0.0) if steps and self.run.batch_size else None
        if self.reached and self.run.samples:
            return self.run.samples, 0.0
        # The curve below is of runs to 0.720 only.
        if self.target != TARGET_ACCURACY:
            return _extrapolate(self._counted[-_FITTED:], self.target)
        guesses = (
            [] if self.result.rcp_point is None else [(self.result.rcp_point.mean, _RCP_ERROR)]
        )
        shares = [(samples, curve_share(accuracy)) for samples, accuracy in self._counted[-2:]]
        # Below its first point the curve says nothing about the end.
        if shares and all(share > 0 for _, share in shares):
            by_curve = sum(samples / share for samples, share in shares) / len(shares)
            guesses.append(
                (by_curve, float(np.interp(shares[-1][1], _KNOWN_SHARES, _CURVE_ERRORS)))
            )
        if not guesses:
            return None
        weight = sum(error**-2 for _, error in guesses)
        # The errors are relative, so it is the logarithms that are averaged.
        projected = math.exp(sum(math.log(guess) * error**-2 for guess, error in guesses) / weight)
        return max(projected, self.samples or 0.0), projected * weight**-0.5

    @functools.cached_property
    def share(self) -> float | None:
        """Share of the run that is done, by samples, 0 to 1."""
        if self.done:
            return 1.0
        if self.projection is None or self.samples is None or self.projection[0] <= 0:
            return None
        return min(1.0, self.samples / self.projection[0])

    @functools.cached_property
    def eta(self) -> float | None:
        """Seconds to the evaluation that will reach the target, including the evaluations before it."""
        if (
            self.done
            or self.stalled
            or self.projection is None
            or self.samples is None
            or not self.rate
        ):
            return None
        end = self.projection[0]
        if self.interval:
            end = self.interval * math.ceil(end / self.interval - 1e-9)  # runs end at evaluations
        left = max(0.0, end - self.samples)
        times = [seconds for e in self.run.evaluations if (seconds := e.seconds) is not None]
        evaluation = sum(times) / len(times) if times else 0.0
        return (
            left / self.rate
            + (math.ceil(left / self.interval) if self.interval else 0) * evaluation
        )

    @functools.cached_property
    def rcp_margin(self) -> tuple[float, float] | None:
        """(projected samples minus the smallest mean that the RCP test accepts, standard error)."""
        if self.result.rcp_point is None or self.projection is None or self.result.pretrains:
            return None
        return self.projection[0] - self.result.rcp_point.minimum, self.projection[1]

    @functools.cached_property
    def deviation(self) -> Deviation | None:
        """The first evaluation outside the range of published runs, if this run has the same target."""
        return (
            first_deviation(self.run)
            if self.target == TARGET_ACCURACY and not self.result.pretrains
            else None
        )

    def as_dict(self) -> dict[str, Any]:
        projected, error = self.projection or (None, None)
        return {
            **pick(
                self,
                "file=run.path phase done stalled elapsed_seconds=elapsed samples sequences_per_second=rate",
            ),
            "evaluations": len(self.run.evaluations),
            **pick(self, "accuracy=run.final_accuracy target"),
            "projected_samples": projected,
            "projected_samples_error": error,
            **pick(self, "share eta_seconds=eta"),
            "rcp_margin_samples": self.rcp_margin and self.rcp_margin[0],
            "outside_published": self.deviation,
        }

    def parts(self) -> list[str]:
        """Everything known, one phrase per item."""
        run, deviation, expected, margin = self.run, self.deviation, "", ""
        if self.rcp_margin is not None:
            above, error = self.rcp_margin
            margin = f"RCP margin {above:+,.0f}{f' +- {error:,.0f}' if error else ''} samples"
        if self.projection is not None and not self.done:
            end, error = self.projection
            expected = f" of about {end:,.0f} +- {error:,.0f}" if error else f" of {end:,.0f}"
        wanted = "" if self.result.pretrains else f" of {self.target:g}"
        parts = {
            self.phase: True,
            f"{self.samples or 0:,.0f}{expected} samples": self.samples is not None,
            f"accuracy {run.final_accuracy or 0:.4f}{wanted}": run.evaluations,
            f"{self.rate or 0:,.0f} sequences/s": self.rate,
            f"{duration(self.elapsed)} elapsed": self.elapsed is not None,
            f"{duration(self.eta)} to go": self.eta is not None,
            margin: margin,
            f"{deviation.describe()} (likely: {'; '.join(deviation.causes)})"
            if deviation
            else "": deviation,
            f"no new line for {duration(self.silent)}": self.stalled,
        }
        return [text(part) for part, known in parts.items() if known]


def _extrapolate(counted: list[tuple[float, float]], target: float) -> tuple[float, float] | None:
    """Samples at which a straight line through accuracy over log(samples) meets the target, and standard error.

    None if accuracy does not rise.
    """
    x, y = [math.log(samples) for samples, _ in counted], [accuracy for _, accuracy in counted]
    # Evaluations at one and the same count make no line.
    if len(set(x)) < 2:
        return None
    rise, start = statistics.linear_regression(x, y)
    exponent = (target - start) / rise if rise > 0 else math.inf
    if exponent > 50:  # more samples than any run takes
        return None
    projected = max(math.exp(exponent), counted[-1][0])
    residual = math.fsum((b - start - rise * a) ** 2 for a, b in zip(x, y, strict=True))
    return projected, projected * math.sqrt(residual / len(x)) / rise


Watched: TypeAlias = "tuple[Follower, Standing]"


def find_logs(target: Path) -> list[Path]:
    """Every log at or below a path, including those of running trials."""
    if target.is_file():
        return [target]
    below = [Path(folder) / name for folder, _, names in os.walk(target) for name in names]
    return [path for path in below if tree.RESULT_NAME.fullmatch(path.name) and path.is_file()]


def find_log(target: Path) -> Path:
    """The log to follow: the file itself, or the newest in a folder, running trials first. Raises ReviewError.

    The folder of an acceptance test, which has no log, is returned itself.
    """
    if not target.exists():
        raise ReviewError(f"{target}: no such file or folder")

    # Tuples compare in this order: live trials first, then the newest.
    logs = []
    for path in find_logs(target):
        with contextlib.suppress(OSError):  # removed meanwhile
            logs.append(
                (bool(_RUNNING.fullmatch(path.parent.name)), path.stat().st_mtime, str(path))
            )
    if not logs and not is_test(target):
        raise ReviewError(f"{target}: {NO_LOG}; give the log of a run, or its folder")
    return Path(max(logs)[2]) if logs else target


def wait_for_log(
    target: Path, interval: float, sleep: Callable[[float], None] = time.sleep
) -> Path:
    """Waits until there is a log to follow: a run may write its first line after minutes. Raises ReviewError."""
    announced = False
    while True:
        try:
            return find_log(target)
        except ReviewError:
            # In a folder a log may still appear; a missing file will not.
            if not target.is_dir():
                raise
        if not announced:
            print(
                f"review: waiting for the first result_*.txt below {target}",
                file=sys.stderr,
                flush=True,
            )
            announced = True
        sleep(interval)


class Follower:
    """Reads a growing log, and follows it to where the launcher moves it when the trial ends."""

    def __init__(
        self, path: Path, ruleset: str = DEFAULT_RULESET, target: float | None = None
    ) -> None:
        self.path, self.ruleset, self.target = path, ruleset, target
        self.log = path  # initial path; ``path`` changes when the launcher moves the log
        self._run: Run | None = None
        self._read: object = None  # path and stamp of the log when it was last read

    def poll(self, now: float) -> Standing:
        """State at ``now``, Unix seconds, from the log's complete lines. Raises ReviewError if the log is gone."""
        try:
            stat = self.path.stat()
            # With the inode: another trial's log may have the same name and size.
            found = (self.path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if self._run is None or self._read != found:
                data = self.path.read_bytes()
                whole = data[: data.rfind(b"\n") + 1]  # the last line may be half written
                self._run, self._read = Run(parse(self.path, whole), self.ruleset), found
        except FileNotFoundError:
            folder, name = self.path.parent, self.path.name
            # One level up, and renamed if the trial failed.
            moved = [folder.parent / one for one in (name, name.replace("result_", "failed_", 1))]
            if not _RUNNING.fullmatch(folder.name) or not any(path.is_file() for path in moved):
                raise ReviewError(
                    f"{self.path}: is gone; the run was removed or left no log"
                ) from None
            self.path = next(path for path in moved if path.is_file())
            return self.poll(now)
        except OSError as error:
            raise ReviewError(f"{self.path}: {error.strerror}") from None
        result = Result(self.path.parent, (self._run,), ruleset=self.ruleset)
        # A target from the command line wins over that of config.json.
        return Standing(result, 1000 * now, result.target if self.target is None else self.target)

    def broken(self) -> str | None:
        """Why the trial failed; None unless the launcher has recorded a failure."""
        number = re.fullmatch(r"failed_\D*(\d*).*", self.path.name)
        return (
            tree.crashes(self.path.parent).get(int(number[1] or -1), "crashed") if number else None
        )

    def ended(self, standing: Standing) -> bool:
        """Whether the run is over, successful or not."""
        return standing.done or self.broken() is not None


class Runs:
    """Runs at or below some paths, including those that appear later; for a single log, just its run."""

    def __init__(
        self, targets: Sequence[Path], ruleset: str = DEFAULT_RULESET, target: float | None = None
    ) -> None:
        for path in targets:
            if not path.exists():
                raise ReviewError(f"{path}: no such file or folder")
        self.targets, self.ruleset, self.target = targets, ruleset, target
        self.alone = len(targets) == 1 and targets[0].is_file()
        self._followers: list[Follower] = []
        self._now, self._idle_since = 0.0, math.inf

    def poll(self, now: float) -> list[Watched]:
        """State of every run. Skips removed logs, but raises ReviewError for a single one."""
        found: list[Watched] = []

        def look(followers: Sequence[Follower]) -> None:
            for follower in followers:
                try:
                    found.append((follower, follower.poll(now)))
                except ReviewError:
                    if self.alone:
                        raise

        look(self._followers)  # first, since moved logs are known by their new paths afterwards
        known = {follower.path for follower, _ in found}
        new = sorted(
            {path for target in self.targets for path in find_logs(target)} - known, key=str
        )
        look([Follower(path, self.ruleset, self.target) for path in new])
        self._followers = [follower for follower, _ in found]
        # No log yet is not idle: the first trial is still to come.
        idle = found and all(follower.ended(standing) for follower, standing in found)
        self._now, self._idle_since = now, min(self._idle_since, now) if idle else math.inf
        return sorted(
            found, key=lambda pair: (str(pair[0].path.parent), tree.natural_order(pair[0].path))
        )

    def ended(self, found: list[Watched]) -> bool:
        """Whether no run is active and no further one has started for a minute."""
        return self._now - self._idle_since >= (0 if self.alone else _IDLE_SECONDS)


def watch(runs: Runs, interval: float, *, as_json: bool, once: bool) -> int:
    """Shows the runs until they have ended. Returns 1 if one ended without reaching the target, else 0."""
    # By the path at first sight, as logs move when their trials end.
    shown: dict[Path, object] = {}

    def report(found: list[Watched]) -> None:
        for follower, standing in found:
            # Only these are worth a new line; samples and times change with every poll.
            news = (
                len(standing.run.evaluations),
                standing.stalled,
                standing.phase,
                follower.broken(),
            )
            if shown.get(follower.log) == news:
                continue
            shown[follower.log] = news
            if as_json:
                print_json(standing, indent=None)
            else:
                name = "" if runs.alone else f"{text(str(follower.path))}: "
                print(name, ", ".join(standing.parts()), sep="", flush=True)

    states = output.follow(runs.poll, runs.ended, interval)
    # Every state is news to show_states(); report() decides run by run.
    found = output.show_states(
        states, report, lambda _: object(), render, as_json=as_json, once=once
    )
    for follower, _ in found:
        if (reason := follower.broken()) is not None:
            print(
                f"review: {text(str(follower.path))}: the trial failed: {text(reason)}",
                file=sys.stderr,
            )
    return (
        1
        if any(
            follower.ended(standing) and not standing.run.converged for follower, standing in found
        )
        else 0
    )


_CELLS: dict[Column, Callable[[Follower, Standing], str]] = {
    Column("run", wraps=True): lambda follower, _: text("/".join(follower.path.parts[-2:])),
    Column("phase"): lambda follower, one: (
        "broken" if follower.broken() is not None else "stalled" if one.stalled else one.phase
    ),
    Column("done", right=True, drop=4): lambda _, one: number_text(one.share, ".0%"),
    Column("accuracy", right=True): lambda _, one: number_text(one.run.final_accuracy, ".4f"),
    Column("evals", right=True, drop=1): lambda _, one: str(len(one.run.evaluations)),
    Column("seq/s", right=True, drop=2): lambda _, one: number_text(one.rate or None, ",.0f"),
    Column("time", right=True, drop=3): lambda _, one: duration(one.elapsed),
    Column("to go", right=True): lambda _, one: duration(None if one.done else one.eta),
}


def render(found: list[Watched], out: Console) -> RenderableType:
    """Terminal view: a row per run; a single run also gets a progress bar and all its figures."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    if not found:
        return Text("waiting for the first result_*.txt", "dim")
    rows = [[cell(*one) for cell in _CELLS.values()] for one in found]
    colours = (("red", "green")[standing.run.converged] for _, standing in found)
    styles = [
        colour if one[0].ended(one[1]) else "" for one, colour in zip(found, colours, strict=True)
    ]
    table, standing = output.table(*output.fit(list(_CELLS), rows, out.width), styles), found[0][1]
    if len(found) > 1:
        return table
    bar = ProgressBar(total=1.0, completed=standing.share or 0.0, width=min(60, out.width))
    return Group(
        table, bar, Text("\n".join(["", *standing.parts()]))
    )  # "": the bar does not end its line
