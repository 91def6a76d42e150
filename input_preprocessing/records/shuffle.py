"""Shuffles the sequences of a folder of record files into shards, over all of them, seeded, in bounded memory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bert.data.records import DataError, Records
from input_preprocessing.records.deal import Integers, make_shards, plan_deal, random_order
from input_preprocessing.stage.cli import add_jobs, positive, run, stage_parser


class Permute:
    """A random order of a group's sequences."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, records: Records, group: int) -> tuple[Integers, None]:
        return random_order(records.num_sequences, self.seed, group, use=0), None


def source_files(folder: Path) -> list[Path]:
    """The record files of a folder, by name.

    Raises:
        DataError: there are none.
    """
    files = sorted(path for path in folder.glob("*.hdf5") if not path.name.startswith("."))
    if not files:
        raise DataError(f"no .hdf5 files in {folder}; check the path or run the stage before")
    return files


def shuffle_records(
    source: Path, target: Path, *, shards: int | None, seed: int, jobs: int, part: tuple[int, int] = (0, 1)
) -> str:
    """Writes the sequences of the files in `source`, shuffled, as shards to `target`; returns their multiset digest."""
    deal, multiset = plan_deal(source_files(source), target, stage="shuffle", shards=shards, seed=seed)
    return make_shards(deal, Permute(seed), label="shuffle", jobs=jobs, multiset=multiset, part=part)


def add_shard_options(parser: argparse.ArgumentParser) -> None:
    """Source, target, shards, seed and jobs of a stage that makes shards."""
    parser.add_argument("--source", type=Path, required=True, help="folder of record files, as `instances` makes them")
    parser.add_argument("--target", type=Path, required=True, help="folder for part_XXXXX_of_XXXXX.hdf5")
    parser.add_argument(
        "--shards", type=positive, help="number of shards (default: one per 500 sequences, at most 4320)"
    )
    parser.add_argument("--random-seed", type=int, default=12345, help="(default %(default)s)")
    add_jobs(parser)


def _main(options: argparse.Namespace) -> None:
    shuffle_records(options.source, options.target, shards=options.shards, seed=options.random_seed, jobs=options.jobs)
    print(f"{options.target}: {len(source_files(options.target))} shards", file=sys.stderr)


def main() -> None:
    """Command line."""
    parser = stage_parser("shuffle", __doc__)
    add_shard_options(parser)
    run(parser, _main)
