"""Scores of tokens to answers: of each question the best spans over its windows, with probabilities.

As in the published BERT code: of a window the n best starts are paired with the n best ends; a span lies in the
context, starts at a token that has most context in this window, and is short. SQuAD 2.0: the scores at [CLS] stand for
"no answer", the smallest over the windows, and win over the best span by a margin.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert.core.files import write_text
from finetune.squad.features import Features, collapse, has_most_context


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
        """What answers are sorted by."""
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
        write_text(folder / "predictions.json", _json(self.answers))
        write_text(folder / "nbest_predictions.json", _json(self.n_best))
        if self.null_odds:
            write_text(folder / "null_odds.json", _json(self.null_odds))


def _json(value: object) -> str:
    return json.dumps(value, indent=4, ensure_ascii=False) + "\n"


def predict(features: Features, logits: Iterable[Logits], rules: Rules) -> Predictions:
    """The answers to all questions of the features.

    Args: logits: of every window, in the order of the features.
    """
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
        _decide(found, questions[number].id, candidates, null, rules)
        position = stop
    return found


def _candidates(features: Features, row: int, logits: Logits, mine: np.ndarray, rules: Rules) -> list[Candidate]:
    """The spans of a window, best first, each text once."""
    begin, length, offset = features.window_start[row], features.window_length[row], features.offset(row)
    text = features.dataset.contexts[features.dataset.questions[features.question[row]].context]
    pieces = features.context_of(row)
    starts, ends = (_best(values, rules.n_best) - offset for values in logits)  # tokens of the window
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


def _best(values: np.ndarray, count: int) -> np.ndarray:
    """Places of the largest values, largest first, the first among equals."""
    return np.argsort(-values, kind="stable")[:count]


def _decide(found: Predictions, question: str, candidates: list[Candidate], null: Candidate, rules: Rules) -> None:
    """Adds the answer to a question."""
    if rules.version_2:
        candidates = [*candidates, null]
    best = sorted(candidates, key=lambda candidate: -candidate.score)[: rules.n_best] or [Candidate("", 0.0, 0.0)]
    scores = np.array([candidate.score for candidate in best])
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    found.n_best[question] = [
        {"text": c.text, "probability": float(share), "start_logit": c.start_logit, "end_logit": c.end_logit}
        for c, share in zip(best, shares, strict=True)
    ]
    if not rules.version_2:
        found.answers[question] = best[0].text
        return
    span = next((candidate for candidate in best if candidate.text), None)
    odds = null.score - span.score if span is not None else float("inf")
    found.answers[question] = span.text if span is not None and odds <= rules.null_threshold else ""
    found.null_odds[question] = odds if span is not None else 1e9  # JSON has no infinity
