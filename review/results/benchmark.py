"""Whether runs are of the benchmark, BERT-large trained to its target, by their own record and
their logs.

A run of this repository records in config.json what it trained; without that its logs prove
nothing. Logs of other submitters count as they say: the official rules and the review of their
submission cover the rest.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from review.logs import tree
from review.logs.mllog import number, text
from review.logs.output import ReviewError
from review.results.run import TARGET_ACCURACY, Run
from review.rulebook.rules import table

RECORD = "config.json"
EVAL_SAMPLES = 10_000
_OWN_FILE = "bert/training/mlperf.py"  # that logs, in the events' metadata
_STARTING_POINT = "weights", "training_data", "evaluation_data"
# The sizes of BERT-large, sequences of 512 tokens, and data that are not made up.
_SETTINGS: dict[str, dict[str, Any]] = table("benchmark_settings")


def target_of(ruleset: str) -> float:
    """The benchmark's masked-LM accuracy in a round: 0.712 in v0.7, since then 0.720."""
    return 0.712 if ruleset.startswith("0.") else TARGET_ACCURACY


def departures(
    folder: Path, runs: Sequence[Run], division: str | None, ruleset: str
) -> Iterator[str]:
    """How the runs of a folder differ from the benchmark, each in a few words; nothing if they do
    not.
    """
    target = target_of(ruleset)
    reached = [run for run in runs if run.converged]
    try:
        found = _record(folder)
    except ReviewError as error:
        found = {}
        yield f"unknown settings: {error}"
    record = {name: known for name, known in found.items() if isinstance(known, dict)}
    if record.keys() & {*_SETTINGS, "mlperf"}:
        yield from _recorded_departures(record, reached, division, target)
    # It is the record of another program, or there is none.
    elif any(map(_is_own, runs)):
        yield "its settings are not recorded"
    # A lower target that is recorded has been named.
    aim = number(record.get("evaluate", {}).get("target"))
    least = target if aim is None else min(aim, target)
    short = [run for run in reached if _best(run) < least]
    # One run of ten may fail, but not by calling that success in a log of ours.
    if any(len(short) > 1 or run.compliant or _is_own(run) for run in short):
        best = f"{_best(short[0]):.4f}"
        yield f"{short[0].name} says success at an accuracy of {best}, below {least:.3f}"
    counts = (run.log.value("eval_samples") for run in reached if _is_own(run))
    samples = min((number(count) or 0 for count in counts), default=EVAL_SAMPLES)
    if samples < EVAL_SAMPLES:
        yield f"evaluates {samples:,.0f} samples, not {EVAL_SAMPLES:,}"


def _best(run: Run) -> float:
    # An accuracy is a share: 75, perhaps of a hundred, reaches no target.
    shares = (one.accuracy for one in run.evaluations if 0 <= one.accuracy <= 1)
    return max(shares, default=0.0)


def starting_point(run: Run) -> dict[str, Any]:
    """The weights and data that a run logs, with the names of those ``unproved``; empty if it lacks
    one of them.
    """
    # The last one: data are proved when the run is over.
    event = run.log.last("starting_point")
    found = event and event.value
    if not isinstance(found, dict) or not all(map(found.get, _STARTING_POINT)):
        return {}
    return found if isinstance(found.get("unproved"), list) else {}


def _record(folder: Path) -> dict[str, Any]:
    """config.json, or the copy of it in a package; empty without either. Raises ReviewError."""
    # Opening a pipe would wait for its writer.
    if (folder / RECORD).is_file():
        return tree.read_object(folder / RECORD)
    root, system = tree.organization(folder), folder.resolve().parent.name
    kept = root.glob("benchmarks/bert/implementations/*") if root else ()
    records = (
        tree.read_json(path / f"{system}_{path.name}.json", "settings") for path in kept
    )
    return next(filter(None, records), {})


def _recorded_departures(
    record: dict[str, dict[str, Any]],
    runs: Sequence[Run],
    division: str | None,
    target: float,
) -> Iterator[str]:
    for section, wanted in _SETTINGS.items():
        values = record.get(section)
        if values is None:
            yield f"{RECORD} does not record the {section} settings"
            continue
        for name, value in wanted.items():
            # Not recorded is not equal: an absent setting proves nothing.
            if name not in values or values[name] != value:
                yield f"{name} {text(values.get(name, 'not recorded'))}, not {text(value)}"
    aim = record.get("evaluate", {}).get("target")
    if number(aim) != target:
        yield f"target {text(aim)}, not {target:.3f}"
    logged = record.get("mlperf", {}).get("division")
    if logged is None:
        yield "division not recorded"
    elif division is not None and logged != division:
        yield f"run in the {text(logged)} division, not {division}"
    if not all(map(starting_point, runs)):
        # Only a closed run compares them with the benchmark's.
        yield "weights and data not recorded"


def _is_own(run: Run) -> bool:
    """Whether this repository's trainer wrote the log."""
    start = run.log.first("run_start")
    metadata = start.metadata if start is not None else None
    # The logging library writes the file that called it; a path may be installed anywhere.
    return isinstance(metadata, dict) and str(metadata.get("file")).endswith(_OWN_FILE)
