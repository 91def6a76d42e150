"""Scores of tokens to answers: of each question the best spans over its windows; and how good the answers are.

As in the published BERT code: of a window the n best starts are paired with the n best ends; a span lies in the
context, starts at a token that has most context in this window, and is short. SQuAD 2.0: the scores at [CLS] stand for
"no answer", the smallest over the windows, and win over the best span by a margin.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert.core.files import write_text
from finetune.squad.features import Features, Question, collapse, has_most_context

PUNCTUATION = str.maketrans("", "", string.punctuation)


class Logits(NamedTuple):
    """Scores of a window's tokens as the start and as the end of the answer, float32 (length of the sequence,)."""

    start: np.ndarray
    end: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Rules:
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


@dataclass(frozen=True)
class Predictions:
    """By question: the answer; the best answers with probability and logits; by how much "no answer" scores above."""

    answers: dict[str, str]
    n_best: dict[str, list[dict[str, str | float]]]
    null_odds: dict[str, float]

    def write(self, folder: Path) -> None:
        """predictions.json, nbest_predictions.json and, of SQuAD 2.0, null_odds.json, for the official script."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {"predictions": self.answers, "nbest_predictions": self.n_best, "null_odds": self.null_odds}
        for name, values in files.items():
            if values or name != "null_odds":
                write_text(folder / f"{name}.json", json.dumps(values, indent=4, ensure_ascii=False) + "\n")


def predict(features: Features, logits: Iterable[Logits], rules: Rules) -> Predictions:
    """The answers to all questions of the features. logits: of every window, in the order of the features."""
    found = Predictions({}, {}, {})
    scores = iter(logits)
    position, questions = 0, features.dataset.questions
    while position < len(features):
        number = features.question[position]
        stop = int(np.searchsorted(features.question, number, side="right"))
        rows = range(position, stop)
        spans = [(int(features.window_start[row]), int(features.window_length[row])) for row in rows]
        best_window = has_most_context(spans, len(features.context_of(position).ids))
        candidates: list[Candidate] = []
        null = Candidate("", float("inf"), 0.0)
        for row, mine in zip(rows, best_window, strict=True):
            of_window = next(scores)
            candidates += _candidates(features, row, of_window, mine, rules)
            null = min(null, Candidate("", float(of_window.start[0]), float(of_window.end[0])), key=lambda c: c.score)
        position = stop

        best = sorted([*candidates, null] if rules.version_2 else candidates, key=lambda c: -c.score)[: rules.n_best]
        best = best or [Candidate("", 0.0, 0.0)]
        shares = np.exp(np.array([c.score for c in best]) - best[0].score)
        shares /= shares.sum()
        question, answer = questions[number].id, best[0].text
        found.n_best[question] = [
            {"text": c.text, "probability": float(share), "start_logit": c.start_logit, "end_logit": c.end_logit}
            for c, share in zip(best, shares, strict=True)
        ]
        if rules.version_2:
            span = next((candidate for candidate in best if candidate.text), None)
            odds = null.score - span.score if span is not None else 1e9  # JSON has no infinity
            answer = span.text if span is not None and odds <= rules.null_threshold else ""
            found.null_odds[question] = odds
        found.answers[question] = answer
    return found


def _candidates(features: Features, row: int, logits: Logits, mine: np.ndarray, rules: Rules) -> list[Candidate]:
    """The spans of a window, best first, each text once. mine: its tokens that have most context in this window."""
    begin, length, offset = features.window_start[row], features.window_length[row], features.offset(row)
    text = features.dataset.contexts[features.dataset.questions[features.question[row]].context]
    pieces = features.context_of(row)
    # Places of the largest scores among the tokens of the window, largest first, the first among equals.
    starts, ends = (np.argsort(-values, kind="stable")[: rules.n_best] - offset for values in logits)
    starts = starts[(starts >= 0) & (starts < length)]
    starts = starts[mine[starts + begin]]
    ends = ends[(ends >= 0) & (ends < length)]
    first, last = (grid.ravel() for grid in np.meshgrid(starts, ends, indexing="ij"))
    sound = (first <= last) & (last - first < rules.max_answer_length)
    first, last = first[sound], last[sound]
    scores = logits.start[first + offset].astype(np.float64) + logits.end[last + offset]
    found: dict[str, Candidate] = {}
    for i in np.argsort(-scores, kind="stable"):
        answer = collapse(text[pieces.begins[begin + first[i]] : pieces.ends[begin + last[i]]])
        if answer not in found:
            start, end = logits.start[first[i] + offset], logits.end[last[i] + offset]
            found[answer] = Candidate(answer, float(start), float(end))
            if len(found) == rules.n_best:
                break
    return list(found.values())


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, words joined by single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 where both are the same once normalised, else 0."""
    return float(normalise(prediction) == normalise(answer))


def f1(prediction: str, answer: str, version_2: bool = False) -> float:
    """Harmonic mean of precision and recall of the words. An empty answer (2.0) is matched by an empty one alone."""
    found, wanted = normalise(prediction).split(), normalise(answer).split()
    if version_2 and not (found and wanted):
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def score(questions: Sequence[Question], answers: Mapping[str, str], version: str = "1.1") -> dict[str, float]:
    """Mean exact match and F1 in percent over all questions; one that was not answered counts as wrong.

    Of several given answers the one that agrees best counts. 2.0: also by whether the question has an answer
    (HasAns, NoAns).
    """
    version_2 = version == "2.0"
    rows = []  # exact match, F1, whether the question has an answer
    for question in questions:
        given = [answer.text for answer in question.answers]
        if version_2:
            given = [text for text in given if normalise(text)] or [""]
        answer, exact, overlap = answers.get(question.id), 0.0, 0.0
        if answer is not None and given:
            exact = max(exact_match(answer, text) for text in given)
            overlap = max(f1(answer, text, version_2) for text in given)
        rows.append((exact, overlap, bool(question.answers)))
    found = {}
    for prefix, kinds in (("", (True, False)), *((("HasAns_", (True,)), ("NoAns_", (False,))) if version_2 else ())):
        if chosen := [row for row in rows if row[2] in kinds]:
            found[f"{prefix}exact_match"] = 100 * (sum(row[0] for row in chosen) / len(chosen))
            found[f"{prefix}f1"] = 100 * (sum(row[1] for row in chosen) / len(chosen))
    return found
