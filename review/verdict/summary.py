"""A result in a few lines, below its table and on its page."""

from collections.abc import Iterator

from review.logs.output import Line
from review.results.score import REQUIRED_RUNS, UNVERIFIED, Result
from review.rulebook import rcp
from review.verdict.checking import Verdict

# Runs that make the mean: the fastest and the slowest are dropped.
_REMAINING = rcp.RUNS - 2
_MOST_REASONS = 4


def summary(verdict: Verdict) -> list[Line]:
    """What a result amounts to: score, why it is not official, energy and the RCP test."""
    result = verdict.result
    assert result is not None
    if result.pretrains:
        message = "runs to the last step; without a target accuracy there is no score"
        return [Line("pretraining", message)]
    official = ", official" if verdict.official else ""
    lines = [*_time(result, official)]
    # Wherever a time is shown, MLCommons' guidelines want this beside it.
    if lines:
        lines.append(Line("", UNVERIFIED, "dim"))
    if not official:
        reasons, more = verdict.obstacles, len(verdict.obstacles) - _MOST_REASONS
        message = "; ".join(reasons[:_MOST_REASONS])
        message += f"; and {more} more: see check" if more > 0 else ""
        lines.append(Line("unofficial", message, "yellow"))
    if result.unproved:
        message = f"{', '.join(result.unproved)}: not shown to be the benchmark's"
        lines.append(Line("unproved", message, "yellow"))
    if result.other_ruleset:
        message = f"logs of another round: try --ruleset {result.other_ruleset}"
        lines.append(Line("ruleset", message, "yellow"))
    minutes = [run.minutes for run in result.olympic.valid]
    # Of a single run the lines above have said it.
    if len(minutes) > 1:
        spread = f"median {result.olympic.median:.4f}, fastest {minutes[0]:.4f}"
        spread += f", slowest {minutes[-1]:.4f} min"
        lines.append(
            Line("runs", f"{len(minutes)} of {len(result.runs)} count: {spread}")
        )
    return [*lines, *_energy(result, official), *_rcp(result)]


def _time(result: Result, official: str) -> Iterator[Line]:
    """The best that is known: the score, a median, or the mean of logs that no rules accept."""
    if result.score is not None:
        score = f"{result.score:.4f} min"
        if result.scaling_factor != 1:
            why = "converged faster than the RCP mean"
            score += (
                f" = {result.olympic.minutes:.4f} x {result.scaling_factor:.6f} ({why})"
            )
        yield Line("score", score + official, "bold green" if official else "")
    elif result.olympic.median is not None:
        yield Line("median", f"{result.olympic.median:.4f} min, no olympic score yet")
    elif result.raw.minutes is not None:
        about = "not checked: olympic mean of the runs that report success"
        yield Line("raw", f"{result.raw.minutes:.4f} min, {about}", "yellow")


def _energy(result: Result, official: str) -> Iterator[Line]:
    energy = result.energy
    if energy is None:
        return
    if energy.joules is None:
        yield Line("energy", f"none: {energy.reason}", "yellow")
        return
    line = (
        f"{energy.joules:,.2f} J over the same runs, {energy.watts:,.0f} W on average"
    )
    # Energy counts only with a time that counts.
    yield Line("energy", line + official, "bold green" if official else "")


def _rcp(result: Result) -> Iterator[Line]:
    point, test, mean = result.rcp_point, result.rcp_test, result.mean_samples
    if result.division != "closed":
        if result.division:
            yield Line("RCP", f"not tested in the {result.division} division", "dim")
        return
    if point is not None:
        yield Line("RCP", point.describe(result.batch_size))
    elif test is not None:
        yield Line("RCP", test.reason, "red")
    if point is not None and mean is not None:
        margin = mean - point.minimum
        # Deviations of single reference runs, to give the margin a scale.
        sigma = f", {margin / point.std:+.2f} sigma" if point.std else ""
        verdict, style = (
            ("passed", "green") if test and test.passed else ("FAILED", "red")
        )
        short = (
            "" if len(result.runs) == REQUIRED_RUNS else f" on {len(result.runs)} runs"
        )
        message = f"mean {mean:,.0f} samples, {margin:+,.0f} to the minimum{sigma}"
        yield Line("", f"{verdict}{short}: {message}", style)
    elif point is not None and test is not None:
        yield Line("", f"FAILED: {test.reason}", "red")
    if test is not None and not test.passed:
        yield from (Line("", line, "yellow") for line in _rcp_advice(result))


def _rcp_advice(result: Result) -> Iterator[str]:
    """Why the RCP test fails: how much is missing, and the nearest points."""
    point, mean, batch = result.rcp_point, result.mean_samples, result.batch_size
    short = 0.0 if mean is None or point is None else max(0.0, point.minimum - mean)
    if short and point:
        least = f"the smallest that passes {point.minimum:,.0f}"
        over = f"{_REMAINING * short:,.0f} over the {_REMAINING} runs that count"
        yield f"the mean is {mean:,.0f} samples, {least}: {short:,.0f} short on average, {over}"
    near = [] if batch is None else rcp.nearest(batch, result.ruleset)
    for reference in near:
        line = f"reference of batch {reference.batch_size:,}: {reference.describe()}"
        if runs := reference.runs:
            line += f", {len(runs)} runs from {runs[0]:,} to {runs[-1]:,}"
        yield line
    if point is None and batch is not None:
        largest = max((reference.batch_size for reference in near), default=None)
        above = "" if largest is None else f"; the largest is {largest:,}"
        # A new reference point takes twice as many runs as a submission.
        run = f"run the reference {2 * rcp.RUNS} times at {batch:g}"
        yield f"no reference covers batch {batch:g}{above}: {run}"
    elif short:
        how = "have hyper-parameters, data order and evaluation reviewed"
        yield f"{how}, or ask for the rules' rcp-bypass"
