"""Synthetic records of an acceptance test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import numpy as np

from review.acceptance.records import Records
from review.acceptance.schema import ALONE, FIELDS, PARTS, STAGES, RankInfo

ROUNDS, STEPS = 6, 20
STEP_SECONDS, WAIT_SECONDS, REDUCE_SECONDS = 0.1, 0.01, 0.02
SEQUENCES = 32  # of a step


def jitter(shape, generator, step: float) -> np.ndarray:
    """Noise factors of a step's duration, at least 1."""
    return 1 + step * np.abs(generator.standard_normal(shape))


def delays(shape, generator, disturbed: float) -> np.ndarray:
    """Delays of some steps by other load, relative to a step."""
    return (generator.random(shape) < disturbed) * generator.exponential(1.0, shape)


def all_reduces(
    nodes: int,
    per_node: int,
    generator,
    network: float,
    links: Mapping[int | tuple[int, int], float],
) -> dict[str, np.ndarray]:
    """All-reduces of pairs of nodes (three per meeting), of each node and of all ranks; arguments
    as in ``make``.
    """
    rows: list[tuple] = []
    for a, b in combinations(range(nodes), 2):
        factor = network * np.prod([links.get(key, 1.0) for key in (a, b, (a, b))])
        for node, partner in ((a, b), (b, a)):
            for rank in range(node * per_node, (node + 1) * per_node):
                seconds = REDUCE_SECONDS * factor * jitter(3, generator, 0.02)
                rows += [
                    (rank, b"reduce_pairs", (a + b) % nodes, partner, one, 1e6)
                    for one in seconds
                ]
    for probe in (b"reduce_node", b"reduce_together")[nodes == 1 or per_node == 1 :]:
        for rank in range(nodes * per_node):
            seconds = REDUCE_SECONDS * network * jitter(ROUNDS, generator, 0.02)
            rows += [
                (rank, probe, number, -1, one, 1e6)
                for number, one in enumerate(seconds)
            ]
    names = ("rank", "probe", "round", "partner", "seconds", "amount")
    return {
        name: np.array([row[column] for row in rows])
        for column, name in enumerate(names)
    }


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
) -> Records:
    """Records of ranks with noise. slow: factor by (stage, rank); links: factor by node or pair, of
    the all-reduce; starved: factor by rank that something else takes of its CPUs; with it the test
    ran on CPUs.

    step, between: noise of steps and spread of GPUs; common: noise of a round that all share;
    disturbed: share of steps that something else delays; network: factor on every wait for others
    and on every all-reduce.
    """
    generator = np.random.default_rng(seed)
    ranks = nodes * per_node
    speed = 1 + between * generator.standard_normal(ranks)
    rows: dict[str, list[np.ndarray]] = {
        name: []
        for name in (
            "rank",
            "stage",
            "round",
            "partner",
            "step",
            *PARTS,
            "cpu",
            "sequences",
            "checksum",
        )
    }
    for stage_number, stage in enumerate(STAGES):
        if nodes == 1 and stage in ("node", "pairs"):
            continue
        shared = 1 + common * np.abs(generator.standard_normal(rounds))
        for rank in range(ranks):
            times = (
                STEP_SECONDS
                * speed[rank]
                * shared[:, None]
                * (slow or {}).get((stage, rank), 1.0)
            )
            count = times.size * STEPS
            work = times * jitter((rounds, STEPS), generator, step)
            times = (work + times * delays((rounds, STEPS), generator, disturbed)) * (
                starved or {}
            ).get(rank, 1.0)
            columns = {
                "rank": np.full(count, rank), "stage": np.full(count, stage_number),
                "round": np.repeat(np.arange(rounds), STEPS), "step": np.tile(np.arange(STEPS), rounds),
                "partner": np.full(count, -1), "compute": times.ravel(), "data": np.zeros(count),
                "wait": np.full(count, WAIT_SECONDS * (1 if stage in ALONE else network)), "update": np.zeros(count),
                "cpu": work.ravel(), "sequences": np.full(count, SEQUENCES),
                "checksum": 7 + np.tile(np.arange(STEPS), rounds),
            }  # fmt: skip
            for name, column in columns.items():
                rows[name].append(column)
    return Records(
        folder=Path("made up"),
        ranks={
            rank: RankInfo(rank, rank % per_node, f"node{rank // per_node}", "CPU")
            for rank in range(ranks)
        },
        nodes=[f"node{node}" for node in range(nodes)],
        steps={name: np.concatenate(columns) for name, columns in rows.items()},
        probes=all_reduces(nodes, per_node, generator, network, links or {}),
        on_cpus=starved is not None,
    )


def add_rates(
    records: Records, rates: Mapping[tuple[int, str, int], float], rounds: int = 3
) -> None:
    """Adds rows of a GB that tools measured. rates: GB/s by (rank, test, other GPU or -1)."""
    for (rank, name, partner), rate in rates.items():
        rows = {"rank": rank, "probe": name.encode(), "partner": partner}
        rows |= {"seconds": 1 / rate, "amount": 1e9, "round": np.arange(rounds)}
        for column, value in rows.items():
            values = np.broadcast_to(value, rounds)
            before = records.probes[column]
            records.probes[column] = np.concatenate([before, values])


HEALTHY = (1755, 650, 62, 4, 0, 0, 0, np.nan, 5, 5, 16, 16, 3, 0)


def telemetry(devices: int, seconds: int) -> dict[str, np.ndarray]:
    """Samples of healthy GPUs."""
    count = devices * seconds
    found = {
        "time": np.repeat(1e9 + np.arange(seconds), devices),
        "device": np.tile(np.arange(devices), seconds),
    }
    return found | {
        name: np.full(count, value, np.float64)
        for name, value in zip(FIELDS, HEALTHY, strict=True)
    }


def write(folder: Path, records: Records) -> None:
    """Writes the files as the ranks do."""
    for number, node in enumerate(records.nodes):
        ranks = [info for info in records.ranks.values() if info.node == node]
        about = {
            "version": 3,
            "node": node,
            "number": number,
            "nodes": records.nodes,
            "size": len(records.ranks),
        }
        about |= {
            "on_cpus": records.on_cpus,
            "hardware": records.hardware.get(node, {}),
            "tools": records.tools.get(node, []),
            "ranks": [vars(info) for info in ranks],
        }
        tables = {}
        for table, columns in (("steps", records.steps), ("probes", records.probes)):
            chosen = np.isin(columns["rank"], [info.rank for info in ranks])
            tables |= {
                f"{table}.{name}": column[chosen] for name, column in columns.items()
            }
        samples = records.telemetry.get(node) or telemetry(0, 0)
        tables |= {f"telemetry.{name}": column for name, column in samples.items()}
        np.savez_compressed(
            folder / f"certify_{node}.npz", about=np.array(json.dumps(about)), **tables
        )
