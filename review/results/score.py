"""Results: the score of a folder's runs by the official rules, its RCP test and its energy."""

import math
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from review.logs import tree
from review.logs.mllog import read_log, text
from review.logs.output import ReviewError
from review.results.benchmark import departures, starting_point
from review.results.energy import Energy, run_energy
from review.results.folder import RunFolder, run_folder
from review.results.olympic import OlympicMean, olympic_of
from review.results.run import Run, run_of
from review.rulebook import rcp
from review.rulebook.compliance import DEFAULT_RULESET, rulesets

REQUIRED_RUNS = 10
# Required by MLCommons' messaging guidelines for results that they have not reviewed.
UNVERIFIED = (
    'unverified until MLCommons has reviewed it: where you publish it, write "unverified" beside '
    'the score, and "Result not verified by MLCommons Association"'
)
_NOT_CONVERGED = 1e9  # samples of a run that did not converge, in the official RCP test


@dataclass(frozen=True, kw_only=True)
class Result(RunFolder):
    """What the runs of a folder amount to by the official rules.

    ``olympic``: of compliant runs, the official mean. ``raw``: of converged runs, compliant or not:
    for logs of a round whose rules are not installed. ``tolerated``: the only run that is not
    compliant, which the rules take for the slowest. ``mean_samples``: their olympic mean, as the
    RCP test reads them; None if it cannot. ``energy``: mean over the runs of the score, times its factor;
    None without a power folder. ``departures``: how the runs differ from the benchmark, official in
    no division. ``unproved``: what they do not prove to be the benchmark's. ``other_ruleset``: the
    newest that a run complies with if none complies with this one.
    """

    olympic: OlympicMean = field(default_factory=OlympicMean)
    raw: OlympicMean = field(default_factory=OlympicMean)
    tolerated: Run | None = None
    mean_samples: float | None = None
    rcp_test: rcp.Verdict | None = None
    energy: Energy | None = None
    departures: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()
    other_ruleset: str | None = None

    @property
    def scaling_factor(self) -> float:
        """Factor of the time if the runs converged faster than the reference mean, else 1."""
        test = self.rcp_test
        return test.scaling_factor if test and test.passed else 1.0

    @property
    def score(self) -> float | None:
        """Minutes: olympic mean times scaling factor."""
        minutes = self.olympic.minutes
        return minutes and minutes * self.scaling_factor

    def joules(self, run: Run) -> float | None:
        """Energy of one of its runs; None if not measured."""
        return self.energy.runs[run.path].joules if self.energy else None

    def rate_per_accelerator(self, run: Run) -> float | None:
        """Sequences per second and accelerator of one of its runs."""
        rate = run.sequences_per_second
        return rate / self.accelerators if rate and self.accelerators else None


def result_of(folder: RunFolder) -> Result:
    runs = folder.runs
    named = (starting_point(run).get("unproved", ()) for run in runs)
    unproved = (text(name).replace("_", " ") for names in named for name in names)
    failed = [run for run in runs if not run.compliant]
    mean_samples, test = _rcp_test(folder)
    result = Result(
        **vars(folder),
        olympic=olympic_of(runs, lambda run: run.compliant),
        raw=olympic_of(runs, lambda run: run.converged),
        tolerated=failed[0] if len(failed) == 1 else None,
        mean_samples=mean_samples,
        rcp_test=test,
        departures=tuple(
            departures(folder.folder, runs, folder.division, folder.ruleset)
        ),
        unproved=tuple(dict.fromkeys(unproved)),
        other_ruleset=_other_ruleset(folder),
    )
    return replace(result, energy=_energy(result))


def _rcp_test(folder: RunFolder) -> tuple[float | None, rcp.Verdict | None]:
    """Mean samples, and the test; None if not applicable: open division, a round without it, or too
    few runs.
    """
    tested = folder.rcp_tested
    # Of all runs, compliant or not: the RCP checker reads every log of the folder.
    readings = [
        rcp.read_rcp(run.log, True) if folder.train_samples else run.rcp_reading
        for run in folder.runs
    ]
    batch_size, obstacle = folder.batch_size, _rcp_obstacle(folder, readings)
    if obstacle:
        failed = rcp.Verdict(
            passed=False, reason=obstacle, scaling_factor=1.0, point=folder.rcp_point
        )
        return None, failed if tested else None
    if len(readings) < 3 or batch_size is None:
        return None, None
    samples = [reading.samples for reading in readings]
    mean = rcp.olympic_mean([_NOT_CONVERGED if n is None else n for n in samples])
    return mean, rcp.judge(batch_size, mean, folder.ruleset) if tested else None


def _rcp_obstacle(folder: RunFolder, readings: Sequence[rcp.Reading]) -> str | None:
    for run, reading in zip(folder.runs, readings, strict=True):
        # Before anything else: what the other logs say does not
        # matter to a checker that has stopped.
        if reading.crash:
            return f"the RCP checker crashes on {run.name}: {reading.crash}"
    if any(reading.benchmark != readings[0].benchmark for reading in readings):
        return "submission_benchmark is missing or differs between the logs"
    if folder.batch_size is None:
        return "global_batch_size is missing, not a number, or differs between the logs"
    # One such run counts as 1e9 samples, which the olympic
    # mean drops; two end the official test.
    if sum(reading.samples is None for reading in readings) > 1:
        return "more than one run did not converge"
    return None


def _energy(result: Result) -> Energy | None:
    if not (result.folder / tree.POWER).is_dir():
        return None
    energies = {run.path: run_energy(result.folder, run) for run in result.runs}
    # The official summarizer needs the energy of every compliant run.
    valid = [energies[run.path] for run in result.olympic.valid]
    reasons = (energy.reason for energy in valid if energy.joules is None)
    remaining = [energies[run.path] for run in result.olympic.remaining]
    reason = next(reasons, None if remaining else "the runs give no score")
    if reason is not None:
        return Energy(runs=energies, reason=reason)
    joules, watts = (
        math.fsum(getattr(energy, name) for energy in remaining) / len(remaining)
        for name in ("joules", "watts")
    )
    # The factor lengthens the time and with it the energy; the power stays what was measured.
    return Energy(runs=energies, joules=joules * result.scaling_factor, watts=watts)


def _other_ruleset(folder: RunFolder) -> str | None:
    # A log that was cut off complies with no ruleset, so it tells nothing about its round.
    run = next((run for run in folder.runs if run.run_stop is not None), None)
    if run is None or any(run.compliant for run in folder.runs):
        return None
    others = (name for name in reversed(rulesets()) if name != folder.ruleset)
    return next((name for name in others if run_of(run.log, name).compliant), None)


def load_results(
    target: Path, ruleset: str = DEFAULT_RULESET, train_samples: bool = False
) -> list[Result]:
    """Every result at or below a path; what cannot be read is recorded in it. Raises ReviewError."""
    results = []
    for folder, files in tree.find_results(target):
        runs, unreadable = _read(files, ruleset)
        # A log given by itself is judged alone: what crashed beside it are other runs.
        alone = target.is_file()
        if alone and unreadable:
            raise ReviewError(f"{target} {unreadable[target]}")
        errors = {run.path: tree.error_beside(run.path) for run in runs}
        try:
            found = run_folder(
                folder,
                runs,
                ruleset,
                train_samples,
                crashes={} if alone else tree.crashes(folder),
                errors={path: reason for path, reason in errors.items() if reason},
                unreadable=unreadable,
            )
            results.append(result_of(found))
        except ReviewError:
            raise
        # What nobody foresaw in one folder must not take the others along: it is a finding on it.
        except Exception as error:
            unreadable[folder] = f"cannot be judged: {type(error).__name__}: {error}"
            results.append(
                Result(folder=folder, name=folder.name, unreadable=unreadable)
            )
    return results


def _read(files: Sequence[Path], ruleset: str) -> tuple[list[Run], dict[Path, str]]:
    """The runs of some logs, and why the others cannot be read."""
    runs, unreadable = [], {}
    for path in files:
        try:
            # Opening a pipe would wait for its writer.
            if stat.S_ISREG(path.stat().st_mode):
                runs.append(run_of(read_log(path), ruleset))
            else:
                unreadable[path] = "is not a regular file"
        except OSError as error:
            unreadable[path] = f"cannot be read: {error.strerror}"
    return runs, unreadable
