"""`check`: does this result count? The official verdict, each reason with its place, and what that verdict overlooks.

The official package checker decides on a copy of each result. Its reasons are found anew by this package, which knows
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
from review.logs.findings import ERROR, NOTE, WARNING, Finding, ReviewError, failed
from review.results.run import Run
from review.results.score import REQUIRED_RUNS, Result, load_results
from review.rulebook import official
from review.rulebook.compliance import DEFAULT_RULESET
from review.rulebook.description import check_description
from review.rulebook.official import Outcome
from review.verdict import submission_rules, training_rules

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
            "findings": [finding.as_dict() for finding in self.findings],
        }


def check(
    target: Path, ruleset: str = DEFAULT_RULESET, progress: Callable[[str], None] = lambda _: None
) -> list[Checked]:
    """Checks a log, a result folder, a submission, or every one below a folder. Raises ReviewError."""
    results = load_results(target, ruleset)
    if target.is_file():
        return [_check_log(results[0].runs[0])]
    checked: list[Checked] = []
    roots: dict[Path, None] = {}
    for result in results:
        root = tree.organization(result.folder)
        progress(f"official checkers on {result.folder}")
        checked.append(_check_result(result, root))
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


def _check_result(result: Result, root: Path | None) -> Checked:
    findings = [*_compliance(result), *_round(result), *_count(result), *result.seed_findings]
    findings += training_rules.rcp_findings(result)
    findings += [finding for run in result.runs for finding in training_rules.check_run(run)]
    reused = {finding.file for finding in findings if finding.source == "seeds"}  # where more need not be said
    findings += [f for f in training_rules.check_runs(result) if f.key != "seed" or f.file not in reused]
    if root is not None:
        system = tree.system_file(result.folder)
        findings += submission_rules.check_folder(result)
        findings += check_description(system, result.ruleset) if system else []
    with _staged(result, root) as copy:
        outcome = official.check_package(copy, result.ruleset)
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
            raise ReviewError(f"{error.filename}: cannot be copied to a temporary folder: {error.strerror}") from None
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
        findings = [_accepted(finding) for finding in findings]
    elif not failed([finding for finding in findings if finding.source in _OFFICIAL]):
        findings = findings + [_unexplained(path, outcome) for outcome in outcomes if not outcome.passed]
    findings = sorted(findings, key=lambda finding: _ORDER[finding.severity])
    return Checked(path, title, outcomes, tuple(findings))


def _accepted(finding: Finding) -> Finding:
    if finding.source not in _OFFICIAL or finding.severity != ERROR:
        return finding
    return replace(finding, severity=WARNING, hint="the official checker accepts it")


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
    found = []
    failing = [run for run in result.runs if not run.compliant]
    for run in result.runs:
        accepted = len(failing) == 1 and run is failing[0]
        for finding in run.findings:
            if accepted and finding.severity == ERROR and not finding.crash:
                finding = replace(finding, severity=WARNING, message=f"{finding.message}; one run of ten may fail")
            found.append(finding)
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
        found.append(
            Finding(
                severity=ERROR,
                message=f"holds {len(result.runs)} of {REQUIRED_RUNS} result_*.txt",
                source="runs",
                file=result.folder,
                rule=f"a BERT result has exactly {REQUIRED_RUNS} runs",
                hint="run the missing trials" if len(result.runs) < REQUIRED_RUNS else "choose ten before looking",
            )
        )
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
