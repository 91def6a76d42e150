"""Exact match and F1 of answers, as in SQuAD's official evaluation scripts."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from finetune.squad.answers import Predictions
from finetune.squad.data import Question

PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower-cased text without punctuation and articles, words joined by single spaces."""
    # Order and rules of the official evaluation script.
    return " ".join(
        re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split()
    )


def f1(prediction: str, answer: str, version_2: bool = False) -> float:
    """Harmonic mean of precision and recall of the words. An empty answer (2.0) matches only an
    empty one.
    """
    words = normalise(prediction).split()
    wanted = normalise(answer).split()
    # As evaluate-v2.0.py: without words on one side, F1 is 1 or 0.
    if version_2 and not (words and wanted):
        return float(words == wanted)
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted)) if common else 0.0


def _agreement(
    question: Question, answer: str | None, version_2: bool
) -> tuple[float, float]:
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


def best_threshold(
    questions: Sequence[Question], predictions: Predictions
) -> tuple[float, float]:
    """The margin by which "no answer" must win for the best F1 of these questions of SQuAD 2.0, and
    that F1 in percent.
    """
    odds = np.array([predictions.null_odds[question.id] for question in questions])
    spans = (
        next(
            (str(entry["text"]) for entry in predictions.n_best[q.id] if entry["text"]),
            "",
        )
        for q in questions
    )
    pairs = list(zip(questions, spans, strict=True))
    none = np.array([_agreement(question, "", True)[1] for question, _ in pairs])
    gain = np.array([_agreement(*pair, True)[1] for pair in pairs]) - none
    # A question gets its span where its odds are at most the threshold: those of the k least
    # gain sums[k]. Between equal odds there is no threshold.
    order = np.argsort(odds, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(gain[order])])
    edges = np.concatenate([[odds.min() - 2], odds[order], [odds.max() + 2]])
    best = int(np.where(np.diff(edges) > 0, sums, -np.inf).argmax())
    # Halfway to the next question's, so that a rounded copy of it means the same.
    threshold = float(edges[best] + edges[best + 1]) / 2
    return threshold, 100 * float(none.sum() + sums[best]) / len(questions)


def score(
    questions: Sequence[Question], answers: Mapping[str, str], version: str = "1.1"
) -> dict[str, float]:
    """Mean exact match and F1 in percent over all questions; a missing answer counts as wrong.

    The best match among several given answers counts. 2.0: also separately for questions with and
    without an answer (HasAns, NoAns).
    """
    version_2 = version == "2.0"
    parts = {"": list(questions)}
    if version_2:
        parts["HasAns_"] = [question for question in questions if question.answers]
        parts["NoAns_"] = [question for question in questions if not question.answers]
    figures = {}
    for prefix, part in parts.items():
        rows = [
            _agreement(question, answers.get(question.id), version_2)
            for question in part
        ]
        if rows:
            figures[f"{prefix}exact_match"] = 100 * (
                sum(exact for exact, _ in rows) / len(rows)
            )
            figures[f"{prefix}f1"] = 100 * (sum(f1 for _, f1 in rows) / len(rows))
    return figures
