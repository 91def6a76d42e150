"""Exact match and F1 of answers, as the official scripts of SQuAD 1.1 and 2.0 define them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from finetune.squad.examples import Question

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, words joined by single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


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
    rows = []
    for question in questions:
        given = [answer.text for answer in question.answers]
        if version_2:
            given = [text for text in given if normalise(text)] or [""]
        answer = answers.get(question.id)
        if answer is None or not given:
            rows.append((0.0, 0.0, bool(question.answers)))
            continue
        exact = max(exact_match(answer, text) for text in given)
        rows.append((exact, max(f1(answer, text, version_2) for text in given), bool(question.answers)))
    found = _means("", rows)
    if version_2:
        for prefix, has_answer in (("HasAns_", True), ("NoAns_", False)):
            found |= _means(prefix, [row for row in rows if row[2] is has_answer])
    return found


def _means(prefix: str, rows: Sequence[tuple[float, float, bool]]) -> dict[str, float]:
    if not rows:
        return {}
    exact, overlap, _ = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    return {f"{prefix}exact_match": 100 * exact, f"{prefix}f1": 100 * overlap}
