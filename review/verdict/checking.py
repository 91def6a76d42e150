"""The verdict on a result, a log or a submission: the one that all commands show.

The official package checker decides on a copy of each result. This package finds the reasons again,
with the line and what to do, and what the official tools miss; if the two differ on an official
rule, the official verdict stands.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from review.logs import tree
from review.logs.output import (
    ERROR,
    IGNORED,
    SEVERITIES,
    WARNING,
    Finding,
    ReviewError,
    pick,
)
from review.results.run import Run
from review.results.score import REQUIRED_RUNS, Result, load_results
from review.rulebook import official
from review.rulebook.compliance import DEFAULT_RULESET
from review.rulebook.description import check_description
from review.rulebook.rules import broken
from review.verdict import submission_rules, training_rules
from review.verdict.official_rules import check_benchmark, check_together
from review.verdict.places import groups, with_places
from review.verdict.power_rules import check_power

# Sources of findings that repeat what an official tool tests, and that it may overrule.
OFFICIAL = ("compliance", "runs", "seeds", "rcp", "system", "package", "repository")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is found on a ``result``, a log, or a submission (result None).

    ``outcomes``: of official tools, none where an error that they cannot overrule made asking
    needless. ``findings``: by severity. ``official``: the score counts. ``obstacles``: why not.
    """

    path: Path
    title: str
    result: Result | None = None
    outcomes: tuple[official.Outcome, ...] = ()
    findings: tuple[Finding, ...] = ()
    official: bool = False
    obstacles: tuple[str, ...] = ()

    @property
    def official_passed(self) -> bool:
        return all(outcome.passed for outcome in self.outcomes)

    def passed(self, strict: bool = False) -> bool:
        """Whether it passes the official checkers and has no errors, with ``strict`` no warnings
        either.
        """
        # Errors of ours count although the official checkers pass: rules that they do not test.
        severities = {finding.severity for finding in self.findings}
        failing = {ERROR, WARNING} if strict else {ERROR}
        return self.official_passed and not severities & failing

    def ignoring(self, ids: Sequence[str]) -> "Verdict":
        """The same without findings of these ids, which are marked and not removed. What made the
        score count or not stays.
        """
        findings = [
            replace(finding, severity=IGNORED) if finding.id in ids else finding
            for finding in self.findings
        ]
        return replace(self, findings=_sorted(findings))

    def as_dict(self) -> dict[str, Any]:
        named = "passed messages crash"
        return {
            "path": self.path,
            "passed": self.passed(),
            "unverified": True,
            "official_passed": self.official_passed,
            "official": {one.tool: pick(one, named) for one in self.outcomes},
            "findings": self.findings,
        }


def judge(result: Result, ask: bool = False) -> Verdict:
    """The verdict on a folder of runs. ``ask``: also ask official tools whose answer changes
    nothing.
    """
    outcomes: tuple[official.Outcome, ...] = ()
    try:
        findings = own_findings(result)
        if ask or (result.score is not None and not _settled(findings)):
            outcomes = (_ask(result, findings),)
            findings = _agreed(outcomes, findings, result.folder)
    except ReviewError:
        raise
    # What nobody foresaw in one folder must not take the others along. A tree may change while it is
    # read.
    except Exception as error:
        rule, why = "unjudged", f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            rule, why = "changed", f"{error.filename}: {error.strerror}"
        findings = [broken(rule, f"cannot be judged: {why}", result.folder)]
    blocking = [finding for finding in findings if finding.blocks]
    obstacles = [with_places(group, result.folder) for group in groups(blocking)]
    if result.score is None and not obstacles:
        obstacles = ["no score"]
    return Verdict(
        path=result.folder,
        title=result.name,
        result=result,
        outcomes=outcomes,
        findings=_sorted(findings),
        official=bool(outcomes) and not obstacles,
        obstacles=tuple(obstacles),
    )


def _settled(findings: Sequence[Finding]) -> bool:
    """Whether no answer of the official tools could make the score count."""
    return any(f.blocks and f.source not in OFFICIAL for f in findings)


def judge_log(result: Result) -> Verdict:
    """The verdict on a log alone, by the rules for logs: the package checker takes folders."""
    (run,) = result.runs
    outcomes = (official.check_compliance(run.path, run.ruleset),)
    findings = [*run.findings, *training_rules.check_run(run)]
    together = [*check_benchmark(result), *training_rules.check_speed(result)]
    findings += (replace(finding, file=run.path) for finding in together)
    if why := result.errors.get(run.path):
        findings.append(run.broken("ended_in_error", f"ended in an error: {why}"))
    return Verdict(
        path=run.path,
        title=run.path.name,
        result=result,
        outcomes=outcomes,
        findings=_sorted(_agreed(outcomes, findings, run.path)),
    )


def check(
    target: Path, ruleset: str = DEFAULT_RULESET, train_samples: bool = False
) -> list[Verdict]:
    """Checks a log, a result folder, a submission, or all of them below a folder. Raises
    ReviewError.
    """
    results = load_results(target, ruleset, train_samples)
    if target.is_file() and results[0].runs:
        return [judge_log(results[0])]
    verdicts = [judge(result, ask=True) for result in results]
    # A dict, to have each submission once, in order.
    roots = dict.fromkeys(tree.organization(result.folder) for result in results)
    for root in roots:
        # A submission that lies around the target is not what was asked about.
        if root is not None and root.is_relative_to(target.resolve()):
            verdicts.append(_judge_submission(root, ruleset))
    return verdicts


def _judge_submission(root: Path, ruleset: str) -> Verdict:
    outcomes = [official.check_repository(root)]
    findings = submission_rules.check_organization(root)
    for path in submission_rules.descriptions(root):
        # The others are checked with their results.
        if not (root / "results" / path.stem).is_dir():
            findings += check_description(path, ruleset)
            outcomes.append(official.check_system(path, ruleset))
    found = _sorted(_agreed(outcomes, findings, root))
    return Verdict(path=root, title=root.name, outcomes=tuple(outcomes), findings=found)


def own_findings(result: Result) -> list[Finding]:
    """This package's own findings on a result, by official and other rules."""
    findings = [*check_together(result)]
    for run in result.runs:
        findings += _findings_on(run, result)
    # Already reported.
    reused = {finding.file for finding in findings if finding.source == "seeds"}
    findings += [
        finding
        for finding in training_rules.check_runs(result)
        if finding.key != "seed" or finding.file not in reused
    ]
    findings += [*training_rules.check_speed(result), *check_power(result)]
    if tree.organization(result.folder) is not None:
        system = tree.system_file(result.folder)
        findings += submission_rules.check_folder(result)
        findings += check_description(system, result.ruleset) if system else []
    return findings


def _findings_on(run: Run, result: Result) -> Iterator[Finding]:
    """The findings on one run; errors of the only one that fails, which may, are warnings."""
    for finding in (*run.findings, *training_rules.check_run(run, result.division)):
        # Then the RCP test does not use epoch_num.
        if result.train_samples and finding.id == "counts_samples":
            continue
        may_fail = run is result.tolerated and finding.severity == ERROR
        # A crash of the checker takes all runs of the folder with it.
        if may_fail and not finding.crash:
            message = f"{finding.message}; one run of ten may fail"
            finding = replace(finding, severity=WARNING, message=message)
        yield finding


def _ask(result: Result, findings: Sequence[Finding]) -> official.Outcome:
    """The official verdict on a result."""
    if any(finding.id == "endless_line" for finding in findings):
        crash = "not asked, since it would not come to an end"
        return official.Outcome(tool="package_checker", passed=False, crash=crash)
    root = tree.organization(result.folder)
    if root is None and result.division == "open" and len(result.runs) != REQUIRED_RUNS:
        # A run that is no submission: only the rules for logs apply.
        outcomes = [
            official.check_compliance(run.path, run.ruleset) for run in result.runs
        ]
        return official.Outcome(
            tool="compliance_checker",
            # No run at all is no pass.
            passed=bool(outcomes) and all(outcome.passed for outcome in outcomes),
            messages=tuple(
                message for outcome in outcomes for message in outcome.messages
            ),
            crash=next((outcome.crash for outcome in outcomes if outcome.crash), None),
        )
    # On a copy: the checker writes scaling.json into the tree that it checks.
    with tempfile.TemporaryDirectory(prefix="review-check-") as folder:
        copy = submission_rules.stage(result, root, Path(folder))
        outcome = official.check_package(copy, result.ruleset, result.train_samples)
    # The checker speaks of the copy; its words are about the original.
    old, new = (
        (copy, root) if root else (copy / "results" / "system" / "bert", result.folder)
    )
    messages = tuple(
        message.replace(str(old), str(new)) for message in outcome.messages
    )
    crashed = outcome.crash and outcome.crash.replace(str(old), str(new))
    return replace(outcome, messages=messages, crash=crashed)


def _agreed(
    outcomes: Sequence[official.Outcome], findings: list[Finding], path: Path
) -> list[Finding]:
    """Makes the findings agree with the official verdict."""
    severities = {
        finding.severity for finding in findings if finding.source in OFFICIAL
    }
    failing = [outcome for outcome in outcomes if not outcome.passed]
    # The official verdict stands: a failure that nothing of ours explains is told in its words.
    if failing and ERROR not in severities:
        return [*findings, *(_failure(outcome, path) for outcome in failing)]
    if failing:
        return findings
    # And an error of ours that the checkers do not share is no more than a warning.
    findings = [
        replace(finding, severity=WARNING, hint="the official checker accepts it")
        if finding.source in OFFICIAL and finding.severity == ERROR
        else finding
        for finding in findings
    ]
    if {ERROR, WARNING} & severities:
        return findings
    # What they say though they pass, each once: no finding of ours explains it.
    notes = dict.fromkeys(
        (outcome.tool, message.split("\n")[0])
        for outcome in outcomes
        for message in outcome.messages
    )
    messages = (f"the official {tool} says: {note}" for tool, note in notes)
    return [*findings, *(broken("official_says", each, path) for each in messages)]


def _failure(outcome: official.Outcome, path: Path) -> Finding:
    """Why an official tool fails, in its words, without the submission's own path."""
    root = str((tree.organization(path) or path).absolute())
    why = "; ".join(outcome.messages) or "gives no reason"
    why = f"crashes: {outcome.crash}" if outcome.crash else why
    why = why.replace(f"{root}/", "").replace(root, "the submission")
    source = "repository" if outcome.tool == "repo_checker" else "package"
    found = broken("official_fails", f"the official {outcome.tool} {why}", path)
    return replace(found, source=source)


def _sorted(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda found: SEVERITIES.index(found.severity)))
