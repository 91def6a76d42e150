"""Speed of making training instances of a text (tokenize, pair, mask, digest, write).

Prints one JSON line: bytes per CPU second. Beside the reference's create_pretraining_data.py:
tests/bench/against_reference.py.

usage: python bench/prepare.py TEXT VOCAB
       TEXT has one sentence per line and a blank line after each document
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from lib import Parser, cpu_seconds, emit, file, integer

from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.instances.sampling import write_instances
from input_preprocessing.text import vocabulary


def measure(options: argparse.Namespace) -> dict[str, Any]:
    words, config = vocabulary.load(options.vocab), SamplingConfig()
    with tempfile.TemporaryDirectory() as name:
        written = options.text, Path(name, "instances.hdf5"), words, config
        write_instances(*written)  # compiles, warms the file cache
        seconds = statistics.median(
            cpu_seconds(lambda: write_instances(*written))
            for _ in range(options.repeats)
        )
    size = options.text.stat().st_size / 1e6
    return {"ours_mb_per_cpu_second": round(size / seconds, 2)}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("text", type=file)
    parser.add_argument("vocab", type=file)
    parser.add_argument("--repeats", type=integer, default=3)
    emit("instances", measure(parser.parse_args()))


if __name__ == "__main__":
    main()
