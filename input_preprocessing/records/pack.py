"""Stage `pack`: instances into shards of packed rows."""

import argparse
from functools import partial
from pathlib import Path

import numpy as np

from bert.data.packing import pack
from bert.data.records import Records
from input_preprocessing.records import sharding
from input_preprocessing.records.sharding import Integers, random_order


def pack_records(
    source: Path,
    target: Path,
    *,
    shards: int | None,
    seed: int,
    max_sequences_per_row: int,
    jobs: int,
) -> str:
    """Writes the sequences of the files in `source`, packed, as shards to `target`; returns their
    multiset digest.
    """
    files = sharding.verified_files(source, jobs)
    stage = f"pack {max_sequences_per_row}"
    plan = sharding.plan_shards(files, target, stage=stage, shards=shards, seed=seed)
    row_tokens = plan.metadata.max_seq_length
    arrange = partial(_packed, seed, row_tokens, max_sequences_per_row)
    return sharding.make_shards(plan, arrange, label="pack", jobs=jobs)


def _packed(
    seed: int, max_tokens: int, max_sequences: int, records: Records, group: int
) -> tuple[Integers, Integers]:
    """Packs a group's sequences in random order into rows, and shuffles the rows."""
    # Before: pack() takes sequences of one length in the order given. After: it leaves rows of one
    # pattern side by side.
    mixed = random_order(records.num_sequences, seed, group, use=0)
    lengths = records.sequence_lengths[mixed]
    order, row_offsets = pack(lengths, max_tokens, max_sequences)
    rows = random_order(len(row_offsets) - 1, seed, group, use=1)
    sizes = np.diff(row_offsets)[rows]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    # For each sequence (S,), row by row, its index in `order`: where its row starts there, less
    # where that row starts now, plus the sequence's number now.
    shift = np.repeat(row_offsets[rows] - offsets[:-1], sizes)
    return mixed[order[shift + np.arange(offsets[-1])]], offsets


def main(options: argparse.Namespace) -> None:
    """Packs the sequences of a folder of record files into rows, and the rows, in random order,
    into shards.

    Each row has at most --max-sequences-per-row sequences, and at most as many tokens as the
    maximal sequence length.
    """
    sharding.run_stage(options, pack_records)
