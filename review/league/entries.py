"""Entries of the league, made from result folders or read from published.csv."""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from review.logs import tree
from review.logs.mllog import number, text
from review.results.run import Run
from review.verdict.checking import Verdict

HYPERPARAMETERS = (
    "opt_base_learning_rate",
    "opt_learning_rate_training_steps",
    "opt_learning_rate_warmup_steps",
    "start_warmup_step",
    "opt_lamb_beta_1",
    "opt_lamb_beta_2",
    "opt_lamb_weight_decay_rate",
    "opt_epsilon",
    "gradient_accumulation_steps",
)
# Range for a run to the target; a log that counts epochs is far below.
_SANE_SAMPLES = 1e5, 1e8
PUBLISHED = Path(__file__).with_name("published.csv")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A result in the league. Unknown values are None or empty.

    ``checked``: the rules of its round accept the result. ``minutes``: the score by the installed
    rules if there is one, else the olympic mean of the runs that reached the target.
    ``published_minutes``: the same mean times the factor that was committed with the logs; of the
    user's own, ``minutes``.
    ``training_rate``: sequences per second outside evaluations, if the logs time those. ``joules``:
    of the same runs. ``folder``: within the repository of its round. ``obstacles``: why it would
    not count. ``unproved``: of its weights and data.
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
    obstacles: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()

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
        """Key that is equal for the same logs, whatever their round and name; None if too little is
        known.
        """
        if self.samples is None or self.sequences_per_second is None:
            return None
        return (
            f"{self.samples:.0f}",
            f"{self.sequences_per_second:.1f}",
            f"{self.batch_size}",
        )

    def as_dict(self) -> dict[str, Any]:
        known = {
            name: value
            for name, value in vars(self).items()
            if name not in ("obstacles", "unproved")
        }
        return {**known, "sequences_per_second_per_accelerator": self.per_accelerator}


def entry_of(verdict: Verdict, label: str, root: Path) -> Entry:
    """Entry of a judged result. ``label``: its round. ``root``: folder that ``Entry.folder`` is relative
    to.
    """
    result = verdict.result
    assert result is not None
    described = tree.description(result.folder)
    division = (result.division or "").casefold()
    mean = result.raw if result.score is None else result.olympic
    nodes = number(tree.count(described.get("number_of_nodes")))
    # An empty log, of a run that died at once, has no status and no hyper-parameters.
    run = next((run for run in result.runs if run.log.events), None)
    status = run and run.log.value("submission_status")
    # Raw where no installed rules accept the logs.
    minutes = mean.minutes if result.score is None else result.score
    return Entry(
        round=label,
        submitter=text(described.get("submitter") or result.organization or ""),
        system=text(result.name),
        division="closed" if division.startswith("close") else division,
        status=text(described.get("status") or status or ""),
        nodes=nodes,
        # A CPU has processes, but no accelerators to divide by.
        accelerators=None
        if tree.count(described.get("accelerators_per_node")) == 0
        else result.accelerators,
        accelerator=result.accelerator,
        batch_size=result.batch_size,
        runs=len(result.runs),
        minutes=minutes,
        # A file beside the logs could say any factor.
        published_minutes=minutes,
        checked=verdict.official,
        # Of the runs that make the minutes, so that samples, rate and time fit each other.
        samples=_mean([_samples(run) for run in mean.remaining]),
        sequences_per_second=_mean(
            [_samples(run) and run.sequences_per_second for run in mean.remaining]
        ),
        training_rate=_mean(
            [_samples(run) and run.training_rate for run in mean.remaining]
        ),
        joules=result.energy.joules if result.energy else None,
        hyperparameters=logged(run),
        folder=_place(result.folder, root),
        obstacles=verdict.obstacles,
        unproved=result.unproved,
    )


def _samples(run: Run) -> float | None:
    least, most = _SANE_SAMPLES
    return run.samples if least <= (run.samples or 0.0) <= most else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    # A mean of only some runs would be of another set than the minutes.
    if not known or len(known) < len(values):
        return None
    return math.fsum(known) / len(known)


def logged(run: Run | None) -> dict[str, float]:
    """The numeric HYPERPARAMETERS that a run logs."""
    known = {} if run is None else run.hyperparameters
    values = {key: number(known.get(key)) for key in HYPERPARAMETERS}
    return {key: value for key, value in values.items() if value is not None}


def _place(folder: Path, root: Path) -> str:
    # The folder may have been given by another way than the root.
    folder, root = folder.resolve(), root.resolve()
    inside = folder.is_relative_to(root) and folder != root
    return folder.relative_to(root).as_posix() if inside else folder.name


@functools.cache
def published() -> tuple[Entry, ...]:
    """All BERT results of MLPerf Training rounds 0.7 to 5.0, from the logs that MLCommons
    published.
    """
    types = {column.name: column.type for column in fields(Entry)}
    entries = []
    lines = PUBLISHED.read_text(encoding="utf-8").splitlines(keepends=True)
    # The lines with # name the commits that the rows were made from.
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        known: dict[str, Any] = {name: row[name] for name in row if name in types}
        for name, value in known.items():
            if types[name] == "float | None":
                known[name] = float(value) if value else None
        known["checked"] = known["checked"] == "yes"
        values = {key: float(row[key]) for key in HYPERPARAMETERS if row[key]}
        entries.append(Entry(**known, hyperparameters=values))
    return tuple(entries)
