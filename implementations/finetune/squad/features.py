"""Questions and contexts as windows of tokens, as in the SQuAD code of the BERT paper.

A window is [CLS] question [SEP] part of the context [SEP]; a context that does not fit becomes
overlapping windows. The answer of a training question is located by the words that its characters
are in, then narrowed to the tokens that spell it. In a window without the whole answer, its
position is [CLS].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bert.data.records import DataError
from bert.data.tokens import Integers, Pieces, WordPiece
from finetune.squad.data import Answer, Dataset

# Those of the published run_squad.py: str.split() has more, and would count other words.
WHITESPACE = " \t\r\n\u202f"  # separates words
_WHITESPACE_CODES = np.array(
    [ord(character) for character in WHITESPACE], dtype=np.uint32
)
_TO_SPACES = str.maketrans(dict.fromkeys(WHITESPACE, " "))


class Limits(NamedTuple):
    """Lengths in tokens: of a sequence, of a question (truncated), and between the starts of
    windows.
    """

    # The defaults of the published run_squad.py, which NVIDIA's recipes keep.
    max_seq_length: int = 384
    max_query_length: int = 64
    doc_stride: int = 128


Settings = TypeVar("Settings", bound=tuple[Any, ...])


def settings_of(kind: type[Settings], facts: Mapping[str, Any]) -> Settings:
    """Limits or rules among the settings of a training; the others as published."""
    fields: Sequence[str] = kind._fields  # type: ignore[attr-defined]
    return kind(**{name: facts[name] for name in fields if name in facts})


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
        ids = np.concatenate([[cls], query, [sep], text, [sep]])
        return ids.astype(np.int32), self.offset(window)


def make_features(
    dataset: Dataset, tokenizer: WordPiece, limits: Limits, training: bool
) -> tuple[Features, list[str]]:
    """Features of all questions, and ids of questions left out because their answer is not in the
    context.

    training: locates the first answer of each question. Raises DataError if the limits leave no
    room for a context.
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
        pieces = contexts[question.context]
        span = None
        if training and question.answers:
            span = answer_tokens(
                dataset.contexts[question.context],
                words[question.context],
                pieces,
                question.answers[0],
                answers[number].ids,
            )
            # The published code leaves out what it cannot find, too.
            if span is None:
                left_out.append(question.id)
                continue
        query_length = len(queries[number])
        for begin, length in windows(len(pieces.ids), query_length, limits):
            # 0 is [CLS]: this window has no answer, or not all of it.
            start = end = 0
            if span is not None and begin <= span[0] and span[1] < begin + length:
                # Behind [CLS], the query and [SEP].
                start, end = (token - begin + query_length + 2 for token in span)
            rows.append((number, begin, length, start, end))
    # reshape: without any window the array would have no columns to unpack.
    numbers, begins, lengths, starts, ends = (
        np.array(rows, dtype=np.int32).reshape(-1, 5).T
    )
    columns = numbers, begins, lengths, starts, ends
    return Features(dataset, contexts, queries, *columns, tokenizer), left_out


def windows(
    num_tokens: int, query_length: int, limits: Limits
) -> list[tuple[int, int]]:
    """(start, length) of the windows of a context; a context without tokens has one empty
    window.
    """
    # [CLS] and two [SEP].
    room = limits.max_seq_length - query_length - 3
    if room < 1:
        problem = f"MAX_SEQ_LENGTH={limits.max_seq_length} leaves no room for a context after a question of"
        raise DataError(f"{problem} {query_length} tokens: raise it")
    spans, start = [(0, min(num_tokens, room))], 0
    while start + spans[-1][1] < num_tokens:
        # A stride above the window would leave tokens out.
        start += min(spans[-1][1], limits.doc_stride)
        spans.append((start, min(num_tokens - start, room)))
    return spans


def word_numbers(text: str) -> Integers:
    """Index of the word that each character belongs to or follows, -1 before the first word,
    int32.
    """
    # Four bytes a character, so that indices are those of the text.
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    blank = np.isin(codes, _WHITESPACE_CODES)
    after_blank = np.concatenate([[True], blank[:-1]])
    begins_word = ~blank & after_blank
    return (np.cumsum(begins_word) - 1).astype(np.int32)


def answer_tokens(
    text: str, words: Integers, pieces: Pieces, answer: Answer, answer_ids: Integers
) -> tuple[int, int] | None:
    """First and last token of an answer in its context; None if the words there do not contain its
    text.

    Args: words: ``word_numbers`` of the text; answer_ids: tokens of the answer's text.
    """
    last_character = answer.start + len(answer.text) - 1
    if not (0 <= answer.start <= last_character < len(text)):
        return None
    first = words[answer.start]
    last = words[last_character]
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


def has_most_context(
    windows_of_question: Sequence[tuple[int, int]], num_tokens: int
) -> np.ndarray:
    """bool (W, tokens): whether a token has its maximum context in a window.

    That is the window with the largest min(tokens before, tokens after) + 0.01 x length, the first
    of equals.
    """
    tokens = np.arange(num_tokens)
    scores = np.full((len(windows_of_question), num_tokens), -1.0)
    for row, (begin, length) in zip(scores, windows_of_question, strict=True):
        inside = tokens[begin : begin + length]
        row[inside] = (
            np.minimum(inside - begin, begin + length - 1 - inside) + 0.01 * length
        )
    return (scores.argmax(axis=0) == np.arange(len(windows_of_question))[:, None]) & (
        scores >= 0
    )
