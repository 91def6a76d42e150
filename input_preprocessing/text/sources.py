"""Documents of text as people have it: plain text, JSON Lines, WikiExtractor's files, Parquet; several make one pool.

What a file is its contents tell, not its name. A record of JSON Lines or Parquet and a <doc> of WikiExtractor is one
document. Plain text has one of two layouts, which are told apart (`detect_layout`), or named by the user:
  sentences  one sentence per line, a blank line between documents: taken as it is
  prose      paragraphs, wrapped or not, between blank lines: sentences are found at full stops. A document ends at two
             blank lines or a form feed, and after the paragraph with which it reaches 200 sentences
All documents are held in memory.
"""

from __future__ import annotations

import hashlib
import html
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bert.data.records import DataError
from input_preprocessing.stage.manifest import md5_of
from input_preprocessing.stage.reading import read_text

LAYOUTS = {"sentences": "one sentence per line", "prose": "prose, cut into sentences"}  # by name, for people
MOST_SENTENCES = 200  # of a prose document
FEWEST_DOCUMENTS = 4
PYDOC = "pydoc"
_DETECTED_ON = 2_000_000  # characters
_PARQUET = b"PAR1"
_EXTRACTED = re.compile(r"<doc [^>]*>\n(.*?)\n?</doc>", re.DOTALL)
_NO_TEXT = re.compile(r"\.|README|LICENSE|.*\.(json|md5|gitattributes)$", re.IGNORECASE)
_END = re.compile(r"""(?<=[.!?])["')\]”’]*\s+(?=["'(\[“‘]*[A-Z0-9])""")
_RULE = re.compile(r"(?m)^[^\w\s](?:[^\w\n]*[^\w\s])?[^\S\n]*(?:\n|\Z)")  # a line under a heading or between parts
_TERMINATED = re.compile(r"""[.!?:;]["')\]”’]*$""")
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Rev|Gen|Col|Capt|Lt|Hon|vs|e\.g|i\.e|cf|Fig|No|Vol|pp?|ch|sec|ed|al|approx)"
    r"|\b[A-Z])\.$"
)

Document = list[str]


@dataclass(frozen=True)
class Pool:
    """Documents of all inputs."""

    documents: list[Document]
    kinds: tuple[str, ...]  # what the files were read as, for people
    md5: str  # of the text


def read_pool(inputs: Sequence[str], layout: str, text_key: str) -> Pool:
    """The documents of files and folders (and of 'pydoc'), in the order given.

    Args:
        inputs: names; of a folder all files below it are read, by name.
        layout: of plain text and of records: a key of LAYOUTS, or 'auto'.
        text_key: field of JSON Lines and column of Parquet that holds the text.

    Raises:
        DataError: unreadable, of another encoding, without the key, or too few documents.
    """
    documents: list[Document] = []
    kinds: dict[str, None] = {}
    digests = []
    for name in inputs:
        files = [Path(name)]
        if name != PYDOC and files[0].is_dir():
            files = sorted(file for file in files[0].rglob("*") if file.is_file() and not _NO_TEXT.match(file.name))
            if not files:
                raise DataError(f"{name} has no files of text; check --input")
        for path in files:
            if name == PYDOC:
                found, kind = pydoc_documents(), LAYOUTS["prose"]
                md5 = hashlib.md5(repr(found).encode()).hexdigest()
            else:
                found, kind, md5 = _read(path, layout, text_key)
            documents += found
            kinds[kind] = None
            digests.append(md5)
    if len(documents) < FEWEST_DOCUMENTS:
        count = f"{len(documents)} document{'s' * (len(documents) != 1)}"
        gap = "a blank line" if LAYOUTS["sentences"] in kinds else "two blank lines"
        raise DataError(
            f"{' '.join(inputs)} has {count} (read as {', '.join(kinds)}), at least {FEWEST_DOCUMENTS} are needed; "
            f"put {gap} between documents, or give more text"
        )
    md5 = digests[0] if len(digests) == 1 else hashlib.md5(" ".join(digests).encode()).hexdigest()
    return Pool(documents, tuple(kinds), md5)


def pydoc_documents() -> list[Document]:
    """Documents of Python's own language reference, a topic each."""
    from pydoc_data.topics import topics

    return [document for name in sorted(topics) for document in documents_of(topics[name], "prose")]


def detect_layout(text: str) -> str:
    """'sentences' when most lines end a sentence and few hold several; else 'prose'."""
    lines = [line.strip() for line in text[:2_000_000].splitlines() if line.strip()]
    if not lines:
        return "sentences"
    ended = sum(bool(_TERMINATED.search(line)) for line in lines)
    several = sum(len(split_sentences(line)) > 1 for line in lines)
    return "sentences" if ended >= 0.6 * len(lines) and several <= 0.3 * len(lines) else "prose"


def split_sentences(paragraph: str) -> list[str]:
    """Sentences of a paragraph: cut after . ! ? before a capital or digit, but not after abbreviations and initials."""
    sentences = []
    start = 0
    for end in _END.finditer(paragraph):
        if not _ABBREVIATION.search(paragraph, start, end.start()):
            sentences.append(paragraph[start : end.end()].strip())
            start = end.end()
    return [sentence for sentence in [*sentences, paragraph[start:].strip()] if sentence]


def documents_of(text: str, layout: str) -> list[Document]:
    """The documents of a text in the layout given, without empty ones."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    documents: list[Document] = [[]]
    if layout == "sentences":
        for line in text.split("\n"):
            if line.strip():
                documents[-1].append(line.strip())
            elif documents[-1]:
                documents.append([])
    else:
        for part in re.split(r"\f|\n[^\S\n]*\n[^\S\n]*\n", _RULE.sub("", text)):
            documents.append([])
            for paragraph in re.split(r"\n[^\S\n]*\n", part):
                documents[-1] += split_sentences(" ".join(paragraph.split()))
                if len(documents[-1]) >= MOST_SENTENCES:
                    documents.append([])
    return [document for document in documents if document]


def _read(path: Path, layout: str, text_key: str) -> tuple[list[Document], str, str]:
    """Documents of a file, what it was read as, and its md5."""
    is_parquet = False
    with suppress(OSError):  # reading it says why
        if path.is_file():  # what is read of a pipe is gone
            with open(path, "rb") as file:
                is_parquet = file.read(len(_PARQUET)) == _PARQUET
    if is_parquet:
        return _of_records(_parquet(path, text_key), layout), "Parquet", md5_of(path)
    data, md5 = read_text(path, "--input")
    text = data.decode("utf-8", "ignore")
    if text.startswith("<doc "):
        bodies = (html.unescape(match[1]).partition("\n")[2] for match in _EXTRACTED.finditer(text))  # less the title
        return _of_records(bodies, "prose"), "WikiExtractor's documents", md5
    if text.startswith("{"):
        return _of_records(_json_lines(path, text, text_key), layout), "JSON Lines", md5
    found = detect_layout(text) if layout == "auto" else layout
    return documents_of(text, found), LAYOUTS[found], md5


def _of_records(texts: Iterable[str], layout: str) -> list[Document]:
    """A document of each text that has a sentence."""
    held = list(texts)
    if layout == "auto":
        start, length = [], 0
        for text in held:
            start.append(text)
            length += len(text)
            if length > _DETECTED_ON:
                break
        layout = detect_layout("\n".join(start))
    documents = ([line for part in documents_of(text, layout) for line in part] for text in held)
    return [document for document in documents if document]


def _json_lines(path: Path, text: str, key: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}: line {number} is not JSON ({error}); give JSON Lines, a record a line") from error
        if not isinstance(record, dict) or not isinstance(record.get(key), str):
            fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise DataError(f"{path}: line {number} has no text {key!r} (it has {fields}); give --text-key")
        yield record[key]


def _parquet(path: Path, key: str) -> Iterator[str]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"reading {path} needs pyarrow; run: python -m pip install pyarrow") from error
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if key not in columns:
                raise DataError(f"{path} has no column {key!r} (it has {', '.join(columns)}); give --text-key")
            for batch in file.iter_batches(columns=[key]):
                yield from (value for value in batch.column(0).to_pylist() if isinstance(value, str))
    except (OSError, ValueError) as error:  # pyarrow's errors are both
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read as Parquet ({str(error).splitlines()[0]}); copy it again") from error
