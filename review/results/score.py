"""Result of a folder of runs: olympic score, RCP test, and what keeps it from being official."""

import functools
import math
import stat
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from review.logs import tree
from review.logs.mllog import Event, number, read_log, text
from review.logs.output import Finding, ReviewError
from review.results.benchmark import departures, starting_point
from review.results.energy import Energy, run_energy
from review.results.run import TARGET_ACCURACY, Run
from review.rulebook import rcp
from review.rulebook.compliance import BENCHMARK, DEFAULT_RULESET, rulesets

REQUIRED_RUNS = 10
# Required by MLCommons' messaging guidelines for results that they have not reviewed.
UNVERIFIED = (
    'unverified until MLCommons has reviewed it: where you publish it, write "unverified" beside '
    'the score, and "Result not verified by MLCommons Association"'
)
_NOT_CONVERGED = 1e9  # samples of a run that did not converge, in the official RCP test


@dataclass(frozen=True)
class Result:
    """The runs of one folder, judged like the official tools do.

    ``train_samples``: use these in the RCP test instead of the last epoch_num, as the rules allow
    for BERT.
    """

    folder: Path
    runs: tuple[Run, ...]
    crashes: dict[int, str] = field(default_factory=dict)
    unreadable: dict[Path, str] = field(default_factory=dict)
    ruleset: str = DEFAULT_RULESET
    train_samples: bool = False

    # Computed once: cached_property writes into __dict__, which a frozen dataclass allows.
    @functools.cached_property
    def division(self) -> str | None:
        """closed or open, from the system description like in the official checkers, else from the
        first log.
        """
        described = tree.description(self.folder).get("division")
        return (
            described
            if described in ("closed", "open")
            else self._first("submission_division")
        )

    @functools.cached_property
    def organization(self) -> str | None:
        """Submitter, as logged."""
        return self._first("submission_org")

    @functools.cached_property
    def other_benchmark(self) -> str:
        """The logged benchmarks if none is BERT; empty for BERT, or if none is logged."""
        logged = [run.log.value("submission_benchmark") for run in self.runs]
        named = {text(value) for value in logged if value}
        # One log of BERT is enough: in a mixed folder the
        # others are what is wrong, and are reported.
        return "" if BENCHMARK in named else ", ".join(sorted(named))

    @functools.cached_property
    def platform(self) -> str | None:
        """System, as logged."""
        return self._first("submission_platform")

    def _first(self, key: str) -> str | None:
        values = (run.log.value(key) for run in self.runs)
        return next((text(value) for value in values if value not in (None, "")), None)

    @functools.cached_property
    def name(self) -> str:
        """Name of the system in a submission tree, else of the folder."""
        folder = self.folder.resolve()
        return folder.parent.name if tree.system_file(self.folder) else folder.name

    @property
    def subtitle(self) -> str:
        """Submitter, platform, division, batch size and accelerators, as far as known."""
        size = "" if self.batch_size is None else f"batch {self.batch_size:g}"
        ranks = (
            f"{self.processes} process{'es' if self.processes > 1 else ''}"
            if self.processes
            else ""
        )
        if self.accelerators:
            ranks = (
                f"{self.accelerators} accelerator{'s' if self.accelerators > 1 else ''}"
            )
        return ", ".join(
            filter(None, (self.organization, self.platform, self.division, size, ranks))
        )

    @functools.cached_property
    def target(self) -> float:
        """Target accuracy: 0.720, or in the open division that of the run's config.json."""
        # A closed run has the target of the rules, whatever its config.json says.
        if self.division == "open":
            target = number(
                tree.read_json(self.folder / "config.json", "evaluate").get("target")
            )
            if target is not None and 0 < target < 1:
                return target
        return TARGET_ACCURACY

    @functools.cached_property
    def pretrains(self) -> bool:
        """Whether the runs had no target accuracy, by config.json: runs for weights, not for a
        score.
        """
        settings = tree.read_json(self.folder / "config.json", "evaluate")
        # Logs of others come without config.json; they are
        # taken for what they say, runs to a target.
        if "target" not in settings:
            return False
        # A target without any evaluation can never be reached: that, too, is a run for weights.
        return not (settings["target"] and settings.get("every_samples", True))

    @functools.cached_property
    def batch_size(self) -> float | None:
        """The common global batch size; None if the logs differ or lack it."""
        sizes = {run.batch_size for run in self.runs}
        return next(iter(sizes)) if len(sizes) == 1 else None

    @functools.cached_property
    def accelerators(self) -> int | None:
        # Some trainers log init_start on every rank, so that
        # the most in a log is the number of ranks.
        logged = [len(run.log.all("init_start")) for run in self.runs]
        starts = max(logged, default=0)
        return tree.count_accelerators(self.folder, starts)

    @functools.cached_property
    def processes(self) -> int | None:
        """Number of processes of runs without accelerators, else None."""
        ranks, on_gpus = tree.count_ranks(self.folder)
        return None if on_gpus else ranks

    @functools.cached_property
    def counted(self) -> list[Run]:
        """Compliant runs with a time, fastest first, including best and worst."""
        return _timed(run for run in self.runs if run.compliant)

    @functools.cached_property
    def failed_runs(self) -> int:
        """Number of runs that break the rules or have no time. One is allowed: the olympic score
        drops it as worst.
        """
        return len(self.runs) - len(self.counted)

    @functools.cached_property
    def accepted_failure(self) -> Run | None:
        """The only run that breaks the rules, which counts as the slowest; None if no run fails, or
        several.
        """
        failing = [run for run in self.runs if not run.compliant]
        return failing[0] if len(failing) == 1 else None

    @functools.cached_property
    def dropped(self) -> dict[Path, str]:
        """Runs left out of the score: best, worst or failed, by path."""
        out = {run.path: "failed" for run in self.runs if run not in self.counted}
        if self.olympic_minutes is not None:
            out[self.counted[0].path] = "best"
            if self.failed_runs == 0:
                # A failed run is the worst already, and then the slowest that counts is kept.
                out[self.counted[-1].path] = "worst"
        return out

    @functools.cached_property
    def olympic_minutes(self) -> float | None:
        """Mean minutes without best and worst; None with fewer than three runs or more than one
        failed one.
        """
        return _mean_minutes(self.kept)

    @functools.cached_property
    def kept(self) -> list[Run]:
        """Runs averaged in the score; empty with fewer than three runs or more than one failed
        one.
        """
        return _without_best_and_worst(self.counted, self.failed_runs)

    @functools.cached_property
    def reached_kept(self) -> list[Run]:
        """Runs of the unchecked olympic mean: those that report success, compliant or not."""
        reached = _timed(run for run in self.runs if run.converged)
        return _without_best_and_worst(reached, len(self.runs) - len(reached))

    @functools.cached_property
    def reached_minutes(self) -> float | None:
        """Olympic mean, unchecked and unscaled: for logs of a round whose rules are not
        installed.
        """
        return _mean_minutes(self.reached_kept)

    @functools.cached_property
    def energy(self) -> Energy | None:
        """Mean over the runs of the score, times its scaling factor; None without a power
        folder.
        """
        if not (self.folder / tree.POWER).is_dir():
            return None
        energies = {run.path: run_energy(self.folder, run) for run in self.runs}
        # The official summarizer needs the energy of every compliant run.
        counted = [energies[run.path] for run in self.counted]
        reason = next(
            (energy.reason for energy in counted if energy.joules is None), None
        )
        if reason is not None or not self.kept:
            return Energy(runs=energies, reason=reason or "the runs give no score")
        kept = [energies[run.path] for run in self.kept]
        joules, watts = (
            math.fsum(getattr(energy, name) for energy in kept) / len(kept)
            for name in ("joules", "watts")
        )
        # The factor lengthens the time and with it the energy; the power stays what was measured.
        return Energy(runs=energies, joules=joules * self.scaling_factor, watts=watts)

    def joules(self, run: Run) -> float | None:
        """Energy of one of its runs; None if not measured."""
        return self.energy.runs[run.path].joules if self.energy else None

    def rate_per_accelerator(self, run: Run) -> float | None:
        """Sequences per second and accelerator of one of its runs."""
        rate = run.sequences_per_second
        return rate / self.accelerators if rate and self.accelerators else None

    @functools.cached_property
    def median_minutes(self) -> float | None:
        """Median over the compliant runs."""
        # `or 0.0` is for the type checker: runs that count have a time.
        return (
            statistics.median(run.minutes or 0.0 for run in self.counted)
            if self.counted
            else None
        )

    @functools.cached_property
    def mean_samples(self) -> float | None:
        """Olympic mean of samples for the RCP test; one run that did not converge counts as the
        slowest.
        """
        if self._rcp_obstacle or len(self.runs) < 3:
            return None
        # Of all runs, compliant or not: the RCP checker reads every log of the folder.
        samples = (reading.samples for reading in self._rcp_readings)
        return rcp.olympic_mean(
            [_NOT_CONVERGED if value is None else value for value in samples]
        )

    @functools.cached_property
    def _rcp_readings(self) -> list[rcp.Reading]:
        return [
            rcp.read_rcp(run.log, True) if self.train_samples else run.rcp_reading
            for run in self.runs
        ]

    @functools.cached_property
    def _rcp_obstacle(self) -> str | None:
        readings = self._rcp_readings
        for run, reading in zip(self.runs, readings, strict=True):
            # Before anything else: what the other logs say does not
            # matter to a checker that has stopped.
            if reading.crash:
                return f"the RCP checker crashes on {run.name}: {reading.crash}"
        if any(reading.benchmark != readings[0].benchmark for reading in readings):
            return "submission_benchmark is missing or differs between the logs"
        if self.batch_size is None:
            return "global_batch_size is missing, not a number, or differs between the logs"
        # One such run counts as 1e9 samples, which the olympic
        # mean drops; two end the official test.
        if sum(reading.samples is None for reading in readings) > 1:
            return "more than one run did not converge"
        return None

    @property
    def _tested(self) -> bool:
        return self.division == "closed" and rcp.has_points(self.ruleset)

    @functools.cached_property
    def rcp_test(self) -> rcp.Verdict | None:
        """The RCP test; None if not applicable: open division, a round without it, or too few
        runs.
        """
        if not self._tested:
            return None
        if self._rcp_obstacle:
            return rcp.Verdict(
                passed=False,
                reason=self._rcp_obstacle,
                scaling_factor=1.0,
                point=self.rcp_point,
            )
        if self.mean_samples is None or self.batch_size is None:
            return None
        return rcp.judge(self.batch_size, self.mean_samples, self.ruleset)

    @functools.cached_property
    def rcp_point(self) -> rcp.Rcp | None:
        """Reference point of the batch size; None outside the closed division."""
        if not self._tested or self.batch_size is None:
            return None
        return rcp.find(self.batch_size, self.ruleset)[0]

    @functools.cached_property
    def departures(self) -> list[str]:
        """How the runs differ from the benchmark; a result with any is official in no division."""
        return list(departures(self.folder, self.runs, self.division, self.ruleset))

    @functools.cached_property
    def unproved(self) -> list[str]:
        """What the runs do not prove to be the benchmark's, of their weights and data."""
        named = (starting_point(run).get("unproved", ()) for run in self.runs)
        every = (text(name).replace("_", " ") for names in named for name in names)
        return list(dict.fromkeys(every))

    @functools.cached_property
    def seed_findings(self) -> list[Finding]:
        """Findings of the seed checker; none outside the closed division."""
        return check_seeds(self.runs) if self.division == "closed" else []

    @functools.cached_property
    def scaling_factor(self) -> float:
        """Factor of the time if the runs converged faster than the reference mean, else 1."""
        return (
            self.rcp_test.scaling_factor
            if self.rcp_test and self.rcp_test.passed
            else 1.0
        )

    @functools.cached_property
    def score(self) -> float | None:
        """Score in minutes: olympic mean times scaling factor."""
        return (
            None
            if self.olympic_minutes is None
            else self.olympic_minutes * self.scaling_factor
        )

    @functools.cached_property
    def obstacles(self) -> list[str]:
        """Reasons why the score is not official."""
        reasons = []
        if self.departures:
            reasons.append(f"not the benchmark: {'; '.join(self.departures)}")
        if len(self.runs) != REQUIRED_RUNS:
            reasons.append(f"{len(self.runs)} of {REQUIRED_RUNS} runs")
        continued = [run.name for run in self.runs if run.continued_at is not None]
        if continued:
            reasons.append(
                f"no time of {', '.join(continued)}: continued after a restart"
            )
        if self.failed_runs > 1:
            reasons.append(f"{self.failed_runs} runs fail, one may")
        if self.division is None:
            reasons.append("no submission_division")
        # A crash fails the whole folder, so that it cannot be the one run of ten that may fail.
        for run in self.runs:
            crashes = [finding.message for finding in run.findings if finding.crash]
            reasons += [
                f"the compliance checker crashes on {run.name}: {message}"
                for message in crashes[:1]
            ]
        if self.rcp_test is not None and not self.rcp_test.passed:
            point = self.rcp_test.point
            mean = self.mean_samples
            why = self.rcp_test.reason
            if point is not None and mean is not None:
                # The two numbers say more than the checker's phrase.
                why = f"mean of {mean:,.0f} samples, minimum {point.minimum:,.0f}"
            reasons.append(f"RCP test failed: {why}")
        if self.seed_findings:
            first = self.seed_findings[0]
            more = (
                f" (+{len(self.seed_findings) - 1} more)"
                if len(self.seed_findings) > 1
                else ""
            )
            where = "" if first.file is None else f" of {text(first.file.name)}"
            reasons.append(f"seed{where} {first.message}{more}")
        return reasons

    @functools.cached_property
    def other_ruleset(self) -> str | None:
        """Newest ruleset that a run complies with if none complies with this one; else None."""
        # A log that was cut off complies with no ruleset, so it tells nothing about its round.
        run = next((run for run in self.runs if run.run_stop is not None), None)
        if run is None or any(run.compliant for run in self.runs):
            return None
        others = [
            ruleset for ruleset in reversed(rulesets()) if ruleset != self.ruleset
        ]
        return next(
            (ruleset for ruleset in others if Run(run.log, ruleset).compliant), None
        )


def _timed(runs: Iterable[Run]) -> list[Run]:
    """Runs with a time, fastest first."""
    return sorted(
        (run for run in runs if run.minutes is not None),
        key=lambda run: run.minutes or 0.0,
    )


def _without_best_and_worst(runs: list[Run], failed: int) -> list[Run]:
    """``failed``: number of failed runs, which count as the worst; with more than one, no run is
    left.
    """
    # A failed run is not in the list: with one, only the fastest is taken out.
    return [] if failed > 1 else runs[1 : len(runs) - (1 - failed)]


def _mean_minutes(runs: Sequence[Run]) -> float | None:
    return math.fsum(run.minutes or 0.0 for run in runs) / len(runs) if runs else None


def load_results(
    target: Path, ruleset: str = DEFAULT_RULESET, train_samples: bool = False
) -> list[Result]:
    """Every result at or below a path; unreadable logs are recorded in it. Raises ReviewError."""
    results = []
    for folder, files in tree.find_results(target):
        runs, unreadable = [], {}
        for path in files:
            try:
                if stat.S_ISREG(path.stat().st_mode):
                    runs.append(Run(read_log(path), ruleset))
                else:
                    # Opening a pipe would wait for its writer.
                    unreadable[path] = "is not a regular file"
            except OSError as error:
                unreadable[path] = f"cannot be read: {error.strerror}"
        results.append(
            Result(
                folder,
                tuple(runs),
                tree.crashes(folder),
                unreadable,
                ruleset,
                train_samples,
            )
        )
    if target.is_file():
        for path, reason in results[0].unreadable.items():
            raise ReviewError(f"{path} {reason}")
        # A log given by itself is judged alone: what crashed beside it are other runs.
        return [replace(results[0], crashes={}, unreadable={})]
    return results


def check_seeds(runs: Sequence[Run]) -> list[Finding]:
    """The official seed checker, for closed results.

    Every run logs integer seeds, and no two runs log the same seed from the same line of code. It
    also fails on any malformed line of a log.
    """
    findings: list[Finding] = []
    seen: dict[tuple[Any, ...] | None, Run] = {}
    for run in runs:
        events = run.log.all("seed")
        locations = [_place(event) for event in events]
        # In the order of the seed checker: it parses a whole log first, then looks for seeds.
        if run.log.errors:
            first = run.log.errors[0]
            message = f"cannot be read, since a line {first.reason}"
            findings.append(
                replace(
                    run.broken("seed_unreadable", message, key="seed"), line=first.line
                )
            )
        elif not run.log.events:
            findings.append(
                run.broken(
                    "seed_no_lines",
                    "cannot be read: the file has no MLLOG lines",
                    key="seed",
                )
            )
        elif not events:
            findings.append(run.broken("seed_missing", "is missing", key="seed"))
        elif None in locations:
            findings.append(
                run.broken(
                    "seed_odd",
                    "is not a seed that can be compared",
                    events[locations.index(None)],
                )
            )
        else:
            for event, location in zip(events, locations, strict=True):
                # Also within a run: the seed checker does not ask
                # which log the earlier seed is from.
                if location in seen:
                    where = (
                        "twice"
                        if seen[location] is run
                        else f"as in {seen[location].path.name}"
                    )
                    findings.append(
                        run.broken(
                            "seed_again", f"is {int(event.value)}, {where}", event
                        )
                    )
                seen.setdefault(location, run)
    return findings


def _place(event: Event) -> tuple[Any, ...] | None:
    """Key by which the seed checker compares; None if it cannot."""
    try:
        # int() like there, so that "7" and 7.0 are seeds; the file and the line may be anything in
        # JSON, and a list cannot be looked up.
        location = (event.metadata["file"], event.metadata["lineno"], int(event.value))
        hash(location)
    except (TypeError, ValueError, OverflowError, KeyError):
        return None
    return location
