"""Entries of the league, made from result folders or read from CSV."""

from __future__ import annotations

import csv
import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from review.logs import tree
from review.logs.mllog import number, text
from review.logs.output import ReviewError, csv_text, write_whole
from review.results.run import Run
from review.results.score import Result, load_results
from review.rulebook.compliance import BENCHMARK, rulesets
from review.rulebook.rules import table

_BORROWED: dict[str, bool] = table("borrowed")
HYPERPARAMETERS = (*_BORROWED, "opt_epsilon", "gradient_accumulation_steps")
_SANE_SAMPLES = (1e5, 1e8)  # range for a run to the target; a log that counts epochs is far below
_CHECKOUT = re.compile(r"training_results_v(\d+\.\d+)")
_LOG = re.compile(rf"([^/]+/results/[^/]+/{BENCHMARK})/result_[^/]*\.txt", re.IGNORECASE)
_COMMIT = re.compile(r"# round (\S+): (\S+)\n")
PUBLISHED = Path(__file__).with_name("published.csv")
_WHOLE = ("nodes", "accelerators", "batch_size", "runs")
_FORMATS = {
    "minutes": ".4f",
    "published_minutes": ".4f",
    "samples": ".0f",
    "sequences_per_second": ".1f",
}
_FORMATS |= {"training_rate": ".1f", "joules": ".2f", **dict.fromkeys(_WHOLE, ".12g")}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A result in the league. Unknown values are None or empty.

    ``checked``: the rules of its round accept the result. ``minutes``: the score by the installed rules if there is
    one, else the olympic mean of the runs that reached the target. ``published_minutes``: the same mean times the
    factor of scaling.json beside the logs. ``training_rate``: sequences per second outside evaluations, if the logs
    time those. ``joules``: of the same runs. ``folder``: within the repository of its round. ``departures``: how it
    differs from the benchmark.
    """

    round: str
    submitter: str
    system: str
    division: str = ""
    status: str = ""
    nodes: float | None = None
    accelerators: float | None = None
    accelerator: str = ""
    batch_size: float | None = None
    runs: float | None = None
    minutes: float | None = None
    published_minutes: float | None = None
    checked: bool = False
    samples: float | None = None
    sequences_per_second: float | None = None
    training_rate: float | None = None
    joules: float | None = None
    hyperparameters: dict[str, float] = field(default_factory=dict)
    folder: str = ""
    departures: tuple[str, ...] = ()

    @property
    def per_accelerator(self) -> float | None:
        """Sequences per second and accelerator."""
        rate, count = self.sequences_per_second, self.accelerators
        return rate / count if rate and count else None

    @property
    def kind(self) -> tuple[str, str, str, str]:
        """Key of a scaling curve: round, submitter, division, accelerator."""
        return self.round, self.submitter, self.division, self.accelerator

    @property
    def logs(self) -> tuple[str, ...] | None:
        """Key that is equal for the same logs, whatever their round and name; None if too little is known."""
        if self.samples is None or self.sequences_per_second is None:
            return None
        return f"{self.samples:.0f}", f"{self.sequences_per_second:.1f}", f"{self.batch_size}"

    def as_dict(self) -> dict[str, Any]:
        known = {name: value for name, value in vars(self).items() if name != "departures"}
        return {**known, "sequences_per_second_per_accelerator": self.per_accelerator}


_NO_COLUMNS = ("hyperparameters", "folder", "departures")
COLUMNS = tuple(one.name for one in fields(Entry) if one.name not in _NO_COLUMNS)


def entry_of(result: Result, label: str, root: Path) -> Entry:
    """Entry of a result. ``label``: its round. ``root``: folder that ``Entry.folder`` is relative to."""
    described, division = tree.description(result.folder), (result.division or "").casefold()
    kept = result.kept if result.score is not None else result.reached_kept
    nodes = number(tree.count(described.get("number_of_nodes")))
    run = next((run for run in result.runs if run.log.events), None)
    mean = result.reached_minutes if result.score is None else result.olympic_minutes
    committed = number(tree.read_json(result.folder / "scaling.json").get("scaling_factor"))
    return Entry(
        round=label,
        submitter=text(described.get("submitter") or result.organization or ""),
        system=text(result.name),
        division="closed" if division.startswith("close") else division,
        status=text(
            described.get("status") or (run.log.value("submission_status") if run else None) or ""
        ),
        nodes=nodes,
        # A CPU has processes, but no accelerators to divide by.
        accelerators=None
        if tree.count(described.get("accelerators_per_node")) == 0
        else result.accelerators,
        accelerator=_accelerator(described, result),
        batch_size=result.batch_size,
        runs=len(result.runs),
        minutes=result.score if result.score is not None else result.reached_minutes,
        # The package checker leaves no scaling.json where the factor is 1.
        published_minutes=None
        if mean is None
        else mean * (1.0 if committed is None else committed),
        checked=result.official,
        # Of the runs that make the minutes, so that samples, rate and time fit each other.
        samples=_mean([_samples(one) for one in kept]),
        sequences_per_second=_mean([_samples(one) and one.sequences_per_second for one in kept]),
        training_rate=_mean([_samples(one) and one.training_rate for one in kept]),
        joules=result.energy.joules if result.energy else None,
        hyperparameters=logged(run),
        folder=_place(result.folder, root),
        departures=tuple(result.departures),
    )


def _accelerator(described: dict[str, Any], result: Result) -> str:
    """Name of the accelerator, or of the processor of a system without one."""
    name = text(described.get("accelerator_model_name") or "").strip()
    if name and name.casefold() not in ("n/a", "none", "-"):
        return name
    gpus = tree.read_json(result.folder / "environment.json").get("gpus")
    if isinstance(gpus, list) and gpus:
        first = gpus[0]
        return text(first.get("name", "") if isinstance(first, dict) else first)
    return text(described.get("host_processor_model_name") or "").strip()


def _samples(run: Run) -> float | None:
    samples = run.samples
    return (
        samples if samples is not None and _SANE_SAMPLES[0] <= samples <= _SANE_SAMPLES[1] else None
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    # A mean of only some runs would be of another set than the minutes.
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def logged(run: Run | None) -> dict[str, float]:
    """The numeric HYPERPARAMETERS that a run logs."""
    known = {} if run is None else run.hyperparameters
    return {key: value for key in HYPERPARAMETERS if (value := number(known.get(key))) is not None}


def _place(folder: Path, root: Path) -> str:
    folder, root = folder.resolve(), root.resolve()
    return (
        folder.relative_to(root).as_posix()
        if folder.is_relative_to(root) and folder != root
        else folder.name
    )


def to_rows(entries: Iterable[Entry]) -> list[list[str]]:
    """Headings, and a row per entry."""

    def cell(value: Any, form: str = "") -> str:
        return (
            ""
            if value is None
            else ("no", "yes")[value]
            if isinstance(value, bool)
            else f"{value:{form}}"
        )

    rows = [[*COLUMNS, *HYPERPARAMETERS, "folder"]]
    for entry in entries:
        known = [cell(getattr(entry, name), _FORMATS.get(name, "")) for name in COLUMNS]
        rows.append(
            [
                *known,
                *(cell(entry.hyperparameters.get(key), ".10g") for key in HYPERPARAMETERS),
                entry.folder,
            ]
        )
    return rows


def read_digest(path: Path = PUBLISHED) -> list[Entry]:
    """Entries of a CSV written by `league --csv`."""
    found = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # The lines with # name the commits, see update().
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        known: dict[str, Any] = {name: row.get(name) or "" for name in COLUMNS}
        known |= {name: float(known[name]) if known[name] else None for name in _FORMATS}
        known["checked"] = known["checked"] == "yes"
        values = {key: float(row[key]) for key in HYPERPARAMETERS if row.get(key)}
        found.append(Entry(**known, hyperparameters=values, folder=row["folder"]))
    return found


@functools.cache
def published() -> tuple[Entry, ...]:
    """All BERT results of MLPerf Training rounds 0.7 to 5.0, from the logs that MLCommons published."""
    return tuple(read_digest())


def same_hyperparameters(result: Result) -> list[Entry]:
    """Published results with the same hyper-parameters, those of the same batch size first, then by round.

    The rules let submitters borrow hyper-parameters as a group, at any batch size (training rules, "Hyperparameter
    Borrowing"). Compares learning rate, schedule, betas and weight decay as far as both log them.
    """
    own = logged(next((run for run in result.runs if run.log.events), None))
    itself = (text(result.organization or "").casefold(), text(result.name))

    def same(other: dict[str, float]) -> bool:
        both = {key for key in _BORROWED if key in own and key in other}
        close = all(math.isclose(own[key], other[key], rel_tol=1e-6) for key in both)
        return close and all(key in both for key, required in _BORROWED.items() if required)

    found = [one for one in published() if same(one.hyperparameters)]
    # A published result must not be told that it borrowed from itself.
    others = [one for one in found if (one.submitter.casefold(), one.system) != itself]
    # False sorts first: those of the same batch size.
    return sorted(others, key=lambda entry: (entry.batch_size != result.batch_size, entry.round))


def describe_same(result: Result) -> str | None:
    """One line about the published results with the same hyper-parameters; None if there are none."""
    found = same_hyperparameters(result)
    if not found:
        return None
    first = found[0]
    same = sum(entry.batch_size == result.batch_size for entry in found)
    count = "1 published result" if len(found) == 1 else f"{len(found)} published results"
    batch = "" if first.batch_size == result.batch_size else f" at batch {first.batch_size:g}"
    return f"those of {count}, {same} of this batch size; first {first.round} {first.submitter} {first.system}{batch}"


def update(folder: Path, table: Path = PUBLISHED) -> dict[str, str]:
    """Rebuilds the rounds with a checkout, training_results_v<round>, in the folder; returns {round: commit} of all.

    Other rounds keep their rows. The table starts with the commit of each round, and depends on these commits and the
    installed rules only. Raises ReviewError and then leaves the table unchanged.
    """
    checkouts = {
        name[1]: path
        for path in sorted(folder.glob("*"))
        if (name := _CHECKOUT.fullmatch(path.name))
    }
    if not checkouts:
        raise ReviewError(
            f"{folder}: no training_results_v<round>: clone mlcommons/training_results_v5.0, ... there"
        )
    entries = [entry for entry in read_digest(table) if entry.round not in checkouts]
    commits = dict(_COMMIT.findall(table.read_text(encoding="utf-8")))
    for round_, path in checkouts.items():
        commits[round_], found = _read(path, round_)
        entries += found
    entries.sort(key=lambda entry: (entry.round, entry.folder))
    header = "".join(f"# round {round_}: {commit}\n" for round_, commit in sorted(commits.items()))
    write_whole(table, header + csv_text(to_rows(entries)))
    return dict(sorted(commits.items()))


def _read(checkout: Path, round_: str) -> tuple[str, list[Entry]]:
    """Commit of a checkout, and its results by the rules of the round. Raises ReviewError."""
    if f"{round_}.0" not in rulesets():
        raise ReviewError(
            f"{checkout}: the installed mlperf_logging has no rules of BERT for round {round_}"
        )

    def git(*words: str) -> str:
        failure = f"{checkout}: a git checkout is expected"
        return tree.run(["git", "-C", str(checkout), *words], failure).decode("utf-8", "replace")

    # In a folder that is no checkout, git finds the repository around it, and its commit.
    if Path(git("rev-parse", "--show-toplevel").strip()).resolve() != checkout.resolve():
        raise ReviewError(f"{checkout}: is inside another repository: a git checkout is expected")
    parts = [f":(glob,icase)*/results/*/{BENCHMARK}/**", ":(glob)*/systems/*.json"]
    # The table is a function of the commits: changed and additional files would be, too.
    changed = git("status", "--porcelain", "--untracked-files=all", "--", *parts).splitlines()
    if changed:
        raise ReviewError(
            f"{checkout}: {changed[0][3:]} and {len(changed) - 1} others differ from the commit"
        )
    # With -z, as git quotes unusual names otherwise.
    logs = [
        log
        for name in git("ls-files", "-z", "--", *parts).split("\0")
        if (log := _LOG.fullmatch(name))
    ]
    # A sparse checkout lists files that are not there.
    absent = [log[0] for log in logs if not (checkout / log[0]).is_file()]
    if absent:
        raise ReviewError(
            f"{checkout}: {absent[0]} and {len(absent) - 1} others are not checked out"
        )
    folders = sorted({checkout / log[1] for log in logs})
    results = [result for folder in folders for result in load_results(folder, f"{round_}.0")]
    found = [entry_of(result, round_, checkout) for result in results if not result.other_benchmark]
    return git("rev-parse", "HEAD").strip(), found
