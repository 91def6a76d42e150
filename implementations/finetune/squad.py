"""SQuAD 1.1 and 2.0: files to token windows, token scores to answers, answers to exact match and F1.

As in the SQuAD code of the BERT paper: a window is [CLS] question [SEP] part of the context [SEP]; a context that does
not fit becomes overlapping windows. The answer of a training question is located by the words that its characters are
in, then narrowed to the tokens that spell it. In a window without the whole answer, its position is [CLS].

Prediction: the n best starts of a window are paired with its n best ends; a span lies in the context, starts at a token
that has its maximum context in this window, and is short. Spans of all windows compete, each text once. SQuAD 2.0: the
scores at [CLS] stand for "no answer", with their minimum over the windows, and must win by a margin.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert.data.records import DataError
from bert.data.tokens import Integers, Pieces, WordPiece
from common.files import write_text
from finetune.glue import probabilities

PUNCTUATION = str.maketrans("", "", string.punctuation)
# Those of the published run_squad.py: str.split() has more, and would count other words.
WHITESPACE = " \t\r\n\u202f"  # separates words
_WHITESPACE_CODES = np.array([ord(character) for character in WHITESPACE], dtype=np.uint32)
_TO_SPACES = str.maketrans(dict.fromkeys(WHITESPACE, " "))
VERSIONS = ("1.1", "2.0")


class Answer(NamedTuple):
    """Text of an answer, and its first character in the context."""

    text: str
    start: int


class Question(NamedTuple):
    """A question about a context. No answers: it has none (2.0), or they are unknown (prediction)."""

    id: str
    text: str
    context: int  # index of the context
    answers: tuple[Answer, ...] = ()
    impossible: bool = False


class Dataset(NamedTuple):
    """Contexts and the questions about them, in the order of the file."""

    contexts: list[str]
    questions: list[Question]


def is_squad(path: Path) -> bool:
    """Whether a file is one JSON document, like SQuAD's, rather than a table. Raises DataError if it cannot be read."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            first = file.readline().lstrip()
        # JSON Lines of ``datasets`` begin with { as well, but have no "data".
        return first.startswith("[") or (first.startswith("{") and "data" in json.loads(first))
    # The first line is no whole document: SQuAD's JSON written over several lines.
    except ValueError:
        return True
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def read(path: Path, version: str = "1.1", needs_answers: bool = True) -> Dataset:
    """Reads a file of SQuAD 1.1 or 2.0, as published or as Hugging Face's ``datasets`` exports it.

    Raises DataError, naming the place, if it is not JSON or not in SQuAD's format, if it is of the other version, and
    if a question lacks answers that are needed.
    """
    content = _json(path)
    named = (
        str(content.get("version", version)).removeprefix("v")
        if isinstance(content, dict)
        else version
    )
    if named in VERSIONS and named != version:
        raise DataError(f"{path}: is SQuAD {named}, but SQUAD_VERSION is {version}")
    contexts: dict[str, int] = {}
    questions: dict[str, Question] = {}
    for where, context, entry in _entries(path, content):
        if not context.strip():
            raise DataError(f"{path}: {where.rpartition('.qas')[0] or where} has an empty context")
        name = _part(path, entry, "id", str, where)
        text = _part(path, entry, "question", str, where)
        if name in questions:
            raise DataError(f"{path}: {where} repeats the id {name!r} of an earlier question")
        impossible = "is_impossible" in entry and _part(path, entry, "is_impossible", bool, where)
        if impossible and version == "1.1":
            raise DataError(
                f"{path}: {where} has no answer, as in SQuAD 2.0: set SQUAD_VERSION=2.0"
            )
        answers: list[Answer] = []
        if not impossible and (needs_answers or "answers" in entry):
            answers = _answers(path, entry, where)
        # ``datasets`` writes no is_impossible: a question of 2.0 without answers has none.
        if version == "2.0" and isinstance(entry.get("answers"), dict):
            impossible = not answers
        if needs_answers and not answers and not impossible:
            raise DataError(
                f"{path}: {where} ({name}) has no answer, which training and evaluation need"
            )
        # A context is tokenized once, however many questions it has.
        number = contexts.setdefault(context, len(contexts))
        questions[name] = Question(name, text, number, tuple(answers), impossible)
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
    except ValueError as error:
        try:
            # ``datasets`` exports one record per line.
            return [json.loads(line) for line in data.splitlines() if line.strip()]
        except ValueError:
            raise DataError(f"{path}: not JSON ({error})") from None


def _part(path: Path, holder: Any, name: str, kind: type, where: str) -> Any:
    value = holder.get(name) if isinstance(holder, dict) else None
    # In Python True is an integer too.
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        words = {list: "list", str: "string", int: "integer", bool: "boolean"}[kind]
        raise DataError(f"{path}: {where} has no {words} {name!r}: is this a SQuAD file?")
    return value


def _entries(path: Path, content: Any) -> Iterator[tuple[str, str, Any]]:
    """(place, context, question with its answers) of each question."""
    is_export = isinstance(content, list) and bool(content) and isinstance(content[0], dict)
    records = content if is_export else _part(path, content, "data", list, "the file")
    for i, record in enumerate(records):
        if is_export or (isinstance(record, dict) and "context" in record):
            where = f"record {i + 1}"
            yield where, _part(path, record, "context", str, where), record
            continue
        for j, paragraph in enumerate(_part(path, record, "paragraphs", list, f"data[{i}]")):
            place = f"data[{i}].paragraphs[{j}]"
            context = _part(path, paragraph, "context", str, place)
            for k, entry in enumerate(_part(path, paragraph, "qas", list, place)):
                yield f"{place}.qas[{k}]", context, entry


def _answers(path: Path, entry: Any, where: str) -> list[Answer]:
    """Answers of a question: a list of objects as published, or an object of lists as ``datasets`` writes it."""
    given = entry.get("answers") if isinstance(entry, dict) else None
    if isinstance(given, dict):
        texts = _part(path, given, "text", list, where)
        starts = _part(path, given, "answer_start", list, where)
        given = [
            {"text": text, "answer_start": start}
            for text, start in zip(texts, starts, strict=False)
        ]
    elif not isinstance(given, list):
        _part(path, entry, "answers", list, where)
        return []
    return [
        Answer(
            _part(path, answer, "text", str, where),
            _part(path, answer, "answer_start", int, where),
        )
        for answer in given
    ]


class Limits(NamedTuple):
    """Lengths in tokens: of a sequence, of a question (truncated), and between the starts of windows."""

    max_seq_length: int = 384
    max_query_length: int = 64
    doc_stride: int = 128


@dataclass(frozen=True)
class Features:
    """F windows, those of a question consecutive. All arrays int32 (F,).

    starts and ends: of the answer, as positions in the sequence, 0 ([CLS]) if the window has none.
    """

    dataset: Dataset
    contexts: list[Pieces]
    queries: list[Integers]  # tokens of each question, truncated
    question: Integers  # index of the window's question
    window_start: Integers  # first token in the context
    window_length: Integers
    starts: Integers
    ends: Integers
    tokenizer: WordPiece

    def __len__(self) -> int:
        return len(self.question)

    @cached_property
    def lengths(self) -> Integers:
        queries = np.array([len(query) for query in self.queries], dtype=np.int32)
        return queries[self.question] + self.window_length + 3

    def context_of(self, window: int) -> Pieces:
        """Tokens of a window's whole context."""
        return self.contexts[self.dataset.questions[self.question[window]].context]

    def offset(self, window: int) -> int:
        """Position in the sequence of the window's first context token."""
        return len(self.queries[self.question[window]]) + 2

    def sequence(self, window: int) -> tuple[Integers, int]:
        """Token ids of the sequence, and start of its second segment."""
        query = self.queries[self.question[window]]
        begin = self.window_start[window]
        text = self.context_of(window).ids[begin : begin + self.window_length[window]]
        cls, sep = self.tokenizer.cls, self.tokenizer.sep
        return np.concatenate([[cls], query, [sep], text, [sep]]).astype(np.int32), len(query) + 2


def make_features(
    dataset: Dataset, tokenizer: WordPiece, limits: Limits, training: bool
) -> tuple[Features, list[str]]:
    """Features of all questions, and ids of questions left out because their answer is not in the context.

    training: locates the first answer of each question. Raises DataError if the limits leave no room for a context.
    """
    contexts = tokenizer(dataset.contexts)
    queries = [
        pieces.ids[: limits.max_query_length]
        for pieces in tokenizer([q.text for q in dataset.questions])
    ]
    answers = tokenizer(
        [q.answers[0].text if training and q.answers else "" for q in dataset.questions]
    )
    words = [word_numbers(context) for context in dataset.contexts] if training else []
    rows: list[tuple[int, int, int, int, int]] = []
    left_out = []
    for number, question in enumerate(dataset.questions):
        pieces, query = contexts[question.context], queries[number]
        span = None
        if training and question.answers:
            answer, text = question.answers[0], dataset.contexts[question.context]
            span = answer_tokens(text, words[question.context], pieces, answer, answers[number].ids)
            # The published code leaves out what it cannot find, too.
            if span is None:
                left_out.append(question.id)
                continue
        for begin, length in windows(len(pieces.ids), len(query), limits):
            # 0 is [CLS]: this window has no answer, or not all of it.
            start = end = 0
            if span is not None and begin <= span[0] and span[1] < begin + length:
                start, end = (token - begin + len(query) + 2 for token in span)
            rows.append((number, begin, length, start, end))
    # reshape: without any window the array would have no columns to unpack.
    numbers, begins, lengths, starts, ends = np.array(rows, dtype=np.int32).reshape(-1, 5).T
    return Features(
        dataset, contexts, queries, numbers, begins, lengths, starts, ends, tokenizer
    ), left_out


def windows(num_tokens: int, query_length: int, limits: Limits) -> list[tuple[int, int]]:
    """(start, length) of the windows of a context; a context without tokens has one empty window."""
    # [CLS] and two [SEP].
    room = limits.max_seq_length - query_length - 3
    if room < 1:
        problem = f"MAX_SEQ_LENGTH={limits.max_seq_length} leaves no room for a context after a question of"
        raise DataError(f"{problem} {query_length} tokens: raise it, or lower MAX_QUERY_LENGTH")
    found, start = [(0, min(num_tokens, room))], 0
    while start + found[-1][1] < num_tokens:
        # A stride above the window would leave tokens out.
        start += min(found[-1][1], limits.doc_stride)
        found.append((start, min(num_tokens - start, room)))
    return found


def word_numbers(text: str) -> Integers:
    """Index of the word that each character belongs to or follows, -1 before the first word, int32."""
    # Four bytes a character, so that indices are those of the text.
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    blank = np.isin(codes, _WHITESPACE_CODES)
    return (np.cumsum(~blank & np.concatenate([[True], blank[:-1]])) - 1).astype(np.int32)


def answer_tokens(
    text: str, words: Integers, pieces: Pieces, answer: Answer, answer_ids: Integers
) -> tuple[int, int] | None:
    """First and last token of an answer in its context; None if the words there do not contain its text.

    Args: words: ``word_numbers`` of the text; answer_ids: tokens of the answer's text.
    """
    last_character = answer.start + len(answer.text) - 1
    if not (0 <= answer.start <= last_character < len(text)):
        return None
    first, last = words[answer.start], words[last_character]
    if first < 0 and last == words[-1]:
        first = last  # before the first word, the published code's index -1 is the last word
    # Words are numbered in order: the characters of words first to last.
    begin, stop = np.searchsorted(words, [first, last + 1])
    if first < 0 or " ".join(answer.text.split()) not in collapse(text[begin:stop]):
        return None
    first_token = int(np.searchsorted(pieces.begins, begin))
    last_token = int(np.searchsorted(pieces.begins, stop)) - 1
    # As _improve_answer_span of the published code: the first tokens that spell the answer, if any
    # do, such as 1895 in the word (1895-1943).
    size = len(answer_ids)
    if size:
        for start in range(first_token, last_token - size + 2):
            if np.array_equal(pieces.ids[start : start + size], answer_ids):
                return start, start + size - 1
    return (first_token, last_token) if first_token <= last_token else None


def collapse(text: str) -> str:
    """The words of a text, joined by single spaces."""
    return " ".join(word for word in text.translate(_TO_SPACES).split(" ") if word)


def has_most_context(windows_of_question: Sequence[tuple[int, int]], num_tokens: int) -> np.ndarray:
    """bool (W, tokens): whether a token has its maximum context in a window.

    That is the window with the largest min(tokens before, tokens after) + 0.01 x length, the first of equals.
    """
    tokens = np.arange(num_tokens)
    scores = np.full((len(windows_of_question), num_tokens), -1.0)
    for row, (begin, length) in zip(scores, windows_of_question, strict=True):
        inside = tokens[begin : begin + length]
        row[inside] = np.minimum(inside - begin, begin + length - 1 - inside) + 0.01 * length
    return (scores.argmax(axis=0) == np.arange(len(windows_of_question))[:, None]) & (scores >= 0)


class Logits(NamedTuple):
    """Scores of a window's tokens as start and end of the answer, float32 (length of the sequence,)."""

    start: np.ndarray
    end: np.ndarray


class Rules(NamedTuple):
    """n_best: starts, ends and answers kept; max_answer_length: tokens; version_2: a question may have no answer;
    null_threshold: margin by which "no answer" must beat the best span.
    """

    n_best: int = 20
    max_answer_length: int = 30
    version_2: bool = False
    null_threshold: float = 0.0


class Candidate(NamedTuple):
    """A possible answer."""

    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


class Predictions(NamedTuple):
    """By question: the answer; the best answers with probability and logits; margin of "no answer" over a span."""

    answers: dict[str, str]
    n_best: dict[str, list[dict[str, str | float]]]
    null_odds: dict[str, float]

    def write(self, folder: Path) -> None:
        """Writes predictions.json, nbest_predictions.json and, for SQuAD 2.0, null_odds.json, as the official script
        reads them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, values in zip(
            ("predictions", "nbest_predictions", "null_odds"), self, strict=True
        ):
            if values or name != "null_odds":
                write_text(
                    folder / f"{name}.json", json.dumps(values, indent=4, ensure_ascii=False) + "\n"
                )


def predict(features: Features, logits: Iterable[Logits], rules: Rules) -> Predictions:
    """Answers to all questions of the features. logits: of every window, in order."""
    found, scores = Predictions({}, {}, {}), iter(logits)
    for rows in np.split(
        np.arange(len(features)), np.flatnonzero(np.diff(features.question)) + 1
    ):  # per question
        bounds = [
            (int(features.window_start[row]), int(features.window_length[row])) for row in rows
        ]
        best_window = has_most_context(bounds, len(features.context_of(rows[0]).ids))
        of_windows = [next(scores) for _ in rows]
        windows = zip(rows, of_windows, best_window, strict=True)
        spans = [_spans(features, row, window, mine, rules) for row, window, mine in windows]
        nulls = [
            Candidate("", float(window.start[0]), float(window.end[0])) for window in of_windows
        ]
        # As published: the window that is least sure of "no answer" speaks for all.
        null = min(nulls, key=lambda candidate: candidate.score)

        best = _best(features, spans, rows[0], null if rules.version_2 else None, rules.n_best)
        shares = probabilities(np.array([c.score for c in best]))
        question, answer = features.dataset.questions[features.question[rows[0]]].id, best[0].text
        found.n_best[question] = [
            {
                "text": c.text,
                "probability": float(share),
                "start_logit": c.start_logit,
                "end_logit": c.end_logit,
            }
            for c, share in zip(best, shares, strict=True)
        ]
        if rules.version_2:
            span = next((candidate for candidate in best if candidate.text), None)
            # JSON has no infinity.
            odds = null.score - span.start_logit - span.end_logit if span is not None else 1e9
            answer = span.text if span is not None and odds <= rules.null_threshold else ""
            found.null_odds[question] = odds
        found.answers[question] = answer
    return found


Spans = tuple[
    np.ndarray, np.ndarray, np.ndarray, np.ndarray
]  # first and last token in the context, their scores


def _spans(features: Features, row: int, logits: Logits, mine: np.ndarray, rules: Rules) -> Spans:
    """Candidates of a window, sorted by score of start, then of end. mine: tokens with maximum context here."""
    begin, length, offset = (
        features.window_start[row],
        features.window_length[row],
        features.offset(row),
    )
    # Positions of the n best scores in the window, the largest first, the first of equals.
    # Positions in the context from here on: those of [CLS] and the question fall out below.
    starts, ends = (
        np.argsort(-values, kind="stable")[: rules.n_best] - offset for values in logits
    )
    starts = starts[(starts >= 0) & (starts < length)]
    # A start belongs to one window only, or overlapping windows would propose it twice.
    starts = starts[mine[starts + begin]]
    ends = ends[(ends >= 0) & (ends < length)]
    first, last = (grid.ravel() for grid in np.meshgrid(starts, ends, indexing="ij"))
    valid = (first <= last) & (last - first < rules.max_answer_length)
    first, last = first[valid], last[valid]
    start, end = (
        # fp32 scores are summed as Python sums them in the published code, in fp64.
        logits.start[first + offset].astype(np.float64),
        logits.end[last + offset].astype(np.float64),
    )
    return first + begin, last + begin, start, end


def _best(
    features: Features, spans: Sequence[Spans], row: int, null: Candidate | None, n_best: int
) -> list[Candidate]:
    """The best answers to a question, each text once. null: "no answer", always among them; None for SQuAD 1.1."""
    first, last, start, end = (np.concatenate(arrays) for arrays in zip(*spans, strict=True))
    scores = np.append(start + end, [] if null is None else null.score)
    context = features.dataset.contexts[features.dataset.questions[features.question[row]].context]
    words, pieces = word_numbers(context), features.context_of(row)
    found: dict[str, Candidate] = {}
    for i in np.argsort(-scores, kind="stable").tolist():
        if len(found) == n_best:
            break
        # The last place of the sorted scores is that of "no answer".
        candidate = null
        if i < len(first):
            answer = answer_text(
                context, words, pieces, features.tokenizer, int(first[i]), int(last[i])
            )
            candidate = Candidate(answer, float(start[i]), float(end[i]))
        assert candidate is not None
        found.setdefault(candidate.text, candidate)
    if null is not None:
        found.setdefault("", null)
    return list(found.values()) or [Candidate("empty", 0.0, 0.0)]  # as in the published code


def answer_text(
    text: str, words: Integers, pieces: Pieces, tokenizer: WordPiece, first: int, last: int
) -> str:
    """The part of the context's words that the tokens first to last spell; their words if characters do not match up.

    As in the published code (get_final_text): compares the non-space characters before and after normalization, if
    their number is equal.
    """
    numbers = words[pieces.begins[[first, last]]]
    begin, stop = np.searchsorted(words, [numbers[0], numbers[1] + 1])
    whole = collapse(text[begin:stop])
    names = (tokenizer.names[i] for i in pieces.ids[first : last + 1].tolist())
    spelt = " ".join(" ".join(names).replace(" ##", "").replace("##", "").split())
    # Words as the tokenizer splits and normalizes them: lower case, without accents.
    normal = " ".join(tokenizer.words(whole))
    # The k-th visible character before normalization is
    # the k-th after it, if they are equally many.
    places = [i for i, character in enumerate(whole) if character != " "]
    rank = {i: n for n, i in enumerate(i for i, character in enumerate(normal) if character != " ")}
    at = normal.find(spelt)
    if at < 0 or len(places) != len(rank) or not {at, at + len(spelt) - 1} <= rank.keys():
        return whole
    return whole[places[rank[at]] : places[rank[at + len(spelt) - 1]] + 1]


def normalise(text: str) -> str:
    """Lower-cased text without punctuation and articles, words joined by single spaces."""
    # Order and rules of the official evaluation script.
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split())


def f1(prediction: str, answer: str, version_2: bool = False) -> float:
    """Harmonic mean of precision and recall of the words. An empty answer (2.0) matches only an empty one."""
    found, wanted = normalise(prediction).split(), normalise(answer).split()
    # As evaluate-v2.0.py: without words on one side, F1 is 1 or 0.
    if version_2 and not (found and wanted):
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def _agreement(question: Question, answer: str | None, version_2: bool) -> tuple[float, float]:
    """Exact match and F1 of an answer."""
    given = [answer.text for answer in question.answers]
    if version_2:
        # evaluate-v2.0.py: answers that normalize to nothing do
        # not count; none left means "no answer".
        given = [text for text in given if normalise(text)] or [""]
    if answer is None or not given:
        return 0.0, 0.0
    exact = float(any(normalise(answer) == normalise(text) for text in given))
    return exact, max(f1(answer, text, version_2) for text in given)


def best_threshold(questions: Sequence[Question], found: Predictions) -> tuple[float, float]:
    """The NULL_SCORE_DIFF_THRESHOLD with the best F1 on these questions (SQuAD 2.0), and that F1 in percent."""
    odds = np.array([found.null_odds[question.id] for question in questions])
    # The best answer that is not empty: the threshold lets it through or not.
    spans = [
        next((str(entry["text"]) for entry in found.n_best[q.id] if entry["text"]), "")
        for q in questions
    ]
    none = np.array([_agreement(question, "", version_2=True)[1] for question in questions])
    some = np.array(
        [_agreement(q, span, version_2=True)[1] for q, span in zip(questions, spans, strict=True)]
    )
    order = np.argsort(odds, kind="stable")
    # Questions whose odds are at most the threshold get their span; with equal odds, all or none do.
    sums = none.sum() + np.cumsum((some - none)[order])
    last = np.append(np.diff(odds[order]) > 0, True)
    best = int(np.where(last, sums, -1).argmax())
    # "No answer" for all is best: a threshold below all odds.
    if none.sum() >= sums[best]:
        return float(odds.min()) - 1, 100 * float(none.mean())
    return float(odds[order][best]), 100 * float(sums[best]) / len(questions)


def score(
    questions: Sequence[Question], answers: Mapping[str, str], version: str = "1.1"
) -> dict[str, float]:
    """Mean exact match and F1 in percent over all questions; a missing answer counts as wrong.

    The best match among several given answers counts. 2.0: also separately for questions with and without an answer
    (HasAns, NoAns).
    """
    version_2 = version == "2.0"
    # Exact match, F1, whether the question has an answer.
    rows = [
        (*_agreement(one, answers.get(one.id), version_2), bool(one.answers)) for one in questions
    ]
    found = {}
    for prefix, kinds in (
        ("", (True, False)),
        *((("HasAns_", (True,)), ("NoAns_", (False,))) if version_2 else ()),
    ):
        if chosen := [row for row in rows if row[2] in kinds]:
            found[f"{prefix}exact_match"] = 100 * (sum(row[0] for row in chosen) / len(chosen))
            found[f"{prefix}f1"] = 100 * (sum(row[1] for row in chosen) / len(chosen))
    return found
