"""Converts files and folders of text to documents of sentences: in parts, on all cores, in constant
memory.

Plain text and JSON Lines, also compressed, detected by content. A file is cut at document ends into
parts of at least PART_BYTES; a text without such ends at paragraphs, lines or sentences, so that no
part is larger than memory. Each part yields a file of its documents, with a sentence per line and a
blank line after each document, and a table of the documents.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import cramjam
import numpy as np

from bert.data.format import atomic_file
from bert.data.records import DataError
from common.lists import first_few
from input_preprocessing.stage.manifest import (
    StageFolder,
    is_recorded,
    md5_of,
    record,
    write_text,
)
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
    suffix_of,
)
from input_preprocessing.text.laid_out import prose_of

# Name: description.
LAYOUTS = {"sentences": "one sentence per line", "prose": "prose, cut into sentences"}
JSON = "JSON Lines"
MOST_SENTENCES = 200  # per document of prose
FEWEST_DOCUMENTS = 4
PYDOC = "pydoc"
PART_BYTES = 8_000_000  # minimal size of a part
WORTH_WORKERS = (
    2 * PART_BYTES
)  # of text; starting workers takes longer than reading less
_PATIENCE = 1_000_000  # bytes after these in which to look for the end of a document
_DETECTED_ON = 2_000_000  # characters
# Bytes of a JSON record, which is held in memory several times over.
_MOST_RECORD = 64_000_000
_BEGINNINGS: dict[str, Callable[[Path], Any]] = {
    "gzip": gzip.open,
    "bzip2": bz2.open,
    "xz": lzma.open,
}
_SENTENCE_END = re.compile(rb"""[.!?]["')\]]*\s""")
_CLOSING = """"')\\]”’“»」』）》】"""
# Full stops of scripts without capitals: they end a sentence whatever follows, also without a space.
_STOPS = "。！？｡।॥؟۔։።፧။។"
_END = re.compile(
    # All of them first, by which the search is twice as fast.
    rf"""[.!?{_STOPS}](?:(?<=[.!?])[{_CLOSING}]*\s+(?=["'(\[“‘„«¿¡]*([^\W_a-z]))"""
    rf"|(?<=[{_STOPS}])[{_CLOSING}]*\s*(?![\s{_CLOSING}{_STOPS}]))"
)
# Thai to Burmese, Khmer, Chinese and Japanese, with their punctuation: they are written without
# spaces, so that each character counts as a word.
_CHARACTERS = r"\u0e00-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uff9f\U00020000-\U0003ffff"
_WORD = rf"(?:[{_CHARACTERS}]|[^\s{_CHARACTERS}]+(?![^\s{_CHARACTERS}]))\s*"
# A sentence of more than 350 words is hardly one, and longer than most sequences: it is cut to
# pieces of at most 100, if possible at the end of a clause.
_PIECE = re.compile(
    rf"""
    \A (?! (?=.{{351}}) (?:{_WORD}){{351}} ) .+  # a whole sentence
    | (?:{_WORD}){{1,100}} $  # the rest
    | (?:{_WORD}){{50,100}} (?: (?<=[,;:،؛、，；：]) | (?<=[,;:،؛]\s) )
    | (?:{_WORD}){{1,100}}
    """,
    re.VERBOSE,
)
# Other brackets may begin prose.
_OTHER_JSON = re.compile(r"""\s*(\[\s*["{]|[\[{]\s*\n)""")
# A rule under a heading or between sections.
_RULE = re.compile(r"[^\w\s](?:\W*[^\w\s])?\s*")
_TERMINATED = re.compile(rf"[.!?:;{_STOPS}][{_CLOSING}]*$")
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Rev|Gen|Col|Capt|Lt|Hon|vs|e\.g|i\.e|cf|Fig|No|Vol|pp?|ch|sec|ed|al|approx)"
    r"|\b[^\W\d_a-z])\.$"
)


Document = list[str]


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
    path = name
    # Such as a pipe, which can be read only once.
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is no regular file; give one")
    with readable(f"the text {path}", "check --input"), open(path, "rb") as file:
        stamp, magic = stamp_of(os.fstat(file.fileno())), file.read(8)
    kinds = (kind for begins, kind in PACKED.items() if magic.startswith(begins))
    if packed := next(kinds, ""):
        # Before gigabytes of it are unpacked, but for zstd.
        if beginning := _beginning(path, packed):
            check_prose(name, beginning, is_found)
        _unpack(path, packed, unpacked)
        if stamp_of(os.stat(path)) != stamp:
            raise changed(path)
        path, stamp = unpacked, stamp_of(os.stat(unpacked))
    with open(path, "rb") as content:
        check_prose(name, content.read(CHUNK), is_found)
    opened, md5 = open_text(path, "--input", name)
    # utf-8-sig: a byte order mark is no part of the first word.
    with io.TextIOWrapper(
        opened, encoding="utf-8-sig", errors="ignore", newline=""
    ) as text:
        start = text.read(_DETECTED_ON)
    is_json = _is_json_lines(name, start, text_key, is_found)
    if is_json:
        # JSON Lines end at line feeds alone; other line ends may stand within a record.
        with open(path, encoding="utf-8-sig", errors="ignore", newline="\n") as lines:
            records = lines.readlines(_DETECTED_ON)
        start = "\n".join(_json_lines(path, records, text_key, 0, []))
    done = Counter[str]()
    if layout != "sentences" and not is_json:
        start, done = prose_of(start)
    if is_marked_up(start):
        raise NoText(f"{name} is {MARK_UP}")
    if done:
        if stamp[0] > _MOST_RECORD:  # it is held in memory
            message = f"is laid out for pages and has over {_MOST_RECORD:,} bytes"
            raise DataError(f"{name} {message}; split it")
        prose, done = prose_of(path.read_bytes().decode("utf-8-sig", "ignore"))
        layout, path = "prose", unpacked.with_name(f"{unpacked.name}.prose")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, prose)
        stamp, md5 = stamp_of(os.stat(path)), md5_of(path)
    detected = detect_layout(start) if layout == "auto" else layout
    kind = JSON if is_json else LAYOUTS[detected]
    cuts = _cuts(path, kind, stamp[0])
    return Source(path, kind, detected, cuts, md5, stamp, name, done)


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


def _cuts(path: Path, kind: str, size: int) -> list[int]:
    """Bounds of a file's parts, of at least PART_BYTES and a little more."""
    cuts = [0]
    with open(path, "rb") as content:
        while cuts[-1] + PART_BYTES < size:
            # Mostly in the middle of a line, whose rest stays in the part before.
            content.seek(cuts[-1] + PART_BYTES)
            if kind == JSON:
                if len(content.readline(_MOST_RECORD)) == _MOST_RECORD:
                    raise DataError(
                        f"{path} has a record of over {_MOST_RECORD:,} bytes; split it"
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
    end = content.tell() + (_PATIENCE if is_prose else _MOST_RECORD)
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
        texts = _json_lines(path, text, text_key, begin, empty)
        yield from _of_records(texts, layout)
    else:
        yield from documents_of(text, layout)


def _write_pydoc(target: Path) -> None:
    """Python's language reference, a document for each topic."""
    from pydoc_data.topics import topics

    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, "\n\n\n".join(topics[name] for name in sorted(topics)))


def detect_layout(text: str) -> str:
    """'sentences' if most lines end a sentence and few have several; else 'prose'."""
    lines = [line.strip() for line in text[:_DETECTED_ON].splitlines() if line.strip()]
    ended = sum(bool(_TERMINATED.search(line)) for line in lines)
    several = sum(len(split_sentences(line)) > 1 for line in lines)
    return (
        "sentences"
        if ended >= 0.6 * len(lines) and several <= 0.3 * len(lines)
        else "prose"
    )


def split_sentences(paragraph: str) -> list[str]:
    """Splits a paragraph after . ! ? before a digit or a letter that is not lower-case, but not
    after abbreviations and initials, and after the full stops of other scripts.
    """
    sentences = []
    start = 0
    for end in _END.finditer(paragraph):
        letter = end[1] or ""
        # Georgian letters, which begin sentences too, have upper but no title case.
        is_lower = letter != letter.title()
        if not is_lower and not _ABBREVIATION.search(paragraph, start, end.start() + 1):
            sentences.append(paragraph[start : end.end()])
            start = end.end()
    pieces = chain.from_iterable(map(_PIECE.findall, [*sentences, paragraph[start:]]))
    return [piece.strip() for piece in pieces if piece.strip()]


def documents_of(lines: Iterable[str], layout: str) -> Iterator[Document]:
    """Documents of a text's lines in the given layout, without empty ones."""
    if layout == "prose":
        yield from _documents_of_prose(lines)
        return
    for are_sentences, group in groupby(map(str.strip, lines), bool):
        if are_sentences:
            yield list(group)


def _documents_of_prose(lines: Iterable[str]) -> Iterator[Document]:
    """Documents end where the text says so, and at the first paragraph's end from MOST_SENTENCES
    on; one without paragraphs at twice as many.
    """
    document: Document = []
    for paragraph in _paragraphs(lines):
        document += split_sentences(paragraph or "")
        while len(document) >= 2 * MOST_SENTENCES:
            yield document[:MOST_SENTENCES]
            document = document[MOST_SENTENCES:]
        if document and (paragraph is None or len(document) >= MOST_SENTENCES):
            yield document
            document = []


def _paragraphs(lines: Iterable[str]) -> Iterator[str | None]:
    """Paragraphs, each ended by a blank line; None where a document ends: at a second blank line or
    a form feed.
    """
    paragraph: list[str] = []
    blank = 0  # lines in a row
    # Behind the last line, too, a form feed ends paragraph and document.
    for line in chain(lines, "\f"):
        if _RULE.fullmatch(line):
            continue
        for number, piece in enumerate(line.split("\f")):
            # Every piece but the first begins behind a form feed.
            blank = 0 if piece.strip() else blank + 1
            if number or blank:
                yield " ".join(" ".join(paragraph).split())
                paragraph = []
            if number or blank > 1:
                yield None
            paragraph.append(piece)


def _of_records(texts: Iterable[str], layout: str) -> Iterator[Document]:
    """One document per non-empty text."""
    for text in texts:
        # Not splitlines(), which would also cut at form feeds and at U+2028 within a sentence.
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        if document := [line for part in documents_of(lines, layout) for line in part]:
            yield document


def _is_blank(text: object) -> bool:
    """Whether a field is there without a text, as exports of tables have it."""
    return text is None or (isinstance(text, str) and not text.strip())


def _json_lines(
    path: Path, lines: Iterable[str], key: str, begin: int, empty: list[int]
) -> Iterator[str]:
    """Texts of JSON Lines. begin: offset of the lines in the file, for messages; empty: gets the
    lines of records without a text.
    """

    def wrong(reason: str) -> DataError:
        with open(path, "rb") as file:
            # The lines of the parts before are counted only here, for the message.
            before = sum(
                file.read(min(CHUNK, begin - at)).count(b"\n")
                for at in range(0, begin, CHUNK)
            )
        return DataError(f"{path}: line {before + number} {reason}")

    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise wrong(
                f"is not JSON ({error}); give JSON Lines, one record per line"
            ) from error
        if isinstance(record, dict) and _is_blank(record.get(key, 0)):
            empty.append(number)
            continue
        if not isinstance(record, dict) or not isinstance(record.get(key), str):
            fields = (
                ", ".join(record) if isinstance(record, dict) else type(record).__name__
            )
            raise wrong(f"has no text {key!r} (it has {fields}); give --text-field")
        yield record[key]


def _is_json_lines(path: Path, start: str, key: str, is_found: bool) -> bool:
    """Whether a text is JSON Lines. is_found: in a folder, where .json may have no text, such as
    settings.

    Raises NoText for other JSON.
    """
    suffix = suffix_of(path)
    first, _, rest = start.lstrip().partition("\n")
    record = None
    # It may go on in the next line or beyond what was read; prose may begin with a note's number.
    with suppress(ValueError):
        record = json.loads(re.sub(r"^\[\d+\]", "", first))
    if isinstance(record, dict):
        if is_found and suffix == ".json" and key not in record:
            raise NoText(f"{path} is JSON without the field {key!r}")
        return True
    # The reader of JSON Lines tells what is wrong with a broken record.
    is_record = first.startswith("{") and not (suffix == ".json" and rest)
    is_named = suffix in (".json", ".jsonl", ".ndjson") and not is_record
    if is_named or isinstance(record, list) or _OTHER_JSON.match(start):
        raise NoText(f"{path} is JSON, but not JSON Lines: write a record per line")
    return is_record
