"""Speed of making training instances of a text (tokenize, pair, mask, digest, write).

Prints one JSON line: bytes per CPU second; with --reference in turns with MLCommons' published
create_pretraining_data.py: ratios of CPU seconds without startup, of the instances and with their
TFRecord file, and whether the instances are identical. The reference takes minutes for a megabyte.

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
from input_preprocessing.tensorflow_files.tfrecord import (
    Widths,
    read_tfrecord,
    write_tfrecord,
)
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
    """Ratios of CPU seconds of the published program to ours, in turns."""
    theirs, mine = (folder / f"{name}.tfrecord" for name in ("theirs", "mine"))
    script = Path(__file__).with_name("reference_instances.py")
    line = options.reference_python, script, options.reference.parent
    command = [*map(str, (*line, options.text, options.vocab, theirs))]
    words, config = vocabulary.load(options.vocab), SamplingConfig()
    widths = Widths(config.max_seq_length, config.max_predictions_per_seq)
    records, _ = instances_of(options.text, words, config)
    write_tfrecord(mine, records, widths)
    ratios, with_file = list[float](), list[float]()
    for _ in range(options.repeats):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        instances = cpu_seconds(lambda: instances_of(options.text, words, config))
        file = cpu_seconds(lambda: write_tfrecord(mine, records, widths))
        # Of the same turn, so that a slow moment of the machine cancels out.
        made, written = map(float, done.stdout.split()[-2:])
        ratios.append(round(made / instances, 1))
        with_file.append(round(written / (instances + file), 1))
    same = read_tfrecord(theirs)[0]
    return {
        "ratios_to_reference": ratios,
        "with_tfrecord": with_file,
        "same_instances": content_digest(records) == content_digest(same),
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
