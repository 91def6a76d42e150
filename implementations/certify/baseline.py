"""`python -m review baseline`: the figures of a test saved by name, and later ones held to them."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from certify.comparison import OF_MEDIAN
from certify.figures import state_of
from certify.records import Records
from certify.schema import LABELS, REDUCTIONS
from review.logs.output import ReviewError, write_whole

FOLDER = Path("baselines")
# What must be the same for a comparison of times to mean anything.
_DATA = ("batch_size", "gradient_steps", "max_seq_length", "packed")
_SAME = ("devices", "ranks_per_node", "model", "precision", "optimizer", *_DATA)
WHOLE = "together_whole"
_WORDS = LABELS | {WHOLE: f"{LABELS['together']}, with the wait"}
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

    What has run in one round alone is left out: nothing says how well it repeats. Raises ReviewError.
    """
    config = _json(records.folder / "config.json")
    model, precision = config.get("model"), config.get("settled_precision")
    if not model or not precision:
        raise ReviewError(
            f"{records.folder / 'config.json'}: does not say what model of what precision was trained, as an earlier "
            "certify.sh wrote it: run the test again"
        )
    data = config.get("data", {})
    environment = _json(records.folder / "environment.json")
    machine = {
        "host": environment.get("host"),
        "devices": sorted({place.device for place in records.places.values()}),
        "nodes": len(records.nodes),
        "ranks_per_node": records.ranks_per_node,
        "model": model,
        "precision": precision,
        "optimizer": config.get("optim", {}).get("optimizer"),
        **{name: data.get(name) for name in _DATA},
    }
    versions = {**environment.get("packages", {}), **{key: environment.get(key) for key in ("cuda", "cudnn", "nccl")}}
    rounds = {stage: _medians(records.seconds(stage)) for stage in records.stages}
    if "together" in records.stages:
        rounds[WHOLE] = _medians(records.seconds("together", whole=True))
    rounds |= {probe: _by_round(records.probe(probe)) for probe in records.probed}
    rounds |= {name: [*records.reductions(name).values()] for name in REDUCTIONS}
    metrics = {name: _typical(times) for name, times in rounds.items() if len(times) > 1}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Baseline(name, now, machine, versions, environment.get("git_commit"), metrics)


def _medians(steps: Mapping[int, list[np.ndarray]]) -> list[list[float]]:
    """Median seconds of a step in each round, of each rank that has worked in it. steps: by rank and round."""
    return _by_round({rank: [float(np.median(one)) if len(one) else nan for one in own] for rank, own in steps.items()})


def _by_round(values: Mapping[int, list[float]]) -> list[list[float]]:
    """The values of each round, those of ranks that rested left out."""
    rounds = [[time for time in times if time == time] for times in zip(*values.values(), strict=True)]
    return [times for times in rounds if times]


def _typical(rounds: list[list[float]]) -> tuple[float, float]:
    """The median over rounds of each round's median, and its standard error by how much the rounds differ."""
    of_rounds = [statistics.median(times) for times in rounds]
    return statistics.median(of_rounds), OF_MEDIAN * statistics.stdev(of_rounds) / len(of_rounds) ** 0.5


def label(name: str) -> str:
    """A figure in words."""
    return _WORDS[name]


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ReviewError(f"{path}: missing or not JSON; a test that ran to its end leaves it") from None
    return found


def save(records: Records, name: str, folder: Path) -> Path:
    """Writes FOLDER/NAME.json. Raises ReviewError for a name that is none or is taken."""
    if not re.fullmatch(r"[\w.+-]+", name) or name.startswith("."):
        raise ReviewError(f"--name {name}: letters, digits, '.', '_', '+' and '-' expected")
    path = folder / f"{name}.json"
    if path.exists():
        raise ReviewError(f"{path} exists: choose another name, such as {name}-2")
    write_whole(path, (json.dumps(asdict(measure(records, name)), indent=2) + "\n").encode())
    return path


def load(path: Path) -> Baseline:
    """A saved one. Raises ReviewError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        metrics = {name: (float(value), float(error)) for name, (value, error) in found.pop("metrics").items()}
        return Baseline(**found, metrics=metrics)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ReviewError(f"{path}: no baseline; make one with: python -m review baseline save") from None


def load_all(folder: Path) -> list[Baseline]:
    """All of a folder, the oldest first. Raises ReviewError where there are none."""
    found = sorted((load(path) for path in folder.glob("*.json")), key=lambda one: one.saved)
    if not found:
        raise ReviewError(f"{folder}: no baselines; make one with: python -m review baseline save")
    return found


def choose(now: Baseline, folder: Path, name: str | None) -> Baseline:
    """The baseline of that name, else the newest of the same system and load. Raises ReviewError."""
    if name is not None:
        chosen = load(folder / f"{name}.json")
        for key in _SAME:
            if chosen.machine.get(key) != now.machine.get(key):
                raise ReviewError(
                    f"baseline {name} is of {key} {chosen.machine.get(key)}, and this test of {now.machine.get(key)}: "
                    "their times cannot be compared"
                )
        return chosen
    fitting = [one for one in load_all(folder) if all(one.machine.get(key) == now.machine.get(key) for key in _SAME)]
    if not fitting:
        raise ReviewError(f"{folder}: no baseline of the same devices, model and batch; save one of this system first")
    return fitting[-1]


def check(now: Baseline, before: Baseline) -> list[Change]:
    """Every figure that both have; those of stages of several nodes where there are as many nodes."""
    shared = [name for name in now.metrics if name in before.metrics]
    if now.machine["nodes"] != before.machine["nodes"]:
        shared = [name for name in shared if name not in _SEVERAL_NODES]
    found = []
    for name in shared:
        (value, error), (old, old_error) = now.metrics[name], before.metrics[name]
        change = value / old - 1
        noise = ((error / value) ** 2 + (old_error / old) ** 2) ** 0.5
        found.append(Change(name, old, value, change, noise, state_of(change, noise)))
    return found


def verdict(changes: list[Change]) -> str:
    """The worst of all."""
    states = {change.state for change in changes}
    return next(state for state in ("fail", "warn", "pass") if state in states or state == "pass")


def print_changes(before: Baseline, changes: list[Change]) -> None:
    """A line a figure, and the verdict on the last line."""
    print(f"against {before.name} of {before.saved[:10]} (commit {(before.commit or 'unknown')[:12]})")
    for one in changes:
        state = "" if one.state == "pass" else f"  {one.state}"
        times = f"{one.before * 1e3:10.3f} to {one.now * 1e3:10.3f} ms"
        print(f"  {label(one.name):<44} {times}  {one.change:+7.1%} ± {one.error:.1%}{state}")
    print(verdict(changes))
