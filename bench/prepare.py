"""Speed of data preparation's inner loops. Prints one JSON line.

instances  training instances of a text (tokenize, pair, mask, digest, write): bytes per CPU second.
           With --reference in turns with MLCommons' published create_pretraining_data.py: ratio of
           CPU seconds without startup, and whether the instances are identical. The reference takes
           minutes for a megabyte.
packing    fill rate of packed rows on Wikipedia's lengths (synthetic), and time to pack.

usage: python bench/prepare.py instances TEXT VOCAB [--reference FOLDER --reference-python PYTHON]
       python bench/prepare.py packing
       TEXT has one sentence per line and a blank line after each document
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lib import Parser, cpu_seconds, emit, file, folder_with, integer

from bert.data.format import content_digest
from bert.data.packing import pack
from bert.data.synthetic import wikipedia_like_lengths
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.instances.sampling import instances_of, write_instances
from input_preprocessing.tensorflow_files.tfrecord import (
    Widths,
    read_tfrecord,
    write_tfrecord,
)
from input_preprocessing.text import vocabulary

LENGTH, NUM_SEQUENCES = 512, 1_000_000


def measure_instances(options: argparse.Namespace) -> dict[str, Any]:
    words, config = vocabulary.load(options.vocab), SamplingConfig()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def write() -> int:
            sequences, _ = write_instances(
                options.text, folder / "instances.hdf5", words, config
            )
            return sequences

        sequences = write()  # compiles, warms the file cache
        seconds = median_seconds(write, options.repeats)
        size = options.text.stat().st_size / 1e6
        figures = {
            "megabytes_of_text": round(size, 2),
            "sequences": sequences,
            "ours_megabytes_per_cpu_second": round(size / seconds, 2),
        }
        return figures | (
            against_reference(options, folder) if options.reference else {}
        )


def against_reference(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Ratios of CPU seconds of the published program to ours, in turns.

    For the instances only, and with the TFRecord file.
    """
    ours, theirs = folder / "ours.tfrecord", folder / "theirs.tfrecord"
    script = Path(__file__).with_name("reference_instances.py")
    line = [
        options.reference_python,
        script,
        options.reference,
        options.text,
        options.vocab,
    ]
    words, config = vocabulary.load(options.vocab), SamplingConfig()
    widths = Widths(config.max_seq_length, config.max_predictions_per_seq)
    records, _ = instances_of(options.text, words, config)
    made: list[float] = []
    both: list[float] = []
    for _ in range(options.repeats):
        command = [*map(str, line), str(theirs)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        reference = json.loads(done.stdout.splitlines()[-1])
        mine = cpu_seconds(lambda: instances_of(options.text, words, config))
        write = cpu_seconds(lambda: write_tfrecord(ours, records, widths))
        # Of the same turn, so that a slow moment of the machine cancels out.
        made.append(reference["instances"] / mine)
        both.append((reference["instances"] + reference["write"]) / (mine + write))
    digests = [content_digest(read_tfrecord(path)[0]) for path in (ours, theirs)]
    return {
        "ratio_to_reference_instances": round(statistics.median(made), 1),
        "ratio_to_reference_with_tfrecord": round(statistics.median(both), 1),
        "ratios": {
            "instances": [round(ratio, 1) for ratio in made],
            "with_tfrecord": [round(ratio, 1) for ratio in both],
        },
        "same_instances": digests[0] == digests[1],
    }


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    return statistics.median(cpu_seconds(function) for _ in range(repeats))


def measure_packing() -> dict[str, Any]:
    lengths = wikipedia_like_lengths(NUM_SEQUENCES, LENGTH, np.random.default_rng(0))
    figures = {
        "sequences": NUM_SEQUENCES,
        "mean_length": round(float(lengths.mean()), 2),
    }
    for most in (3, 4):
        packing = partial(pack, lengths, LENGTH, most)
        rows = len(packing()[1]) - 1
        figures[f"fullness_at_{most}"] = round(
            float(lengths.sum() / (rows * LENGTH)), 6
        )
        figures[f"cpu_seconds_at_{most}"] = round(median_seconds(packing, 3), 2)
    return figures


def main() -> None:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(
        required=True, dest="what", metavar="instances|packing"
    )
    instances = commands.add_parser("instances")
    instances.add_argument("text", type=file)
    instances.add_argument("vocab", type=file)
    instances.add_argument(
        "--repeats", type=integer, default=3, help="(default %(default)s)"
    )
    reference = folder_with("create_pretraining_data.py", "tokenization.py")
    instances.add_argument(
        "--reference",
        type=reference,
        help="folder of the reference's create_pretraining_data.py",
    )
    instances.add_argument(
        "--reference-python",
        default=sys.executable,
        help="one with TensorFlow (default: this one)",
    )
    commands.add_parser("packing")
    options = parser.parse_args()
    if options.what == "packing":
        emit("packing", measure_packing(), data="Wikipedia mix (synthetic)")
        return
    if shutil.which(options.reference_python) is None:
        parser.error(f"--reference-python {options.reference_python}: no such program")
    emit("instances", measure_instances(options))


if __name__ == "__main__":
    main()
