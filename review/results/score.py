"""Result of a folder of runs: what its files say of all of them, olympic score, RCP test and energy."""

import math
import stat
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from review.logs import tree
from review.logs.mllog import number, read_log, text
from review.logs.output import ReviewError, counted
from review.results.benchmark import departures, starting_point
from review.results.energy import Energy, run_energy
from review.results.run import TARGET_ACCURACY, Run, run_of
from review.rulebook import rcp
from review.rulebook.compliance import BENCHMARK, DEFAULT_RULESET, rulesets

REQUIRED_RUNS = 10
# Required by MLCommons' messaging guidelines for results that they have not reviewed.
UNVERIFIED = (
    'unverified until MLCommons has reviewed it: where you publish it, write "unverified" beside '
    'the score, and "Result not verified by MLCommons Association"'
)
_NOT_CONVERGED = 1e9  # samples of a run that did not converge, in the official RCP test


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The runs of one folder. None or empty: not known.

    ``crashes``: trials without a result; ``errors``: of logs whose run ended in one;
    ``unreadable``: files. ``division``: of the system description, as for the official checkers,
    else of the first log. ``target``: 0.720, or of open runs that of config.json. ``pretrains``: the
    runs had no target, by config.json: they are for weights, not for a score. ``batch_size``: None if
    the logs differ. ``processes``: of runs without accelerators. ``train_samples``: use these in the
    RCP test instead of the last epoch_num, as the rules allow for BERT.
    """

    folder: Path
    runs: tuple[Run, ...] = ()
    crashes: dict[int, str] = field(default_factory=dict)
    errors: dict[Path, str] = field(default_factory=dict)
    unreadable: dict[Path, str] = field(default_factory=dict)
    ruleset: str = DEFAULT_RULESET
    train_samples: bool = False
    name: str = ""
    division: str | None = None
    organization: str | None = None
    platform: str | None = None
    other_benchmark: str = ""
    target: float = TARGET_ACCURACY
    pretrains: bool = False
    batch_size: float | None = None
    accelerator: str = ""
    accelerators: int | None = None
    processes: int | None = None
    rcp_point: rcp.Rcp | None = None

    @property
    def subtitle(self) -> str:
        """Submitter, platform, division, batch size and accelerators, as far as known."""
        size = "" if self.batch_size is None else f"batch {self.batch_size:g}"
        ranks = counted(self.processes, "process") if self.processes else ""
        if self.accelerators:
            ranks = counted(self.accelerators, "accelerator")
        known = (self.organization, self.platform, self.division, size, ranks)
        return ", ".join(filter(None, known))

    @property
    def rcp_tested(self) -> bool:
        return self.division == "closed" and rcp.has_points(self.ruleset)


def run_folder(
    folder: Path,
    runs: Sequence[Run],
    ruleset: str = DEFAULT_RULESET,
    train_samples: bool = False,
    **found: Any,
) -> RunFolder:
    """What logs and files say together. ``found``: crashes, errors and unreadable."""

    def first(key: str) -> str | None:
        values = (run.log.value(key) for run in runs)
        return next((text(value) for value in values if value not in (None, "")), None)

    described = tree.description(folder).get("division")
    closed_or_open = described in ("closed", "open")
    division = described if closed_or_open else first("submission_division")
    sizes = {run.batch_size for run in runs}
    batch_size = next(iter(sizes)) if len(sizes) == 1 else None
    # Some trainers log init_start on every rank, so that the most in a log is the number of ranks.
    starts = max((len(run.log.all("init_start")) for run in runs), default=0)
    ranks, on_gpus = tree.count_ranks(folder)
    settings = tree.read_json(folder / "config.json", "evaluate")
    resolved = folder.resolve()
    made = RunFolder(
        folder=folder,
        runs=tuple(runs),
        ruleset=ruleset,
        train_samples=train_samples,
        name=resolved.parent.name if tree.system_file(folder) else resolved.name,
        division=division,
        organization=first("submission_org"),
        platform=first("submission_platform"),
        other_benchmark=_other_benchmark(runs),
        target=_target(settings, division),
        pretrains=_pretrains(settings),
        batch_size=batch_size,
        accelerator=_accelerator(folder),
        accelerators=tree.count_accelerators(folder, starts),
        processes=None if on_gpus else ranks,
        **found,
    )
    if batch_size is None or not made.rcp_tested:
        return made
    return replace(made, rcp_point=rcp.find(batch_size, ruleset)[0])


def _other_benchmark(runs: Sequence[Run]) -> str:
    """The logged benchmarks if none is BERT; empty for BERT, or if none is logged."""
    logged = [run.log.value("submission_benchmark") for run in runs]
    named = {text(value) for value in logged if value}
    # One log of BERT is enough: in a mixed folder the others are what is wrong, and are reported.
    return "" if BENCHMARK in named else ", ".join(sorted(named))


def _accelerator(folder: Path) -> str:
    """Name of the accelerator, or of the processor of a system without one."""
    described = tree.description(folder)
    name = text(described.get("accelerator_model_name") or "").strip()
    if name and name.casefold() not in ("n/a", "none", "-"):
        return name
    gpus = tree.read_json(folder / "environment.json").get("gpus")
    if isinstance(gpus, list) and gpus:
        first = gpus[0]
        return text(first.get("name", "") if isinstance(first, dict) else first)
    return text(described.get("host_processor_model_name") or "").strip()


def _target(settings: dict[str, Any], division: str | None) -> float:
    # A closed run has the target of the rules, whatever its config.json says.
    target = number(settings.get("target")) if division == "open" else None
    return TARGET_ACCURACY if target is None or not 0 < target < 1 else target


def _pretrains(settings: dict[str, Any]) -> bool:
    # Logs of others come without config.json; they are taken for what they say, runs to a target.
    if "target" not in settings:
        return False
    # A target without any evaluation can never be reached: that, too, is a run for weights.
    return not (settings["target"] and settings.get("every_samples", True))


@dataclass(frozen=True, kw_only=True)
class Olympic:
    """A mean of runs without the fastest and the slowest.

    ``counted``: those with a time, fastest first; ``failed``: number of others, of which one may
    stand in for the slowest. ``kept``: those averaged, none if there are fewer than three or more
    than one failed. ``dropped``: why a run is not in the mean: best, worst or failed.
    """

    counted: tuple[Run, ...] = ()
    failed: int = 0
    kept: tuple[Run, ...] = ()
    minutes: float | None = None
    median: float | None = None
    dropped: dict[Path, str] = field(default_factory=dict)


def olympic(runs: Sequence[Run], counts: Callable[[Run], bool]) -> Olympic:
    minutes = {run.path: run.minutes for run in runs if counts(run) and run.minutes}
    counted = [run for run in runs if run.path in minutes]
    counted.sort(key=lambda run: minutes[run.path])
    failed = len(runs) - len(counted)
    dropped = {run.path: "failed" for run in runs if run.path not in minutes}
    # A failed run is the slowest: with one, only the fastest is taken out.
    kept = [] if failed > 1 else counted[1 : len(counted) - (1 - failed)]
    if kept:
        dropped[counted[0].path] = "best"
        dropped |= {} if failed else {counted[-1].path: "worst"}
    times = [minutes[run.path] for run in kept]
    return Olympic(
        counted=tuple(counted),
        failed=failed,
        kept=tuple(kept),
        minutes=math.fsum(times) / len(times) if times else None,
        median=statistics.median(minutes.values()) if minutes else None,
        dropped=dropped,
    )


@dataclass(frozen=True, kw_only=True)
class Result(RunFolder):
    """What the runs of a folder amount to by the official rules.

    ``scored``: of the runs that comply: the official mean. ``unchecked``: of those that say success,
    compliant or not: for logs of a round whose rules are not installed. ``failing``: the only run
    that breaks the rules, which counts as the slowest. ``mean_samples``: olympic mean in the RCP
    test, None if it cannot be tested. ``energy``: mean over the runs of the score, times its factor;
    None without a power folder. ``departures``: how the runs differ from the benchmark, official in
    no division. ``unproved``: what they do not prove to be the benchmark's. ``other_ruleset``: the
    newest that a run complies with if none complies with this one.
    """

    scored: Olympic = field(default_factory=Olympic)
    unchecked: Olympic = field(default_factory=Olympic)
    failing: Run | None = None
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
        minutes = self.scored.minutes
        return None if minutes is None else minutes * self.scaling_factor

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
    failing = [run for run in runs if not run.compliant]
    mean_samples, test = _rcp_test(folder)
    found = departures(folder.folder, runs, folder.division, folder.ruleset)
    result = Result(
        **vars(folder),
        scored=olympic(runs, lambda run: run.compliant),
        unchecked=olympic(runs, lambda run: run.converged),
        failing=failing[0] if len(failing) == 1 else None,
        mean_samples=mean_samples,
        rcp_test=test,
        departures=tuple(found),
        unproved=tuple(dict.fromkeys(unproved)),
        other_ruleset=_other_ruleset(folder),
    )
    return replace(result, energy=_energy(result))


def _rcp_test(folder: RunFolder) -> tuple[float | None, rcp.Verdict | None]:
    """Mean samples, and the test; None if not applicable: open division, a round without it, or too
    few runs.
    """
    option = folder.train_samples
    # Of all runs, compliant or not: the RCP checker reads every log of the folder.
    readings = [
        rcp.read_rcp(run.log, True) if option else run.rcp_reading
        for run in folder.runs
    ]
    batch_size, obstacle = folder.batch_size, _rcp_obstacle(folder, readings)
    if obstacle:
        failed = rcp.Verdict(
            passed=False, reason=obstacle, scaling_factor=1.0, point=folder.rcp_point
        )
        return None, failed if folder.rcp_tested else None
    if len(readings) < 3 or batch_size is None:
        return None, None
    samples = (reading.samples for reading in readings)
    mean = rcp.olympic_mean(
        [_NOT_CONVERGED if value is None else value for value in samples]
    )
    tested = folder.rcp_tested
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
    counted = [energies[run.path] for run in result.scored.counted]
    reasons = (energy.reason for energy in counted if energy.joules is None)
    kept = [energies[run.path] for run in result.scored.kept]
    reason = next(reasons, None if kept else "the runs give no score")
    if reason is not None:
        return Energy(runs=energies, reason=reason)
    joules, watts = (
        math.fsum(getattr(energy, name) for energy in kept) / len(kept)
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
        runs: list[Run] = []
        unreadable: dict[Path, str] = {}
        for path in files:
            try:
                # Opening a pipe would wait for its writer.
                if stat.S_ISREG(path.stat().st_mode):
                    runs.append(run_of(read_log(path), ruleset))
                else:
                    unreadable[path] = "is not a regular file"
            except OSError as error:
                unreadable[path] = f"cannot be read: {error.strerror}"
        if target.is_file():
            for path, reason in unreadable.items():
                raise ReviewError(f"{path} {reason}")
        # A log given by itself is judged alone: what crashed beside it are other runs.
        crashes = {} if target.is_file() else tree.crashes(folder)
        errors = {run.path: tree.error_beside(run.path) for run in runs}
        errors = {path: reason for path, reason in errors.items() if reason}
        try:
            found = run_folder(
                folder,
                runs,
                ruleset,
                train_samples,
                crashes=crashes,
                errors=errors,
                unreadable=unreadable,
            )
            results.append(result_of(found))
        except ReviewError:
            raise
        # What nobody foresaw in one folder must not take the others along: it is a finding on it.
        except Exception as error:
            why = f"cannot be judged: {type(error).__name__}: {error}"
            reasons = {**unreadable, folder: why}
            results.append(Result(folder=folder, name=folder.name, unreadable=reasons))
    return results
