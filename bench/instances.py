"""Training instances (tokenise, pair, mask, digest, write), ours against a plain Python re-statement of the reference.

Both make the same instances of the same text; ours of the whole text, the other of its start, in turns. The figure that
does not depend on the machine is the ratio of bytes a CPU second; `reference_published` compares with the 0.12 MB/s a
core measured for the original (TensorFlow) program after start-up.

usage: python bench/instances.py TEXT [--vocab-file V] [--repeats 3] [--sample-kilobytes 150]
       without TEXT: a made-up text of 27 MB (the size of a shard of the real corpus), see bench/corpus.py
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import corpus
import result

from input_preprocessing.instances.make import write_instances
from input_preprocessing.instances.sampling import SamplingConfig
from input_preprocessing.text import vocabulary

_REFERENCE = 0.12e6  # bytes of text a second a core
_SHARD_BYTES = 27_000_000
sys.path.insert(0, str(result.ROOT / "tests" / "input_preprocessing" / "instances"))
import oracle  # noqa: E402


def peak_gigabytes(text: Path, vocab: Path, target: Path) -> float:
    """Greatest resident memory of a process that makes the instances of the text."""
    command = [sys.executable, "-m", "input_preprocessing.instances", "--input-file", text, "--vocab-file", vocab]
    subprocess.run([*map(str, command), "--output-file", str(target)], check=True, capture_output=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6


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
        "ratio_to_published_reference": round(ours / _REFERENCE, 1),
        "peak_gigabytes_of_a_worker": round(memory, 2),
        "cpu_seconds": {name: [round(span, 2) for span in spans] for name, spans in times.items()},
    }
    targets = {
        "ratio_to_published_reference": (50.0, True),
        "peak_gigabytes_of_a_worker": (1.0, False),
    }
    result.emit(
        "instances", figures, data="made-up text" if options.text is None else "the text given", targets=targets
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="?", help="one sentence per line")
    parser.add_argument("--vocab-file", type=Path, help="(default: the made-up corpus's)")
    parser.add_argument("--repeats", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--sample-kilobytes", type=float, default=150, help="for the slow one (default %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.text is None or options.vocab_file is None:
            corpus.make(folder, _SHARD_BYTES, 1)
        text = options.text or folder / "download" / "results4" / "part-00000-of-00001"
        measure(text, options.vocab_file or folder / "download" / "vocab.txt", folder, options)


if __name__ == "__main__":
    main()
