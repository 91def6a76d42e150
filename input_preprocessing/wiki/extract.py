"""Extracts the articles of Wikipedia dumps: wikitext of every page of the main namespace that is not a redirect.

Reads enwiki-*-pages-articles*.xml.bz2 as it streams by; a multistream dump is spread over the workers. Writes
pages-XXXXX.jsonl.gz, a page a line ({"id", "title", "text"}), in the order of the dump. Finished files are kept when it
is run again; the result does not depend on --jobs.
"""

from __future__ import annotations

import argparse
import gzip
import io
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bert.data.format import atomic_file
from bert.data.records import DataError
from input_preprocessing.stage.benchmark import DUMP_MD5
from input_preprocessing.stage.cli import add_jobs, positive
from input_preprocessing.stage.folder import StageFolder, contents_of
from input_preprocessing.stage.parallel import Progress, run_tasks
from input_preprocessing.wiki.dumps import Page, PageReader, is_multistream, parse_page

CHUNK_BYTES = 32_000_000  # of the dump a file: 555 files of English Wikipedia of 2020
_GROWTH = 4  # bytes of XML a byte of the dump; tells how much a file of a single-stream dump gets
PATTERN = "pages-*.jsonl.gz"


@dataclass(frozen=True)
class _Chunk:
    """A file to write: the pages of a range of a dump's bytes."""

    source: Path
    begin: int
    end: int
    target: Path


def extract(sources: list[Path], target: Path, *, jobs: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Writes the pages of the dumps to `target`; the number of files.

    Raises:
        DataError: a dump is missing, damaged or holds no article.
    """
    dumps = sorted(sources, key=_natural)
    try:
        sizes = [path.stat().st_size for path in dumps]
    except OSError as error:
        raise DataError(f"cannot read the dump {error.filename}: {error.strerror}; check --source") from error
    contents = contents_of(dumps, "check dumps", jobs)
    _check_known(contents)
    recipe = {"dumps": contents, "chunk_bytes": chunk_bytes}
    folder = StageFolder(target, "extract", [PATTERN], recipe)
    if not folder.finished:
        chunks: list[_Chunk] = []
        for path, size in zip(dumps, sizes, strict=True):
            if is_multistream(path):
                chunks += [_Chunk(path, begin, min(begin + chunk_bytes, size), target / _name(len(chunks) + i))
                           for i, begin in enumerate(range(0, size, chunk_bytes))]  # fmt: skip
            else:
                chunks += _extract_single_stream(path, size, target, len(chunks), chunk_bytes * _GROWTH)
        costs = [float(chunk.end - chunk.begin) for chunk in chunks]
        run_tasks("extract", _extract_chunk, chunks, jobs=jobs, weights=costs)
        folder.finish([chunk.target.name for chunk in chunks])
    files = sorted(target.glob(PATTERN))
    if not any(next(read_pages(path), None) for path in files):
        raise DataError(f"{dumps[0]} holds no article; give a dump of pages-articles")
    return len(files)


def _check_known(contents: dict[str, str]) -> None:
    """Checks the md5 of the benchmark's dump, and tells whether it is the one.

    Raises:
        DataError: a file of its name is another, or damaged.
    """
    for name, md5 in contents.items():
        wanted = DUMP_MD5.get(name)
        if wanted is None:
            print(f"{name}: not the benchmark's dump, {', '.join(DUMP_MD5)}", file=sys.stderr)
        elif md5 != wanted:
            raise DataError(f"{name} has md5 {md5}, the published one has {wanted}; download it again, or rename it")
        else:
            print(f"{name}: the benchmark's dump, md5 {md5}", file=sys.stderr)


def find_dumps(folder: Path) -> list[Path]:
    """The dumps in a folder, in the order of their pages."""
    found = [path for path in folder.glob("*.xml.bz2") if path.is_file()] if folder.is_dir() else []
    return sorted(found, key=_natural)


def read_pages(path: Path) -> Iterator[Page]:
    """Pages of a file that `extract` wrote.

    Raises:
        DataError: it is damaged.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                page = json.loads(line)
                yield Page(page["id"], page["title"], page["text"])
    except (OSError, EOFError, ValueError, KeyError) as error:
        again = "remove it and run python -m input_preprocessing extract"
        raise DataError(f"{path} is damaged ({error}); {again}") from error


def write_pages(path: Path, pages: Iterable[Page | None]) -> None:
    """Writes pages, whole or not at all, the same bytes each time."""
    with atomic_file(path) as partial, open(partial, "wb") as raw:
        # No name and no time in the header; the lowest level, as the file is read once and then removed.
        zipped = gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0)
        with zipped, io.TextIOWrapper(zipped, encoding="utf-8", errors="ignore", newline="\n") as text:
            for page in filter(None, pages):
                line = {"id": page.number, "title": page.title, "text": page.text}
                text.write(json.dumps(line, ensure_ascii=False) + "\n")


def _extract_chunk(chunk: _Chunk) -> None:
    if not chunk.target.is_file():
        reader = PageReader(chunk.source, chunk.begin, chunk.end)
        write_pages(chunk.target, (parse_page(xml, chunk.source) for xml in reader))


def _extract_single_stream(path: Path, size: int, target: Path, first: int, xml_bytes: int) -> list[_Chunk]:
    """Writes the files of a dump of one stream, which only one process can read; files of so much XML each."""
    progress = Progress(f"extract {path.name}"[:24], size)
    reader = PageReader(path)
    chunks: list[_Chunk] = []
    held: list[bytes] = []
    volume = 0
    for xml in itertools.chain(reader, [None]):
        if xml is not None:
            held.append(xml)
            volume += len(xml)
        if volume >= xml_bytes or (xml is None and (held or not chunks)):
            made = target / _name(first + len(chunks))
            if not made.is_file():
                write_pages(made, (parse_page(xml, path) for xml in held))
            chunks.append(_Chunk(path, 0, 0, made))
            held, volume = [], 0
        progress.done = float(reader.position)
        progress.refresh()
    progress.close()
    return chunks


def _name(number: int) -> str:
    return f"pages-{number:05d}.jsonl.gz"


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key by which articles2 comes before articles10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", path.name)]


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, required=True, nargs="+", help="dumps (.xml.bz2)")
    parser.add_argument("--target", type=Path, required=True, help="folder for pages-XXXXX.jsonl.gz")
    parser.add_argument("--chunk-bytes", type=positive, default=CHUNK_BYTES, help="of the dump a file (%(default)s)")
    add_jobs(parser)
    options = parser.parse_args()
    files = extract(options.source, options.target, jobs=options.jobs, chunk_bytes=options.chunk_bytes)
    print(f"{options.target}: {files} files", file=sys.stderr)
