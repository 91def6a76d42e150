"""Verdicts as commands show them: the text of `check`, and the JSON of a result."""

from collections.abc import Sequence
from typing import Any

from review.logs.mllog import text
from review.logs.output import SEVERITIES, Heading, Line, Part, counted, pick
from review.results.run import Run
from review.results.score import Result
from review.verdict.checking import Verdict
from review.verdict.places import groups, places, shortened, subject

_STYLES = dict(zip(SEVERITIES, ("bold red", "yellow", "dim", "dim"), strict=True))


def parts(verdicts: Sequence[Verdict], strict: bool = False) -> list[Part]:
    """All findings, then the verdict with their number."""
    made: list[Part] = []
    for verdict in verdicts:
        word = "pass" if verdict.passed(strict) else "fail"
        made.append(Heading(text(verdict.title), word, str(verdict.path)))
        tools = []
        for outcome in verdict.outcomes:
            crash = (
                f"crashes: {shortened(text(outcome.crash))}" if outcome.crash else ""
            )
            passes = "passes" if outcome.passed else "fails"
            tools.append(f"{outcome.tool} {crash or passes}")
        made.append(Line("official", ", ".join(tools)))
        for group in groups(verdict.findings):
            first, at = group[0], places(group, verdict.path)
            style = _STYLES[first.severity]
            made.append(Line(first.severity, subject(group, verdict.path), style))
            rule = f"rule {shortened(first.rule or '')} [{first.source}: {first.id}]"
            lines = at and f"at   {at}", rule, first.hint and f"do   {first.hint}"
            made += [Line("", text(line)) for line in lines if line]
    word = "PASS" if all(verdict.passed(strict) for verdict in verdicts) else "FAIL"
    listed = ", ".join(filter(None, (_counted(verdicts, s) for s in SEVERITIES)))
    title = f"{word}: {listed or 'nothing found'}"
    return [*made, Heading(title, "unverified by MLCommons")]


def _counted(verdicts: Sequence[Verdict], severity: str) -> str:
    """The number of findings of a severity, and of their places; of those ignored their ids."""
    of_severity = [
        group
        for verdict in verdicts
        for group in groups(verdict.findings)
        if group[0].severity == severity
    ]
    if not of_severity:
        return ""
    number, in_all = len(of_severity), sum(map(len, of_severity))
    at = f" at {in_all} places" if in_all > number else ""
    if severity in SEVERITIES[:3]:
        return f"{counted(number, severity)}{at}"
    names = ", ".join(dict.fromkeys(group[0].id for group in of_severity))
    return f"{number} {severity}{at} ({names})"


def result_as_dict(verdict: Verdict) -> dict[str, Any]:
    """A judged result for JSON."""
    result = verdict.result
    assert result is not None
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
            "crashed=crashes unreadable olympic_minutes=olympic.minutes"
            " raw_olympic_minutes_not_checked=raw.minutes"
            " median_minutes=olympic.median mean_samples",
        ),
        "rcp": point and {**test, **pick(point, "mean std minimum"), "margin": margin},
        **pick(result, "scaling_factor score_minutes=score"),
        "energy": _energy_as_dict(verdict, result),
        "official": verdict.official,
        "unverified": True,  # no result of this round's rules is reviewed by MLCommons
        "obstacles": verdict.obstacles,
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
        "error": result.errors.get(run.path),
        **pick(run, "compliant findings"),
        "dropped": result.olympic.dropped.get(run.path),
    }


def _energy_as_dict(verdict: Verdict, result: Result) -> dict[str, Any] | None:
    """None if it was not measured."""
    energy = result.energy
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
        "official": verdict.official and energy.joules is not None,
    }
