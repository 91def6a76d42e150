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
    own = [run for run in runs if _is_own(run)]
    yield from _recorded_departures(folder, runs, division, target, bool(own))
    for run in own:
        if not run.converged:
            continue
        # An accuracy is a share: 75, perhaps of a hundred, reaches no target.
        reached = (one.accuracy for one in run.evaluations if 0 <= one.accuracy <= 1)
        best = max(reached, default=0.0)
        samples = number(run.log.value("eval_samples")) or 0
        # "success" with a lower target of one's own would be ranked among those who reached 0.720.
        if best < target:
            yield f"{run.name} says success at an accuracy of {best:.4f}, below {target:.3f}"
        if samples < EVAL_SAMPLES:
            yield f"{run.name} evaluates {samples:,.0f} samples, not {EVAL_SAMPLES:,}"
        # One run is enough to refuse the result; ten equal lines help nobody.
        if best < target or samples < EVAL_SAMPLES:
            return


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
    folder: Path, runs: Sequence[Run], division: str | None, target: float, own: bool
) -> Iterator[str]:
    try:
        found = _record(folder)
    except ReviewError as error:
        yield f"unknown settings: {error}"
        return
    record = {name: known for name, known in found.items() if isinstance(known, dict)}
    if not record.keys() & {*_SETTINGS, "mlperf"}:
        # It is the record of another program, or there is none.
        if own:
            yield "its settings are not recorded"
        return
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
    if division == "open" and not any(run.log.first("starting_point") for run in runs):
        # Only a closed run compares its data with the benchmark's.
        yield "data not shown to be the benchmark's"


def _is_own(run: Run) -> bool:
    """Whether this repository's trainer wrote the log."""
    start = run.log.first("run_start")
    metadata = start.metadata if start is not None else None
    # The logging library writes the file that called it; a path may be installed anywhere.
    return isinstance(metadata, dict) and str(metadata.get("file")).endswith(_OWN_FILE)
