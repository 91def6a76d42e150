"""`check`: does this result count? The official verdict, each reason with its place, and what that verdict overlooks.

The official package checker decides on a copy of each result. Its reasons are found again by this package, which knows
the line and what to do; where the two differ, the official verdict stands.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from review.logs import tree
from review.logs.output import ERROR, NOTE, WARNING, Finding
from review.results.run import Run
from review.results.score import REQUIRED_RUNS, USUAL, Result, Terms, load_results
from review.rulebook import official
from review.rulebook.compliance import DEFAULT_RULESET
from review.rulebook.description import check_description
from review.rulebook.official import Outcome
from review.verdict import result_rules, submission_rules, training_rules
from review.verdict.grouping import groups, with_places
from review.verdict.power_rules import KEY as POWER
from review.verdict.power_rules import check_power

_OFFICIAL = ("compliance", "runs", "seeds", "rcp", "system", "package", "repository")
_ORDER = {"error": 0, "warning": 1, "note": 2}


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
        return {
            "path": str(self.path),
            "passed": self.passed(),
            "official_passed": self.official_passed,
            "official": {outcome.tool: outcome.as_dict() for outcome in self.outcomes},
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
        return [_check_log(results[0].runs[0])]
    checked: list[Checked] = []
    roots: dict[Path, None] = {}
    for result in results:
        root = tree.organization(result.folder)
        progress(f"official checkers on {result.folder}")
        try:
            checked.append(_check_result(result, root))
        except OSError as error:  # of a tree that changes while it is read
            message = f"cannot be checked: {error.filename}: {error.strerror}"
            gone = Finding(severity=ERROR, message=message, source="rules", file=result.folder, hint="check again")
            checked.append(Checked(result.folder, result.name, (), (gone,)))
        if root is not None and _covers(target, root):
            roots[root] = None
    for root in roots:
        progress(f"official checkers on {root}")
        checked.append(_check_organization(root, ruleset))
    return checked


def _covers(target: Path, root: Path) -> bool:
    target = target.resolve()
    return target == root or target in root.parents


def _check_log(run: Run) -> Checked:
    outcome = official.check_compliance(run.path, run.ruleset)
    findings = [*run.findings, *training_rules.check_run(run)]
    return _checked(run.path, run.path.name, (outcome,), findings)


def own_findings(result: Result) -> list[Finding]:
    """What this package finds of a result by itself, the official rules included."""
    found = [*_compliance(result), *_round(result), *_count(result), *result.seed_findings]
    found += result_rules.rcp_findings(result)
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
    others = [f for f in _own_errors(result) if f.key != POWER]
    return [*result.obstacles, *(with_places(group, result.folder) for group in groups(others))]


def energy_obstacles(result: Result) -> list[str]:
    """Why the energy would not stand as submitted; none where it was not measured."""
    others = [f for f in check_power(result) if f.severity == ERROR]
    return [with_places(group, result.folder) for group in groups(others)]


def _own_errors(result: Result) -> list[Finding]:
    return [f for f in own_findings(result) if f.severity == ERROR and f.source in ("rules", "system")]


def as_dict(result: Result) -> dict[str, Any]:
    """A result for JSON, official only where nothing is in the way."""
    reasons, found = obstacles(result), result.as_dict()
    if found["energy"] is not None:
        found["energy"]["obstacles"] = energy_obstacles(result)
        found["energy"]["official"] = (
            not reasons and not found["energy"]["obstacles"] and found["energy"]["joules"] is not None
        )
    return {**found, "official": result.score is not None and not reasons, "obstacles": reasons}


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
    with _staged(result, root) as copy:
        outcome = official.check_package(copy, result.ruleset, result.terms.train_samples)
    real = str(root) if root else str(result.folder)
    outcome = _relocated(outcome, str(copy) if root else str(copy / "results" / "system" / "bert"), real)
    return _checked(result.folder, result.name, (outcome,), findings)


@contextlib.contextmanager
def _staged(result: Result, root: Path | None) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="review-check-"))
            copy = submission_rules.stage(result, root, Path(folder))
        except OSError as error:
            message = f"cannot be copied to a temporary folder: {error.strerror}"
            raise OSError(error.errno, message, error.filename) from None
        yield copy


def _relocated(outcome: Outcome, old: str, new: str) -> Outcome:
    """The outcome with the names of the copy replaced by those of the original."""
    crash = outcome.crash.replace(old, new) if outcome.crash else None
    return replace(outcome, messages=tuple(message.replace(old, new) for message in outcome.messages), crash=crash)


def _check_organization(root: Path, ruleset: str) -> Checked:
    outcomes = [official.check_repository(root)]
    findings = submission_rules.check_organization(root)
    for path in sorted((root / "systems").glob("*.json")):
        if not (root / "results" / path.stem).is_dir():  # others are checked with their results
            findings += check_description(path, ruleset)
            outcomes.append(official.check_system(path, ruleset))
    return _checked(root, root.name, tuple(outcomes), findings)


def _checked(path: Path, title: str, outcomes: tuple[Outcome, ...], findings: list[Finding]) -> Checked:
    """Makes the findings agree with the official verdict, and sorts them."""
    passed = all(outcome.passed for outcome in outcomes)
    if passed:
        explained = any(finding.source in _OFFICIAL and finding.severity != NOTE for finding in findings)
        findings = [_accepted(finding) for finding in findings]
        findings += [] if explained else _said_in_passing(path, outcomes)
    elif not any(finding.source in _OFFICIAL and finding.severity == ERROR for finding in findings):
        findings = findings + [_unexplained(path, outcome) for outcome in outcomes if not outcome.passed]
    findings = sorted(findings, key=lambda finding: _ORDER[finding.severity])
    return Checked(path, title, outcomes, tuple(findings))


def _accepted(finding: Finding) -> Finding:
    if finding.source not in _OFFICIAL or finding.severity != ERROR:
        return finding
    return replace(finding, severity=WARNING, hint="the official checker accepts it")


def _said_in_passing(path: Path, outcomes: tuple[Outcome, ...]) -> list[Finding]:
    """Warnings of an official checker that passes all the same."""
    said = dict.fromkeys((outcome.tool, message.split("\n")[0]) for outcome in outcomes for message in outcome.messages)
    return [
        Finding(
            severity=NOTE,
            message=f"the official {tool} says: {message}",
            source="package",
            file=path,
            rule="the official checkers pass",
            hint="its own words; it passes",
        )
        for tool, message in said
    ]


def _unexplained(path: Path, outcome: Outcome) -> Finding:
    said = f"crashes: {outcome.crash}" if outcome.crash else "; ".join(outcome.messages) or "gives no reason"
    return Finding(
        severity=ERROR,
        message=f"the official {outcome.tool} {said}",
        source="repository" if outcome.tool == "repo_checker" else "package",
        file=path,
        rule="the official checkers pass",
        hint="its own words",
    )


def _compliance(result: Result) -> list[Finding]:
    """The compliance findings of every run; one failing run of a full set is accepted as the slowest."""
    found: list[Finding] = []
    for run in result.runs:
        found += map(_accept_one, run.findings) if run is result.accepted_failure else run.findings
    return found


def _round(result: Result) -> list[Finding]:
    if result.other_ruleset is None:
        return []
    return [
        Finding(
            severity=NOTE,
            message=f"no log complies with ruleset {result.ruleset}, but with {result.other_ruleset}",
            source="rules",
            file=result.folder,
            rule="each round has its ruleset",
            hint=f"check with --ruleset {result.other_ruleset} where the result is of that round",
        )
    ]


def _count(result: Result) -> list[Finding]:
    found = []
    if len(result.runs) != REQUIRED_RUNS:
        alone = result.division == "open" and tree.organization(result.folder) is None
        hint = "run the missing trials" if len(result.runs) < REQUIRED_RUNS else "choose ten before looking"
        found.append(
            Finding(
                severity=NOTE if alone else ERROR,
                message=f"holds {len(result.runs)} of {REQUIRED_RUNS} result_*.txt",
                source="runs",
                file=result.folder,
                rule=f"a {'submitted ' if alone else ''}BERT result has exactly {REQUIRED_RUNS} runs",
                hint="fine for runs of your own" if alone else hint,
            )
        )
    for path, reason in result.unreadable.items():
        rule, hint = "every result_*.txt is a log", "remove it, or make it readable"
        found.append(Finding(severity=ERROR, message=reason, source="rules", file=path, rule=rule, hint=hint))
    for trial, reason in result.crashes.items():
        found.append(
            Finding(
                severity=WARNING,
                message=f"trial {trial} left no result: {reason}",
                source="rules",
                file=result.folder / f"failed_{trial}.txt",
                rule="a run that was started counts, unless the system broke",
                hint="correct the cause, and run the trial again",
            )
        )
    return found
