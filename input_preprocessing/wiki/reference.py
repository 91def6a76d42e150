"""The rules by which the benchmark's reference parts its articles: which are held out, and which files make a part.

Stated from what MLCommons' clean-up scripts do (seperate_test_set.py, do_gather.py), and tested against their output.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bert.data.records import DataError

SENTENCES = "??/wiki_??.3"  # what the scripts leave of WikiExtractor's ??/wiki_??, a sentence a line
SEED_STEP = 13  # from one file's seed to the next one's
BLOCK_BYTES = int(26.92 * (1 << 20))  # of WikiExtractor's files that make a part, at most
FILE_BYTES = 1 << 20  # of WikiExtractor's files, at most

Integers = npt.NDArray[np.int64]


def hold_out(files: Integers, wanted: int, seed: int) -> npt.NDArray[np.bool_]:
    """Which documents are for evaluation.

    File f of F holds out floor((f + 1) * wanted / F) - floor(f * wanted / F) of its documents, drawn one by one with a
    generator seeded seed + 13 * f: floor(random() * documents of the file), again where it was drawn before. A file
    with fewer documents gives all of them.

    Args:
        files: number of the file of each document, ascending without gaps.
        wanted: documents to hold out of all.
        seed: of the first file.
    """
    counts = np.bincount(files)
    starts = np.cumsum(counts) - counts
    held_out = np.zeros(len(files), dtype=bool)
    for number, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        share = (number + 1) * wanted // len(counts) - number * wanted // len(counts)
        generator = random.Random(seed + SEED_STEP * number)
        drawn: set[int] = set()
        while len(drawn) < min(share, count):
            drawn.add(int(generator.random() * count))
        held_out[[start + i for i in drawn]] = True
    return held_out


def files_of(sizes: Sequence[int]) -> Integers:
    """The file, of at most FILE_BYTES, that each document would be in if they were written one after the other."""
    files = np.zeros(len(sizes), dtype=np.int64)
    number = filled = 0
    for i, size in enumerate(sizes):
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        files[i] = number
        filled += size
    return files


def parts_of(texts: Sequence[Path], block_bytes: int = BLOCK_BYTES) -> Integers:
    """The part that each sentence file goes to: a part ends before WikiExtractor's files exceed the bytes of a block.

    Raises:
        DataError: one of WikiExtractor's files, whose sizes decide, is not beside its sentences.
    """
    parts = np.zeros(len(texts), dtype=np.int64)
    number = filled = 0
    for i, path in enumerate(texts):
        try:
            size = path.with_suffix("").stat().st_size
        except OSError as error:
            raw = path.with_suffix("")
            raise DataError(f"{raw} is missing, by whose size the parts are cut; or give --shards") from error
        if filled and filled + size > block_bytes:
            number, filled = number + 1, 0
        parts[i] = number
        filled += size
    return parts
