"""SQuAD's files: contexts, and questions about them with their answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bert.data.records import DataError


class Answer(NamedTuple):
    """Text of an answer, and its first character in the context."""

    text: str
    start: int


class Question(NamedTuple):
    """A question about a context. No answers: it has none (2.0), or they are unknown
    (prediction).
    """

    id: str
    text: str
    context: int  # index of the context
    answers: tuple[Answer, ...] = ()


class Dataset(NamedTuple):
    """Contexts and the questions about them, in the order of the file."""

    contexts: list[str]
    questions: list[Question]


def read(path: Path, version: str = "1.1", needs_answers: bool = True) -> Dataset:
    """Reads a file of SQuAD 1.1 or 2.0, as published or as Hugging Face's ``datasets`` exports it.

    Raises DataError, naming the place, if it is not JSON or not in SQuAD's format, and
    if a question lacks answers that are needed.
    """
    contexts: dict[str, int] = {}
    questions: dict[str, Question] = {}
    content = _json(path)
    named = content.get("version") if isinstance(content, dict) else None
    if str(named).lstrip("v") == "2.0" != version:
        raise DataError(f"{path}: is SQuAD 2.0: set SQUAD_VERSION=2.0")
    for where, context, entry in _entries(path, content):
        if not context.strip():
            raise DataError(f"{where} has an empty context")
        name = _part(entry, "id", str, where)
        text = _part(entry, "question", str, where)
        if name in questions:
            raise DataError(f"{where} repeats the id {name!r} of an earlier question")
        impossible = "is_impossible" in entry and _part(
            entry, "is_impossible", bool, where
        )
        if impossible and version == "1.1":
            raise DataError(
                f"{where} has no answer, as in SQuAD 2.0: set SQUAD_VERSION=2.0"
            )
        answers: list[Answer] = []
        if not impossible and (needs_answers or "answers" in entry):
            answers = _answers(entry, where)
        # ``datasets`` writes no is_impossible: a question of 2.0 without answers has none.
        exported = version == "2.0" and isinstance(entry.get("answers"), dict)
        if needs_answers and not answers and not (impossible or exported):
            message = "has no answer, which training and evaluation need"
            cure = "" if version == "2.0" else ": set SQUAD_VERSION=2.0 if it has none"
            raise DataError(f"{where} ({name}) {message}{cure}")
        # A context is tokenized once, however many questions it has.
        number = contexts.setdefault(context, len(contexts))
        questions[name] = Question(name, text, number, tuple(answers))
    if not questions:
        raise DataError(f"{path}: has no questions")
    return Dataset(list(contexts), list(questions.values()))


def _json(path: Path) -> Any:
    """One JSON document, or a list of the records of JSON Lines."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        try:
            # ``datasets`` exports one record per line.
            return [json.loads(line) for line in data.splitlines() if line.strip()]
        except (ValueError, RecursionError):
            raise DataError(f"{path}: not JSON ({error})") from None


def _part(holder: Any, name: str, kind: type, where: str) -> Any:
    value = holder.get(name) if isinstance(holder, dict) else None
    # In Python True is an integer too.
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        message = f"has no {kind.__name__} {name!r}: is this a SQuAD file?"
        raise DataError(f"{where} {message}")
    return value


def _entries(path: Path, content: Any) -> Iterator[tuple[str, str, Any]]:
    """(place, context, question with its answers) of each question."""
    is_list = isinstance(content, list)
    records = content if is_list else _part(content, "data", list, f"{path}: the file")
    for i, record in enumerate(records):
        # Also a list of paragraphs, without titles.
        if isinstance(record, dict) and "qas" in record:
            record = {"paragraphs": [record]}
        if isinstance(record, dict) and "context" in record:
            where = f"{path}: record {i + 1}"
            yield where, _part(record, "context", str, where), record
            continue
        paragraphs = _part(record, "paragraphs", list, f"{path}: data[{i}]")
        for j, paragraph in enumerate(paragraphs):
            where = f"{path}: data[{i}].paragraphs[{j}]"
            context = _part(paragraph, "context", str, where)
            for k, entry in enumerate(_part(paragraph, "qas", list, where)):
                yield f"{where}.qas[{k}]", context, entry


def _answers(entry: dict[str, Any], where: str) -> list[Answer]:
    """Answers of a question: a list of objects as published, or an object of lists as ``datasets``
    writes it.
    """
    given = entry.get("answers")
    if isinstance(given, dict):
        texts = _part(given, "text", list, where)
        starts = _part(given, "answer_start", list, where)
        if len(texts) != len(starts):
            message = (
                f"{len(texts)} texts of answers, but {len(starts)} of answer_start"
            )
            raise DataError(f"{where} has {message}")
        pairs = zip(texts, starts, strict=True)
        given = [{"text": text, "answer_start": start} for text, start in pairs]
    else:
        given = _part(entry, "answers", list, where)
    return [
        Answer(
            _part(answer, "text", str, where), _part(answer, "answer_start", int, where)
        )
        for answer in given
    ]
