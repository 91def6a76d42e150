"""The table of a result's runs, as a terminal, Markdown and the page show it."""

from __future__ import annotations

from collections.abc import Sequence

from review.logs.mllog import text
from review.logs.output import ERROR, Column, Finding, number_text, rate_text
from review.results.run import Run
from review.results.score import Result

_COLUMNS = (
    Column("run"),
    Column("seed", right=True, drop=5),
    Column("status"),
    Column("init s", right=True, drop=4),
    Column("minutes", right=True),
    Column("evals", right=True, drop=3),
    Column("samples", right=True),
    Column("first acc", right=True, drop=6),
    Column("final acc", right=True),
    Column("seq/s", right=True, drop=7),
    Column("/accel", right=True, drop=2),
    Column("eval %", right=True, drop=1),
    Column("kJ", right=True, drop=2),
    Column("compliance"),
)


def columns(result: Result) -> list[Column]:
    """The columns; kJ only if power was measured."""
    return [one for one in _COLUMNS if result.energy or one.heading != "kJ"]


def cells(run: Run, result: Result) -> dict[str, str]:
    """Cells of a run by the heading of their column."""
    rate, share, joules = run.sequences_per_second, run.evaluation_share, result.joules(run)
    more = len(set(map(repr, run.seeds))) - 1
    return {
        "run": run.name,
        "seed": text(run.seeds[0])[:12] + (f" +{more}" if more else "") if run.seeds else "-",
        "status": text(run.status),
        "init s": number_text(run.init_seconds, ",.1f"),
        "minutes": number_text(run.minutes, ",.4f"),
        "evals": str(len(run.evaluations)),
        "samples": number_text(run.samples, ",.0f"),
        "first acc": number_text(run.first_accuracy, ".4f"),
        "final acc": number_text(run.final_accuracy, ".4f"),
        "seq/s": rate_text(rate),
        "/accel": rate_text(rate / result.accelerators if rate and result.accelerators else None),
        "eval %": number_text(None if share is None else 100 * share, ".1f"),
        "kJ": number_text(None if joules is None else joules / 1000, ",.1f"),
        "compliance": first_reason(run.findings),
    }


def first_reason(findings: Sequence[Finding]) -> str:
    """The first broken rule in a few words, and how many more there are; ok if there is none."""
    errors = [finding for finding in findings if finding.severity == ERROR]
    if not errors:
        return "ok"
    more = f" (+{len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{errors[0].key + ' ' if errors[0].key else ''}{errors[0].message}{more}"
