"""Synthetic records of an acceptance test."""

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from review.acceptance.records import Records
from review.acceptance.schema import ALONE, FIELDS, STAGES, RankInfo

ROUNDS, STEPS = 6, 20
STEP_SECONDS, WAIT_SECONDS, REDUCE_SECONDS = 0.1, 0.01, 0.02
SEQUENCES = 32  # of a step
PROBES = "rank", "probe", "round", "partner", "seconds", "amount"


def jitter(shape, generator, step: float) -> np.ndarray:
    """Noise factors of a step's duration, at least 1."""
    return 1 + step * np.abs(generator.standard_normal(shape))


def joined(tables: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Rows of all tables."""
    columns = zip(*(table.values() for table in tables), strict=True)
    return dict(zip(tables[0], map(np.concatenate, columns), strict=True))


def all_reduces(nodes, per_node, generator, network, links) -> dict[str, np.ndarray]:
    """All-reduces of pairs of nodes (three per meeting), of each node and of all ranks; arguments as in ``make``."""
    rows: list[tuple] = []
    for a, b in combinations(range(nodes), 2):
        factor = network * np.prod([links.get(key, 1.0) for key in (a, b, (a, b))])
        for node, partner in ((a, b), (b, a)):
            for rank in range(node * per_node, (node + 1) * per_node):
                meeting = rank, b"reduce_pairs", (a + b) % nodes, partner
                seconds = REDUCE_SECONDS * factor * jitter(3, generator, 0.02)
                rows += [(*meeting, one, 1e6) for one in seconds]
    for probe in (b"reduce_node", b"reduce_together")[nodes == 1 or per_node == 1 :]:
        for rank in range(nodes * per_node):
            seconds = REDUCE_SECONDS * network * jitter(ROUNDS, generator, 0.02)
            rows += [(rank, probe, n, -1, one, 1e6) for n, one in enumerate(seconds)]
    return dict(zip(PROBES, map(np.array, zip(*rows, strict=True)), strict=True))


def make(
    nodes: int = 4,
    per_node: int = 2,
    seed: int = 0,
    slow: Mapping[tuple[str, int], float] | None = None,
    links: Mapping[int | tuple[int, int], float] | None = None,
    starved: Mapping[int, float] | None = None,
    step: float = 0.005,
    between: float = 0.003,
    common: float = 0.0,
    disturbed: float = 0.0,
    network: float = 1.0,
    rounds: int = ROUNDS,
    gpu: str | None = "CPU",
) -> Records:
    """Records of ranks with noise. slow: factor by (stage, rank); links: factor by node or pair, of
    the all-reduce; starved: factor by rank that something else takes of its CPUs; with it the test
    ran on CPUs; gpu: each rank's device.

    step, between: noise of steps and spread of GPUs; common: noise of a round that all share;
    disturbed: share of steps that something else delays; network: factor on every wait for others
    and on every all-reduce.
    """
    generator = np.random.default_rng(seed)
    ranks, shape = nodes * per_node, (rounds, STEPS)
    speed = 1 + between * generator.standard_normal(ranks)
    tables = []
    for stage_number, stage in enumerate(STAGES):
        if nodes == 1 and stage in ("node", "pairs"):
            continue
        shared = 1 + common * np.abs(generator.standard_normal(rounds))
        for rank in range(ranks):
            own = STEP_SECONDS * speed[rank] * shared[:, None]
            own = own * (slow or {}).get((stage, rank), 1.0)
            work = own * jitter(shape, generator, step)
            is_delayed = generator.random(shape) < disturbed
            times = work + own * is_delayed * generator.exponential(1.0, shape)
            times *= (starved or {}).get(rank, 1.0)
            wait = WAIT_SECONDS * (1 if stage in ALONE else network)
            numbers = np.tile(np.arange(STEPS), rounds)
            columns = {
                "rank": rank, "stage": stage_number, "round": np.repeat(np.arange(rounds), STEPS), "step": numbers,
                "partner": -1, "compute": times.ravel(), "data": 0.0, "wait": wait, "update": 0.0,
                "cpu": work.ravel(), "sequences": SEQUENCES, "checksum": 7 + numbers,
            }  # fmt: skip
            whole = np.broadcast_arrays(*columns.values())
            tables.append(dict(zip(columns, whole, strict=True)))
    infos = [
        RankInfo(n, n % per_node, f"node{n // per_node}", gpu) for n in range(ranks)
    ]
    return Records(
        folder=Path("made up"),
        ranks=dict(enumerate(infos)),
        nodes=[f"node{node}" for node in range(nodes)],
        steps=joined(tables),
        probes=all_reduces(nodes, per_node, generator, network, links or {}),
        on_cpus=starved is not None,
    )


def add_rates(records: Records, rates, rounds=3, amount=1e9) -> Records:
    """Adds rows of so many bytes that tools measured. rates: GB/s by (rank, test, other GPU or -1)."""
    for (rank, name, partner), rate in rates.items():
        row = (
            rank,
            name.encode(),
            np.arange(rounds),
            partner,
            amount / rate / 1e9,
            amount,
        )
        whole = dict(zip(PROBES, np.broadcast_arrays(*row), strict=True))
        for column, values in whole.items():
            before = records.probes[column]
            records.probes[column] = np.concatenate([before, values])
    return records


HEALTHY = (1755, 650, 62, 4, 0, 0, 0, np.nan, 5, 5, 16, 16, 3, 0)


def telemetry(devices: int, seconds: int) -> dict[str, np.ndarray]:
    """Samples of healthy GPUs."""
    found = {
        "time": np.repeat(1e9 + np.arange(seconds), devices),
        "device": np.tile(np.arange(devices), seconds),
    }
    fields = zip(FIELDS, HEALTHY, strict=True)
    return found | {name: np.full(devices * seconds, 1.0 * one) for name, one in fields}


def chosen(columns: Mapping[str, np.ndarray], **wanted) -> np.ndarray:
    """Which rows have these ranks, stages, rounds and so on."""
    found = [np.isin(columns[name], own) for name, own in wanted.items()]
    return np.logical_and.reduce(found)


def write(folder: Path, records: Records, **config: Any) -> Path:
    """Writes the files as the ranks do, and the test's settings; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for number, node in enumerate(records.nodes):
        ranks = [info for info in records.ranks.values() if info.node == node]
        about = {
            "version": 3, "node": node, "number": number, "nodes": records.nodes, "size": len(records.ranks),
            "on_cpus": records.on_cpus, "hardware": records.hardware.get(node, {}),
            "tools": records.tools.get(node, []), "ranks": [vars(info) for info in ranks],
        }  # fmt: skip
        tables = {}
        for table, columns in (("steps", records.steps), ("probes", records.probes)):
            own = chosen(columns, rank=[info.rank for info in ranks])
            tables |= {
                f"{table}.{name}": values[own] for name, values in columns.items()
            }
        samples = records.telemetry.get(node) or telemetry(0, 0)
        tables |= {f"telemetry.{name}": column for name, column in samples.items()}
        about = np.array(json.dumps(about))
        np.savez_compressed(folder / f"certify_{node}.npz", about=about, **tables)
    return folder
