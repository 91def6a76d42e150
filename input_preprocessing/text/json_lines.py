"""JSON Lines, of which one field is the text of a document."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from bert.data.records import DataError
from input_preprocessing.stage.reading import CHUNK
from input_preprocessing.text.inputs import NoText, suffix_of
from input_preprocessing.text.sentences import DETECTED_ON, Document, documents_of

JSON = "JSON Lines"
# Bytes of a JSON record, which is held in memory several times over.
MOST_RECORD = 64_000_000
# Other brackets may begin prose.
_OTHER_JSON = re.compile(r"""\s*(\[\s*["{]|[\[{]\s*\n)""")


def is_json_lines(path: Path, start: str, key: str, is_found: bool) -> bool:
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


def texts_of(
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
        text = record.get(key, 0) if isinstance(record, dict) else 0
        # Exports of tables have fields without a text.
        if text is None or (isinstance(text, str) and not text.strip()):
            empty.append(number)
            continue
        if not isinstance(text, str):
            fields = (
                ", ".join(record) if isinstance(record, dict) else type(record).__name__
            )
            raise wrong(f"has no text {key!r} (it has {fields}); give --text-field")
        yield text


def first_texts(path: Path, key: str) -> str:
    """The texts of a file's first records, a line each, to tell their layout by."""
    # JSON Lines end at line feeds alone; other line ends may stand within a record.
    with open(path, encoding="utf-8-sig", errors="ignore", newline="\n") as lines:
        records = lines.readlines(DETECTED_ON)
    return "\n".join(texts_of(path, records, key, 0, []))


def documents_of_records(texts: Iterable[str], layout: str) -> Iterator[Document]:
    """One document per non-empty text."""
    for text in texts:
        # Not splitlines(), which would also cut at form feeds and at U+2028 within a sentence.
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        if document := [line for part in documents_of(lines, layout) for line in part]:
            yield document
