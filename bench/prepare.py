"""Data preparation on a synthetic corpus with the statistics of English Wikipedia that matter for time. Prints JSON.

all        text to packed shards: CPU seconds of each step, memory, disk. Extrapolates by bytes to the real corpus
           (13.2 GB, 501 files, 156.7 million sequences, 4,320 shards) on 64 cores: the tasks of a step run in rounds,
           an incomplete last round takes as long as a full one, and the last step is a single process. Run it twice
           to exclude the compilation, which happens once per machine.
instances  training instances (tokenize, pair, mask, digest, write): bytes per CPU second, memory. With --reference,
           the beginning of the text in turns with MLCommons' published create_pretraining_data.py: ratio of CPU
           seconds without startup, and whether the instances are identical.
packing    fill rate of packed rows on Wikipedia's length distribution (synthetic), and time to pack.

The corpus: nearly Zipfian word frequencies over 200,000 words, the frequent ones from Python's documentation, the rare
ones made of syllables. Documents of log-normal length, 2 kB on average; every eighth sentence has a non-ASCII
character. With a vocabulary of 30,522 trained on it: 0.227 tokens per byte, sequences of 256 tokens on average, 20% of
them full (Wikipedia: 254.5 and 23.5%). Seeded.

usage: python bench/prepare.py all [--megabytes 108] [--jobs 2] [--keep FOLDER]
       python bench/prepare.py instances [TEXT] [--vocab-file V] [--reference FOLDER --reference-python PYTHON]
       python bench/prepare.py packing [--sequences 1000000]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from lib import (
    Parser,
    at_least,
    cpu_seconds,
    emit,
    file,
    folder_with,
    in_turns,
    integer,
    medians,
    new_folder,
    positive,
)

from bert.data.format import atomic_file, content_digest
from bert.data.packing import pack
from bert.data.synthetic import wikipedia_like_lengths
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.instances.sampling import instances_of, write_instances
from input_preprocessing.tensorflow_files.tfrecord import Widths, read_tfrecord, write_tfrecord
from input_preprocessing.text import vocabulary
from input_preprocessing.text.corpus import bert_config, train_vocabulary
from input_preprocessing.text.sources import pydoc_documents

# A shard of the real text: 13.2 GB in 500 files.
SHARD_BYTES = 27_000_000
# Of MLCommons' Wikipedia of 2020-01-01, with its evaluation text, in 4,320 packed shards.
REAL_BYTES, REAL_FILES, REAL_SEQUENCES, REAL_SHARDS, CORES = 13_233e6, 501, 156_726_829, 4320, 64
SEQUENCES_PER_GROUP = 1_200_000  # input_preprocessing.deal
LENGTH = 512
WORDS, SKEW = (
    200_000,
    2.0,
)  # words, and how much more frequent the frequent ones are than in Zipf's law
BEYOND_ASCII = ("–", "é", "ö", "’", "“", "ā", "č", "漢", "…", "°")
VOCABULARY = 30_522


def documents(generator: np.random.Generator, bank: np.ndarray) -> str:
    """A hundred documents with words of the bank: one sentence per line, a blank line after each document."""
    counts = np.maximum(1, generator.lognormal(np.log(9.0), 1.1, 100).astype(int))  # sentences
    lengths = np.maximum(3, generator.poisson(20.0, counts.sum()))  # words
    # In Zipf's law the logarithm of the rank is uniform; a
    # power above 1 favours the frequent words.
    ranks = generator.random(lengths.sum()) ** SKEW * np.log(len(bank))
    chosen = bank[np.minimum(np.exp(ranks).astype(np.int64) - 1, len(bank) - 1)]
    # Non-ASCII text takes the slow path of the tokenizer.
    beyond = generator.random(len(lengths)) < 1 / 8
    sentences, at = [], 0
    for length, odd in zip(lengths.tolist(), beyond.tolist(), strict=True):
        sentence = " ".join(chosen[at : at + length])
        mark = f" {BEYOND_ASCII[at % len(BEYOND_ASCII)]}" if odd else ""
        sentences.append(f"{sentence[:1].upper()}{sentence[1:]}{mark}, {at % 2000}.")
        at += length
    ends = np.cumsum(counts).tolist()
    texts = (
        "\n".join(sentences[end - count : end])
        for end, count in zip(ends, counts.tolist(), strict=True)
    )
    return "\n\n".join(texts) + "\n\n"


def make_corpus(outputdir: Path, size: int) -> None:
    """Writes OUTPUTDIR/download for `prepare_data.sh --skip-download`, with `size` bytes of training text."""
    download = outputdir / "download"
    folder = download / "results4"
    folder.mkdir(parents=True, exist_ok=True)
    # The words, the most frequent first.
    text = " ".join(sentence for document in pydoc_documents() for sentence in document)
    real = [word for word, _ in Counter(re.findall(r"[A-Za-z']{1,12}", text)).most_common(8_000)]
    generator = np.random.default_rng(1)
    syllables = [
        a + b + c for a in "bcdfghklmnprstvw" for b in "aeiou" for c in ("", "n", "r", "s", "l")
    ]
    picked = generator.integers(0, len(syllables), (WORDS - len(real), 4)).tolist()
    lengths = generator.integers(2, 5, len(picked)).tolist()
    # Rare words break into several tokens, as Wikipedia's do.
    made = ["".join(syllables[i] for i in row[:n]) for row, n in zip(picked, lengths, strict=True)]
    bank, files = np.array(real + made, dtype=object), max(1, round(size / SHARD_BYTES))

    def write(path: Path, size: int, seed: int) -> None:
        generator, written = np.random.default_rng(seed), 0
        with atomic_file(path) as partial, open(partial, "w", encoding="utf-8") as target:
            while written < size:
                written += target.write(documents(generator, bank))

    for number in range(files):
        write(folder / f"part-{number:05d}-of-{files:05d}", size // files, number)
    # The real eval.txt has 32.9 MB.
    write(folder / "eval.txt", max(200_000, min(33_000_000, size // 50)), files)
    sample = outputdir / "vocabulary.txt"
    write(sample, min(size, 6_000_000), files + 1)
    train_vocabulary([sample], VOCABULARY, download / "vocab.txt")
    sample.unlink()
    with atomic_file(download / "bert_config.json") as partial:
        partial.write_text(json.dumps(bert_config(VOCABULARY, 4, 256, 512)) + "\n")


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder, except downloads."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # just renamed
            total += path.stat().st_size if path.is_file() and "download" not in path.parts else 0
    return total


def measure_all(options: argparse.Namespace) -> None:
    """CPU seconds of each step, total wall time, peak memory of a process and peak disk usage."""
    with tempfile.TemporaryDirectory() as name:
        outputdir = options.keep or Path(name)
        if not (outputdir / "download" / "bert_config.json").is_file():
            make_corpus(outputdir, int(options.megabytes * 1e6))
        size = sum(path.stat().st_size for path in (outputdir / "download" / "results4").iterdir())
        scale = REAL_BYTES / size
        command = [
            sys.executable,
            "-m",
            "input_preprocessing",
            "prepare",
            "--outputdir",
            str(outputdir),
        ]
        command += ["--skip-download", "--packed-data", "--jobs", str(options.jobs)]
        command += ["--shards", str(max(2, round(REAL_SHARDS / scale)))]
        most, ended = [0], threading.Event()

        # The peak lies between: unfinished files are removed before the end.
        def watch() -> None:
            while not ended.wait(0.5):
                most[0] = max(most[0], size_of(outputdir))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        started, cpu = time.perf_counter(), {}
        # Each step by itself, to extrapolate it by itself; the last command does what remains.
        for step in ("start", "instances", "shards", "finish"):
            only = [] if step == "finish" else ["--only", step]
            run = functools.partial(
                subprocess.run, [*command, *only], check=True, capture_output=True
            )
            cpu[step] = cpu_seconds(run)
        wall = time.perf_counter() - started
        ended.set()
        watcher.join()
        output = size_of(outputdir)
    num_groups = REAL_SEQUENCES / SEQUENCES_PER_GROUP
    # 501 files on 64 cores take 8 rounds, the last of them nearly empty.
    files = math.ceil(REAL_FILES / CORES) * cpu["instances"] / REAL_FILES
    groups = math.ceil(num_groups / CORES) * cpu["shards"] / num_groups
    figures = {
        "jobs": options.jobs,
        "bytes_of_text": size,
        "cpu_seconds": {step: round(seconds, 1) for step, seconds in cpu.items()},
        "wall_seconds": round(wall, 1),
        # ru_maxrss is in kilobytes.
        "peak_gigabytes_of_a_worker": round(
            resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6, 2
        ),
        "peak_disk_megabytes": round(most[0] / 1e6),
        "output_megabytes": round(output / 1e6),
        "real_corpus_minutes_on_64_cores": round((files + groups + cpu["finish"]) * scale / 60, 1),
        "real_corpus_gigabytes_of_disk": round(most[0] * scale / 1e9),
    }
    emit("prepare", figures, data="made-up corpus")


def measure_instances(options: argparse.Namespace) -> None:
    if shutil.which(options.reference_python) is None:
        name = options.reference_python
        options.parser.error(
            f"--reference-python {name}: no such program: give a Python that has TensorFlow"
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.text is None or options.vocab_file is None:
            make_corpus(folder, SHARD_BYTES)
        text = options.text or folder / "download" / "results4" / "part-00000-of-00001"
        vocab = options.vocab_file or folder / "download" / "vocab.txt"
        data = text.read_bytes()
        line = [sys.executable, "-m", "input_preprocessing", "instances"]
        line += map(
            str,
            [
                "--input-file",
                text,
                "--vocab-file",
                vocab,
                "--output-file",
                folder / "instances.hdf5",
            ],
        )
        # A process of its own, as its peak memory is a figure.
        subprocess.run(line, check=True, capture_output=True)
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
        words, config = vocabulary.load(vocab), SamplingConfig()
        write = functools.partial(write_instances, text, folder / "instances.hdf5", words, config)
        sequences, _ = write()  # compiles, warms the file cache
        # In this process, without its startup.
        times = in_turns({"ours": write}, options.repeats)
        figures = {
            "megabytes_of_text": round(len(data) / 1e6, 2),
            "sequences": sequences,
            "ours_megabytes_per_cpu_second": round(len(data) / medians(times)["ours"] / 1e6, 2),
            "peak_gigabytes_of_a_worker": round(memory, 2),
            "cpu_seconds": {
                name: [round(span, 2) for span in spans] for name, spans in times.items()
            },
        }
        if options.reference:
            # Whole documents; without a blank line find returns -1, and all of the text is taken.
            end = data.find(b"\n\n", int(options.sample_kilobytes * 1000)) + 2
            (folder / "piece").write_bytes(data[: end if end > 1 else len(data)])
            figures |= against_reference(folder / "piece", vocab, folder, options)
    emit("instances", figures, data="made-up text" if options.text is None else "the text given")


def against_reference(
    text: Path, vocab: Path, folder: Path, options: argparse.Namespace
) -> dict[str, object]:
    """Ratios of CPU seconds of the published program to ours, in turns: instances only, and with the TFRecord file."""
    ours, theirs = folder / "ours.tfrecord", folder / "theirs.tfrecord"
    script = Path(__file__).with_name("reference_instances.py")
    line = [options.reference_python, script, options.reference, text, vocab, theirs]
    words, config = vocabulary.load(vocab), SamplingConfig()
    widths = Widths(config.max_seq_length, config.max_predictions_per_seq)
    records, _ = instances_of(text, words, config)
    write_tfrecord(ours, records, widths)
    made: list[float] = []
    both: list[float] = []
    for _ in range(options.repeats):
        done = subprocess.run([*map(str, line)], check=True, capture_output=True, text=True)
        reference = json.loads(done.stdout.splitlines()[-1])
        mine = cpu_seconds(lambda: instances_of(text, words, config))
        write = cpu_seconds(lambda: write_tfrecord(ours, records, widths))
        # Of the same turn, so that a slow moment of the machine cancels out.
        made.append(reference["instances"] / mine)
        both.append((reference["instances"] + reference["write"]) / (mine + write))
    return {
        "reference_megabytes": round(text.stat().st_size / 1e6, 2),
        "ratio_to_reference_instances": round(statistics.median(made), 1),
        "ratio_to_reference_with_tfrecord": round(statistics.median(both), 1),
        "ratios": {
            "instances": [round(r, 1) for r in made],
            "with_tfrecord": [round(r, 1) for r in both],
        },
        "same_instances": content_digest(read_tfrecord(ours)[0])
        == content_digest(read_tfrecord(theirs)[0]),
    }


def measure_packing(options: argparse.Namespace) -> None:
    lengths = wikipedia_like_lengths(options.sequences, LENGTH, np.random.default_rng(0))

    figures: dict[str, object] = {
        "sequences": len(lengths),
        "mean_length": round(float(lengths.mean()), 2),
    }
    for most in (3, 4):
        times = in_turns({"pack": lambda most=most: pack(lengths, LENGTH, most)}, 3)
        rows = len(pack(lengths, LENGTH, most)[1]) - 1
        figures[f"fullness_at_{most}"] = round(float(lengths.sum() / (rows * LENGTH)), 6)
        figures[f"cpu_seconds_at_{most}"] = round(medians(times)["pack"], 2)
    emit("packing", figures, data="Wikipedia mix (synthetic)")


def main() -> None:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(required=True, metavar="all|instances|packing")

    def command(
        name: str, function: Callable[[argparse.Namespace], None]
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name)
        added.set_defaults(function=function, parser=added)
        return added

    everything = command("all", measure_all)
    everything.add_argument(
        "--megabytes", type=positive, default=108, help="of text, up to 1000 (default %(default)s)"
    )
    everything.add_argument("--jobs", type=integer, default=2, help="(default %(default)s)")
    everything.add_argument(
        "--keep", type=new_folder, help="folder to keep the corpus in for the next run"
    )
    instances = command("instances", measure_instances)
    instances.add_argument(
        "text", type=file, nargs="?", help="one sentence per line (default: 27 MB of the corpus)"
    )
    instances.add_argument("--vocab-file", type=file, help="(default: the corpus's)")
    instances.add_argument("--repeats", type=integer, default=3, help="(default %(default)s)")
    instances.add_argument(
        "--sample-kilobytes", type=positive, default=150, help="for --reference (default 150)"
    )
    reference = folder_with("create_pretraining_data.py", "tokenization.py")
    instances.add_argument(
        "--reference", type=reference, help="folder of the reference's create_pretraining_data.py"
    )
    instances.add_argument(
        "--reference-python", default=sys.executable, help="one with TensorFlow (default: this one)"
    )
    packing = command("packing", measure_packing)
    packing.add_argument(
        "--sequences", type=at_least(1000), default=1_000_000, help="(default %(default)s)"
    )
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
