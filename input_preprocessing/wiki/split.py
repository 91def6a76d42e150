"""Splits cleaned text into training shards and evaluation text, by the rule of the benchmark's
reference.

Reads the folder written by `clean`, or the tree of sentence files (AA/wiki_00.3 ...) left by
WikiExtractor and the reference's clean-up scripts. --num-eval-documents articles become eval.txt:
each file contributes its share, drawn by a separate generator seeded with --random-seed + 13 x file
number. Text of `clean` is treated as files of at most 1 MiB like WikiExtractor's. The others go, in
order, to part-XXXXX-of-XXXXX files of about equal size. No article is split, lost or in two files.
Resumes where it was stopped; the result does not depend on --jobs.

On the reference's own files, the rule yields the benchmark's evaluation text; programs other than
those of 2020 produce other text, and so other articles per file. The result is compared with the
published md5 and reported.
"""

import argparse
import random
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bert.data.format import atomic_file
from bert.data.packing import Integers
from bert.data.prepared import TEXT_MD5
from bert.data.records import DataError
from input_preprocessing.stage.cli import OPTIONS, human_bytes, say
from input_preprocessing.stage.manifest import (
    STAGE_FILE,
    StageFolder,
    contents_of,
    finished_files,
    is_recorded,
    md5_of,
    record,
)
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.stage.reading import slices

NUM_SHARDS = 500
NUM_EVAL_DOCUMENTS: int = OPTIONS["split"]["--num-eval-documents"]["default"]
_BLANK = b"\n\n"
# At least; random next sentences are drawn from the same shard.
DOCUMENTS_PER_SHARD = 20
_MOST_FOR_EVALUATION = 0.05  # maximal share of the documents, if there are few
SENTENCES = "??/wiki_??.3"  # written by the scripts for WikiExtractor's ??/wiki_??, one sentence per line
SEED_STEP = 13  # between the seeds of consecutive files
# 26.92 MiB: the --block_size of the reference's do_gather.py is in MiB, too.
BLOCK_BYTES = int(26.92 * (1 << 20))  # maximal bytes of WikiExtractor's files per part
FILE_BYTES = 1 << 20  # maximal size of WikiExtractor's files


class Split(NamedTuple):
    """Summary of a split."""

    shards: int
    training: int  # documents
    held_out: int
    eval_md5: str  # of eval.txt

    @property
    def note(self) -> str:
        """Whether eval.txt is the benchmark's own, in words."""
        if self.eval_md5 == TEXT_MD5["eval.txt"]:
            return "eval.txt is the benchmark's, byte for byte"
        return f"eval.txt (md5 {self.eval_md5}) is not the benchmark's ({TEXT_MD5['eval.txt']})"


def split(
    source: Path,
    target: Path,
    *,
    jobs: int,
    shards: int | None = None,
    num_eval_documents: int = NUM_EVAL_DOCUMENTS,
    random_seed: int = 12345,
) -> Split:
    """Writes the shards and eval.txt to `target`.

    Args:
        source: folder that `clean` wrote, or a tree of the reference's sentence files. target:
        folder to write to. jobs: worker processes. shards: part files; None: NUM_SHARDS, fewer
        where that would leave less than DOCUMENTS_PER_SHARD in each. num_eval_documents: for
        evaluation, at most a twentieth of the documents. random_seed: of the choice.

    Raises:
        DataError: `source` is not finished, or has too few documents for so many shards.
    """
    texts, md5s, is_reference = _texts(source, jobs)
    numbered = [(number, path, is_reference) for number, path in enumerate(texts)]
    # (file, begin, end) of each document, in bytes [documents, 3].
    documents = np.concatenate(
        run_tasks("split: documents", _documents, numbered, jobs=jobs)
    )
    files = documents[:, 0]
    if not is_reference:
        # Empty documents count in the reference's files alone, where they take part in the draws.
        documents = documents[documents[:, 2] > documents[:, 1]]
        most = max(1, int(len(documents) * _MOST_FOR_EVALUATION))
        num_eval_documents = min(num_eval_documents, most)
        sizes = documents[:, 2] - documents[:, 1] + len(_BLANK)
        files = fill(sizes.tolist(), FILE_BYTES)
    held_out = hold_out(files, num_eval_documents, random_seed)
    training = documents[~held_out]
    gathered = is_reference and shards is None
    parts = _gather(texts, training) if gathered else _cut(source, training, shards)
    names = [f"part-{number:05d}-of-{len(parts):05d}" for number in range(len(parts))]
    recipe = {
        "texts": md5s,
        "rule": SEED_STEP,
        "shards": len(parts),
        "num_eval_documents": num_eval_documents,
        "seed": random_seed,
    }
    outputs = ("part-*-of-*", "eval.txt")
    folder = StageFolder(target, "split", outputs, recipe, jobs=jobs)
    if not folder.finished:
        tasks = [
            (part, target / name, gathered)
            for part, name in zip(parts, names, strict=True)
        ]
        tasks.append((documents[held_out], target / "eval.txt", False))
        costs = [float((part[:, 2] - part[:, 1]).sum()) for part, *_ in tasks]
        run_tasks("split", partial(_write, texts), tasks, jobs=jobs, weights=costs)
        folder.finish([*names, "eval.txt"])
    md5 = md5_of(target / "eval.txt")
    return Split(len(parts), len(training), int(held_out.sum()), md5)


def _texts(source: Path, jobs: int) -> tuple[list[Path], dict[str, str], bool]:
    """The files of sentences, their md5 by name, and whether the reference's programs made them."""
    if not (source / STAGE_FILE).is_file():
        texts = sorted(source.glob(SENTENCES))
        if texts:
            return texts, contents_of(texts, "check text", jobs, base=source), True
    cleaned = finished_files(source, "clean", jobs)
    return list(cleaned), {path.name: md5 for path, md5 in cleaned.items()}, False


def _gather(texts: list[Path], training: Integers) -> list[Integers]:
    """The reference's parts: one ends before its WikiExtractor files, beside those of sentences,
    exceed a block.
    """
    try:
        sizes = [path.with_suffix("").stat().st_size for path in texts]
    except OSError as error:
        raise DataError(
            f"{error.filename} is missing, its size determines the parts; or give --shards"
        ) from error
    part_of_text = fill(sizes, BLOCK_BYTES)
    bounds = np.arange(1, part_of_text[-1] + 1)
    return np.split(training, np.searchsorted(part_of_text[training[:, 0]], bounds))


def _cut(source: Path, training: Integers, shards: int | None) -> list[Integers]:
    count = shards or max(1, min(NUM_SHARDS, len(training) // DOCUMENTS_PER_SHARD))
    if len(training) < 2 * count:
        most = max(1, len(training) // 2)
        raise DataError(
            f"{source} has {len(training)} documents, too few for {count} shards; use --shards {most}"
        )
    return cut(training, count)


def hold_out(files: Integers, wanted: int, seed: int) -> npt.NDArray[np.bool_]:
    """Boolean mask of the evaluation documents.

    File f of F holds out floor((f + 1) * wanted / F) - floor(f * wanted / F) of its documents,
    drawn one by one with a generator seeded with seed + 13 * f: floor(random() * documents of the
    file), repeated if already drawn. A file with fewer documents contributes all of them.

    Args:
        files: file number of each document, ascending without gaps.
        wanted: number of documents to hold out in total.
        seed: of the first file.
    """
    counts = np.bincount(files)
    starts = np.cumsum(counts) - counts
    held_out = np.zeros(len(files), dtype=bool)
    for number, (start, count) in enumerate(
        zip(starts.tolist(), counts.tolist(), strict=True)
    ):
        share = (number + 1) * wanted // len(counts) - number * wanted // len(counts)
        generator = random.Random(seed + SEED_STEP * number)
        drawn: set[int] = set()
        while len(drawn) < min(share, count):
            drawn.add(int(generator.random() * count))
        held_out[[start + i for i in drawn]] = True
    return held_out


def fill(sizes: Iterable[int], most: int) -> Integers:
    """Block number of each item when blocks of at most ``most`` bytes are filled in order."""
    blocks: list[int] = []
    number = filled = 0
    for size in sizes:
        if filled and filled + size > most:
            number, filled = number + 1, 0
        blocks.append(number)
        filled += size
    return np.array(blocks, dtype=np.int64)


def cut(documents: Integers, count: int) -> list[Integers]:
    """Cuts the documents (file, begin, end) into `count` non-empty runs of about equal bytes."""
    ends = np.cumsum(documents[:, 2] - documents[:, 1])
    positions = (
        np.searchsorted(ends, ends[-1] * np.arange(1, count) / count, side="left") + 1
    )
    first = np.arange(1, count)
    # One document a run, from the front.
    positions = np.maximum.accumulate(np.maximum(positions - first, 0)) + first
    # And from the back.
    positions = np.minimum(positions, len(documents) - count + first)
    return np.split(documents, positions)


def _documents(task: tuple[int, Path, bool]) -> Integers:
    """(file, begin, end) of every document of a text file, (N, 3), without the blank line that ends
    it.

    Like in the reference, what follows the last blank line is a document, even if empty.
    """
    number, path, is_reference = task
    data = path.read_bytes()
    if data and not data.endswith(b"\n" if is_reference else _BLANK):
        unit = "line" if is_reference else "document"
        raise DataError(
            f"{path} is truncated, it does not end with a complete {unit}; make it again"
        )
    ends = [*(match.start() for match in re.finditer(_BLANK, data)), len(data)]
    begins = [0, *(end + len(_BLANK) for end in ends[:-1])]
    return np.array(
        [(number, *bounds) for bounds in zip(begins, ends, strict=True)], dtype=np.int64
    )


def _write(texts: list[Path], task: tuple[Integers, Path, bool]) -> None:
    """Writes documents to a file unless it exists.

    Where the reference gathers files, it drops the last of the two final newlines of each.
    """
    documents, target, gathered = task
    if is_recorded(target):
        return
    with atomic_file(target) as unfinished, open(unfinished, "wb") as output:
        for pieces in slices(texts, documents):
            output.write(
                b"".join(each + _BLANK for each in pieces)[: -1 if gathered else None]
            )
    record(target)


def main(options: argparse.Namespace) -> None:
    made = split(**vars(options))
    size = human_bytes(
        sum(path.stat().st_size for path in options.target.glob("part-*"))
    )
    summary = f"{made.training:,} documents ({size}) in {made.shards} files, {made.held_out:,} for evaluation"
    say(f"{options.target}: {summary}; {made.note}")
