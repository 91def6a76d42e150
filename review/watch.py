"""`watch`: follows live runs and acceptance tests, one row each; a single one also has a bar and
all its figures.

Samples to the target are projected by the RCP mean, and in the last 40% of a run by the accuracy of
the last two evaluations, which follows a curve of fixed shape over the share of the total samples
(_ACCURACIES).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from common.durations import duration
from common.files import text_of
from review.acceptance.journal import EXIT, BurnIn, Journal
from review.logs import output, tree
from review.logs.mllog import number, parse, text
from review.logs.output import Column, ReviewError, number_text, pick, print_json
from review.results.published_curves import Deviation, first_deviation
from review.results.run import TARGET_ACCURACY, Run
from review.results.score import Result
from review.rulebook.compliance import DEFAULT_RULESET

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from review.acceptance.verdict import Certificate

# Folders of live trials; the launcher moves the log up one level when the trial ends.
_RUNNING = re.compile(r"running_\d+(_\d+)?")
# The load of an acceptance test prints such a line as a stage begins; the last one is where it is.
_STAGE = re.compile(r"certify: ([\w, ]+):")
# A burn-in that is silent for longer than these, and _STALLED_SECONDS, has stalled.
_SILENT_REPEATS = 10
NO_LOG = "no result_*.txt here or below"
_IDLE_SECONDS = 60.0  # to wait for another trial after the last run ended
# Accuracies at 10, 15, ... 100% of the samples to the target: medians of the 20 runs of two
# published 5.0 results.
# fmt: off
_ACCURACIES = (
    0.3966, 0.4452, 0.5472, 0.6544, 0.7015, 0.7079, 0.7105, 0.7125, 0.7136, 0.7146,
    0.7155, 0.7163, 0.7170, 0.7177, 0.7181, 0.7187, 0.7192, 0.7197, 0.7201,
)
# fmt: on
_SHARES = [(index + 2) / 20 for index in range(len(_ACCURACIES))]
# Relative standard errors of projections: by the RCP mean, and by the curve at a share of the run,
# larger than on the runs it was fitted to.
_RCP_ERROR = 0.17
_KNOWN_SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_CURVE_ERRORS = (1.0, 0.4, 0.22, 0.14, 0.10, 0.07, 0.05, 0.04)
_STALLED_SECONDS = 60.0


def curve_share(accuracy: float) -> float:
    """Share of its samples at which a run to 0.720 has this accuracy, by interpolation; 0 below the
    curve.
    """
    return float(np.interp(accuracy, _ACCURACIES, _SHARES, left=0.0))


@dataclass(frozen=True)
class Standing:
    """State of a run at ``now_ms``, a Unix time in milliseconds. None: not known yet."""

    result: Result
    now_ms: float

    @property
    def run(self) -> Run:
        return self.result.runs[0]

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def target(self) -> float:
        return self.result.target

    @functools.cached_property
    def phase(self) -> str:
        """starting, initialising, training, evaluating, finishing, or how the run ended: success,
        aborted, ...
        """
        if self.done:
            return self.run.status
        if self.run.run_start is None:
            return "initialising" if self.run.log.events else "starting"
        if self.reached:
            return "finishing"
        marks = [
            event.key
            for event in self.run.log.events
            if event.key in ("eval_start", "eval_stop")
        ]
        return "evaluating" if marks[-1:] == ["eval_start"] else "training"

    @property
    def reached(self) -> bool:
        return (
            not self.result.pretrains and (self.run.final_accuracy or 0) >= self.target
        )

    @property
    def done(self) -> bool:
        return self.run.run_stop is not None

    @functools.cached_property
    def broken(self) -> str | None:
        """Why the trial failed; None unless the launcher has recorded a failure."""
        failed = re.fullmatch(r"failed_\D*(\d*).*", self.path.name)
        number = int(failed[1] or -1) if failed else -1
        return tree.crashes(self.path.parent).get(number, "crashed") if failed else None

    @property
    def status(self) -> int:
        """Exit status: 1 if it ended without reaching the target."""
        return int((self.done or self.broken is not None) and not self.run.converged)

    @property
    def news(self) -> object:
        """What is worth a new line; samples and times change with every look."""
        return len(self.run.evaluations), self.stalled, self.phase, self.broken

    @functools.cached_property
    def elapsed(self) -> float | None:
        """Seconds since run_start."""
        start, stop = self.run.run_start, self.run.run_stop
        if start is None:
            return None
        # The clocks of the cluster and of this machine may differ: time does not run backwards.
        end = stop.time_ms if stop else max(self.now_ms, start.time_ms)
        return number((end - start.time_ms) / 1000)

    @functools.cached_property
    def silent(self) -> float:
        """Seconds since the last event of a run that has not ended."""
        events = self.run.log.events
        return (
            0.0
            if self.done or not events
            else (self.now_ms - events[-1].time_ms) / 1000
        )

    @functools.cached_property
    def stalled(self) -> bool:
        """Whether the log has been silent for more than a minute and three times its longest
        silence so far.
        """
        times = [event.time_ms for event in self.run.log.events]
        # Logs are silent during an evaluation; how long, the log's past tells.
        longest = max((b - a for a, b in itertools.pairwise(times)), default=0.0) / 1000
        return self.silent > max(_STALLED_SECONDS, 3 * longest)

    @functools.cached_property
    def _counted(self) -> list[tuple[float, float]]:
        """(samples, accuracy) of every evaluation with a sample count."""
        return [(e.samples, e.accuracy) for e in self.run.evaluations if e.samples]

    @functools.cached_property
    def samples(self) -> float | None:
        """Samples trained at the last count that the log has."""
        if self.done:
            return self.run.samples
        counted = [samples for samples, _ in self._counted]
        if self.run.counts_samples:
            stats = self.run.log.all("tracked_stats")
            counted += [
                event.meta("epoch_num", "samples_count") or 0.0 for event in stats
            ]
        return max(counted) if counted else 0.0 if self.run.run_start else None

    @functools.cached_property
    def projection(self) -> float | None:
        """Samples to the target, or of a run without a target to the last step; None if unknown."""
        if self.result.pretrains:
            steps = number(
                tree.read_json(self.result.folder / "config.json", "schedule").get(
                    "max_steps"
                )
            )
            return (
                steps * self.run.batch_size if steps and self.run.batch_size else None
            )
        if self.reached and self.run.samples:
            return self.run.samples
        # The curve and the reference are of runs to 0.720.
        if self.target != TARGET_ACCURACY:
            return None
        shares = [
            (samples, curve_share(accuracy)) for samples, accuracy in self._counted[-2:]
        ]
        point = self.result.rcp_point
        projected, errors = ([point.mean], [_RCP_ERROR]) if point else ([], [])
        # Below its first point the curve says nothing about the end.
        if shares and all(share > 0 for _, share in shares):
            projected.append(
                sum(samples / share for samples, share in shares) / len(shares)
            )
            errors.append(float(np.interp(shares[-1][1], _KNOWN_SHARES, _CURVE_ERRORS)))
        if not projected:
            return None
        # Weighted by inverse variance; the errors are relative, so it is the logarithms that are
        # averaged.
        mean = float(np.average(np.log(projected), weights=np.array(errors) ** -2.0))
        return max(math.exp(mean), self.samples or 0.0)

    @functools.cached_property
    def share(self) -> float | None:
        """Share of the run that is done, by samples, 0 to 1."""
        if self.done:
            return 1.0
        if self.samples is None or not self.projection:
            return None
        return min(1.0, self.samples / self.projection)

    @functools.cached_property
    def eta(self) -> float | None:
        """Seconds of training from the last count of samples to the target."""
        rate = self.run.last_rate
        if self.done or self.stalled or not rate or self.samples is None:
            return None
        return self.projection and (self.projection - self.samples) / rate

    @functools.cached_property
    def rcp_margin(self) -> float | None:
        """Projected samples minus the smallest mean that the RCP test accepts."""
        if (
            self.result.rcp_point is None
            or self.projection is None
            or self.result.pretrains
        ):
            return None
        return self.projection - self.result.rcp_point.minimum

    @functools.cached_property
    def deviation(self) -> Deviation | None:
        """The first evaluation outside the range of published runs, if this run has the same
        target.
        """
        if self.target != TARGET_ACCURACY or self.result.pretrains:
            return None
        return first_deviation(self.run)

    def as_dict(self) -> dict[str, Any]:
        names = "file=path phase done stalled elapsed_seconds=elapsed samples share"
        names += (
            " sequences_per_second=run.last_rate accuracy=run.final_accuracy target"
        )
        names += " projected_samples=projection eta_seconds=eta"
        names += " rcp_margin_samples=rcp_margin outside_published=deviation"
        return {**pick(self, names), "evaluations": len(self.run.evaluations)}

    def parts(self) -> list[str]:
        """Everything known, one phrase per item."""
        run, deviation, margin = self.run, self.deviation, self.rcp_margin
        expected = (
            ""
            if self.done or not self.projection
            else f" of about {self.projection:,.0f}"
        )
        wanted = "" if self.result.pretrains else f" of {self.target:g}"
        causes = f" (likely: {'; '.join(deviation.causes)})" if deviation else ""
        parts = (
            (self.phase, True),
            (f"{self.samples or 0:,.0f}{expected} samples", self.samples is not None),
            (f"accuracy {run.final_accuracy or 0:.4f}{wanted}", run.evaluations),
            (f"{run.last_rate or 0:,.0f} sequences/s", run.last_rate),
            (f"{duration(self.elapsed)} elapsed", self.elapsed is not None),
            (f"{duration(self.eta)} to go", self.eta is not None),
            (f"RCP margin {margin or 0:+,.0f} samples", margin is not None),
            (f"{deviation.describe() if deviation else ''}{causes}", deviation),
            (f"no new line for {duration(self.silent)}", self.stalled),
        )
        return [text(part) for part, known in parts if known]

    def cells(self) -> list[str]:
        """What _COLUMNS show from the third on."""
        return [
            number_text(self.share, ".0%"),
            number_text(self.run.final_accuracy, ".4f"),
            str(len(self.run.evaluations)),
            number_text(self.run.last_rate or None, ",.0f"),
            duration(self.elapsed),
            duration(self.eta),
        ]


@dataclass(frozen=True)
class Certification:
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
        return self.silent > max(_STALLED_SECONDS, _SILENT_REPEATS * repeat)

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


State: TypeAlias = "Standing | Certification"


def is_test(folder: Path) -> bool:
    """Whether this is the folder of an acceptance test, which writes no log."""
    begun = any(folder.glob("certify_*.npz")) or (folder / "burn_in.json").exists()
    return begun or "expected" in tree.read_json(folder / "config.json")


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


class Follower:
    """Reads a growing log, and follows it to where the launcher moves it when the trial ends."""

    def __init__(self, path: Path, ruleset: str = DEFAULT_RULESET) -> None:
        self.path, self.ruleset = path, ruleset
        self._run: Run | None = None
        self._read: object = None  # path and stamp of the log when it was last read

    def poll(self, now: float) -> Standing:
        """State at ``now``, Unix seconds, from the log's complete lines. Raises ReviewError if the
        log is gone.
        """
        try:
            stat = self.path.stat()
            # With the inode: another trial's log may have the same name and size.
            stamp = (self.path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if self._run is None or self._read != stamp:
                data = self.path.read_bytes()
                whole = data[
                    : data.rfind(b"\n") + 1
                ]  # the last line may be half written
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
        result = Result(self.path.parent, (self._run,), ruleset=self.ruleset)
        return Standing(result, 1000 * now)


class TestFollower:
    """Reads a test's folder; its records are judged whenever they change, in a burn-in every few
    minutes.
    """

    __test__ = False  # pytest takes a class of this name for one of its own

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._found: Certificate | None = None
        self._judged: list[tuple[str, int]] = []
        self._journal = Journal(folder)

    def poll(self, now: float) -> Certification:
        """State at ``now``, Unix seconds. Raises ReviewError for invalid files."""
        # Late, as it imports scipy, and `watch` should start at once.
        from review.acceptance.verdict import certify

        records = sorted(
            [*self.path.glob("certify_*.npz"), *self.path.glob("burn_in_*.npz")]
        )
        judged = [(path.name, path.stat().st_mtime_ns) for path in records]
        if judged != self._judged:
            self._found = None
            with contextlib.suppress(
                ReviewError
            ):  # files of other nodes are still to come
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
            burn.elapsed >= seconds if burn is not None else not seconds
        )
        stage = "burn-in" if burn else "over" if done else "starting"
        if (
            stage == "starting"
        ):  # not during a burn-in: the load's output grows with each repeat
            stage = [stage, *_STAGE.findall(text_of(self.path / "output.txt"))][-1]
        changed = [path.stat().st_mtime for path in self.path.glob("burn_in_*.jsonl")]
        silent, error = (
            now - max(changed, default=now),
            text_of(self.path / "error_0.txt"),
        )
        state = Certification(
            self.path, stage, certificate, burn, silent, error or None, done
        )
        if certificate is None:
            return state
        # As long as it moves, a burn-in has not ended early.
        running = burn and replace(burn, running=not state.stalled)
        return replace(state, certificate=replace(certificate, burn_in=running))


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
        self._followers: dict[Path, Follower | TestFollower] = {}
        self._now, self._idle_since = 0.0, math.inf

    def poll(self, now: float) -> dict[Path, State]:
        """States by the path at first sight. Skips removed logs, but raises ReviewError for a
        single one.
        """
        # First, since moved logs are known by their new paths afterwards.
        states = self._look(self._followers, now)
        # A log that has moved is not another one.
        known = {state.path for state in states.values()}
        new: dict[Path, Follower | TestFollower] = {
            path: TestFollower(path) if path.is_dir() else Follower(path, self.ruleset)
            for target in self.targets
            for path in find_logs(target)
            if path not in known
        }
        states |= self._look(new, now)
        everyone = self._followers | new
        self._followers = {path: everyone[path] for path in states}
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
        self, followers: Mapping[Path, Follower | TestFollower], now: float
    ) -> dict[Path, State]:
        states: dict[Path, State] = {}
        for path, follower in followers.items():
            with (
                contextlib.nullcontext()
                if self.alone
                else contextlib.suppress(ReviewError)
            ):
                states[path] = follower.poll(now)
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
