"""Training instances (tokenise, pair, mask, digest, write) against the reference and a plain Python re-statement of it.

Ours takes the whole text, the others its start, in turns; the figures are ratios of bytes a CPU second, start-up apart.
With --reference they are to MLCommons' create_pretraining_data.py itself, run as published, and the instances in its
file with those in ours. The start of our whole process, with --help and on a text of two lines, is measured as well.

usage: python bench/instances.py TEXT [--vocab-file V] [--repeats 3] [--sample-kilobytes 150]
         [--reference FOLDER --reference-python PYTHON]
       without TEXT: a made-up text of 27 MB (the size of a shard of the real corpus), see bench/corpus.py
       FOLDER: of create_pretraining_data.py and tokenization.py; PYTHON: an interpreter that has TensorFlow
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import corpus
import result
from command_line import Parser, file, folder_with, integer, positive

from bert.data.format import content_digest
from input_preprocessing.instances.make import instances_of, write_instances
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.tensorflow_files.tfrecord import Widths, read_tfrecord, write_tfrecord
from input_preprocessing.text import vocabulary

_SHARD_BYTES = 27_000_000
sys.path.insert(0, str(result.ROOT / "tests" / "input_preprocessing" / "instances"))
import oracle  # noqa: E402


def peak_gigabytes(text: Path, vocab: Path, target: Path) -> float:
    """Greatest resident memory of a process that makes the instances of the text."""
    command = [sys.executable, "-m", "input_preprocessing", "instances", "--input-file", text, "--vocab-file", vocab]
    subprocess.run([*map(str, command), "--output-file", str(target)], check=True, capture_output=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6


def start_seconds(vocab: Path, folder: Path, repeats: int) -> dict[str, float]:
    """Median CPU seconds of a whole process: --help, and a text of two lines."""
    tiny = folder / "tiny"
    tiny.write_text("The cat sat.\n\nA dog ran.\n")
    line = [sys.executable, "-m", "input_preprocessing", "instances"]
    work = [*line, "--input-file", str(tiny), "--vocab-file", str(vocab), "--output-file", str(folder / "tiny.hdf5")]
    subprocess.run(work, check=True, capture_output=True)  # compiled, and kept
    times = result.in_turns(
        {
            "help": lambda: subprocess.run([*line, "--help"], check=True, capture_output=True),
            "two_lines": lambda: subprocess.run(work, check=True, capture_output=True),
        },
        repeats,
    )
    return {name: round(seconds, 2) for name, seconds in result.medians(times).items()}


def against_reference(text: Path, vocab: Path, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Ratios of CPU seconds of the published program to ours, in turns: instances alone, and with the TFRecord file."""
    ours, theirs = folder / "ours.tfrecord", folder / "theirs.tfrecord"
    script = Path(__file__).with_name("reference_instances.py")
    line = [options.reference_python, script, options.reference, text, vocab, theirs]
    words, config = vocabulary.load(vocab), SamplingConfig()
    records, _ = instances_of(text, words, config)
    write_tfrecord(ours, records, Widths(config.max_seq_length, config.max_predictions_per_seq))
    made: list[float] = []
    both: list[float] = []
    for _ in range(options.repeats):
        done = subprocess.run([*map(str, line)], check=True, capture_output=True, text=True)
        reference = json.loads(done.stdout.splitlines()[-1])
        mine = result.cpu_seconds(lambda: instances_of(text, words, config))
        write = result.cpu_seconds(
            lambda: write_tfrecord(ours, records, Widths(config.max_seq_length, config.max_predictions_per_seq))
        )
        made.append(reference["instances"] / mine)
        both.append((reference["instances"] + reference["write"]) / (mine + write))
    return {
        "reference_megabytes": round(text.stat().st_size / 1e6, 2),
        "ratio_to_reference_instances": round(statistics.median(made), 1),
        "ratio_to_reference_with_tfrecord": round(statistics.median(both), 1),
        "ratios": {"instances": [round(r, 1) for r in made], "with_tfrecord": [round(r, 1) for r in both]},
        "same_instances": content_digest(read_tfrecord(ours)[0]) == content_digest(read_tfrecord(theirs)[0]),
    }


def measure(text: Path, vocab: Path, folder: Path, options: argparse.Namespace) -> None:
    """Prints the result."""
    data = text.read_bytes()
    end = data.find(b"\n\n", int(options.sample_kilobytes * 1000)) + 2
    sample = data[: end if end > 1 else len(data)]
    words = vocabulary.load(vocab)
    target = folder / "instances.hdf5"
    config = SamplingConfig()
    memory = peak_gigabytes(text, vocab, target)
    slow_words = oracle.read_vocabulary(vocab.read_bytes())
    sequences, _ = write_instances(text, target, words, config)  # compiled, and the file cache warm
    times = result.in_turns(
        {
            "ours": lambda: write_instances(text, target, words, config),
            "plain_python": lambda: oracle.make_instances(sample, slow_words),
        },
        options.repeats,
    )
    seconds = result.medians(times)
    ours, plain = len(data) / seconds["ours"], len(sample) / seconds["plain_python"]
    figures = {
        "megabytes_of_text": round(len(data) / 1e6, 2),
        "sequences": sequences,
        "ours_megabytes_per_cpu_second": round(ours / 1e6, 2),
        "plain_python_megabytes_per_cpu_second": round(plain / 1e6, 3),
        "ratio_to_plain_python": round(ours / plain, 1),
        "peak_gigabytes_of_a_worker": round(memory, 2),
        "start_cpu_seconds": start_seconds(vocab, folder, options.repeats),
        "cpu_seconds": {name: [round(span, 2) for span in spans] for name, spans in times.items()},
    }
    targets: dict[str, tuple[float, bool]] = {"peak_gigabytes_of_a_worker": (1.0, False)}
    if options.reference:
        piece = folder / "piece"
        piece.write_bytes(sample)
        figures |= against_reference(piece, vocab, folder, options)
        targets |= {"ratio_to_reference_instances": (50.0, True), "ratio_to_reference_with_tfrecord": (40.0, True)}
    result.emit(
        "instances", figures, data="made-up text" if options.text is None else "the text given", targets=targets
    )


def main() -> None:
    """Command line."""
    parser = Parser(__doc__)
    parser.add_argument("text", type=file, nargs="?", help="one sentence per line")
    parser.add_argument("--vocab-file", type=file, help="(default: the made-up corpus's)")
    parser.add_argument("--repeats", type=integer, default=3, help="(default %(default)s)")
    parser.add_argument("--sample-kilobytes", type=positive, default=150, help="for the slow one (default %(default)s)")
    reference = folder_with("create_pretraining_data.py", "tokenization.py")
    parser.add_argument("--reference", type=reference, help="folder of the reference's create_pretraining_data.py")
    parser.add_argument("--reference-python", default=sys.executable, help="that has TensorFlow (default: this one)")
    options = parser.parse_args()
    if shutil.which(options.reference_python) is None:
        parser.error(f"--reference-python {options.reference_python}: no such program: give a Python with TensorFlow")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.text is None or options.vocab_file is None:
            corpus.make(folder, _SHARD_BYTES, 1)
        text = options.text or folder / "download" / "results4" / "part-00000-of-00001"
        measure(text, options.vocab_file or folder / "download" / "vocab.txt", folder, options)


if __name__ == "__main__":
    main()
