"""The parts of the texts, made on all cores: each a file of its documents, with a sentence per line
and a blank line after each document, and a table of them.
"""

import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from bert.data.format import atomic_file
from bert.data.records import DataError
from common.lists import first_few
from input_preprocessing.stage.manifest import (
    StageFolder,
    is_recorded,
    record,
    write_text,
)
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.stage.reading import changed, stamp_of
from input_preprocessing.text.json_lines import JSON, documents_of_records, texts_of
from input_preprocessing.text.sentences import Document, documents_of
from input_preprocessing.text.sources import WORTH_WORKERS, Source


def split(
    sources: Sequence[Source], text_key: str, folder: Path, jobs: int = 1
) -> list[Path]:
    """Makes the parts of all sources unless an earlier run did; returns their files.

    Raises:
        DataError: sources are invalid, or changed: all of them.
    """
    # Without paths: a text that was moved is the same text.
    recipe = {
        "texts": [
            (source.kind, source.layout, source.cuts, source.md5) for source in sources
        ],
        "text_key": text_key,
    }
    StageFolder(folder, "corpus", ["part-*"], recipe)
    tasks = [(source, *ends) for source in sources for ends in pairwise(source.cuts)]
    parts = [folder / f"part-{number:06d}.txt" for number in range(len(tasks))]
    left = [
        (*task, part)
        for task, part in zip(tasks, parts, strict=True)
        if not (is_recorded(part) and is_recorded(table_of(part)))
    ]
    weights = [end - begin for _, begin, end, _ in left]
    cut = partial(_split, text_key)
    problems = run_tasks(
        "corpus: sentences", cut, left, jobs=jobs, weights=weights, worth=WORTH_WORKERS
    )
    if distinct := list(dict.fromkeys(filter(None, problems))):
        raise DataError(first_few(distinct))
    return parts


def table_of(part: Path) -> Path:
    """Where each of a part's documents ends, its characters and its hash, uint64 [documents, 3]."""
    return part.with_suffix(".npy")


def _count_file(part: Path) -> Path:
    """How many records of a part have no text."""
    return part.with_suffix(".empty")


def records_without_text(
    sources: Sequence[Source], parts: Sequence[Path]
) -> dict[Path, int]:
    """How many records of each file have no text, for those that have any."""
    names = [source.name for source in sources for _ in pairwise(source.cuts)]
    counts: Counter[Path] = Counter()
    for name, part in zip(names, parts, strict=True):
        counts[name] += int(_count_file(part).read_text())
    return dict(+counts)


def _split(text_key: str, task: tuple[Source, int, int, Path]) -> str:
    """Writes a part and its table; returns what is wrong with the source, if anything."""
    source = task[0]
    try:
        # Errors are returned, not raised, so that one run tells the problems of all sources.
        _write_part(text_key, *task)
    except DataError as error:
        return str(error).replace(str(source.path), str(source.name))
    return ""


def _write_part(
    text_key: str, source: Source, begin: int, end: int, part: Path
) -> None:
    rows = []  # end in the part, characters and hash of each document
    size = 0
    empty: list[int] = []
    with atomic_file(part) as partial_file, open(partial_file, "wb") as output:
        for document in _documents(source, text_key, begin, end, empty):
            data = ("\n".join(document) + "\n\n").encode("utf-8", "ignore")
            # 8 bytes: two of 100 million different documents collide with a chance of 0.03%.
            digest = hashlib.blake2b(data, digest_size=8).digest()
            size += len(data)
            characters = sum(map(len, document)) + len(document)
            rows.append((size, characters, int.from_bytes(digest, "little")))
            output.write(data)
    # Before they are recorded, which makes them count as complete.
    if stamp_of(os.stat(source.path)) != source.stamp:
        raise changed(source.name)
    with (
        atomic_file(table_of(part)) as partial_file,
        open(partial_file, "wb") as output,
    ):
        np.save(output, np.array(rows, dtype=np.uint64).reshape(-1, 3))
    write_text(_count_file(part), str(len(empty)))
    record(part)
    record(table_of(part))


def _documents(
    source: Source, text_key: str, begin: int, end: int, empty: list[int]
) -> Iterator[Document]:
    """Documents between two cuts of a source. empty: gets the records without a text."""
    path, kind, layout = source.path, source.kind, source.layout
    with open(path, "rb") as file:
        file.seek(begin)
        data = file.read(end - begin).removeprefix(b"" if begin else b"\xef\xbb\xbf")
    # Line ends: of JSON Lines only \n, of plain text any.
    newline = "\n" if kind == JSON else None
    text = io.TextIOWrapper(io.BytesIO(data), "utf-8", "ignore", newline)
    if kind == JSON:
        texts = texts_of(path, text, text_key, begin, empty)
        yield from documents_of_records(texts, layout)
    else:
        yield from documents_of(text, layout)
