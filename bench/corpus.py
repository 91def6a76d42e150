"""A corpus of any size for the benchmarks: made-up text with the statistics of English Wikipedia that cost time.

Word frequencies nearly after Zipf over 200,000 words: the frequent ones those of Python's own documentation, the rare
ones made of syllables. Documents of log-normal length, 2 kB in the mean; every eighth sentence holds a character beyond
ASCII. With a vocabulary of 30,522 trained on it: 0.227 tokens a byte, sequences of 256 tokens in the mean, 20% of them
full (Wikipedia: 254.5 and 23.5%). Seeded.

usage: python bench/corpus.py OUTPUTDIR [--megabytes 100] [--files 16]
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from command_line import Parser, integer, new_folder, positive

from bert.data.format import atomic_file
from input_preprocessing.text.corpus import bert_config, train_vocabulary
from input_preprocessing.text.sources import pydoc_documents

_WORDS, _SKEW = 200_000, 2.0  # words, and how much more frequent the frequent ones are than after Zipf
_SENTENCE_WORDS = 20.0
_DOCUMENT_SENTENCES, _DOCUMENT_SIGMA = 9.0, 1.1  # log-normal: median, shape
_BEYOND_ASCII = ("–", "é", "ö", "’", "“", "ā", "č", "漢", "…", "°")
_SHARE_BEYOND_ASCII = 1 / 8
_VOCABULARY = 30_522
_VOCABULARY_TEXT = 6_000_000  # bytes that the vocabulary is trained on


def words() -> np.ndarray:
    """The words, most frequent first."""
    text = " ".join(sentence for document in pydoc_documents() for sentence in document)
    real = [word for word, _ in Counter(re.findall(r"[A-Za-z']{1,12}", text)).most_common(8_000)]
    generator = np.random.default_rng(1)
    syllables = [a + b + c for a in "bcdfghklmnprstvw" for b in "aeiou" for c in ("", "n", "r", "s", "l")]
    picked = generator.integers(0, len(syllables), (_WORDS - len(real), 4)).tolist()
    lengths = generator.integers(2, 5, len(picked)).tolist()
    made = ["".join(syllables[i] for i in row[:n]) for row, n in zip(picked, lengths, strict=True)]
    return np.array(real + made, dtype=object)


def write_file(path: Path, size: int, seed: int, bank: np.ndarray) -> None:
    """A text file of about `size` bytes: one sentence per line, a blank line after each document."""
    generator = np.random.default_rng(seed)
    written = 0
    with atomic_file(path) as partial, open(partial, "w", encoding="utf-8") as file:
        while written < size:
            documents = "\n\n".join(_documents(generator, bank)) + "\n\n"
            file.write(documents)
            written += len(documents)


def _documents(generator: np.random.Generator, bank: np.ndarray) -> list[str]:
    """A hundred documents."""
    counts = np.maximum(1, generator.lognormal(np.log(_DOCUMENT_SENTENCES), _DOCUMENT_SIGMA, 100).astype(int))
    lengths = np.maximum(3, generator.poisson(_SENTENCE_WORDS, counts.sum()))
    ranks = generator.random(lengths.sum()) ** _SKEW * np.log(len(bank))
    chosen = bank[np.minimum(np.exp(ranks).astype(np.int64) - 1, len(bank) - 1)]
    beyond = generator.random(len(lengths)) < _SHARE_BEYOND_ASCII
    sentences, at = [], 0
    for length, odd in zip(lengths.tolist(), beyond.tolist(), strict=True):
        sentence = " ".join(chosen[at : at + length])
        mark = f" {_BEYOND_ASCII[at % len(_BEYOND_ASCII)]}" if odd else ""
        sentences.append(f"{sentence[:1].upper()}{sentence[1:]}{mark}, {at % 2000}.")
        at += length
    ends = np.cumsum(counts).tolist()
    return ["\n".join(sentences[end - count : end]) for end, count in zip(ends, counts.tolist(), strict=True)]


def make(outputdir: Path, size: int, files: int) -> None:
    """OUTPUTDIR/download as `prepare_data.sh --skip-download` takes it, `size` bytes of training text in `files`."""
    download = outputdir / "download"
    folder = download / "results4"
    folder.mkdir(parents=True, exist_ok=True)
    bank = words()
    for number in range(files):
        write_file(folder / f"part-{number:05d}-of-{files:05d}", size // files, number, bank)
    write_file(folder / "eval.txt", max(200_000, min(33_000_000, size // 50)), files, bank)
    sample = outputdir / "vocabulary.txt"
    write_file(sample, min(size, _VOCABULARY_TEXT), files + 1, bank)
    train_vocabulary([sample], _VOCABULARY, download / "vocab.txt")
    sample.unlink()
    with atomic_file(download / "bert_config.json") as partial:
        partial.write_text(str(bert_config(_VOCABULARY, 4, 256, 512)).replace("'", '"') + "\n")


def main() -> None:
    """Command line."""
    parser = Parser(__doc__)
    parser.add_argument("outputdir", type=new_folder)
    parser.add_argument("--megabytes", type=positive, default=100, help="of training text (default %(default)s)")
    parser.add_argument("--files", type=integer, default=16, help="text files (default %(default)s)")
    options = parser.parse_args()
    make(options.outputdir, int(options.megabytes * 1e6), options.files)
    print(f"{options.outputdir}: {options.megabytes:g} MB in {options.files} files", file=sys.stderr)


if __name__ == "__main__":
    main()
