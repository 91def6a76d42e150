"""Documents of text as people have it: plain text, JSON Lines, WikiExtractor's files, Parquet; several make one pool.

What a file is its contents tell, not its name. A record of JSON Lines or Parquet and a <doc> of WikiExtractor is one
document; how plain text is cut into documents `sentences` says. All documents are held in memory.
"""

from __future__ import annotations

import hashlib
import html
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bert.data.records import DataError
from input_preprocessing.stage.manifest import md5_of
from input_preprocessing.stage.reading import read_text
from input_preprocessing.text.sentences import Document, detect_layout, documents_of

FEWEST_DOCUMENTS = 4
PYDOC = "pydoc"
_DETECTED_ON = 2_000_000  # characters
_PARQUET = b"PAR1"
_EXTRACTED = re.compile(r"<doc [^>]*>\n(.*?)\n?</doc>", re.DOTALL)
_NO_TEXT = re.compile(r"\.|README|LICENSE|.*\.(json|md5|gitattributes)$", re.IGNORECASE)


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
        layout: of plain text and of records: a key of `sentences.LAYOUTS`, or 'auto'.
        text_key: field of JSON Lines and column of Parquet that holds the text.

    Raises:
        DataError: unreadable, of another encoding, without the key, or too few documents.
    """
    documents: list[Document] = []
    kinds: dict[str, None] = {}
    digests = []
    for name in inputs:
        for path in [None] if name == PYDOC else _files(Path(name)):
            found, kind, md5 = _pydoc() if path is None else _read(path, layout, text_key)
            documents += found
            kinds[kind] = None
            digests.append(md5)
    if len(documents) < FEWEST_DOCUMENTS:
        count = f"{len(documents)} document{'s' * (len(documents) != 1)}"
        gap = "a blank line" if "one sentence per line" in kinds else "two blank lines"
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


def _pydoc() -> tuple[list[Document], str, str]:
    documents = pydoc_documents()
    return documents, _named("prose"), hashlib.md5(repr(documents).encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    """The file, or all text below the folder."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file() and not _NO_TEXT.match(file.name))
    if not found:
        raise DataError(f"{path} has no files of text; check --input")
    return found


def _read(path: Path, layout: str, text_key: str) -> tuple[list[Document], str, str]:
    """Documents of a file, what it was read as, and its md5."""
    if _starts_as_parquet(path):
        return _of_records(_parquet(path, text_key), layout), "Parquet", md5_of(path)
    data, md5 = read_text(path, "--input")
    text = data.decode("utf-8", "ignore")
    if text.startswith("<doc "):
        bodies = (html.unescape(match[1]).partition("\n")[2] for match in _EXTRACTED.finditer(text))  # less the title
        return _of_records(bodies, "prose"), "WikiExtractor's documents", md5
    if text.startswith("{"):
        return _of_records(_json_lines(path, text, text_key), layout), "JSON Lines", md5
    found = detect_layout(text) if layout == "auto" else layout
    return documents_of(text, found), _named(found), md5


def _starts_as_parquet(path: Path) -> bool:
    """Whether the file is Parquet; a pipe is not looked into, as what is read of it is gone."""
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            return file.read(len(_PARQUET)) == _PARQUET
    except OSError:
        return False  # reading it says why


def _named(layout: str) -> str:
    return "one sentence per line" if layout == "sentences" else "prose, cut into sentences"


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
