"""Extracts the articles of Wikipedia dumps: wikitext of every page of the main namespace that is
not a redirect.

Streams enwiki-*-pages-articles*.xml.bz2; a multistream dump is spread over the workers. Writes
pages-XXXXX.jsonl.gz, one page per line ({"id", "title", "text"}), in the order of the dump.
Finished files are kept when run again; the result does not depend on --jobs.
"""

# A multistream dump is many bzip2 streams end to end (100 pages each in Wikimedia's), so workers
# can each process a byte range. A page belongs to the range in which the stream with its first byte
# begins: every page is in exactly one range, even if streams do not end between pages.

import argparse
import bz2
import gzip
import io
import json
import mmap
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bert.data.format import atomic_file
from bert.data.records import DataError
from input_preprocessing.stage.cli import say
from input_preprocessing.stage.manifest import (
    PUBLISHED,
    StageFolder,
    contents_of,
    is_recorded,
    record,
)
from input_preprocessing.stage.parallel import run_tasks

CHUNK_BYTES = 32_000_000  # of the dump per file: 555 files for enwiki 2020
# Header of a stream and of its first block: ten bytes, byte-aligned.
_STREAM = re.compile(rb"BZh[1-9]1AY&SY")
_READ = 1 << 18
_OPEN, _CLOSE = b"<page>", b"</page>"


Page = dict[str, Any]  # an article: id, title and text, its wikitext


def extract(
    sources: list[Path], target: Path, *, jobs: int, chunk_bytes: int = CHUNK_BYTES
) -> int:
    """Writes the pages of the dumps to `target`, one file per `chunk_bytes` of a dump; returns the
    number of files.

    Raises:
        DataError: a dump is missing or damaged, or has no articles.
    """
    dumps = sorted(sources, key=_natural)
    try:
        ranges = [
            (path, at, at + chunk_bytes)
            for path in dumps
            for at in range(0, path.stat().st_size, chunk_bytes)
        ]
    except OSError as error:
        raise DataError(
            f"cannot read the dump {error.filename}: {error.strerror}; check --source"
        ) from error
    contents = contents_of(dumps, "check dumps", jobs)
    _check_known(contents)
    folder = StageFolder(
        target,
        "extract",
        ["pages-*.jsonl.gz"],
        {"dumps": contents, "chunk_bytes": chunk_bytes},
        jobs=jobs,
    )
    files = [target / f"pages-{number:05d}.jsonl.gz" for number in range(len(ranges))]
    if not folder.finished:
        # All are looked at first: extraction takes long.
        for path in dumps:
            with open(path, "rb") as file:
                if not _STREAM.match(file.read(10)):
                    usual = "enwiki-DATE-pages-articles-multistream.xml.bz2"
                    raise DataError(
                        f"{path} is not a bzip2 file; give a dump such as {usual}"
                    )
        tasks = [(*each, file) for each, file in zip(ranges, files, strict=True)]
        run_tasks("extract", _extract_range, tasks, jobs=jobs)
        folder.finish([path.name for path in files])
    if not any(next(read_pages(path), None) for path in files):
        raise DataError(f"{dumps[0]} has no articles; give a dump of pages-articles")
    return len(files)


def _check_known(contents: dict[str, str]) -> None:
    """Raises DataError if a file has the name of the benchmark's dump and another md5."""
    for name, md5 in contents.items():
        wanted = PUBLISHED["dump_md5"].get(name, md5)
        if md5 != wanted:
            raise DataError(
                f"{name} has md5 {md5}, the published one {wanted}; download it again, or rename it"
            )


def read_pages(path: Path) -> Iterator[Page]:
    """Pages of a file written by `extract`. Raises DataError if it is damaged."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                page = json.loads(line)
                yield {name: page[name] for name in ("id", "title", "text")}
    except (OSError, EOFError, ValueError, KeyError) as error:
        again = "remove it and run python -m input_preprocessing extract"
        raise DataError(f"{path} is damaged ({error}); {again}") from error


def write_pages(path: Path, pages: Iterable[Page | None]) -> None:
    """Writes pages atomically and reproducibly."""
    with atomic_file(path) as partial, open(partial, "wb") as raw:
        # No name and time in the header; the lowest level, since the file is read only once.
        zipped = gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0)
        with (
            zipped,
            io.TextIOWrapper(
                zipped, encoding="utf-8", errors="ignore", newline="\n"
            ) as text,
        ):
            for page in filter(None, pages):
                text.write(json.dumps(page, ensure_ascii=False) + "\n")


def _extract_range(task: tuple[Path, int, int, Path]) -> None:
    dump, begin, end, target = task
    if not is_recorded(target):
        write_pages(
            target, (parse_page(xml, dump) for xml in read_dump(dump, begin, end))
        )
        record(target)


def read_dump(path: Path, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    """XML of the pages that belong to a byte range of the dump; in a single-stream dump, all belong
    to the first.

    Raises:
        DataError: the dump is truncated or damaged.
    """
    start = begin
    if end is not None:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            # A header has ten bytes and is of the range in which its first byte lies.
            match = _STREAM.search(data, begin, min(len(data), end + 9))
        if match is None:
            return
        start = match.start()
    buffer = bytearray()
    # Bytes of the buffer from streams of this range; None: all so far.
    kept_end: int | None = None
    for stream, block in _blocks(path, start):
        if kept_end is None and end is not None and stream >= end:
            kept_end = len(buffer)
        buffer += block
        done = 0
        while True:
            page = buffer.find(_OPEN, done)
            # An unfinished page, or as many bytes as the beginning of a <page> tag may have.
            keep = page if page >= 0 else max(done, len(buffer) - len(_OPEN) + 1)
            # The next page starts in a stream of the next range, which has it.
            if kept_end is not None and keep >= kept_end:
                return
            close = buffer.find(_CLOSE, page) if page >= 0 else -1
            if close < 0:
                break
            done = close + len(_CLOSE)
            yield bytes(buffer[page:done])
        del buffer[:keep]
        kept_end = None if kept_end is None else kept_end - keep
    if buffer.find(_OPEN) >= 0:
        raise DataError(f"{path} ends in the middle of a page; download it again")


def _blocks(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """(offset of its stream, decompressed block), to the end of the file."""
    with open(path, "rb") as file:
        file.seek(start)
        decompressor = bz2.BZ2Decompressor()
        data, stream, started = file.read(_READ), start, True
        try:
            while data:
                if block := decompressor.decompress(data):
                    yield stream, block
                data, started = b"", True
                if decompressor.eof:
                    data = decompressor.unused_data
                    # What is left over begins the next stream; none begins at the end of the file.
                    stream, started = file.tell() - len(data), bool(data)
                    decompressor = bz2.BZ2Decompressor()
                data = data or file.read(_READ)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} is damaged at about byte {stream} ({error}); download it again"
            ) from error
        if started and not decompressor.eof:
            raise DataError(
                f"{path} is truncated after {file.tell()} bytes; download it again"
            )


def parse_page(xml: bytes, path: Path) -> Page | None:
    """The article; None for redirects and pages of other namespaces (talk, templates, ...).

    Raises:
        DataError: not a valid page.
    """
    try:
        page = ElementTree.fromstring(xml)
        number = int(page.findtext("id", ""))
    except (ElementTree.ParseError, ValueError) as error:
        shown = xml[:60].decode("utf-8", "replace").replace("\n", " ")
        raise DataError(
            f"{path} holds a page that is not XML ({error}): {shown}...; download it again"
        ) from error
    text = page.findtext("revision/text")
    if page.findtext("ns", "0") != "0" or page.find("redirect") is not None or not text:
        return None
    return {"id": number, "title": page.findtext("title", ""), "text": text}


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key that puts articles2 before articles10."""
    return [
        (int(part), "") if part.isdigit() else (0, part)
        for part in re.split(r"(\d+)", path.name)
    ]


def main(options: argparse.Namespace) -> None:
    files = extract(options.source, options.target, jobs=options.jobs)
    say(f"{options.target}: {files} files")
