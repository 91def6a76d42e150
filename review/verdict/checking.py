"""`check`: does this result count? The official verdict, its reasons with file and line, and what
it misses.

The official package checker decides on a copy of each result. This package finds the reasons again,
with the line and what to do; if the two differ, the official verdict stands.
"""

import functools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from review.logs import tree
from review.logs.mllog import text
from review.logs.output import (
    ERROR,
    NOTE,
    SEVERITIES,
    WARNING,
    Finding,
    Heading,
    Line,
    Part,
    pick,
)
from review.results.benchmark import target_of
from review.results.run import Run
from review.results.score import REQUIRED_RUNS, Result, load_results
from review.rulebook import official
from review.rulebook.compliance import DEFAULT_RULESET
from review.rulebook.description import check_description
from review.rulebook.rules import broken
from review.verdict import submission_rules, training_rules
from review.verdict.power_rules import KEY as POWER
from review.verdict.power_rules import check_power

# Sources of findings that repeat what an official tool tests, and that it may overrule.
_OFFICIAL = ("compliance", "runs", "seeds", "rcp", "system", "package", "repository")
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
_PASSES = "the official checkers pass"
_MOST_PLACES = 6
_LONGEST_RULE = 300  # some official rules are lists of hundreds of names


@dataclass(frozen=True)
class Checked:
    """A checked result, log or submission: the official outcomes and all findings."""

    path: Path
    title: str
    outcomes: tuple[official.Outcome, ...]
    findings: tuple[Finding, ...]

    @functools.cached_property
    def official_passed(self) -> bool:
        return all(outcome.passed for outcome in self.outcomes)

    def passed(self, strict: bool = False) -> bool:
        """Whether it counts: it passes the official checkers and has no errors, with ``strict`` no
        warnings either.
        """
        # Errors of ours count although the official checkers pass: rules that they do not test.
        severities = {finding.severity for finding in self.findings}
        return (
            self.official_passed
            and ERROR not in severities
            and not (strict and WARNING in severities)
        )

    def as_dict(self) -> dict[str, Any]:
        official = {
            outcome.tool: pick(outcome, "passed messages crash")
            for outcome in self.outcomes
        }
        verdicts = {
            "path": self.path,
            "passed": self.passed(),
            "unverified": True,
            "official_passed": self.official_passed,
        }
        return {**verdicts, "official": official, "findings": self.findings}


def check(
    target: Path, ruleset: str = DEFAULT_RULESET, train_samples: bool = False
) -> list[Checked]:
    """Checks a log, a result folder, a submission, or all of them below a folder. Raises
    ReviewError.
    """
    results = load_results(target, ruleset, train_samples)
    if target.is_file():
        run = results[0].runs[0]
        # The package checker takes folders; a log alone is judged by the rules for logs.
        outcome = official.check_compliance(run.path, run.ruleset)
        findings = [*run.findings, *training_rules.check_run(run)]
        benchmark = _check_benchmark(results[0])
        findings += (replace(finding, file=run.path) for finding in benchmark)
        return [_checked(run.path, run.path.name, (outcome,), findings)]
    checked: list[Checked] = []
    # A dict, for its order, and to have each submission once.
    roots: dict[Path, None] = {}
    for result in results:
        root = tree.organization(result.folder)
        try:
            checked.append(_check_result(result, root))
        except OSError as error:  # the tree changed while it was read
            message = f"cannot be checked: {error.filename}: {error.strerror}"
            gone = Finding(ERROR, message, file=result.folder, hint="check again")
            checked.append(Checked(result.folder, result.name, (), (gone,)))
        # A submission that lies around the target is not what was asked about.
        if root is not None and root.is_relative_to(target.resolve()):
            roots[root] = None
    for root in roots:
        outcomes = [official.check_repository(root)]
        findings = submission_rules.check_organization(root)
        for path in submission_rules.descriptions(root):
            # The others are checked with their results.
            if not (root / "results" / path.stem).is_dir():
                findings += check_description(path, ruleset)
                outcomes.append(official.check_system(path, ruleset))
        checked.append(_checked(root, root.name, tuple(outcomes), findings))
    return checked


def own_findings(result: Result) -> list[Finding]:
    """This package's own findings on a result, by official and other rules."""

    def accepted(run: Run, findings: list[Finding]) -> Iterator[Finding]:
        """Turns errors of the single failing run, which counts as the slowest, into warnings."""
        for finding in findings:
            # A crash of the checker takes all runs of the folder with it.
            if (
                run is result.accepted_failure
                and finding.severity == ERROR
                and not finding.crash
            ):
                finding = replace(
                    finding,
                    severity=WARNING,
                    message=f"{finding.message}; one run of ten may fail",
                )
            yield finding

    ours_and_theirs = [
        finding for run in result.runs for finding in accepted(run, run.findings)
    ]
    ours_and_theirs += [
        *_check_count(result),
        *_check_benchmark(result),
        *result.seed_findings,
        *training_rules.rcp_findings(result),
    ]
    for run in result.runs:
        ours = training_rules.check_run(run, result.division)
        if result.train_samples:  # then the RCP test does not use epoch_num
            ours = [
                finding
                for finding in ours
                if finding.message != training_rules.NOT_SAMPLES
            ]
        ours_and_theirs += accepted(run, ours)
    # Already reported.
    reused = {finding.file for finding in ours_and_theirs if finding.source == "seeds"}
    ours_and_theirs += [
        f
        for f in training_rules.check_runs(result)
        if f.key != "seed" or f.file not in reused
    ]
    ours_and_theirs += check_power(result)
    if tree.organization(result.folder) is not None:
        system = tree.system_file(result.folder)
        ours_and_theirs += submission_rules.check_folder(result)
        ours_and_theirs += check_description(system, result.ruleset) if system else []
    return ours_and_theirs


def obstacles(result: Result) -> list[str]:
    """Reasons why the score would not stand as submitted, without running the official checkers.

    Includes errors in the description, the folder and the logs by rules that no tool tests, but not
    in power files, which invalidate the energy only.
    """
    # What the other sources find is in result.obstacles.
    errors = [
        f
        for f in own_findings(result)
        if f.severity == ERROR and f.source in ("rules", "system", "package")
    ]
    others = [f for f in errors if f.key != POWER]
    ours = [with_places(group, result.folder) for group in groups(others)]
    return [*result.obstacles, *ours]


def is_official(result: Result) -> bool:
    return result.score is not None and not obstacles(result)


def energy_obstacles(result: Result) -> list[str]:
    """Reasons why the energy would not stand as submitted; none if it was not measured."""
    others = [f for f in check_power(result) if f.severity == ERROR]
    return [with_places(group, result.folder) for group in groups(others)]


def as_dict(result: Result) -> dict[str, Any]:
    """A result for JSON."""
    reasons = obstacles(result)
    point, mean = result.rcp_point, result.mean_samples
    test = pick(result, "passed=rcp_test.passed reason=rcp_test.reason")
    margin = None if mean is None or point is None else mean - point.minimum
    return {
        **pick(
            result,
            "folder name organization platform division ruleset"
            " complies_with_other_ruleset=other_ruleset global_batch_size=batch_size"
            " accelerators processes_without_accelerator=processes",
        ),
        "runs": [_run_as_dict(result, run) for run in result.runs],
        **pick(
            result,
            "crashed=crashes unreadable olympic_minutes"
            " raw_olympic_minutes_not_checked=reached_minutes median_minutes mean_samples",
        ),
        "rcp": point and {**test, **pick(point, "mean std minimum"), "margin": margin},
        **pick(result, "scaling_factor score_minutes=score"),
        "energy": _energy_as_dict(result, reasons),
        "official": result.score is not None and not reasons,
        "unverified": True,  # no result of this round's rules is reviewed by MLCommons
        "obstacles": reasons,
    }


def _run_as_dict(result: Result, run: Run) -> dict[str, Any]:
    return {
        "file": run.path,
        "seed": run.seeds[0] if run.seeds else None,
        **pick(run, "status init_seconds minutes"),
        "evaluations": len(run.evaluations),
        **pick(run, "samples first_accuracy final_accuracy sequences_per_second"),
        "sequences_per_second_per_accelerator": result.rate_per_accelerator(run),
        "evaluation_share": run.evaluation_share,
        "joules": result.joules(run),
        **pick(run, "compliant findings"),
        "dropped": result.dropped.get(run.path),
    }


def _energy_as_dict(result: Result, reasons: list[str]) -> dict[str, Any] | None:
    """None if it was not measured. reasons: why the result itself would not stand."""
    energy, against = result.energy, energy_obstacles(result)
    if energy is None:
        return None
    without = {
        path.name: run.reason
        for path, run in energy.runs.items()
        if run.reason is not None
    }
    return {
        **pick(energy, "joules mean_watts=watts reason"),
        "runs_without": without,
        "obstacles": against,
        "official": not reasons and not against and energy.joules is not None,
    }


def _check_result(result: Result, root: Path | None) -> Checked:
    findings = own_findings(result)
    if root is None and result.division == "open" and len(result.runs) != REQUIRED_RUNS:
        # A run that is no submission: only the rules for logs apply.
        outcomes = [
            official.check_compliance(run.path, run.ruleset) for run in result.runs
        ]
        messages = tuple(
            message for outcome in outcomes for message in outcome.messages
        )
        crash = next((outcome.crash for outcome in outcomes if outcome.crash), None)
        # No run at all is no pass.
        passed = bool(outcomes) and all(outcome.passed for outcome in outcomes)
        outcome = official.Outcome(
            tool="compliance_checker", passed=passed, messages=messages, crash=crash
        )
        return _checked(result.folder, result.name, (outcome,), findings)
    # On a copy: the checker writes scaling.json into the tree that it checks.
    with tempfile.TemporaryDirectory(prefix="review-check-") as folder:
        copy = submission_rules.stage(result, root, Path(folder))
        outcome = official.check_package(copy, result.ruleset, result.train_samples)
    # The checker speaks of the copy; its words are about the original.
    old, new = (
        (copy, root) if root else (copy / "results" / "system" / "bert", result.folder)
    )
    messages = tuple(said.replace(str(old), str(new)) for said in outcome.messages)
    crash = outcome.crash and outcome.crash.replace(str(old), str(new))
    outcome = replace(outcome, messages=messages, crash=crash)
    return _checked(result.folder, result.name, (outcome,), findings)


def _checked(
    path: Path,
    title: str,
    outcomes: tuple[official.Outcome, ...],
    findings: list[Finding],
) -> Checked:
    """Makes the findings agree with the official verdict, and sorts them by severity."""
    severities = {
        finding.severity for finding in findings if finding.source in _OFFICIAL
    }
    failing = [outcome for outcome in outcomes if not outcome.passed]
    # The official verdict stands: a failure that nothing of ours explains is told in its words.
    if failing and ERROR not in severities:
        findings = [*findings, *(_failure(outcome, path) for outcome in failing)]
    elif not failing:
        # And an error of ours that the checkers do not share is no more than a warning.
        findings = [
            replace(finding, severity=WARNING, hint="the official checker accepts it")
            if finding.source in _OFFICIAL and finding.severity == ERROR
            else finding
            for finding in findings
        ]
        if not {ERROR, WARNING} & severities:
            findings += _warnings(outcomes, path)
    findings = sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
    return Checked(path, title, outcomes, tuple(findings))


def _failure(outcome: official.Outcome, path: Path) -> Finding:
    """Why an official tool fails, in its words, without the submission's own path."""
    root = str((tree.organization(path) or path).absolute())
    why = "; ".join(outcome.messages) or "gives no reason"
    why = f"crashes: {outcome.crash}" if outcome.crash else why
    why = why.replace(f"{root}/", "").replace(root, "the submission")
    source = "repository" if outcome.tool == "repo_checker" else "package"
    message = f"the official {outcome.tool} {why}"
    return Finding(ERROR, message, source, path, rule=_PASSES, hint="its own words")


def _warnings(outcomes: Sequence[official.Outcome], path: Path) -> list[Finding]:
    """What official tools say though they pass, each once: no finding of ours explains it."""
    messages = dict.fromkeys(
        (outcome.tool, message.split("\n")[0])
        for outcome in outcomes
        for message in outcome.messages
    )
    hint = "its own words; it passes"
    return [
        Finding(
            NOTE,
            f"the official {tool} says: {message}",
            "package",
            path,
            rule=_PASSES,
            hint=hint,
        )
        for tool, message in messages
    ]


def _check_count(result: Result) -> Iterator[Finding]:
    """Checks that there are ten logs, all readable and of this round, and no crashed trials."""
    folder = result.folder
    count = len(result.runs)
    other = result.other_ruleset
    if other is not None:
        yield broken(
            "round",
            f"no log complies with ruleset {result.ruleset}, but with {other}",
            folder,
            other=other,
        )
    if count != REQUIRED_RUNS:
        # One's own run in the open division may have any number
        # of trials; only a submission needs ten.
        alone = result.division == "open" and tree.organization(folder) is None
        rule = (
            "ten_runs_to_submit"
            if alone
            else "ten_runs"
            if count < REQUIRED_RUNS
            else "ten_runs_at_most"
        )
        yield broken(
            rule,
            f"holds {count} of {REQUIRED_RUNS} result_*.txt",
            folder,
            count=REQUIRED_RUNS,
        )
    for path, reason in result.unreadable.items():
        yield broken("readable", reason, path)
    for trial, reason in result.crashes.items():
        yield broken(
            "crashed",
            f"trial {trial} left no result: {reason}",
            folder / f"failed_{trial}.txt",
        )


def _check_benchmark(result: Result) -> Iterator[Finding]:
    """Whether BERT-large was trained to the target; the open division allows others, as one's own
    runs.
    """
    if result.departures:
        severity = ERROR if result.division == "closed" else WARNING
        message = f"not the benchmark: {'; '.join(result.departures)}"
        target = target_of(result.ruleset)
        yield broken(
            "benchmark", message, result.folder, severity=severity, target=target
        )


def groups(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings grouped by rule and message, in order of first occurrence."""
    by_kind: dict[tuple[str | None, ...], list[Finding]] = {}
    for finding in findings:
        # Ten logs with one fault make one entry with ten places.
        key = (
            finding.severity,
            finding.source,
            finding.message,
            finding.rule,
            finding.hint,
        )
        by_kind.setdefault(key, []).append(finding)
    return list(by_kind.values())


def subject(group: Sequence[Finding], base: Path) -> str:
    """The keys or files, and the message about them."""
    keys = dict.fromkeys(finding.key for finding in group if finding.key)
    files = [_file(finding, base) for finding in group]
    names = _listed(keys or dict.fromkeys(filter(None, files)))
    return text(f"{names} {group[0].message}" if names else group[0].message)


def shortened(rule: str) -> str:
    """A rule cut to a readable length."""
    return (
        rule
        if len(rule) <= _LONGEST_RULE
        else f"{' '.join(rule[:_LONGEST_RULE].split())} ..."
    )


def places(group: Sequence[Finding], base: Path) -> str:
    """Files with line numbers; empty if the findings are about whole files."""
    if not any(finding.line or finding.key for finding in group):
        return ""
    files: dict[str, dict[str, None]] = {}
    for finding in group:
        files.setdefault(_file(finding, base), {}).update(
            {} if finding.line is None else {str(finding.line): None}
        )
    return _listed(
        f"{name}:{','.join(lines)}" if lines else name
        for name, lines in files.items()
        if name
    )


def _listed(names: Iterable[str]) -> str:
    """The first names and the number of others."""
    every = list(names)
    more = f" and {len(every) - _MOST_PLACES} more" if len(every) > _MOST_PLACES else ""
    return ", ".join(every[:_MOST_PLACES]) + more


def _file(finding: Finding, base: Path) -> str:
    """The file relative to the checked folder or its organisation's; empty for that folder
    itself.
    """
    if finding.file is None or finding.file == base:
        return ""
    file, base = finding.file.absolute(), base.absolute()
    # Three levels above BENCHMARK is ORG, in which the description and the README lie.
    for above in (base, *base.parents[:3]):
        if above.is_dir() and file.is_relative_to(above):
            return str(file.relative_to(above))
    return str(finding.file)


def with_places(group: Sequence[Finding], base: Path) -> str:
    """``subject`` and its files."""
    files = places(group, base)
    return (
        f"{subject(group, base)}, in {text(files)}"
        if files and group[0].key
        else subject(group, base)
    )


def parts(checked: Sequence[Checked], strict: bool = False) -> list[Part]:
    """All findings, then the verdict with their number."""
    made: list[Part] = []
    for result in checked:
        verdict = "pass" if result.passed(strict) else "fail"
        made.append(Heading(text(result.title), verdict, str(result.path)))
        tools = []
        for outcome in result.outcomes:
            crash = (
                f"crashes: {shortened(text(outcome.crash))}" if outcome.crash else ""
            )
            tools.append(
                f"{outcome.tool} {crash or ('passes' if outcome.passed else 'fails')}"
            )
        made.append(Line("official", ", ".join(tools)))
        for group in groups(result.findings):
            first, at = group[0], places(group, result.path)
            style = _STYLES[first.severity]
            made.append(Line(first.severity, subject(group, result.path), style))
            rule = f"rule {shortened(first.rule or '')} [{first.source}]"
            lines = at and f"at   {at}", rule, first.hint and f"do   {first.hint}"
            made += [Line("", text(line)) for line in lines if line]
    counts = []
    for severity in _STYLES:
        of_severity = [
            group
            for result in checked
            for group in groups(result.findings)
            if group[0].severity == severity
        ]
        if of_severity:
            in_all = sum(len(group) for group in of_severity)
            at = f" at {in_all} places" if in_all > len(of_severity) else ""
            counts.append(
                f"{len(of_severity)} {severity}{'s' if len(of_severity) > 1 else ''}{at}"
            )
    verdict = "PASS" if all(result.passed(strict) for result in checked) else "FAIL"
    listed = ", ".join(counts) or "nothing found"
    return [*made, Heading(f"{verdict}: {listed}", "unverified by MLCommons")]
