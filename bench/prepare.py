"""Speed of making training instances of a text (tokenize, pair, mask, digest, write).

Prints one JSON line: bytes per CPU second; with --reference in turns with MLCommons' published
create_pretraining_data.py: ratio of CPU seconds without startup, and whether the instances are
identical. The reference takes minutes for a megabyte.

usage: python bench/prepare.py TEXT VOCAB [--reference FILE --reference-python PYTHON]
       TEXT has one sentence per line and a blank line after each document; FILE is the
       reference's create_pretraining_data.py, beside its tokenization.py
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib import Parser, cpu_seconds, emit, file, integer

from bert.data.format import content_digest
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.instances.sampling import instances_of, write_instances
from input_preprocessing.tensorflow_files.tfrecord import read_tfrecord
from input_preprocessing.text import vocabulary


def measure(options: argparse.Namespace) -> dict[str, Any]:
    words, config = vocabulary.load(options.vocab), SamplingConfig()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = options.text, folder / "instances.hdf5", words, config
        write_instances(*written)  # compiles, warms the file cache
        seconds = statistics.median(
            cpu_seconds(lambda: write_instances(*written))
            for _ in range(options.repeats)
        )
        size = options.text.stat().st_size / 1e6
        figures = {"ours_mb_per_cpu_second": round(size / seconds, 2)}
        if options.reference:
            figures |= against_reference(options, folder)
        return figures


def against_reference(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Ratio of CPU seconds of the published program to ours, in turns, without writing files."""
    theirs = folder / "theirs.tfrecord"
    script = Path(__file__).with_name("reference_instances.py")
    line = options.reference_python, script, options.reference.parent
    command = [*map(str, (*line, options.text, options.vocab, theirs))]
    words, config = vocabulary.load(options.vocab), SamplingConfig()
    records, _ = instances_of(options.text, words, config)
    ratios = []
    for _ in range(options.repeats):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        mine = cpu_seconds(lambda: instances_of(options.text, words, config))
        # Of the same turn, so that a slow moment of the machine cancels out.
        ratios.append(float(done.stdout.splitlines()[-1]) / mine)
    digests = [content_digest(each) for each in (records, read_tfrecord(theirs)[0])]
    return {
        "ratio_to_reference": round(statistics.median(ratios), 1),
        "ratios": [round(ratio, 1) for ratio in ratios],
        "same_instances": digests[0] == digests[1],
    }


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("text", type=file)
    parser.add_argument("vocab", type=file)
    parser.add_argument("--repeats", type=integer, default=3)
    parser.add_argument(
        "--reference", type=file, help="the reference's create_pretraining_data.py"
    )
    parser.add_argument(
        "--reference-python",
        default=sys.executable,
        help="one with TensorFlow (default: this one)",
    )
    options = parser.parse_args()
    if shutil.which(options.reference_python) is None:
        parser.error(f"--reference-python {options.reference_python}: no such program")
    emit("instances", measure(options))


if __name__ == "__main__":
    main()
