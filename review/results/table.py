"""The table of a result's runs."""

from collections.abc import Callable, Sequence

from review.logs.mllog import text
from review.logs.output import ERROR, Column, Finding, number_text, rate_text
from review.results.run import Run
from review.results.score import Result


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def _seed(run: Run) -> str:
    # By repr: a logged seed may be a list, which no set holds.
    others = len(set(map(repr, run.seeds))) - 1
    if not run.seeds:
        return "-"
    seed = text(run.seeds[0])[:12]
    return f"{seed} +{others}" if others else seed


_COLUMNS: dict[Column, Callable[[Run, Result], str]] = {
    Column("run"): lambda run, _: run.name,
    Column("seed", right=True, drop=5): lambda run, _: _seed(run),
    Column("status"): lambda run, _: text(run.status),
    Column("init s", right=True, drop=4): lambda run, _: number_text(
        run.init_seconds, ",.1f"
    ),
    Column("minutes", right=True): lambda run, _: number_text(run.minutes, ",.4f"),
    Column("evals", right=True, drop=3): lambda run, _: str(len(run.evaluations)),
    Column("samples", right=True): lambda run, _: number_text(run.samples, ",.0f"),
    Column("first acc", right=True, drop=6): lambda run, _: number_text(
        run.first_accuracy, ".4f"
    ),
    Column("final acc", right=True): lambda run, _: number_text(
        run.final_accuracy, ".4f"
    ),
    Column("seq/s", right=True, drop=7): lambda run, _: rate_text(
        run.sequences_per_second
    ),
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
    return [column for column in _COLUMNS if result.energy or column.heading != "kJ"]


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
