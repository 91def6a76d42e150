"""The files of text, detected by their content: plain text and JSON Lines, also compressed; and where
each is cut into parts.
"""

import bz2
import gzip
import io
import lzma
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import cramjam

from bert.data.records import DataError
from input_preprocessing.stage.manifest import md5_of, write_text
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.stage.reading import (
    CHUNK,
    PACKED,
    Stamp,
    changed,
    open_text,
    readable,
    stamp_of,
)
from input_preprocessing.text.inputs import (
    MARK_UP,
    LeftOut,
    NoText,
    check_prose,
    files_in,
    is_marked_up,
)
from input_preprocessing.text.json_lines import (
    JSON,
    MOST_RECORD,
    first_texts,
    is_json_lines,
)
from input_preprocessing.text.laid_out import prose_of
from input_preprocessing.text.sentences import DETECTED_ON, LAYOUTS, detect_layout

PYDOC = "pydoc"
PART_BYTES = 8_000_000  # minimal size of a part
_PATIENCE = 1_000_000  # bytes after these in which to look for the end of a document
_SENTENCE_END = re.compile(rb"""[.!?]["')\]]*\s""")
# Bytes of text; starting workers takes longer than reading less.
WORTH_WORKERS = 2 * PART_BYTES
_BEGINNINGS: dict[str, Callable[[Path], Any]] = {
    "gzip": gzip.open,
    "bzip2": bz2.open,
    "xz": lzma.open,
}


class Source(NamedTuple):
    """A file to read. cuts: bounds of its parts, in bytes."""

    path: Path
    kind: str  # for display
    layout: str
    cuts: list[int]
    md5: str
    stamp: Stamp
    name: Path  # as the user knows it: path may be its unpacked copy
    done: Counter[str]  # what was done to text that was laid out


def find(
    inputs: Sequence[str], layout: str, text_key: str, folder: Path, jobs: int = 1
) -> tuple[list[Source], list[LeftOut]]:
    """All input files, in the order given, checked and decompressed; and those left out, with
    errors among them.

    Args:
        inputs: files, folders (all files below, by name) or 'pydoc'.
        layout: of plain text and of records: a key of LAYOUTS, or 'auto'.
        text_key: field of JSON Lines with the text.
        folder: for decompressed files.
        jobs: processes.
    """
    files: list[tuple[Path, bool]] = []  # and whether it was found in a folder
    left_out: list[LeftOut] = []
    for name in inputs:
        path = Path(name)
        if name == PYDOC or not path.is_dir():
            files.append((path, False))
            continue
        for file in files_in(path):
            if isinstance(file, LeftOut):
                left_out.append(file)
            else:
                files.append((file, True))
    look = partial(_look, layout, text_key, folder)
    tasks = [(*file, number) for number, file in enumerate(files)]
    seen = run_tasks("corpus: files", look, tasks, jobs=jobs, worth=WORTH_WORKERS)
    left_out += [each for each in seen if isinstance(each, LeftOut)]
    return [each for each in seen if isinstance(each, Source)], left_out


def _look(
    layout: str, text_key: str, folder: Path, task: tuple[Path, bool, int]
) -> Source | LeftOut:
    """A file's format and where to cut it, or why it is not in the corpus."""
    path, is_found, number = task
    unpacked = folder / f"{number}-{path.name}"
    try:
        if str(path) == PYDOC:
            _write_pydoc(unpacked)
            return _source("prose", text_key, unpacked, unpacked, False)._replace(
                name=path
            )
        return _source(layout, text_key, path, unpacked, is_found)
    except DataError as error:
        reason = str(error).replace(str(unpacked), str(path))
        return LeftOut(
            path, reason, is_error=not (is_found and isinstance(error, NoText))
        )


def _source(
    layout: str, text_key: str, name: Path, unpacked: Path, is_found: bool
) -> Source:
    """unpacked: where to write a packed file; is_found: in a folder."""
    path, stamp = _readable(name, unpacked, is_found)
    start, md5 = _start_of(path, name, is_found)
    done = Counter[str]()
    is_json = is_json_lines(name, start, text_key, is_found)
    if is_json:
        start = first_texts(path, text_key)
    elif layout != "sentences":
        start, done = prose_of(start)
    if is_marked_up(start):
        raise NoText(f"{name} is {MARK_UP}")
    if done:
        prose = unpacked.with_name(f"{unpacked.name}.prose")
        done = _write_prose(path, name, prose)
        layout, path = "prose", prose
        stamp, md5 = stamp_of(os.stat(path)), md5_of(path)
    detected = detect_layout(start) if layout == "auto" else layout
    kind = JSON if is_json else LAYOUTS[detected]
    cuts = _cuts(path, kind, stamp[0])
    return Source(path, kind, detected, cuts, md5, stamp, name, done)


def _readable(path: Path, unpacked: Path, is_found: bool) -> tuple[Path, Stamp]:
    """The file, or its unpacked copy if it is packed."""
    # Such as a pipe, which can be read only once.
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is no regular file; give one")
    with readable(f"the text {path}", "check --input"), open(path, "rb") as file:
        stamp, magic = stamp_of(os.fstat(file.fileno())), file.read(8)
    kinds = (kind for begins, kind in PACKED.items() if magic.startswith(begins))
    packed = next(kinds, "")
    if not packed:
        return path, stamp
    # Before gigabytes of it are unpacked, but for zstd.
    if beginning := _beginning(path, packed):
        check_prose(path, beginning, is_found)
    _unpack(path, packed, unpacked)
    if stamp_of(os.stat(path)) != stamp:
        raise changed(path)
    return unpacked, stamp_of(os.stat(unpacked))


def _start_of(path: Path, name: Path, is_found: bool) -> tuple[str, str]:
    """What the text begins with, to tell its format by, and the MD5 of all of it."""
    with open(path, "rb") as content:
        check_prose(name, content.read(CHUNK), is_found)
    opened, md5 = open_text(path, "--input", name)
    # utf-8-sig: a byte order mark is no part of the first word.
    with io.TextIOWrapper(
        opened, encoding="utf-8-sig", errors="ignore", newline=""
    ) as text:
        return text.read(DETECTED_ON), md5


def _write_prose(path: Path, name: Path, target: Path) -> Counter[str]:
    """Writes a text that was laid out for pages as prose; returns what was done to it."""
    if path.stat().st_size > MOST_RECORD:  # it is held in memory
        message = f"is laid out for pages and has over {MOST_RECORD:,} bytes"
        raise DataError(f"{name} {message}; split it")
    prose, done = prose_of(path.read_bytes().decode("utf-8-sig", "ignore"))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, prose)
    return done


def _beginning(path: Path, packed: str) -> bytes:
    """The first bytes of what is packed; none of zstd, or if it is damaged, which unpacking
    tells.
    """
    beginning = b""
    with (
        suppress(KeyError, OSError, EOFError, lzma.LZMAError, zlib.error),
        _BEGINNINGS[packed](path) as content,
    ):
        beginning = content.read(CHUNK)
    return beginning


def _unpack(path: Path, packed: str, unpacked: Path) -> None:
    unpacked.parent.mkdir(parents=True, exist_ok=True)
    unpacked.write_bytes(b"")
    try:
        if packed == "xz":  # cramjam's reads only the first of several streams
            with lzma.open(path) as content, open(unpacked, "wb") as target:
                shutil.copyfileobj(content, target, CHUNK)
        else:
            files = cramjam.File(str(path)), cramjam.File(str(unpacked))
            getattr(cramjam, packed).decompress_into(*files)
    except (cramjam.DecompressionError, lzma.LZMAError, EOFError) as error:
        raise DataError(
            f"{path} is {packed} and cannot be unpacked ({error}); copy it again"
        ) from error


def _write_pydoc(target: Path) -> None:
    """Python's language reference, a document for each topic."""
    from pydoc_data.topics import topics

    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, "\n\n\n".join(topics[name] for name in sorted(topics)))


def _cuts(path: Path, kind: str, size: int) -> list[int]:
    """Bounds of a file's parts, of at least PART_BYTES and a little more."""
    cuts = [0]
    with open(path, "rb") as content:
        while cuts[-1] + PART_BYTES < size:
            # Mostly in the middle of a line, whose rest stays in the part before.
            content.seek(cuts[-1] + PART_BYTES)
            if kind == JSON:
                if len(content.readline(MOST_RECORD)) == MOST_RECORD:
                    raise DataError(
                        f"{path} has a record of over {MOST_RECORD:,} bytes; split it"
                    )
            else:
                _to_document_end(content, is_prose=kind == LAYOUTS["prose"])
            cuts.append(content.tell())
    # A cut at the very end would make a part without content.
    return [*cuts[: -1 if cuts[-1] == size > 0 else None], size]


def _to_document_end(content: BinaryIO, is_prose: bool) -> None:
    """Moves to the next end of a document of plain text; if none is near, of a paragraph, a line or
    a sentence.
    """
    # Prose is cut into documents of MOST_SENTENCES anyhow, so the end of a paragraph will soon do;
    # the documents of other text are to stay whole.
    end = content.tell() + (_PATIENCE if is_prose else MOST_RECORD)
    blank = 0
    line = content.readline(_PATIENCE)
    while line and blank < (2 if is_prose else 1):
        if content.tell() > end and (blank or not is_prose):
            return
        if content.tell() > end + _PATIENCE or len(line) == _PATIENCE:
            break  # not even paragraphs
        line = content.readline(_PATIENCE)
        blank = 0 if line.strip() else blank + 1
    if line and not line.endswith(b"\n"):
        *_, last = [0, *(match.end() for match in _SENTENCE_END.finditer(line))]
        # Without a sentence's end at a space, or at least not within a character of UTF-8.
        last = (
            last or line.rfind(b" ") + 1 or len(line.decode("utf-8", "ignore").encode())
        )
        content.seek(last - len(line), os.SEEK_CUR)
