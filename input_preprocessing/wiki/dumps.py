"""Reads the pages of a bzip2 Wikipedia dump, from its start or from any stream within.

A multistream dump is many bzip2 streams end to end (100 pages each in Wikimedia's), so that workers can each take a
range of its bytes. A page belongs to the range in which the stream begins that holds its first byte: every page comes
from exactly one range, also where streams do not end between pages.
"""

from __future__ import annotations

import bz2
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from bert.data.records import DataError

_STREAM = re.compile(rb"BZh[1-9]1AY&SY")  # head of a stream and of its first block: ten bytes, on a byte boundary
_READ = 1 << 18
_OPEN, _CLOSE = b"<page>", b"</page>"


@dataclass(frozen=True)
class Page:
    """An article's wikitext."""

    number: int
    title: str
    text: str


def is_multistream(path: Path) -> bool:
    """Whether the dump has a second stream: its name does not say.

    Raises:
        DataError: it is not a bzip2 file.
    """
    with open(path, "rb") as file:
        if not _STREAM.match(file.read(10)):
            raise DataError(
                f"{path} is not a bzip2 file; give a dump such as enwiki-DATE-pages-articles-multistream.xml.bz2"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _STREAM.search(data, 10) is not None


def first_stream(path: Path, begin: int, end: int) -> int | None:
    """Byte at which the first stream that begins in [begin, end) does; None: there is none."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = _STREAM.search(data, begin, min(len(data), end + 9))
        return found.start() if found else None


class PageReader:
    """Iterates over the XML of the pages that belong to a range of the dump's bytes."""

    def __init__(self, path: Path, begin: int = 0, end: int | None = None) -> None:
        self.path, self.begin, self.end = path, begin, end
        self.position = begin  # in the compressed file

    def __iter__(self) -> Iterator[bytes]:
        """Raises DataError for a dump that is cut off or damaged."""
        start = self.begin if self.end is None else first_stream(self.path, self.begin, self.end)
        if start is None:
            return
        buffer = bytearray()
        own: int | None = None  # bytes of the buffer that came from streams of this range; None: all so far
        for stream, block in self._blocks(start):
            if own is None and self.end is not None and stream >= self.end:
                own = len(buffer)
            buffer += block
            done = 0
            while True:
                page = buffer.find(_OPEN, done)
                if own is not None and not 0 <= page < own:
                    return
                close = buffer.find(_CLOSE, page) if page >= 0 else -1
                if close < 0:
                    keep = page if page >= 0 else max(done, len(buffer) - len(_OPEN) + 1)
                    break
                done = close + len(_CLOSE)
                yield bytes(buffer[page:done])
            del buffer[:keep]
            own = None if own is None else own - keep
        if buffer.find(_OPEN) >= 0:
            raise DataError(f"{self.path} ends in the middle of a page; download it again")

    def _blocks(self, start: int) -> Iterator[tuple[int, bytes]]:
        """(byte at which its stream begins, decompressed block), to the end of the file."""
        with open(self.path, "rb") as file:
            file.seek(start)
            self.position = start
            decompressor = bz2.BZ2Decompressor()
            data, stream, started = file.read(_READ), start, True
            try:
                while data:
                    block = decompressor.decompress(data)
                    self.position = file.tell()
                    if block:
                        yield stream, block
                    data = decompressor.unused_data if decompressor.eof else b""
                    if decompressor.eof:
                        stream = file.tell() - len(data)
                        decompressor = bz2.BZ2Decompressor()
                        started = bool(data)
                    else:
                        started = True
                    data = data or file.read(_READ)
            except (OSError, ValueError) as error:
                raise DataError(
                    f"{self.path} is damaged at about byte {stream} ({error}); download it again"
                ) from error
            if started and not decompressor.eof:
                raise DataError(f"{self.path} is cut off after {file.tell()} bytes; download it again")


def parse_page(xml: bytes, path: Path) -> Page | None:
    """The article; None for redirects and pages of other namespaces (talk, templates, ...).

    Raises:
        DataError: this is not a page.
    """
    try:
        page = ElementTree.fromstring(xml)
        number = int(page.findtext("id", ""))
    except (ElementTree.ParseError, ValueError) as error:
        shown = xml[:60].decode("utf-8", "replace").replace("\n", " ")
        raise DataError(f"{path} holds a page that is no XML ({error}): {shown}...; download it again") from error
    text = page.findtext("revision/text")
    if page.findtext("ns", "0") != "0" or page.find("redirect") is not None or not text:
        return None
    return Page(number, page.findtext("title", ""), text)
