"""Picks the evaluation samples: --num-samples of the n sequences of a record file, at int(i * (n / num_samples))."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np

from bert.data.format import open_records, write_records
from bert.data.records import DataError
from input_preprocessing.stage.cli import check_not_source, positive, run, stage_parser

NUM_SAMPLES = 10_000


def pick_samples(source: Path, target: Path, num_samples: int = NUM_SAMPLES) -> int:
    """Writes the picked sequences; returns how many: all n where n is below num_samples.

    Raises:
        DataError: unreadable or empty source, or unwritable target.
    """
    records, metadata = open_records(source)
    count = records.num_sequences
    if not count:
        raise DataError(f"{source} has no sequences to evaluate on; check the evaluation text")
    chosen = range(count) if count <= num_samples else [int(i * (count / num_samples)) for i in range(num_samples)]
    indices = np.array(chosen, dtype=np.int64)
    origin = (*metadata.source, (f"evalset {num_samples}", metadata.content_digest))
    write_records(target, records.select(indices), dataclasses.replace(metadata, source=origin))
    return len(indices)


def report(target: Path, count: int, num_samples: int) -> str:
    """What to tell the user about the evaluation set."""
    short = f" (all there are; {num_samples:,} were asked for)" if count < num_samples else ""
    return f"{target}: {count:,} evaluation samples{short}"


def _main(options: argparse.Namespace) -> None:
    check_not_source(options.target, options.source)
    count = pick_samples(options.source, options.target, options.num_samples)
    print(report(options.target, count, options.num_samples), file=sys.stderr)


def main() -> None:
    """Command line."""
    parser = stage_parser("evalset", __doc__)
    parser.add_argument("--source", type=Path, required=True, help="instances of the evaluation text")
    parser.add_argument("--target", type=Path, required=True, help="records to write, part_eval_10k.hdf5")
    parser.add_argument("--num-samples", type=positive, default=NUM_SAMPLES, help="(default %(default)s)")
    run(parser, _main)
