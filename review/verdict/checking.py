"""`check`: does this result count? The official verdict, each reason with its place, and what that verdict overlooks.

The official package checker decides on a copy of each result. Its reasons are found again by this package, which knows
the line and what to do; where the two differ, the official verdict stands.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from review.logs import tree
from review.logs.mllog import text
from review.logs.output import ERROR, NOTE, WARNING, Finding
from review.results.run import Run
from review.results.score import REQUIRED_RUNS, USUAL, Result, Terms, load_results
from review.rulebook import official
from review.rulebook.compliance import DEFAULT_RULESET
from review.rulebook.description import check_description
from review.rulebook.official import Outcome
from review.verdict import result_rules, submission_rules, training_rules
from review.verdict.power_rules import KEY as POWER
from review.verdict.power_rules import check_power

_OFFICIAL = ("compliance", "runs", "seeds", "rcp", "system", "package", "repository")
_MOST_PLACES = 6
_LONGEST_RULE = 300  # some official rules are lists of hundreds of names


@dataclass(frozen=True)
class Checked:
    """One result, log or submission: the official outcomes and every finding."""

    path: Path
    title: str
    outcomes: tuple[Outcome, ...]
    findings: tuple[Finding, ...]

    @functools.cached_property
    def official_passed(self) -> bool:
        """The verdict of the official checkers."""
        return all(outcome.passed for outcome in self.outcomes)

    def passed(self, strict: bool = False) -> bool:
        """Whether it counts: the official verdict, and no error of our own; with ``strict`` no warning either."""
        severities = {finding.severity for finding in self.findings}
        return self.official_passed and ERROR not in severities and not (strict and WARNING in severities)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        said = ("passed", "messages", "crash")
        return {
            "path": self.path,
            "passed": self.passed(),
            "official_passed": self.official_passed,
            "official": {one.tool: {name: getattr(one, name) for name in said} for one in self.outcomes},
            "findings": self.findings,
        }


def check(
    target: Path,
    ruleset: str = DEFAULT_RULESET,
    progress: Callable[[str], None] = lambda _: None,
    terms: Terms = USUAL,
) -> list[Checked]:
    """Checks a log, a result folder, a submission, or every one below a folder. Raises ReviewError."""
    results = load_results(target, ruleset, terms)
    if target.is_file():
        run = results[0].runs[0]
        outcome = official.check_compliance(run.path, run.ruleset)
        return [_checked(run.path, run.path.name, (outcome,), [*run.findings, *training_rules.check_run(run)])]
    checked: list[Checked] = []
    roots: dict[Path, None] = {}
    for result in results:
        root = tree.organization(result.folder)
        progress(f"official checkers on {result.folder}")
        try:
            checked.append(_check_result(result, root))
        except OSError as error:  # of a tree that changes while it is read
            message = f"cannot be checked: {error.filename}: {error.strerror}"
            gone = Finding(ERROR, message, file=result.folder, hint="check again")
            checked.append(Checked(result.folder, result.name, (), (gone,)))
        if root is not None and root.is_relative_to(target.resolve()):
            roots[root] = None
    for root in roots:
        progress(f"official checkers on {root}")
        outcomes, findings = [official.check_repository(root)], submission_rules.check_organization(root)
        for path in submission_rules.descriptions(root):
            if not (root / "results" / path.stem).is_dir():  # others are checked with their results
                findings += check_description(path, ruleset)
                outcomes.append(official.check_system(path, ruleset))
        checked.append(_checked(root, root.name, tuple(outcomes), findings))
    return checked


def own_findings(result: Result) -> list[Finding]:
    """What this package finds of a result by itself, the official rules included."""
    found: list[Finding] = []
    for run in result.runs:
        found += map(_accept_one, run.findings) if run is result.accepted_failure else run.findings
    found += [*_check_round(result), *_check_count(result), *result.seed_findings, *result_rules.rcp_findings(result)]
    for run in result.runs:
        ours = training_rules.check_run(run, result.division)
        if result.terms.train_samples:  # then the RCP test does not take epoch_num
            ours = [finding for finding in ours if finding.message != training_rules.NOT_SAMPLES]
        found += map(_accept_one, ours) if run is result.accepted_failure else ours
    reused = {finding.file for finding in found if finding.source == "seeds"}  # where more need not be said
    found += [f for f in result_rules.check_runs(result) if f.key != "seed" or f.file not in reused]
    found += check_power(result)
    if tree.organization(result.folder) is not None:
        system = tree.system_file(result.folder)
        found += submission_rules.check_folder(result)
        found += check_description(system, result.ruleset) if system else []
    return found


def obstacles(result: Result) -> list[str]:
    """Why the score would not stand as submitted, as far as this package knows by itself.

    Those of the runs, and what is wrong with the description, the folder or the logs by rules that no tool tests. Power
    files that break the rules take nothing from the time: they stand in the way of the energy alone.
    """
    errors = [f for f in own_findings(result) if f.severity == ERROR and f.source in ("rules", "system", "package")]
    others = [f for f in errors if f.key != POWER]
    return [*result.obstacles, *(with_places(group, result.folder) for group in groups(others))]


def energy_obstacles(result: Result) -> list[str]:
    """Why the energy would not stand as submitted; none where it was not measured."""
    others = [f for f in check_power(result) if f.severity == ERROR]
    return [with_places(group, result.folder) for group in groups(others)]


def as_dict(result: Result) -> dict[str, Any]:
    """A result for JSON, official only where nothing is in the way."""
    reasons, point, test, energy = obstacles(result), result.rcp_point, result.rcp_test, result.energy
    against = energy_obstacles(result)
    return {
        "folder": result.folder,
        "name": result.name,
        "organization": result.organization,
        "platform": result.platform,
        "division": result.division,
        "ruleset": result.ruleset,
        "complies_with_other_ruleset": result.other_ruleset,
        "global_batch_size": result.batch_size,
        "accelerators": result.accelerators,
        "processes_without_accelerator": result.processes,
        "runs": [_run_dict(run, result) for run in result.runs],
        "crashed": result.crashes,
        "unreadable": result.unreadable,
        "olympic_minutes": result.olympic_minutes,
        "raw_olympic_minutes_not_checked": result.reached_minutes,
        "median_minutes": result.median_minutes,
        "mean_samples": result.mean_samples,
        "rcp": point
        and {
            "passed": test and test.passed,
            "reason": test and test.reason,
            "mean": point.mean,
            "std": point.std,
            "minimum": point.minimum,
            "margin": None if result.mean_samples is None else result.mean_samples - point.minimum,
        },
        "scaling_factor": result.scaling_factor,
        "score_minutes": result.score,
        "energy": energy
        and {
            "joules": energy.joules,
            "mean_watts": energy.watts,
            "reason": energy.reason,
            "runs_without": {path.name: run.reason for path, run in energy.runs.items() if run.reason is not None},
            "obstacles": against,
            "official": not reasons and not against and energy.joules is not None,
        },
        "official": result.score is not None and not reasons,
        "obstacles": reasons,
    }


def _run_dict(run: Run, result: Result) -> dict[str, Any]:
    rate, accelerators = run.sequences_per_second, result.accelerators
    return {
        "file": run.path,
        "seed": run.seeds[0] if run.seeds else None,
        "status": run.status,
        "init_seconds": run.init_seconds,
        "minutes": run.minutes,
        "evaluations": len(run.evaluations),
        "samples": run.samples,
        "first_accuracy": run.first_accuracy,
        "final_accuracy": run.final_accuracy,
        "sequences_per_second": rate,
        "sequences_per_second_per_accelerator": rate / accelerators if rate and accelerators else None,
        "evaluation_share": run.evaluation_share,
        "joules": result.joules(run),
        "compliant": run.compliant,
        "findings": run.findings,
        "dropped": result.dropped.get(run.path),
    }


def _accept_one(finding: Finding) -> Finding:
    """What the one failing run of a full set breaks is a warning: it counts as the slowest."""
    if finding.severity != ERROR or finding.crash:
        return finding
    return replace(finding, severity=WARNING, message=f"{finding.message}; one run of ten may fail")


def _check_result(result: Result, root: Path | None) -> Checked:
    findings = own_findings(result)
    if root is None and result.division == "open" and len(result.runs) != REQUIRED_RUNS:
        # A run of one's own, not a submission: its logs are held to the rules of logs, and nothing else is missing.
        outcomes = [official.check_compliance(run.path, run.ruleset) for run in result.runs]
        messages = tuple(message for outcome in outcomes for message in outcome.messages)
        crash = next((outcome.crash for outcome in outcomes if outcome.crash), None)
        passed = bool(outcomes) and all(outcome.passed for outcome in outcomes)
        outcome = Outcome(tool="compliance_checker", passed=passed, messages=messages, crash=crash)
        return _checked(result.folder, result.name, (outcome,), findings)
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="review-check-"))
            copy = submission_rules.stage(result, root, Path(folder))
        except OSError as error:
            message = f"cannot be copied to a temporary folder: {error.strerror}"
            raise OSError(error.errno, message, error.filename) from None
        outcome = official.check_package(copy, result.ruleset, result.terms.train_samples)
    old, new = (copy, root) if root else (copy / "results" / "system" / "bert", result.folder)
    crash = outcome.crash and outcome.crash.replace(str(old), str(new))
    messages = tuple(message.replace(str(old), str(new)) for message in outcome.messages)
    return _checked(result.folder, result.name, (replace(outcome, messages=messages, crash=crash),), findings)


def _checked(path: Path, title: str, outcomes: tuple[Outcome, ...], findings: list[Finding]) -> Checked:
    """Makes the findings agree with the official verdict, and sorts them."""
    known = [finding for finding in findings if finding.source in _OFFICIAL]
    rule = "the official checkers pass"
    if all(outcome.passed for outcome in outcomes):
        accepted = "the official checker accepts it"
        findings = [
            replace(one, severity=WARNING, hint=accepted) if one.source in _OFFICIAL and one.severity == ERROR else one
            for one in findings
        ]
        if all(finding.severity == NOTE for finding in known):  # then its warnings are not explained
            said = [(outcome.tool, message.split("\n")[0]) for outcome in outcomes for message in outcome.messages]
            for tool, message in dict.fromkeys(said):
                message, hint = f"the official {tool} says: {message}", "its own words; it passes"
                findings.append(Finding(NOTE, message, "package", path, rule=rule, hint=hint))
    elif all(finding.severity != ERROR for finding in known):
        for outcome in (outcome for outcome in outcomes if not outcome.passed):
            why = f"crashes: {outcome.crash}" if outcome.crash else "; ".join(outcome.messages) or "gives no reason"
            source = "repository" if outcome.tool == "repo_checker" else "package"
            tree_of = str((tree.organization(path) or path).absolute())
            message = f"the official {outcome.tool} {why.replace(f'{tree_of}/', '').replace(tree_of, 'the submission')}"
            findings = [*findings, Finding(ERROR, message, source, path, rule=rule, hint="its own words")]
    findings = sorted(findings, key=lambda finding: (ERROR, WARNING, NOTE).index(finding.severity))
    return Checked(path, title, outcomes, tuple(findings))


def _check_round(result: Result) -> Iterator[Finding]:
    if result.other_ruleset is not None:
        message = f"no log complies with ruleset {result.ruleset}, but with {result.other_ruleset}"
        hint = f"check with --ruleset {result.other_ruleset} where the result is of that round"
        yield Finding(NOTE, message, file=result.folder, rule="each round has its ruleset", hint=hint)


def _check_count(result: Result) -> Iterator[Finding]:
    if len(result.runs) != REQUIRED_RUNS:
        alone = result.division == "open" and tree.organization(result.folder) is None
        hint = "run the missing trials" if len(result.runs) < REQUIRED_RUNS else "choose ten before looking"
        message = f"holds {len(result.runs)} of {REQUIRED_RUNS} result_*.txt"
        rule = f"a {'submitted ' if alone else ''}BERT result has exactly {REQUIRED_RUNS} runs"
        hint = "fine for runs of your own" if alone else hint
        yield Finding(NOTE if alone else ERROR, message, "runs", result.folder, rule=rule, hint=hint)
    for path, reason in result.unreadable.items():
        rule, hint = "every result_*.txt is a log", "remove it, or make it readable"
        yield Finding(ERROR, reason, "package", path, rule=rule, hint=hint)
    for trial, reason in result.crashes.items():
        message, path = f"trial {trial} left no result: {reason}", result.folder / f"failed_{trial}.txt"
        rule = "a run that was started counts, unless the system broke"
        hint = "correct the cause, and run the trial again"
        yield Finding(WARNING, message, file=path, rule=rule, hint=hint)


def groups(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings of one rule together, in the order of the first."""
    found: dict[tuple[str | None, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.severity, finding.source, finding.message, finding.rule, finding.hint)
        found.setdefault(key, []).append(finding)
    return list(found.values())


def subject(group: Sequence[Finding], base: Path) -> str:
    """Which keys or files, and what about them."""
    names = [finding.key for finding in group if finding.key]
    if not names:
        names = [place for finding in group if (place := _file(finding, base))]
    names = list(dict.fromkeys(names))
    prefix = f"{', '.join(names[:_MOST_PLACES])}{_more(names)} " if names else ""
    return text(prefix + group[0].message)


def shortened(rule: str) -> str:
    """A rule at a length for reading."""
    return rule if len(rule) <= _LONGEST_RULE else f"{' '.join(rule[:_LONGEST_RULE].split())} ..."


def places(group: Sequence[Finding], base: Path) -> str:
    """Files with the lines of each."""
    files: dict[str, list[str]] = {}
    for finding in group:
        lines = files.setdefault(_file(finding, base), [])
        if finding.line is not None and str(finding.line) not in lines:
            lines.append(str(finding.line))
    found = [f"{name}:{','.join(lines)}" if lines else name for name, lines in files.items() if name]
    return ", ".join(found[:_MOST_PLACES]) + _more(found)


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - _MOST_PLACES} more" if len(names) > _MOST_PLACES else ""


def _file(finding: Finding, base: Path) -> str:
    """The file, as seen from the checked folder or its organisation's; empty for that folder itself."""
    if finding.file is None or finding.file == base:
        return ""
    file, base = finding.file.absolute(), base.absolute()
    above = next((one for one in (base, *base.parents[:3]) if one.is_dir() and file.is_relative_to(one)), None)
    return str(file.relative_to(above) if above else finding.file)


def with_places(group: Sequence[Finding], base: Path) -> str:
    """``subject`` and the files it is about."""
    files = places(group, base)
    return f"{subject(group, base)}, in {text(files)}" if files and group[0].key else subject(group, base)
