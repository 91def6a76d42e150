"""Packs the sequences of a folder of record files into rows, and the rows, in random order, into shards.

Each row holds at most --max-sequences-per-row sequences and as many tokens as the longest sequence allowed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from bert.data.packing import pack
from bert.data.records import Records
from input_preprocessing.records.deal import Integers, make_shards, plan_deal, random_order
from input_preprocessing.records.shuffle import add_shard_options, source_files
from input_preprocessing.stage.cli import positive, run, stage_parser


class _Pack:
    """Rows of a group's sequences in random order, each made of random sequences of the lengths it wants."""

    def __init__(self, seed: int, max_tokens: int, max_sequences: int) -> None:
        self.seed, self.max_tokens, self.max_sequences = seed, max_tokens, max_sequences

    def __call__(self, records: Records, group: int) -> tuple[Integers, Integers]:
        mixed = random_order(records.num_sequences, self.seed, group, use=0)
        order, row_offsets = pack(records.sequence_lengths[mixed], self.max_tokens, self.max_sequences)
        rows = random_order(len(row_offsets) - 1, self.seed, group, use=1)
        sizes = np.diff(row_offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        where = np.repeat(row_offsets[rows] - offsets[:-1], sizes) + np.arange(offsets[-1])
        return mixed[order[where]], offsets


def pack_records(
    source: Path,
    target: Path,
    *,
    shards: int | None,
    seed: int,
    max_sequences_per_row: int,
    jobs: int,
    part: tuple[int, int] = (0, 1),
) -> str:
    """Writes the sequences of the files in `source`, packed, as shards to `target`; returns their multiset digest."""
    deal, multiset = plan_deal(
        source_files(source), target, stage=f"pack {max_sequences_per_row}", shards=shards, seed=seed
    )
    arrange = _Pack(seed, deal.metadata.max_seq_length, max_sequences_per_row)
    return make_shards(deal, arrange, label="pack", jobs=jobs, multiset=multiset, part=part)


def _main(options: argparse.Namespace) -> None:
    pack_records(
        options.source,
        options.target,
        shards=options.shards,
        seed=options.random_seed,
        max_sequences_per_row=options.max_sequences_per_row,
        jobs=options.jobs,
    )
    print(f"{options.target}: {len(source_files(options.target))} shards", file=sys.stderr)


def main() -> None:
    """Command line."""
    parser = stage_parser("pack", __doc__)
    add_shard_options(parser)
    parser.add_argument("--max-sequences-per-row", type=positive, default=3, help="(default %(default)s)")
    run(parser, _main)
