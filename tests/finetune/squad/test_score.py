"""Exact match and F1 equal torchmetrics' on random answers; SQuAD 2.0's equal a plain re-statement."""

from __future__ import annotations

import random
import re
import string

import pytest

from finetune.squad.examples import Answer, Question
from finetune.squad.score import f1, normalise, score

from .. import made_up


def questions_and_answers(seed, count, unanswerable=0.0):
    generator = random.Random(seed)
    questions, predictions = [], {}
    for number in range(count):
        # At least one word is no article: of an empty answer torchmetrics takes SQuAD 2.0's view, 1.1's script did not.
        given = tuple(Answer(made_up.prose(generator, generator.randrange(4)) + "cats", 0) for _ in range(3))
        impossible = generator.random() < unanswerable
        questions.append(Question(str(number), "?", 0, () if impossible else given, impossible))
        words = generator.choice(given).text.split()
        kind = generator.random()
        if kind < 0.3:
            predictions[str(number)] = " ".join(words).upper() + "!"
        elif kind < 0.6:
            predictions[str(number)] = " ".join([*words[: generator.randrange(len(words) + 1)], "red"])
        elif kind < 0.8:
            predictions[str(number)] = made_up.prose(generator, 3)
        else:
            predictions[str(number)] = generator.choice(["", "the", "a."])
    return questions, predictions


def test_scores_equal_torchmetrics_on_a_thousand_random_answers():
    squad = pytest.importorskip("torchmetrics.functional.text").squad
    questions, predictions = questions_and_answers(1, 1000)
    target = [
        {"id": q.id, "answers": {"text": [a.text for a in q.answers], "answer_start": [0] * len(q.answers)}}
        for q in questions
    ]
    expected = squad([{"id": name, "prediction_text": text} for name, text in predictions.items()], target)
    found = score(questions, predictions)
    assert found["exact_match"] == pytest.approx(float(expected["exact_match"]), abs=1e-4)
    assert found["f1"] == pytest.approx(float(expected["f1"]), abs=1e-4)
    assert 20 < found["exact_match"] < found["f1"] < 80


def plain_words(text):
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def plain_score_2(question, prediction):
    """Exact match and F1 of SQuAD 2.0, of one question, by lists and loops."""
    given = [words for answer in question.answers if (words := plain_words(answer.text))] or [[]]
    found = plain_words(prediction)
    best = 0.0
    for words in given:
        left, common = list(words), 0
        for word in found:
            if word in left:
                left.remove(word)
                common += 1
        if not words or not found:
            best = max(best, float(words == found))
        elif common:
            precision, recall = common / len(found), common / len(words)
            best = max(best, 2 * precision * recall / (precision + recall))
    return float(found in given), best


def test_scores_of_version_2_equal_the_restatement():
    questions, predictions = questions_and_answers(2, 1000, unanswerable=0.4)
    expected = [plain_score_2(question, predictions[question.id]) for question in questions]
    found = score(questions, predictions, "2.0")
    for prefix, chosen in (("", {True, False}), ("HasAns_", {False}), ("NoAns_", {True})):
        rows = [row for row, question in zip(expected, questions, strict=True) if question.impossible in chosen]
        assert found[f"{prefix}exact_match"] == pytest.approx(100 * sum(row[0] for row in rows) / len(rows))
        assert found[f"{prefix}f1"] == pytest.approx(100 * sum(row[1] for row in rows) / len(rows))
    assert found["NoAns_f1"] > 10
    assert found["HasAns_f1"] > 10


def test_an_empty_answer_and_a_missing_one():
    question = Question("a", "?", 0, (Answer("the", 0),))
    assert score([question], {"a": ""}, "2.0")["exact_match"] == 100  # an article alone is no answer
    several = Question("a", "?", 0, (Answer("the", 0), Answer("cat", 4)))
    assert score([several], {"a": ""}, "2.0")["f1"] == 0  # beside a real one it does not count
    assert f1("", "the") == 0
    assert f1("", "the", version_2=True) == 1
    assert score([question, Question("b", "?", 0, (Answer("cat", 0),))], {"b": "The cat!"}) == {
        "exact_match": 50.0,
        "f1": 50.0,
    }


def test_normalising_drops_case_punctuation_articles_and_spaces():
    assert normalise(" The  Cat's-an \n a mat. ") == "catsan mat"
