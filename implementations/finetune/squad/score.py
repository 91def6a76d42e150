"""Exact match and F1 of answers, as in SQuAD's official evaluation scripts."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

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
    question: Question,
    answer: str | None,
    version_2: bool,
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


def score(
    questions: Sequence[Question],
    answers: Mapping[str, str],
    version: str = "1.1",
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
