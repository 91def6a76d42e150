"""Sweep of the acceptance test: slowdowns of every stage, place, length, size and number of ranks.

Records of a test are made up: 16 rounds of each stage, ranks that differ by 0.3%, 0.5% noise of a
round. From a round on (onset), for a share of the rounds (length), somebody is slower by a factor:
one rank, two, a node or half of all. A row counts the tests in which exactly those were named, over
all onsets and lengths. Healthy tests of 16 kinds, half of them on four nodes, count the false
alarms. Power: how often one rank is named that is 5% slower all the time, by the noise of a round,
which has an autocorrelation of 0.8, and the number of rounds. Prints one JSON line.

usage: python -m tests.review.acceptance.sweep [--seeds 2] [--healthy 2400] [--power 60] [--seed 0]
                                               [--ranks 4 8 64]      0 of a part leaves it out
"""

import argparse
import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np

from review.acceptance.journal import BurnIn
from review.acceptance.outliers import members
from review.acceptance.schema import PARTS, STAGES
from review.acceptance.verdict import Certificate, judge

from .made_up import make

ROUNDS, STEPS, BETWEEN, NOISE = 16, 4, 0.003, 0.005
TESTED = ("single", "parallel", "together")
BURN_IN = "burn-in"
FACTORS = (1.1, 1.2, 1.5, 2.0, 5.0, 10.0)
# Onset and length, as shares of the rounds.
WHEN = (
    (0, 1),
    *((onset, 1 / 3) for onset in (0, 0.2, 0.34, 2 / 3)),
    *((0, 0.5), (0.4, 0.6), (0.34, 0.66), (0.6, 0.4)),
)
WHO = ("rank", "two ranks", "node", "half")
# Ranks, rounds, and what disturbs healthy machines: see noise_of().
HEALTHY: dict[str, dict[str, Any]] = {
    "quiet, 4 ranks": {"ranks": 4},
    "quiet, 64 ranks": {"ranks": 64},
    "2 ranks": {"ranks": 2},
    "6 rounds": {"rounds": 6},
    "64 rounds": {"rounds": 64},
    "noise 2%": {"noise": 0.02},
    "noise 5%": {"noise": 0.05},
    "correlated 2%": {"noise": 0.02, "correlation": 0.8},
    "correlated 5%, 6 rounds": {"noise": 0.05, "correlation": 0.8, "rounds": 6},
    "correlated 5%, 6 rounds, 4 ranks": {"noise": 0.05, "correlation": 0.8, "rounds": 6, "ranks": 4},
    "heavy tails": {"noise": 0.02, "tails": 3},
    "one in 20 rounds half as long again": {"pauses": 0.05},
    "one rank three times noisier": {"noisy": 3.0},
    "drift of 2% over a stage": {"drift": 0.02},
    "30% of common noise": {"common": 0.3},
    "ranks that differ by 1%": {"between": 0.01},
}  # fmt: skip


def noise_of(
    generator: np.random.Generator,
    ranks: int = 8,
    rounds: int = ROUNDS,
    noise: float = NOISE,
    correlation: float = 0.0,
    tails: float = 0.0,
    pauses: float = 0.0,
    noisy: float = 1.0,
    drift: float = 0.0,
    common: float = 0.0,
) -> np.ndarray:
    """Relative time of each round of a stage [ranks, rounds]."""
    shape = (ranks, rounds)
    errors = generator.standard_normal(shape)
    if tails:
        errors = generator.standard_t(tails, shape)
    for number in range(1, rounds):
        errors[:, number] *= (1 - correlation**2) ** 0.5
        errors[:, number] += correlation * errors[:, number - 1]
    errors[0] *= noisy
    # Each to where it drifts by itself, as GPUs get warm.
    trend = np.outer(generator.uniform(-0.5, 0.5, ranks), np.linspace(0, drift, rounds))
    paused = 0.5 * (generator.random(shape) < pauses)
    shared = 1 + common * np.abs(generator.standard_normal(rounds))
    return np.asarray((1 + noise * errors + trend + paused) * shared)


def certified(
    generator: np.random.Generator,
    nodes: int,
    ranks: int,
    slow: np.ndarray | None = None,
    stages: tuple[str, ...] = (),
    between: float = BETWEEN,
    **noise: Any,
) -> Certificate:
    """The verdict on made-up records. slow: factors [ranks, rounds] in ``stages``."""
    speed = 1 + between * generator.standard_normal((ranks, 1))
    seconds = {}
    for stage in (*TESTED, BURN_IN):
        seconds[stage] = 0.1 * speed * noise_of(generator, ranks, **noise)
        if slow is not None and stage in stages:
            seconds[stage] *= slow
    repeats = dict(enumerate(seconds.pop(BURN_IN).tolist()))
    tables = np.stack([*seconds.values()])  # [stages, ranks, rounds]
    numbers = [number.ravel() for number in np.indices((*tables.shape, STEPS))]
    steps = dict(zip(("stage", "rank", "round", "step"), numbers, strict=True))
    steps["stage"] = np.array([[*STAGES].index(name) for name in TESTED])[numbers[0]]
    zeros = np.zeros(tables.size * STEPS)
    steps |= dict.fromkeys((*PARTS, "cpu", "partner"), zeros)
    steps["compute"] = np.repeat(tables.ravel(), STEPS)
    steps |= dict.fromkeys(("sequences", "checksum"), zeros.astype(int) + 1)
    made = make(nodes, ranks // nodes, rounds=1)
    probes = {name: own[:0] for name, own in made.probes.items()}
    records = replace(made, steps=steps, probes=probes)
    return judge(records, BurnIn(1, 1.0, 1.0, [], rounds=repeats))


def culprits(who: str, ranks: int) -> tuple[int, list[int]]:
    """Number of nodes, and the slow ranks."""
    if who == "node":
        return 4, [*range(ranks // 4)]
    return 1, [*range({"rank": 1, "two ranks": 2, "half": ranks // 2}[who])]


def is_named(certificate: Certificate, slow: list[int]) -> bool:
    """Whether all slow ranks or their node fail the test, and nobody else."""
    names = {name for one in certificate.findings for name in members(one.name)}
    ranks = certificate.records.ranks.items()
    found = {rank for rank, info in ranks if {info.name, f"node {info.node}"} & names}
    return certificate.state == "fail" and found == {*slow}


def sweep(seeds: range, counts: list[int]) -> list[dict[str, Any]]:
    """A row for each stage, culprit, number of ranks and factor."""
    rows = []
    stages = {name: (name,) for name in (*TESTED, BURN_IN)} | {"all": TESTED}
    for (stage, where), who, ranks in itertools.product(stages.items(), WHO, counts):
        nodes, slow = culprits(who, ranks)
        # Of one node, of one rank, of most: other rows have them.
        if (ranks < 4 and who != "rank") or (who == "two ranks" and ranks <= 4):
            continue
        for factor in FACTORS:
            named = 0
            for (onset, length), seed in itertools.product(WHEN, seeds):
                factors = np.ones((ranks, ROUNDS))
                first = round(onset * ROUNDS)
                factors[slow, first : first + round(length * ROUNDS)] = factor
                generator = np.random.default_rng(seed)
                found = certified(generator, nodes, ranks, factors, where)
                named += is_named(found, slow)
            row = {"stage": stage, "slow": who, "ranks": ranks, "factor": factor}
            rows.append(row | {"named": named, "tests": len(seeds) * len(WHEN)})
    return rows


def false_alarms(tests: int, seed: int) -> dict[str, str]:
    """Healthy tests in which somebody is named, of all, by kind."""
    each, alarms = tests // len(HEALTHY), {}
    for number, (kind, options) in enumerate(HEALTHY.items()):
        generator = np.random.default_rng((seed, number))
        settings = {"ranks": 8} | options
        nodes = [
            (1, 4 if settings["ranks"] % 4 == 0 else 1)[n % 2] for n in range(each)
        ]
        tests = [certified(generator, count, **settings) for count in nodes]
        alarms[kind] = f"{sum(bool(one.findings) for one in tests)} of {each}"
    return alarms


def slow_rank_is_named(
    generator: np.random.Generator, ranks: int, excess: float, **noise: Any
) -> bool:
    """In one test, in which rank 0 is slower by ``excess``, and nobody else with it."""
    factors = np.ones((ranks, noise.get("rounds", ROUNDS)))
    factors[0] += excess
    everywhere = (*TESTED, BURN_IN)
    return is_named(certified(generator, 1, ranks, factors, everywhere, **noise), [0])


def power(tests: int, seed: int, counts: list[int]) -> list[dict[str, Any]]:
    """Share of tests in which one rank that is 5% slow is named."""
    rows, rounds = [], (6, 16, 32, 64)
    for ranks, noise, count in itertools.product(counts, (0.01, 0.02, 0.05), rounds):
        generator, row = np.random.default_rng(seed), {"noise": noise, "rounds": count}
        case = row | {"ranks": ranks, "excess": 0.05, "correlation": 0.8}
        found = sum(slow_rank_is_named(generator, **case) for _ in range(tests))
        rows.append({"ranks": ranks, **row, "named": f"{found} of {tests}"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parts = (("--seeds", 2), ("--healthy", 2400), ("--power", 60), ("--seed", 0))
    for name, number in parts:
        parser.add_argument(name, type=int, default=number)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 64])
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.seeds)
    found = {
        "false_alarms": false_alarms(options.healthy, options.seed),
        "power": power(options.power, options.seed, options.ranks),
        "rows": sweep(seeds, options.ranks),
    }
    print(json.dumps(vars(options) | found))


if __name__ == "__main__":
    main()
