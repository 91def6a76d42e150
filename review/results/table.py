"""The table of a result's runs, and why its RCP test fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from review.logs.mllog import text
from review.logs.output import ERROR, Column, Finding, number_text, rate_text
from review.results.run import Run
from review.results.score import Result
from review.rulebook import rcp

# Runs that make the mean: the fastest and the slowest are dropped.
_COUNTED = rcp.RUNS - 2


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def _seed(run: Run) -> str:
    # By repr: a logged seed may be a list, which no set holds.
    others = len(set(map(repr, run.seeds))) - 1
    return text(run.seeds[0])[:12] + (f" +{others}" if others else "") if run.seeds else "-"


_COLUMNS: dict[Column, Callable[[Run, Result], str]] = {
    Column("run"): lambda run, _: run.name,
    Column("seed", right=True, drop=5): lambda run, _: _seed(run),
    Column("status"): lambda run, _: text(run.status),
    Column("init s", right=True, drop=4): lambda run, _: number_text(run.init_seconds, ",.1f"),
    Column("minutes", right=True): lambda run, _: number_text(run.minutes, ",.4f"),
    Column("evals", right=True, drop=3): lambda run, _: str(len(run.evaluations)),
    Column("samples", right=True): lambda run, _: number_text(run.samples, ",.0f"),
    Column("first acc", right=True, drop=6): lambda run, _: number_text(run.first_accuracy, ".4f"),
    Column("final acc", right=True): lambda run, _: number_text(run.final_accuracy, ".4f"),
    Column("seq/s", right=True, drop=7): lambda run, _: rate_text(run.sequences_per_second),
    Column("/accel", right=True, drop=2): lambda run, result: rate_text(
        result.rate_per_accelerator(run)
    ),
    Column("eval %", right=True, drop=1): lambda run, _: number_text(
        _scaled(run.evaluation_share, 100), ".1f"
    ),
    Column("kJ", right=True, drop=2): lambda run, result: number_text(
        _scaled(result.joules(run), 1 / 1000), ",.1f"
    ),
    Column("compliance"): lambda run, _: first_reason(run.findings),
}


def columns(result: Result) -> list[Column]:
    """The columns, kJ only if power was measured."""
    return [one for one in _COLUMNS if result.energy or one.heading != "kJ"]


def cells(run: Run, result: Result) -> dict[str, str]:
    """Cells of a run by column heading."""
    return {column.heading: cell(run, result) for column, cell in _COLUMNS.items()}


def first_reason(findings: Sequence[Finding]) -> str:
    """The first broken rule in short and the number of others; ok if there is none."""
    errors = [finding for finding in findings if finding.severity == ERROR]
    if not errors:
        return "ok"
    more = f" (+{len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{errors[0].key + ' ' if errors[0].key else ''}{errors[0].message}{more}"


def rcp_lines(result: Result) -> list[str]:
    """Why the RCP test fails: the smallest mean that passes, how much is missing, the nearest points."""
    if result.rcp_test is None or result.rcp_test.passed:
        return []
    lines, point, short, near = [], result.rcp_point, rcp_short(result), _nearest(result)
    if short and point:
        mean = f"the mean is {result.mean_samples:,.0f} samples, the smallest that passes {point.minimum:,.0f}"
        over = f"{_COUNTED * short:,.0f} over the {_COUNTED} runs that count"
        lines.append(f"{mean}: {short:,.0f} short on average, {over}")
    for one in near:
        runs = (
            f", {len(one.runs)} runs from {one.runs[0]:,} to {one.runs[-1]:,}" if one.runs else ""
        )
        lines.append(f"reference of batch {one.batch_size:,}: {one.describe()}{runs}")
    if point is None and result.batch_size is not None:
        above = f"; the largest is {max(one.batch_size for one in near):,}" if near else ""
        size = f"{result.batch_size:g}"
        # A new reference point takes twice as many runs as a submission.
        lines.append(
            f"no reference covers batch {size}{above}: run the reference {2 * rcp.RUNS} times at {size}"
        )
    elif short:
        lines.append(
            "have hyper-parameters, data order and evaluation reviewed, or ask for the rules' rcp-bypass"
        )
    return lines


def rcp_short(result: Result) -> float | None:
    """Samples by which the mean is below the smallest one that passes the RCP test; 0 if it passes."""
    mean, point = result.mean_samples, result.rcp_point
    return None if mean is None or point is None else max(0.0, point.minimum - mean)


def _nearest(result: Result) -> list[rcp.Rcp]:
    if result.batch_size is None or result.rcp_test is None:
        return []
    return rcp.nearest(result.batch_size, result.ruleset)
