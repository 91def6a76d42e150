"""Stage `shuffle`: instances into shards in random order."""

import argparse
from functools import partial
from pathlib import Path

from input_preprocessing.records import sharding


def shuffle_records(
    source: Path, target: Path, *, shards: int | None, seed: int, jobs: int
) -> str:
    """Writes the sequences of the files in `source`, shuffled, as shards to `target`; returns their
    multiset digest.
    """
    files = sharding.verified_files(source, jobs)
    plan = sharding.plan_shards(
        files, target, stage="shuffle", shards=shards, seed=seed
    )
    arrange = partial(sharding.in_random_order, seed)
    return sharding.make_shards(plan, arrange, label="shuffle", jobs=jobs)


def main(options: argparse.Namespace) -> None:
    """Shuffles all sequences of a folder of record files into shards, seeded, in bounded memory."""
    sharding.run_stage(options, shuffle_records)
