"""`show`: a table of runs for each result, with the score below it."""

from collections.abc import Sequence
from typing import Any

from review.logs.mllog import text
from review.logs.output import Heading, Line, Part, Table
from review.results.score import Result
from review.results.table import cells, columns, first_reason
from review.verdict.checking import Verdict
from review.verdict.shown import result_as_dict
from review.verdict.summary import summary

_OF_RESULT = (
    "name",
    "folder",
    "organization",
    "division",
    "global_batch_size",
    "accelerators",
    "score_minutes",
)
_OF_SCORE = ("olympic_minutes", "scaling_factor", "official", "unverified")


def parts(verdicts: Sequence[Verdict]) -> list[Part]:
    """Table and summary of every result, and why runs failed."""
    made: list[Part] = []
    for verdict in verdicts:
        result = verdict.result
        assert result is not None
        made.append(Heading(text(result.name), result.subtitle, str(result.folder)))
        made += [_table(result), *summary(verdict)]
        # Runs without a target are not meant to comply.
        runs = (
            []
            if result.pretrains
            else [run for run in result.runs if not run.compliant]
        )
        fails = [(run.path.name, first_reason(run.findings)) for run in runs]
        fails += [(path.name, why) for path, why in result.unreadable.items()]
        for path, why in result.errors.items():
            fails.append((path.name, f"ended in an error: {why}"))
        for number, why in result.crashes.items():
            fails.append((f"failed_{number}.txt", why))
        made += [
            Line("fails", f"{text(file)}: {text(why)}", "red") for file, why in fails
        ]
    return made


def as_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [*map(result_as_dict, verdicts)]


def csv_rows(verdicts: Sequence[Verdict]) -> list[list[Any]]:
    """Headings and a row per run, the columns of its result first."""
    records = []
    for whole in map(result_as_dict, verdicts):
        shared = {name: whole[name] for name in (*_OF_RESULT, *_OF_SCORE)}
        # Flat, as a row of CSV has no objects.
        shared["energy_joules"] = whole["energy"]["joules"] if whole["energy"] else None
        records += [
            shared | {name: run[name] for name in run if name != "findings"}
            for run in whole["runs"]
        ]
    # All records have the same keys, so that those of the last are the headings.
    headings = list(records[-1]) if records else []
    return [headings, *(list(record.values()) for record in records)]


def _table(result: Result) -> Table:
    from rich.text import Text

    shown, records = columns(result), []
    for run in result.runs:
        record: dict[str, str | Text] = {**cells(run, result)}
        # Colour repeats the word, so that nothing is lost without a terminal.
        verdict = Text("ok", "green") if run.compliant else Text("fails", "red")
        if result.pretrains and run.converged:
            verdict = Text("no target", "dim")
        if (dropped := result.olympic.dropped.get(run.path)) in ("fastest", "slowest"):
            verdict.append(f", {dropped}", "italic")
        record["status"] = Text(
            str(record["status"]), "" if run.converged else "yellow"
        )
        record["minutes"] = Text(str(record["minutes"]), "bold")
        records.append(record | {"compliance": verdict})
    for number in result.crashes:
        records.append(
            {"run": f"failed_{number}.txt", "status": "crashed", "compliance": "fails"}
        )
    styles = [
        "dim" if run.path in result.olympic.dropped else "" for run in result.runs
    ]
    styles += ["red"] * len(result.crashes)
    rows = [[record.get(column.heading, "") for column in shown] for record in records]
    return Table(shown, rows, styles)
