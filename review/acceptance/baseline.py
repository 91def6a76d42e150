"""Figures of a test saved by name, and later tests compared with them (`python -m review baseline`)."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from review.acceptance import schema
from review.acceptance.comparison import OF_MEDIAN
from review.acceptance.figures import state_of
from review.acceptance.records import Records, known, median
from review.acceptance.schema import REDUCTIONS
from review.logs.output import ReviewError, write_whole
from review.logs.tree import read_object

# The time of a step as training sees it.
WHOLE = "together_whole"
LABELS = schema.LABELS | {WHOLE: f"{schema.LABELS['together']}, with the wait"}
# Facts that must match for times to be comparable.
_DATA = ("batch_size", "gradient_steps", "max_seq_length", "packed")
_SAME = ("devices", "ranks_per_node", "model", "precision", "optimizer", *_DATA)
# Their times depend on the number of nodes.
_SEVERAL_NODES = ("pairs", "together", WHOLE, "reduce_pairs", "reduce_together")


@dataclass(frozen=True)
class Baseline:
    """Figures of a test. metrics: (seconds, standard error) by name; machine: hardware and load."""

    name: str
    saved: str
    machine: dict[str, Any]
    versions: dict[str, Any]
    commit: str | None
    metrics: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Change:
    """A figure against the baseline's. change: fraction, positive is slower; state: pass, warn or fail."""

    name: str
    before: float
    now: float
    change: float
    error: float
    state: str


def measure(records: Records, name: str) -> Baseline:
    """Figures of a test: of each stage, probe and all-reduce, the median over all ranks.

    Figures of a single round are left out, since their noise is unknown. Raises ReviewError.
    """
    config = read_object(records.folder / "config.json")
    model, precision = config.get("model"), config.get("settled_precision")
    if not model or not precision:
        raise ReviewError(
            f"{records.folder / 'config.json'}: lacks model and precision (written by an earlier version): "
            "run the test again"
        )
    environment = read_object(records.folder / "environment.json")
    machine = {
        "host": environment.get("host"),
        "devices": sorted({place.device for place in records.places.values()}),
        "nodes": len(records.nodes),
        "ranks_per_node": records.ranks_per_node,
        "model": model,
        "precision": precision,
        "optimizer": config.get("optim", {}).get("optimizer"),
        **{key: config.get("data", {}).get(key) for key in _DATA},
    }
    versions = environment.get("packages", {}) | {
        key: environment.get(key) for key in ("cuda", "cudnn", "nccl")
    }
    tables = {stage: _by_rank(records.seconds(stage)) for stage in records.stages}
    if "together" in tables:
        tables[WHOLE] = _by_rank(records.seconds("together", whole=True))
    tables |= {probe: records.probe(probe) for probe in records.probed}
    rounds: dict[str, list[Any]] = {
        # Ranks that rested in a round are left out of it.
        name: [own for times in table.T if len(own := known(times))]
        for name, table in tables.items()
    }
    rounds |= {name: [*records.reductions(name).values()] for name in REDUCTIONS}
    metrics = {name: _typical(times) for name, times in rounds.items() if len(times) > 1}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Baseline(name, now, machine, versions, environment.get("git_commit"), metrics)


def _by_rank(steps: np.ndarray) -> np.ndarray:
    """Median seconds per step [ranks, rounds], nan where a rank rests."""
    return np.apply_along_axis(median, 2, steps)


def _typical(rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Median over rounds of each round's median, and its standard error from the spread of rounds."""
    of_rounds = [float(np.median(times)) for times in rounds]
    return statistics.median(of_rounds), OF_MEDIAN * statistics.stdev(of_rounds) / len(
        of_rounds
    ) ** 0.5


def save(records: Records, name: str, folder: Path) -> Path:
    """Writes FOLDER/NAME.json. Raises ReviewError for a name that is invalid or taken."""
    # A name must not lead out of the folder, nor be hidden in it.
    if not re.fullmatch(r"[\w.+-]+", name) or name.startswith("."):
        raise ReviewError(f"--name {name}: letters, digits, '.', '_', '+' and '-' expected")
    path = folder / f"{name}.json"
    # Never overwritten: other tests were judged by it.
    if path.exists():
        raise ReviewError(f"{path} exists: choose another name, such as {name}-2")
    write_whole(path, json.dumps(asdict(measure(records, name)), indent=2) + "\n")
    return path


def load(path: Path) -> Baseline:
    """Raises ReviewError for a missing or invalid file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        metrics = {
            name: (float(value), float(error))
            for name, (value, error) in found.pop("metrics").items()
        }
        return Baseline(**found, metrics=metrics)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ReviewError(
            f"{path}: not a baseline; save one with: python -m review baseline save"
        ) from None


def choose(now: Baseline, folder: Path, name: str | None) -> Baseline:
    """The named baseline, else the newest of the same system and load. Raises ReviewError."""
    paths = folder.glob("*.json") if name is None else [folder / f"{name}.json"]
    for one in sorted(map(load, paths), key=lambda one: one.saved, reverse=True):
        other = next((key for key in _SAME if one.machine.get(key) != now.machine.get(key)), None)
        if other is None:
            return one
        if name is not None:
            raise ReviewError(
                f"baseline {name} has {other} {one.machine.get(other)}, this test {now.machine.get(other)}: "
                "their times cannot be compared"
            )
    raise ReviewError(
        f"{folder}: no baseline of the same devices, model and batch; save one of this system first"
    )


def check(now: Baseline, before: Baseline) -> list[Change]:
    """Every figure that both have; those of several nodes only if the number of nodes is the same."""
    other_size = now.machine["nodes"] != before.machine["nodes"]
    found = []
    for name, (value, error) in now.metrics.items():
        if name in before.metrics and not (other_size and name in _SEVERAL_NODES):
            old, old_error = before.metrics[name]
            change = value / old - 1
            # Relative errors of a quotient add in squares.
            noise = ((error / value) ** 2 + (old_error / old) ** 2) ** 0.5
            found.append(Change(name, old, value, change, noise, state_of(change, noise)))
    return found


def print_changes(
    before: Baseline, changes: Sequence[Change], failed: Sequence[str], state: str
) -> None:
    """Prints a line per figure, why the test itself failed, and the verdict on the last line."""
    print(
        f"against {before.name} of {before.saved[:10]} (commit {(before.commit or 'unknown')[:12]})"
    )
    for one in changes:
        times = f"{one.before * 1e3:10.3f} to {one.now * 1e3:10.3f} ms"
        flag = "" if one.state == "pass" else f"  {one.state}"
        print(f"  {LABELS[one.name]:<44} {times}  {one.change:+7.1%} ± {one.error:.1%}{flag}")
    for reason in failed:
        print(f"  the test itself failed: {reason}")
    print(state)
