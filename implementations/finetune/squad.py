"""SQuAD 1.1 and 2.0: files to windows of tokens, scores of tokens to answers, answers to exact match and F1.

A window is [CLS] question [SEP] part of the context [SEP], cut as in the SQuAD code of the BERT paper: a context longer
than the room beside its question becomes overlapping windows. The answer of a training question is found through the
words that its characters lie in, then narrowed to the tokens that spell it. A window without the whole answer, and a
question without one, have it at [CLS].

Predicted as there too: of a window the n best starts are paired with the n best ends; a span lies in the context,
starts at a token that has most context in this window, and is short. Spans of all windows compete, each text once.
SQuAD 2.0: the scores at [CLS] stand for "no answer", the smallest over the windows, and win over the best span by a
margin.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert.core.files import write_text
from bert.data.records import DataError
from bert.data.tokens import Integers, Pieces, WordPiece
from finetune.glue import probabilities

PUNCTUATION = str.maketrans("", "", string.punctuation)
WHITESPACE = " \t\r\n\u202f"  # what ends a word
_WHITESPACE_CODES = np.array([ord(character) for character in WHITESPACE], dtype=np.uint32)
_TO_SPACES = str.maketrans(dict.fromkeys(WHITESPACE, " "))
VERSIONS = ("1.1", "2.0")


class Answer(NamedTuple):
    """Text of an answer, and the character of the context that it starts at."""

    text: str
    start: int


class Question(NamedTuple):
    """A question about one context. Without answers where it has none (2.0), or none are known (prediction)."""

    id: str
    text: str
    context: int  # number of the context
    answers: tuple[Answer, ...] = ()
    impossible: bool = False


class Dataset(NamedTuple):
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

    def part(holder: Any, name: str, kind: type, where: str) -> Any:
        value = holder.get(name) if isinstance(holder, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            words = {list: "a list", str: "text", int: "a whole number", bool: "true or false"}[kind]
            raise DataError(f"{path}: {where} has no {name!r} that is {words}: is this a file of SQuAD's format?")
        return value

    named = str(content.get("version", version)).removeprefix("v") if isinstance(content, dict) else version
    if named in VERSIONS and named != version:
        raise DataError(f"{path}: is of SQuAD {named}, and SQUAD_VERSION is {version}")
    contexts: list[str] = []
    questions: dict[str, Question] = {}
    for i, article in enumerate(part(content, "data", list, "the file")):
        for j, paragraph in enumerate(part(article, "paragraphs", list, f"data[{i}]")):
            place = f"data[{i}].paragraphs[{j}]"
            context = part(paragraph, "context", str, place)
            if not context.strip():
                raise DataError(f"{path}: {place} has an empty context")
            contexts.append(context)
            for k, entry in enumerate(part(paragraph, "qas", list, place)):
                where = f"{place}.qas[{k}]"
                name, text = part(entry, "id", str, where), part(entry, "question", str, where)
                if name in questions:
                    raise DataError(f"{path}: {where} has the id {name!r} of an earlier question")
                impossible = "is_impossible" in entry and part(entry, "is_impossible", bool, where)
                if impossible and version == "1.1":
                    raise DataError(f"{path}: {where} has no answer, as in SQuAD 2.0: set SQUAD_VERSION=2.0")
                answers: list[Answer] = []
                if not impossible and (needs_answers or "answers" in entry):
                    for answer in part(entry, "answers", list, where):
                        start = part(answer, "answer_start", int, where)
                        answers.append(Answer(part(answer, "text", str, where), start))
                    if needs_answers and not answers:
                        raise DataError(f"{path}: {where} ({name}) has no answer to learn from or to compare with")
                questions[name] = Question(name, text, len(contexts) - 1, tuple(answers), impossible)
    if not questions:
        raise DataError(f"{path}: holds no question")
    return Dataset(contexts, list(questions.values()))


class Limits(NamedTuple):
    """Lengths in tokens: of a sequence, of a question (cut there), and from one window's start to the next."""

    max_seq_length: int = 384
    max_query_length: int = 64
    doc_stride: int = 128


@dataclass(frozen=True)
class Features:
    """F windows, those of a question in a row. All arrays int32 (F,).

    starts and ends: of the answer, as positions in the sequence, 0 ([CLS]) where the window has none.
    """

    dataset: Dataset
    contexts: list[Pieces]
    queries: list[Integers]  # tokens of each question, cut
    question: Integers  # number of the window's question
    window_start: Integers  # first token of the context
    window_length: Integers
    starts: Integers
    ends: Integers
    tokenizer: WordPiece

    def __len__(self) -> int:
        return len(self.question)

    @cached_property
    def lengths(self) -> Integers:
        """Tokens of each sequence."""
        queries = np.array([len(query) for query in self.queries], dtype=np.int32)
        return queries[self.question] + self.window_length + 3

    def context_of(self, window: int) -> Pieces:
        """Tokens of the whole context of a window."""
        return self.contexts[self.dataset.questions[self.question[window]].context]

    def offset(self, window: int) -> int:
        """Position in the sequence of the window's first token of the context."""
        return len(self.queries[self.question[window]]) + 2

    def sequence(self, window: int) -> tuple[Integers, int]:
        """Token ids of the sequence, and the position at which its second segment starts."""
        query = self.queries[self.question[window]]
        begin = self.window_start[window]
        text = self.context_of(window).ids[begin : begin + self.window_length[window]]
        cls, sep = self.tokenizer.cls, self.tokenizer.sep
        return np.concatenate([[cls], query, [sep], text, [sep]]).astype(np.int32), len(query) + 2


def make_features(dataset: Dataset, tokenizer: WordPiece, limits: Limits, training: bool) -> tuple[Features, list[str]]:
    """Features of all questions, and the ids of those left out because their answer is not in the context.

    training: answers are looked for, the first of each question. Raises DataError for limits that leave no room.
    """
    contexts = tokenizer(dataset.contexts)
    queries = [pieces.ids[: limits.max_query_length] for pieces in tokenizer([q.text for q in dataset.questions])]
    answers = tokenizer([q.answers[0].text if training and q.answers else "" for q in dataset.questions])
    words = [word_numbers(context) for context in dataset.contexts] if training else []
    rows: list[tuple[int, int, int, int, int]] = []
    left_out = []
    for number, question in enumerate(dataset.questions):
        pieces, query = contexts[question.context], queries[number]
        span = None
        if training and question.answers:
            answer, text = question.answers[0], dataset.contexts[question.context]
            span = answer_tokens(text, words[question.context], pieces, answer, answers[number].ids)
            if span is None:
                left_out.append(question.id)
                continue
        for begin, length in windows(len(pieces.ids), len(query), limits):
            start = end = 0
            if span is not None and begin <= span[0] and span[1] < begin + length:
                start, end = (token - begin + len(query) + 2 for token in span)
            rows.append((number, begin, length, start, end))
    numbers, begins, lengths, starts, ends = np.array(rows, dtype=np.int32).reshape(-1, 5).T
    found = (dataset, contexts, queries, numbers, begins, lengths, starts, ends, tokenizer)
    return Features(*found), left_out


def windows(num_tokens: int, query_length: int, limits: Limits) -> list[tuple[int, int]]:
    """(start, length) of the windows of a context; at least one, which is empty where the context has no tokens."""
    room = limits.max_seq_length - query_length - 3
    if room < 1:
        lacking = f"MAX_SEQ_LENGTH={limits.max_seq_length} leaves no room for a context beside a question of"
        raise DataError(f"{lacking} {query_length} tokens: raise it, or lower MAX_QUERY_LENGTH")
    found, start = [(0, min(num_tokens, room))], 0
    while start + found[-1][1] < num_tokens:
        start += min(found[-1][1], limits.doc_stride)
        found.append((start, min(num_tokens - start, room)))
    return found


def word_numbers(text: str) -> Integers:
    """Number of the word that each character is of or that came last before it, -1 ahead of the first, int32."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    blank = np.isin(codes, _WHITESPACE_CODES)
    starts = ~blank & np.concatenate([[True], blank[:-1]])
    return (np.cumsum(starts) - 1).astype(np.int32)


def answer_tokens(
    text: str, words: Integers, pieces: Pieces, answer: Answer, answer_ids: Integers
) -> tuple[int, int] | None:
    """First and last token of an answer in its context; None where the words there do not hold its text.

    Args: words: ``word_numbers`` of the text; answer_ids: tokens of the answer's own text.
    """
    last_character = answer.start + len(answer.text) - 1
    if not (0 <= answer.start <= last_character < len(text)):
        return None
    first, last = words[answer.start], words[last_character]
    if first < 0 and last == words[-1]:
        first = last  # ahead of the first word the published code counts from the end, as Python's lists do
    begin, stop = np.searchsorted(words, [first, last + 1])
    if first < 0 or " ".join(answer.text.split()) not in collapse(text[begin:stop]):
        return None
    first_token = int(np.searchsorted(pieces.begins, begin))
    last_token = int(np.searchsorted(pieces.begins, stop)) - 1
    size = len(answer_ids)
    if size:
        for start in range(first_token, last_token - size + 2):
            if np.array_equal(pieces.ids[start : start + size], answer_ids):
                return start, start + size - 1
    return (first_token, last_token) if first_token <= last_token else None


def collapse(text: str) -> str:
    """The words of a text, a space between each two."""
    return " ".join(word for word in text.translate(_TO_SPACES).split(" ") if word)


def has_most_context(windows_of_question: Sequence[tuple[int, int]], num_tokens: int) -> np.ndarray:
    """bool (W, tokens): whether a window is the one in which a token has most context around it.

    That is the window with the largest min(tokens before, tokens behind) + 0.01 x its length, the first among equals.
    """
    tokens = np.arange(num_tokens)
    scores = np.full((len(windows_of_question), num_tokens), -1.0)
    for row, (begin, length) in zip(scores, windows_of_question, strict=True):
        inside = tokens[begin : begin + length]
        row[inside] = np.minimum(inside - begin, begin + length - 1 - inside) + 0.01 * length
    best = scores.argmax(axis=0)
    return (best[None, :] == np.arange(len(windows_of_question))[:, None]) & (scores >= 0)


class Logits(NamedTuple):
    """Scores of a window's tokens as the start and as the end of the answer, float32 (length of the sequence,)."""

    start: np.ndarray
    end: np.ndarray


class Rules(NamedTuple):
    """n_best: starts, ends and answers kept; max_answer_length: tokens; version_2: a question may have no answer;
    null_threshold: by how much "no answer" must score above the best span.
    """

    n_best: int = 20
    max_answer_length: int = 30
    version_2: bool = False
    null_threshold: float = 0.0


class Candidate(NamedTuple):
    """An answer that a window proposes."""

    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


class Predictions(NamedTuple):
    """By question: the answer; the best answers with probability and logits; by how much "no answer" scores above."""

    answers: dict[str, str]
    n_best: dict[str, list[dict[str, str | float]]]
    null_odds: dict[str, float]

    def write(self, folder: Path) -> None:
        """predictions.json, nbest_predictions.json and, of SQuAD 2.0, null_odds.json, for the official script."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, values in zip(("predictions", "nbest_predictions", "null_odds"), self, strict=True):
            if values or name != "null_odds":
                write_text(folder / f"{name}.json", json.dumps(values, indent=4, ensure_ascii=False) + "\n")


def predict(features: Features, logits: Iterable[Logits], rules: Rules) -> Predictions:
    """The answers to all questions of the features. logits: of every window, in the order of the features."""
    found, scores = Predictions({}, {}, {}), iter(logits)
    for rows in np.split(np.arange(len(features)), np.flatnonzero(np.diff(features.question)) + 1):  # of a question
        bounds = [(int(features.window_start[row]), int(features.window_length[row])) for row in rows]
        best_window = has_most_context(bounds, len(features.context_of(rows[0]).ids))
        of_windows = [next(scores) for _ in rows]
        windows = zip(rows, of_windows, best_window, strict=True)
        spans = [_spans(features, row, window, mine, rules) for row, window, mine in windows]
        nulls = [Candidate("", float(window.start[0]), float(window.end[0])) for window in of_windows]
        null = min(nulls, key=lambda candidate: candidate.score)

        best = _best(features, spans, rows[0], null if rules.version_2 else None, rules.n_best)
        shares = probabilities(np.array([c.score for c in best]))
        question, answer = features.dataset.questions[features.question[rows[0]]].id, best[0].text
        found.n_best[question] = [
            {"text": c.text, "probability": float(share), "start_logit": c.start_logit, "end_logit": c.end_logit}
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


class Spans(NamedTuple):
    """Spans that a window proposes: first and last token of the context, and their scores; each (n,)."""

    first: np.ndarray
    last: np.ndarray
    start: np.ndarray
    end: np.ndarray


def _spans(features: Features, row: int, logits: Logits, mine: np.ndarray, rules: Rules) -> Spans:
    """By their start, the largest score first, and then by their end. mine: tokens with most context in this window."""
    begin, length, offset = features.window_start[row], features.window_length[row], features.offset(row)
    # Places of the largest scores among the tokens of the window, largest first, the first among equals.
    starts, ends = (np.argsort(-values, kind="stable")[: rules.n_best] - offset for values in logits)
    starts = starts[(starts >= 0) & (starts < length)]
    starts = starts[mine[starts + begin]]
    ends = ends[(ends >= 0) & (ends < length)]
    first, last = (grid.ravel() for grid in np.meshgrid(starts, ends, indexing="ij"))
    sound = (first <= last) & (last - first < rules.max_answer_length)
    first, last = first[sound], last[sound]
    start, end = logits.start[first + offset].astype(np.float64), logits.end[last + offset].astype(np.float64)
    return Spans(first + begin, last + begin, start, end)


def _best(features: Features, spans: Sequence[Spans], row: int, null: Candidate | None, n_best: int) -> list[Candidate]:
    """The best texts of a question, each once. null: "no answer", always among them; None: there is one (1.1)."""
    first, last, start, end = (np.concatenate(arrays) for arrays in zip(*spans, strict=True))
    scores = np.append(start + end, [] if null is None else null.score)
    text = ContextText(features, row)
    found: dict[str, Candidate] = {}
    for i in np.argsort(-scores, kind="stable").tolist():
        if len(found) == n_best:
            break
        candidate = null
        if i < len(first):
            answer = text.answer(int(first[i]), int(last[i]))
            candidate = Candidate(answer, float(start[i]), float(end[i]))
        assert candidate is not None
        found.setdefault(candidate.text, candidate)
    if null is not None:
        found.setdefault("", null)
    return list(found.values()) or [Candidate("empty", 0.0, 0.0)]  # the published code's word


class ContextText:
    """Answers as the context of a window has them."""

    def __init__(self, features: Features, row: int) -> None:
        self.text = features.dataset.contexts[features.dataset.questions[features.question[row]].context]
        self.pieces, self.tokenizer = features.context_of(row), features.tokenizer
        self.words = word_numbers(self.text)

    def answer(self, first: int, last: int) -> str:
        """The part of their words that the tokens first to last spell, or all of it where characters do not correspond.

        As the published code finds it (get_final_text): by the characters that are no spaces, before and after
        normalisation, where these are equally many.
        """
        numbers = self.words[self.pieces.begins[[first, last]]]
        begin, stop = np.searchsorted(self.words, [numbers[0], numbers[1] + 1])
        whole = collapse(self.text[begin:stop])
        names = (self.tokenizer.names[i] for i in self.pieces.ids[first : last + 1].tolist())
        spelt = " ".join(" ".join(names).replace(" ##", "").replace("##", "").split())
        normal = " ".join(self.tokenizer.words(whole))
        places = [i for i, character in enumerate(whole) if character != " "]
        rank = {i: n for n, i in enumerate(i for i, character in enumerate(normal) if character != " ")}
        at = normal.find(spelt)
        if at < 0 or len(places) != len(rank) or not {at, at + len(spelt) - 1} <= rank.keys():
            return whole
        return whole[places[rank[at]] : places[rank[at + len(spelt) - 1]] + 1]


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, words joined by single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split())


def f1(prediction: str, answer: str, version_2: bool = False) -> float:
    """Harmonic mean of precision and recall of the words. An empty answer (2.0) is matched by an empty one alone."""
    found, wanted = normalise(prediction).split(), normalise(answer).split()
    if version_2 and not (found and wanted):
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def _agreement(question: Question, answer: str | None, version_2: bool) -> tuple[float, float]:
    """Exact match and F1 of an answer to one question."""
    given = [answer.text for answer in question.answers]
    if version_2:
        given = [text for text in given if normalise(text)] or [""]
    if answer is None or not given:
        return 0.0, 0.0
    exact = float(any(normalise(answer) == normalise(text) for text in given))
    return exact, max(f1(answer, text, version_2) for text in given)


def best_threshold(questions: Sequence[Question], found: Predictions) -> tuple[float, float]:
    """The NULL_SCORE_DIFF_THRESHOLD that gives these questions of SQuAD 2.0 the best F1, and that F1 in percent."""
    odds = np.array([found.null_odds[question.id] for question in questions])
    spans = [next((str(entry["text"]) for entry in found.n_best[q.id] if entry["text"]), "") for q in questions]
    none = np.array([_agreement(question, "", version_2=True)[1] for question in questions])
    some = np.array([_agreement(q, span, version_2=True)[1] for q, span in zip(questions, spans, strict=True)])
    order = np.argsort(odds, kind="stable")
    # Questions whose odds are at most the threshold get their span; of equal odds all do or none.
    sums = none.sum() + np.cumsum((some - none)[order])
    last = np.append(np.diff(odds[order]) > 0, True)
    best = int(np.where(last, sums, -1).argmax())
    if none.sum() >= sums[best]:
        return float(odds.min()) - 1, 100 * float(none.mean())
    return float(odds[order][best]), 100 * float(sums[best]) / len(questions)


def score(questions: Sequence[Question], answers: Mapping[str, str], version: str = "1.1") -> dict[str, float]:
    """Mean exact match and F1 in percent over all questions; one that was not answered counts as wrong.

    Of several given answers the one that agrees best counts. 2.0: also by whether the question has an answer
    (HasAns, NoAns).
    """
    version_2 = version == "2.0"
    # Exact match, F1, whether the question has an answer.
    rows = [
        (*_agreement(question, answers.get(question.id), version_2), bool(question.answers)) for question in questions
    ]
    found = {}
    for prefix, kinds in (("", (True, False)), *((("HasAns_", (True,)), ("NoAns_", (False,))) if version_2 else ())):
        if chosen := [row for row in rows if row[2] in kinds]:
            found[f"{prefix}exact_match"] = 100 * (sum(row[0] for row in chosen) / len(chosen))
            found[f"{prefix}f1"] = 100 * (sum(row[1] for row in chosen) / len(chosen))
    return found
