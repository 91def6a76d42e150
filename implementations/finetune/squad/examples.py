"""SQuAD's JSON files: contexts, questions, answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert.data.records import DataError

VERSIONS = ("1.1", "2.0")


@dataclass(frozen=True)
class Answer:
    """Text of an answer, and the character of the context that it starts at."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about one context. Without answers where it has none (2.0), or none are known (prediction)."""

    id: str
    text: str
    context: int  # number of the context
    answers: tuple[Answer, ...] = ()
    impossible: bool = False


@dataclass(frozen=True)
class Dataset:
    """Contexts, each once, and the questions about them, in the order of the file."""

    contexts: list[str]
    questions: list[Question]


def read(path: Path, version: str = "1.1", needs_answers: bool = True) -> Dataset:
    """Reads a file of SQuAD 1.1 or 2.0.

    Raises DataError, naming the place in the file, for what is not JSON or not SQuAD's format, for a file of the other
    version, and where answers are needed for a question that has none.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from None
    reader = _Reader(path, version, needs_answers)
    named = str(content.get("version", version)).removeprefix("v") if isinstance(content, dict) else version
    if named in VERSIONS and named != version:
        raise DataError(f"{path}: is of SQuAD {named}, and SQUAD_VERSION is {version}")
    for number, article in enumerate(reader.part(content, "data", list, "the file")):
        for place, paragraph in enumerate(reader.part(article, "paragraphs", list, f"data[{number}]")):
            reader.paragraph(paragraph, f"data[{number}].paragraphs[{place}]")
    if not reader.dataset.questions:
        raise DataError(f"{path}: holds no question")
    return reader.dataset


class _Reader:
    def __init__(self, path: Path, version: str, needs_answers: bool) -> None:
        self.path, self.version, self.needs_answers = path, version, needs_answers
        self.dataset = Dataset([], [])
        self.seen: set[str] = set()

    def part(self, holder: Any, name: str, kind: type, where: str) -> Any:
        value = holder.get(name) if isinstance(holder, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            words = {list: "a list", str: "text", int: "a whole number", bool: "true or false"}[kind]
            raise DataError(f"{self.path}: {where} has no {name!r} that is {words}: is this a file of SQuAD's format?")
        return value

    def paragraph(self, paragraph: Any, where: str) -> None:
        context = self.part(paragraph, "context", str, where)
        if not context.strip():
            raise DataError(f"{self.path}: {where} has an empty context")
        self.dataset.contexts.append(context)
        for number, entry in enumerate(self.part(paragraph, "qas", list, where)):
            self.question(entry, f"{where}.qas[{number}]")

    def question(self, entry: Any, where: str) -> None:
        name, text = self.part(entry, "id", str, where), self.part(entry, "question", str, where)
        if name in self.seen:
            raise DataError(f"{self.path}: {where} has the id {name!r} of an earlier question")
        self.seen.add(name)
        impossible = "is_impossible" in entry and self.part(entry, "is_impossible", bool, where)
        if impossible and self.version == "1.1":
            raise DataError(f"{self.path}: {where} has no answer, as in SQuAD 2.0: set SQUAD_VERSION=2.0")
        answers: list[Answer] = []
        if not impossible and (self.needs_answers or "answers" in entry):
            for answer in self.part(entry, "answers", list, where):
                answers.append(
                    Answer(self.part(answer, "text", str, where), self.part(answer, "answer_start", int, where))
                )
            if self.needs_answers and not answers:
                raise DataError(f"{self.path}: {where} ({name}) has no answer to learn from or to compare with")
        context = len(self.dataset.contexts) - 1
        self.dataset.questions.append(Question(name, text, context, tuple(answers), impossible))
