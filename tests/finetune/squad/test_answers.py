"""Answers, their probabilities and SQuAD 2.0's "no answer" equal a plain re-statement; so do exact
match and F1.
"""

from __future__ import annotations

import functools
import json
import random
import re
import string

import numpy as np
import pytest

from bert.data.tokens import WordPiece
from finetune.squad import answers
from finetune.squad.answers import Logits, Predictions, Rules
from finetune.squad.data import Answer, Dataset, Question
from finetune.squad.features import Limits, make_features
from finetune.squad.score import best_threshold, f1, normalise, score

from .. import made_up
from . import oracle

LIMITS = Limits(max_seq_length=40, max_query_length=9, doc_stride=11)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(made_up.VOCABULARY) + "\n", encoding="utf-8")
    return WordPiece(path)


def odd(generator, text):
    """The text with characters between its own that change their number, case or place in
    normalisation, or vanish.
    """
    kinds = [
        "İ",
        "ﬁ",
        "é",
        "ß",
        "\u200b",
        "\xad",
        "\u2028",
        "\u3000",
        "ẞ",
        "가",
        "ǅ",
        "①",
        "😀",
        "\u0600",
        "Ａ",
        "̈́",
    ]
    kinds += ["\ufeff", "\x85", "—", "½", "་", "ﷺ"]
    return "".join(
        character + (generator.choice(kinds) if generator.random() < 0.1 else "")
        for character in text
    )


@pytest.fixture(scope="module")
def dataset():
    generator = random.Random(5)
    contexts = [
        made_up.prose(generator, generator.randrange(2, 120)) for _ in range(25)
    ]
    contexts[1] = " \n" + contexts[1]
    # The same answer in many places and windows.
    contexts[2] = " ".join(generator.choices(["red", "cat"], k=70))
    contexts[3:9] = [odd(generator, context) for context in contexts[3:9]]
    questions = [
        Question(
            f"q{i}",
            made_up.prose(generator, generator.randrange(1, 12)),
            i // 2,
            (Answer("cat", 0),),
        )
        for i in range(2 * len(contexts))
    ]
    return Dataset(contexts, questions)


def random_logits(found, seed, scale=4.0):
    """Scores of all windows, some of them equal."""
    generator = np.random.default_rng(seed)
    return [
        Logits(*np.round(generator.normal(0, scale, (2, length)), 1).astype(np.float32))
        for length in made_up.lengths(found)
    ]


@pytest.mark.parametrize("rules", [
    Rules(),
    Rules(n_best=3, max_answer_length=2),
    Rules(squad_version="2.0"),
    Rules(squad_version="2.0", n_best=8),
    Rules(squad_version="2.0", null_threshold=-3.0),
])  # fmt: skip
def test_answers_equal_the_restatement(tokenizer, dataset, rules):
    found, _ = make_features(dataset, tokenizer, LIMITS, training=False)
    logits = random_logits(found, seed=1, scale=1.5)
    for number, pair in enumerate(logits):
        pair.start[0] += number % 3 * 4  # some questions look unanswerable
    predictions = answers.predict(found, logits, rules)
    position, unanswered = 0, 0
    for question in dataset.questions:
        context = dataset.contexts[question.context]
        windows = oracle.windows_of(
            context,
            question.text,
            None,
            tokenizer.ids,
            length=40,
            query_length=9,
            stride=11,
        )
        scores = [
            [part.tolist() for part in pair]
            for pair in logits[position : position + len(windows)]
        ]
        position += len(windows)
        pieces, _, word_of = oracle.pieces_of_words(
            oracle.words_of(context)[0], tokenizer.ids
        )
        text_of = functools.partial(oracle.answer_of, context, pieces, word_of)
        expected, n_best, odds = oracle.answers_of(
            windows, scores, text_of, n_best=rules.n_best, longest=rules.max_answer_length, version_2=rules.version_2, threshold=rules.null_threshold,
        )  # fmt: skip
        assert predictions.answers[question.id] == expected
        unanswered += not expected
        mine = [tuple(entry.values()) for entry in predictions.n_best[question.id]]
        assert [entry[0] for entry in mine] == [entry[0] for entry in n_best], context
        assert len({entry[0] for entry in mine}) == len(mine)
        np.testing.assert_allclose(
            [entry[1:] for entry in mine], [entry[1:] for entry in n_best], rtol=1e-6
        )
        if rules.version_2:
            assert predictions.null_odds[question.id] == pytest.approx(odds)
    assert unanswered < len(dataset.questions)
    assert unanswered or not rules.version_2
    assert bool(predictions.null_odds) == rules.version_2


def answered(tokenizer, context, **scores):
    """The answer where the tokens named have a high score as start or end. The question is one
    token long.
    """
    dataset = Dataset([context], [Question("a", "who", 0)])
    found, _ = make_features(dataset, tokenizer, Limits(), training=False)
    start, end = np.zeros((2, made_up.lengths(found)[0]), dtype=np.float32)
    for name, value in scores.items():
        (start if name.startswith("start") else end)[
            int(name.split("_")[1]) + found.offset(0)
        ] = value
    return answers.predict(found, [Logits(start, end)], Rules()).answers["a"]


def test_an_answer_is_the_text_of_the_context_as_it_was_written(tokenizer):
    context = "The  Café\nsat (2,000 cats)."
    assert answered(tokenizer, context, start_0=9, end_1=1, end_4=9) == "The Café"
    assert answered(tokenizer, context, start_6=9, end_10=9).startswith("(2")


def test_a_span_that_ends_before_it_starts_or_lies_in_the_question_is_not_an_answer(
    tokenizer,
):
    assert answered(tokenizer, "cat sat there", start_2=9, end_0=9, end_2=1) == "there"
    assert (
        answered(
            tokenizer,
            "cat sat there",
            **{"start_-1": 99, "end_-1": 99, "start_1": 3, "end_1": 3},
        )
        == "sat"
    )


def test_a_context_without_tokens_has_an_empty_answer(tokenizer):
    dataset = Dataset(["\u0000"], [Question("a", "who", 0)])
    found, _ = make_features(dataset, tokenizer, Limits(), training=False)
    for version_2 in (False, True):
        predictions = answers.predict(
            found,
            random_logits(found, 1),
            Rules(squad_version="2.0" if version_2 else "1.1"),
        )
        # As published.
        assert predictions.answers == {"a": "" if version_2 else "empty"}
        assert [entry["probability"] for entry in predictions.n_best["a"]] == [1.0]


def test_the_files_hold_what_the_official_script_reads(tokenizer, dataset, tmp_path):
    found, _ = make_features(dataset, tokenizer, LIMITS, training=False)
    for version_2 in (False, True):
        predictions = answers.predict(
            found,
            random_logits(found, 2),
            Rules(squad_version="2.0" if version_2 else "1.1"),
        )
        folder = tmp_path / str(version_2)
        predictions.write(folder)
        read = {
            path.name: json.loads(path.read_text(encoding="utf-8"))
            for path in folder.iterdir()
        }
        assert read.pop("predictions.json") == predictions.answers
        assert read.pop("nbest_predictions.json") == predictions.n_best
        assert read == ({"null_odds.json": predictions.null_odds} if version_2 else {})
        for entries in predictions.n_best.values():
            assert list(entries[0]) == [
                "text",
                "probability",
                "start_logit",
                "end_logit",
            ]
            assert sum(entry["probability"] for entry in entries) == pytest.approx(1)


def questions_and_answers(seed, count, unanswerable=0.0):
    generator = random.Random(seed)
    questions, predictions = [], {}
    for number in range(count):
        # At least one word is no article: of an empty answer torchmetrics takes SQuAD 2.0's view,
        # 1.1's script did not.
        given = tuple(
            Answer(made_up.prose(generator, generator.randrange(4)) + "cats", 0)
            for _ in range(3)
        )
        impossible = generator.random() < unanswerable
        questions.append(Question(str(number), "?", 0, () if impossible else given))
        words = generator.choice(given).text.split()
        kind = generator.random()
        if kind < 0.3:
            predictions[str(number)] = " ".join(words).upper() + "!"
        elif kind < 0.6:
            predictions[str(number)] = " ".join(
                [*words[: generator.randrange(len(words) + 1)], "red"]
            )
        elif kind < 0.8:
            predictions[str(number)] = made_up.prose(generator, 3)
        else:
            predictions[str(number)] = generator.choice(["", "the", "a."])
    return questions, predictions


def test_scores_equal_torchmetrics_on_a_thousand_random_answers():
    squad = pytest.importorskip("torchmetrics.functional.text").squad
    questions, predictions = questions_and_answers(1, 1000)
    target = [
        {
            "id": q.id,
            "answers": {
                "text": [a.text for a in q.answers],
                "answer_start": [0] * len(q.answers),
            },
        }
        for q in questions
    ]
    expected = squad(
        [{"id": name, "prediction_text": text} for name, text in predictions.items()],
        target,
    )
    found = score(questions, predictions)
    assert found["exact_match"] == pytest.approx(
        float(expected["exact_match"]), abs=1e-4
    )
    assert found["f1"] == pytest.approx(float(expected["f1"]), abs=1e-4)
    assert 20 < found["exact_match"] < found["f1"] < 80


def plain_words(text):
    kept = "".join(
        character for character in text.lower() if character not in string.punctuation
    )
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def plain_score_2(question, prediction):
    """Exact match and F1 of SQuAD 2.0, of one question, by lists and loops."""
    given = [
        words for answer in question.answers if (words := plain_words(answer.text))
    ] or [[]]
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
    expected = [
        plain_score_2(question, predictions[question.id]) for question in questions
    ]
    found = score(questions, predictions, "2.0")
    for prefix, chosen in (
        ("", {True, False}),
        ("HasAns_", {False}),
        ("NoAns_", {True}),
    ):
        rows = [
            row
            for row, question in zip(expected, questions, strict=True)
            if (not question.answers) in chosen
        ]
        assert found[f"{prefix}exact_match"] == pytest.approx(
            100 * sum(row[0] for row in rows) / len(rows)
        )
        assert found[f"{prefix}f1"] == pytest.approx(
            100 * sum(row[1] for row in rows) / len(rows)
        )
    assert found["NoAns_f1"] > 10
    assert found["HasAns_f1"] > 10


def test_an_empty_answer_and_a_missing_one():
    question = Question("a", "?", 0, (Answer("the", 0),))
    # An article alone is no answer.
    assert score([question], {"a": ""}, "2.0")["exact_match"] == 100
    several = Question("a", "?", 0, (Answer("the", 0), Answer("cat", 4)))
    # Beside a real one it does not count.
    assert score([several], {"a": ""}, "2.0")["f1"] == 0
    assert f1("", "the") == 0
    assert f1("", "the", version_2=True) == 1
    assert score(
        [question, Question("b", "?", 0, (Answer("cat", 0),))], {"b": "The cat!"}
    ) == {"exact_match": 50.0, "f1": 50.0}


def test_normalising_drops_case_punctuation_articles_and_spaces():
    assert normalise(" The  Cat's-an \n a mat. ") == "catsan mat"


def test_the_best_threshold_is_the_one_that_trying_them_all_finds():
    generator = random.Random(5)
    for _ in range(60):
        some = (Answer("red cat", 0),)
        questions = [
            Question(str(n), "?", 0, some if generator.random() < 0.6 else ())
            for n in range(generator.randrange(1, 9))
        ]
        spans = {q.id: generator.choice(["red cat", "cat", "dog"]) for q in questions}
        odds = {q.id: float(generator.randrange(-3, 4)) for q in questions}
        n_best = {name: [{"text": ""}, {"text": span}] for name, span in spans.items()}
        threshold, best = best_threshold(questions, Predictions({}, n_best, odds))

        def f1_at(tried, questions=questions, spans=spans, odds=odds):
            said = {q: span if odds[q] <= tried else "" for q, span in spans.items()}
            return score(questions, said, "2.0")["f1"]

        rivals = [f1_at(value + 0.5) for value in range(-5, 5)]
        assert best == pytest.approx(max(rivals)) == pytest.approx(f1_at(threshold))
        assert f1_at(round(threshold, 1)) == f1_at(threshold)
