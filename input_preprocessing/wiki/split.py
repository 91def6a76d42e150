"""Splits cleaned text into training shards and evaluation text.

Takes the folder that `clean` wrote. --num-eval-documents articles, picked at random with --random-seed over all of
them, become eval.txt; the others go, in their order, to part-XXXXX-of-XXXXX files of about the same size, as the
reference gathers them. No article is cut, lost or in two files. Runs again from where it was stopped; the result does
not depend on --jobs.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bert.data.format import atomic_file
from bert.data.records import DataError
from input_preprocessing.stage.cli import add_jobs, human_bytes, positive, run, stage_parser
from input_preprocessing.stage.folder import StageFolder, contents_of, finished_files
from input_preprocessing.stage.parallel import run_tasks

NUM_SHARDS, NUM_EVAL_DOCUMENTS = 500, 10_000
DOCUMENTS_PER_SHARD = 20  # a random next sentence comes from the same shard
_MOST_FOR_EVALUATION = 0.05  # of the documents, where there are few
PATTERNS = ("part-*-of-*", "eval.txt")

Integers = npt.NDArray[np.int64]


def split(
    source: Path,
    target: Path,
    *,
    jobs: int,
    shards: int | None = None,
    num_eval_documents: int = NUM_EVAL_DOCUMENTS,
    seed: int = 12345,
    origin: dict[str, str] | None = None,
) -> tuple[int, int, int]:
    """Writes the shards and eval.txt to `target`; (shards, training documents, evaluation documents).

    Args:
        source: folder that `clean` wrote.
        target: folder to write to.
        jobs: worker processes.
        shards: part files; None: NUM_SHARDS, fewer where that would leave less than DOCUMENTS_PER_SHARD in each.
        num_eval_documents: for evaluation; of few documents, a twentieth.
        seed: of the choice.
        origin: what the text was made of, noted with what was made.

    Raises:
        DataError: `source` is not finished, or has too few documents for so many shards.
    """
    texts = finished_files(source, "clean")
    documents = np.concatenate(run_tasks("split: documents", _documents, list(enumerate(texts)), jobs=jobs))
    num_eval = min(num_eval_documents, max(1, int(len(documents) * _MOST_FOR_EVALUATION)))
    num_training = len(documents) - num_eval
    if shards is None:
        shards = max(1, min(NUM_SHARDS, num_training // DOCUMENTS_PER_SHARD))
    if num_training < 2 * shards:
        most = max(1, num_training // 2)
        raise DataError(f"{source} has {len(documents)} documents, too few for {shards} shards; use --shards {most}")
    recipe = {
        "texts": contents_of(texts, "check text", jobs),
        "shards": shards,
        "num_eval_documents": num_eval,
        "seed": seed,
        "origin": origin,
    }
    held_out = np.zeros(len(documents), dtype=bool)
    held_out[random.Random(seed).sample(range(len(documents)), num_eval)] = True
    folder = StageFolder(target, "split", PATTERNS, recipe)
    training = documents[~held_out]
    names = [f"part-{number:05d}-of-{shards:05d}" for number in range(shards)]
    if not folder.finished:
        tasks = [(texts, part, target / name) for part, name in zip(cut(training, shards), names, strict=True)]
        tasks.append((texts, documents[held_out], target / "eval.txt"))
        costs = [float((part[:, 2] - part[:, 1]).sum()) for _, part, _ in tasks]
        run_tasks("split", _write, tasks, jobs=jobs, weights=costs)
        folder.finish([*names, "eval.txt"])
    return shards, len(training), num_eval


def cut(documents: Integers, count: int) -> list[Integers]:
    """The documents (file, begin, end) in `count` runs of about as many bytes, each with one at least."""
    ends = np.cumsum(documents[:, 2] - documents[:, 1])
    places = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count, side="left") + 1
    first = np.arange(1, count)
    places = np.maximum.accumulate(np.maximum(places - first, 0)) + first  # one document a run, from the front
    places = np.minimum(places, len(documents) - count + first)  # and from the back
    return np.split(documents, places)


def _documents(task: tuple[int, Path]) -> Integers:
    """(file, begin, end) of every document of a text file, (N, 3)."""
    number, path = task
    data = path.read_bytes()
    ends = []
    found = data.find(b"\n\n")
    while found >= 0:
        ends.append(found + 2)
        found = data.find(b"\n\n", found + 2)
    if (ends[-1] if ends else 0) != len(data):
        raise DataError(f"{path} does not end with a blank line; run python -m input_preprocessing.clean again")
    bounds = np.array([0, *ends], dtype=np.int64)
    return np.stack([np.full(len(ends), number), bounds[:-1], bounds[1:]], axis=1)


def _write(task: tuple[list[Path], Integers, Path]) -> None:
    """Writes documents to a file unless it is there already."""
    texts, documents, target = task
    if target.is_file():
        return
    with atomic_file(target) as partial, open(partial, "wb") as output:
        for number in np.unique(documents[:, 0]).tolist():
            with open(texts[number], "rb") as text:
                for begin, end in documents[documents[:, 0] == number, 1:].tolist():
                    text.seek(begin)
                    output.write(text.read(end - begin))


def _main(options: argparse.Namespace) -> None:
    shards, training, held_out = split(
        options.source, options.target, jobs=options.jobs, shards=options.shards,
        num_eval_documents=options.num_eval_documents, seed=options.random_seed,
    )  # fmt: skip
    size = sum(path.stat().st_size for path in options.target.glob("part-*"))
    print(
        f"{options.target}: {training:,} documents ({human_bytes(size)}) in {shards} files, "
        f"{held_out:,} for evaluation",
        file=sys.stderr,
    )


def main() -> None:
    """Command line."""
    parser = stage_parser("split", __doc__)
    parser.add_argument("--source", type=Path, required=True, help="folder that `clean` wrote")
    parser.add_argument("--target", type=Path, required=True, help="folder for part-XXXXX-of-XXXXX and eval.txt")
    parser.add_argument("--shards", type=positive, help=f"training files (default {NUM_SHARDS}, fewer for little text)")
    parser.add_argument(
        "--num-eval-documents", type=positive, default=NUM_EVAL_DOCUMENTS, help="at most (default %(default)s)"
    )
    parser.add_argument("--random-seed", type=int, default=12345, help="(default %(default)s)")
    add_jobs(parser)
    run(parser, _main)
