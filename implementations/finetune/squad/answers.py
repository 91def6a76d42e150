"""Scores of tokens as answers, as in the SQuAD code of the BERT paper.

The n best starts of a window are paired with its n best ends; a span lies in the context, starts at
a token that has its maximum context in this window, and is short. Spans of all windows compete,
each text once. SQuAD 2.0: the scores at [CLS] stand for "no answer", with their minimum over the
windows.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import softmax

from bert.data.tokens import Integers, Pieces, WordPiece
from common.files import write_text
from finetune.squad.features import Features, collapse, has_most_context, word_numbers


class Logits(NamedTuple):
    """Scores of a window's tokens as start and end of the answer, float32 (length of the
    sequence,).
    """

    start: np.ndarray
    end: np.ndarray


class Rules(NamedTuple):
    """n_best: starts, ends and answers kept; max_answer_length: tokens; null_threshold: margin by
    which "no answer" must win.
    """

    # The defaults of the published run_squad.py, which NVIDIA's recipes keep.
    n_best: int = 20
    max_answer_length: int = 30
    null_threshold: float = 0.0
    squad_version: str = "1.1"

    @property
    def version_2(self) -> bool:
        """Whether a question may have no answer."""
        return self.squad_version == "2.0"


class Candidate(NamedTuple):
    """A possible answer."""

    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


class Predictions(NamedTuple):
    """By question: the answer; the best answers with probability and logits; margin of "no answer"
    over a span.
    """

    answers: dict[str, str]
    n_best: dict[str, list[dict[str, str | float]]]
    null_odds: dict[str, float]

    def write(self, folder: Path) -> None:
        """Writes predictions.json, nbest_predictions.json and, for SQuAD 2.0, null_odds.json, as
        the official script reads them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, values in zip(
            ("predictions", "nbest_predictions", "null_odds"), self, strict=True
        ):
            if values or name != "null_odds":
                write_text(
                    folder / f"{name}.json",
                    json.dumps(values, indent=4, ensure_ascii=False) + "\n",
                )


def predict(features: Features, logits: Sequence[Logits], rules: Rules) -> Predictions:
    """Answers to all questions of the features. logits: of every window."""
    predictions = Predictions({}, {}, {})
    bounds = np.flatnonzero(np.diff(features.question)) + 1
    # The windows of each question.
    for rows in np.split(np.arange(len(features)), bounds):
        positions = [
            (int(features.window_start[row]), int(features.window_length[row]))
            for row in rows
        ]
        best_window = has_most_context(positions, len(features.context_of(rows[0]).ids))
        spans = [
            _spans(features, row, logits[row], mine, rules)
            for row, mine in zip(rows, best_window, strict=True)
        ]
        nulls = [
            Candidate("", float(logits[row].start[0]), float(logits[row].end[0]))
            for row in rows
        ]
        # As published: the window that is least sure of "no answer" speaks for all.
        null = min(nulls, key=lambda candidate: candidate.score)
        best = _best(
            features, spans, rows[0], null if rules.version_2 else None, rules.n_best
        )
        question = features.dataset.questions[features.question[rows[0]]].id
        shares = softmax(np.array([candidate.score for candidate in best]))
        predictions.n_best[question] = [
            {
                "text": candidate.text,
                "probability": float(share),
                **candidate._asdict(),
            }
            for candidate, share in zip(best, shares, strict=True)
        ]
        answer = best[0].text
        if rules.version_2:
            span = next((candidate for candidate in best if candidate.text), None)
            # JSON has no infinity.
            odds = (
                1e9 if span is None else null.score - span.start_logit - span.end_logit
            )
            answer = span.text if span and odds <= rules.null_threshold else ""
            predictions.null_odds[question] = odds
        predictions.answers[question] = answer
    return predictions


# First and last token in the context, and their scores.
Spans = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _spans(
    features: Features, row: int, logits: Logits, mine: np.ndarray, rules: Rules
) -> Spans:
    """Candidates of a window, sorted by score of start, then of end. mine: tokens with maximum
    context here.
    """
    begin = features.window_start[row]
    length = features.window_length[row]
    offset = features.offset(row)
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
    # fp32 scores are summed as Python sums them in the published code, in fp64.
    start = logits.start[first + offset].astype(np.float64)
    end = logits.end[last + offset].astype(np.float64)
    return first + begin, last + begin, start, end


def _best(
    features: Features,
    spans: Sequence[Spans],
    row: int,
    null: Candidate | None,
    n_best: int,
) -> list[Candidate]:
    """The best answers to a question, each text once. null: "no answer", always among them; None
    for SQuAD 1.1.
    """
    first, last, start, end = (
        np.concatenate(arrays) for arrays in zip(*spans, strict=True)
    )
    scores = np.append(start + end, [] if null is None else null.score)
    context = features.dataset.contexts[
        features.dataset.questions[features.question[row]].context
    ]
    words = word_numbers(context)
    pieces = features.context_of(row)
    best: dict[str, Candidate] = {}
    for i in np.argsort(-scores, kind="stable").tolist():
        if len(best) == n_best:
            break
        # The last place of the sorted scores is that of "no answer".
        candidate = null
        if i < len(first):
            answer = answer_text(
                context, words, pieces, features.tokenizer, int(first[i]), int(last[i])
            )
            candidate = Candidate(answer, float(start[i]), float(end[i]))
        assert candidate is not None
        best.setdefault(candidate.text, candidate)
    if null is not None:
        best.setdefault("", null)
    # As in the published code.
    return list(best.values()) or [Candidate("empty", 0.0, 0.0)]


def answer_text(
    text: str,
    words: Integers,
    pieces: Pieces,
    tokenizer: WordPiece,
    first: int,
    last: int,
) -> str:
    """The part of the context's words that the tokens first to last spell; their words if
    characters do not match up.

    As in the published code (get_final_text): compares the non-space characters before and after
    normalization, if their number is equal.
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
    visible = [i for i, character in enumerate(whole) if character != " "]
    rank = {
        i: n
        for n, i in enumerate(
            i for i, character in enumerate(normal) if character != " "
        )
    }
    at = normal.find(spelt)
    if (
        at < 0
        or len(visible) != len(rank)
        or not {at, at + len(spelt) - 1} <= rank.keys()
    ):
        return whole
    return whole[visible[rank[at]] : visible[rank[at + len(spelt) - 1]] + 1]
