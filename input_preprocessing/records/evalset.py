"""Stage `evalset`: the evaluation samples."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bert.data.format import write_records
from bert.data.records import DataError
from input_preprocessing.records.tfrecord_nvidia import read_any
from input_preprocessing.stage import manifest
from input_preprocessing.stage.cli import OPTIONS, check_not_source, say
from input_preprocessing.tensorflow_files.tfrecord import notes_of_sizes

NUM_EVAL_SAMPLES: int = OPTIONS["evalset"]["--num-samples"]["default"]


def pick_samples(
    source: Path, target: Path, num_samples: int = NUM_EVAL_SAMPLES
) -> int:
    """Writes `num_samples` evenly spaced sequences, or all if there are fewer; prints and returns
    their number.

    Raises:
        DataError: unreadable or empty source, or unwritable target.
    """
    if target.suffix in (".tfrecord", ".tfrecords"):
        raise DataError(
            f"{target}: evalset writes records, .hdf5; export_records makes TFRecords of them"
        )
    records, metadata = read_any(source)
    count = records.num_sequences
    if not count:
        raise DataError(
            f"{source} has no sequences to evaluate on; check the evaluation text"
        )
    picked: Sequence[int] = range(count)
    short = ""
    if count < num_samples:
        short = f" (all available; {num_samples:,} were requested)"
    else:
        # The reference's pick_eval_samples.py, in its order of operations: the quotient is rounded.
        step = count / num_samples
        picked = [int(number * step) for number in range(num_samples)]
    made_of = metadata.source or ((source.name, manifest.md5_of(source)),)
    origin = (*made_of, (f"evalset {num_samples}", metadata.content_digest))
    metadata = dataclasses.replace(metadata, source=origin)
    write_records(target, records.select(picked), metadata)
    say(f"{target}: {len(picked):,} evaluation samples{short}")
    return len(picked)


def main(options: argparse.Namespace) -> None:
    """Picks the evaluation samples: --num-samples of a file's n sequences, at int(i * (n /
    num_samples)).

    Of a record file, a TFRecord (as the reference's pick_eval_samples.py), or NVIDIA's HDF5.
    """
    check_not_source(options.target, options.source)
    pick_samples(options.source, options.target, options.num_samples)
    for note in notes_of_sizes([options.source]):
        say(note)
