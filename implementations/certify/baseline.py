"""`python -m review baseline`: the figures of a test saved by name, and later tests held to them."""

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

from certify import schema
from certify.comparison import OF_MEDIAN
from certify.figures import state_of
from certify.reasons import worst
from certify.records import Records, known, median
from certify.schema import REDUCTIONS
from review.logs.output import ReviewError, write_whole

WHOLE = "together_whole"
LABELS = schema.LABELS | {WHOLE: f"{schema.LABELS['together']}, with the wait"}
# What must be the same for a comparison of times to mean anything.
_DATA = ("batch_size", "gradient_steps", "max_seq_length", "packed")
LOAD = ("model", "precision", "optimizer", *_DATA)
_SAME = ("devices", "ranks_per_node", *LOAD)
_SEVERAL_NODES = ("pairs", "together", WHOLE, "reduce_pairs", "reduce_together")


@dataclass(frozen=True)
class Baseline:
    """A test's figures. metrics: (seconds, their standard error) by name; machine: what they were measured on."""

    name: str
    saved: str
    machine: dict[str, Any]
    versions: dict[str, Any]
    commit: str | None
    metrics: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Change:
    """A figure against the baseline's. change: as a share, above 0 is slower; state: pass, warn, fail."""

    name: str
    before: float
    now: float
    change: float
    error: float
    state: str


def measure(records: Records, name: str) -> Baseline:
    """The figures of a test: of each stage and part of the load the median of all ranks, and of each all-reduce.

    A figure of one round is left out: nothing says how well it repeats. Raises ReviewError.
    """
    config = _json(records.folder / "config.json")
    model, precision = config.get("model"), config.get("settled_precision")
    if not model or not precision:
        raise ReviewError(
            f"{records.folder / 'config.json'}: does not say what model of what precision was trained, as an earlier "
            "certify.sh wrote it: run the test again"
        )
    environment = _json(records.folder / "environment.json")
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
    versions = environment.get("packages", {}) | {key: environment.get(key) for key in ("cuda", "cudnn", "nccl")}
    tables = {stage: _by_rank(records.seconds(stage)) for stage in records.stages}
    if "together" in tables:
        tables[WHOLE] = _by_rank(records.seconds("together", whole=True))
    tables |= {probe: records.probe(probe) for probe in records.probed}
    rounds: dict[str, list[Any]] = {
        name: [own for times in table.T if len(own := known(times))] for name, table in tables.items()
    }
    rounds |= {name: [*records.reductions(name).values()] for name in REDUCTIONS}
    metrics = {name: _typical(times) for name, times in rounds.items() if len(times) > 1}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Baseline(name, now, machine, versions, environment.get("git_commit"), metrics)


def _by_rank(steps: np.ndarray) -> np.ndarray:
    """Median seconds of a step [ranks, rounds], nan where a rank rests."""
    return np.apply_along_axis(median, 2, steps)


def _typical(rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The median over rounds of each round's median, and its standard error by how much the rounds differ."""
    of_rounds = [float(np.median(times)) for times in rounds]
    return statistics.median(of_rounds), OF_MEDIAN * statistics.stdev(of_rounds) / len(of_rounds) ** 0.5


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ReviewError(f"{path}: missing or not JSON; a test that ran to its end leaves it") from None
    return found


def save(records: Records, name: str, folder: Path) -> Path:
    """Writes FOLDER/NAME.json. Raises ReviewError for a name that is invalid or taken."""
    if not re.fullmatch(r"[\w.+-]+", name) or name.startswith("."):
        raise ReviewError(f"--name {name}: letters, digits, '.', '_', '+' and '-' expected")
    path = folder / f"{name}.json"
    if path.exists():
        raise ReviewError(f"{path} exists: choose another name, such as {name}-2")
    write_whole(path, json.dumps(asdict(measure(records, name)), indent=2) + "\n")
    return path


def load(path: Path) -> Baseline:
    """Raises ReviewError for a file that is missing or no baseline."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        metrics = {name: (float(value), float(error)) for name, (value, error) in found.pop("metrics").items()}
        return Baseline(**found, metrics=metrics)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ReviewError(f"{path}: no baseline; make one with: python -m review baseline save") from None


def load_all(folder: Path) -> list[Baseline]:
    """The oldest first. Raises ReviewError for a folder without any."""
    found = sorted((load(path) for path in folder.glob("*.json")), key=lambda one: one.saved)
    if not found:
        raise ReviewError(f"{folder}: no baselines; make one with: python -m review baseline save")
    return found


def choose(now: Baseline, folder: Path, name: str | None) -> Baseline:
    """The baseline of that name, else the newest of the same system and load. Raises ReviewError."""
    baselines = load_all(folder) if name is None else [load(folder / f"{name}.json")]
    for one in reversed(baselines):
        other = next((key for key in _SAME if one.machine.get(key) != now.machine.get(key)), None)
        if other is None:
            return one
        if name is not None:
            raise ReviewError(
                f"baseline {name} is of {other} {one.machine.get(other)}, and this test of {now.machine.get(other)}: "
                "their times cannot be compared"
            )
    raise ReviewError(f"{folder}: no baseline of the same devices, model and batch; save one of this system first")


def check(now: Baseline, before: Baseline) -> list[Change]:
    """Every figure that both have; those of stages of several nodes only if there are as many nodes."""
    other_size = now.machine["nodes"] != before.machine["nodes"]
    found = []
    for name, (value, error) in now.metrics.items():
        if name in before.metrics and not (other_size and name in _SEVERAL_NODES):
            old, old_error = before.metrics[name]
            change = value / old - 1
            noise = ((error / value) ** 2 + (old_error / old) ** 2) ** 0.5
            found.append(Change(name, old, value, change, noise, state_of(change, noise)))
    return found


def verdict(changes: Sequence[Change]) -> str:
    return worst(change.state for change in changes)


def print_changes(before: Baseline, changes: Sequence[Change], failed: Sequence[str]) -> None:
    """A line a figure, why the test failed by itself, and the verdict on the last line."""
    print(f"against {before.name} of {before.saved[:10]} (commit {(before.commit or 'unknown')[:12]})")
    for one in changes:
        state = "" if one.state == "pass" else f"  {one.state}"
        times = f"{one.before * 1e3:10.3f} to {one.now * 1e3:10.3f} ms"
        print(f"  {LABELS[one.name]:<44} {times}  {one.change:+7.1%} ± {one.error:.1%}{state}")
    for reason in failed:
        print(f"  the test itself failed: {reason}")
    print("fail" if failed else verdict(changes))
