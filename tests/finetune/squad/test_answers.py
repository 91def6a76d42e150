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

from finetune.squad import answers
from finetune.squad.answers import Logits, Predictions, Rules
from finetune.squad.data import Answer, Dataset, Question
from finetune.squad.features import Limits, make_features
from finetune.squad.score import best_threshold, f1, normalise, score

from .. import made_up
from . import oracle

LIMITS = Limits(max_seq_length=40, max_query_length=9, doc_stride=11)


ODD = [
    "İ", "ﬁ", "é", "ß", "\u200b", "\xad", "\u2028", "\u3000", "ẞ", "가", "ǅ", "①", "😀", "\u0600",
    "Ａ", "\u0344", "\ufeff", "\x85", "—", "½", "་", "ﷺ",
]  # fmt: skip


def odd(generator, text):
    """The text with characters between its own that change their number, case or place in
    normalisation, or vanish.
    """
    return "".join(
        character + (generator.choice(ODD) if generator.random() < 0.1 else "")
        for character in text
    )


@pytest.fixture(scope="module")
def dataset():
    generator = random.Random(5)
    sizes = [generator.randrange(2, 120) for _ in range(25)]
    contexts = [made_up.prose(generator, size) for size in sizes]
    contexts[1] = " \n" + contexts[1]
    # The same answer in many places and windows.
    contexts[2] = " ".join(generator.choices(["red", "cat"], k=70))
    contexts[3:9] = [odd(generator, context) for context in contexts[3:9]]
    texts = [made_up.prose(generator, generator.randrange(1, 12)) for _ in range(50)]
    cats = (Answer("cat", 0),)
    questions = [Question(f"q{i}", x, i // 2, cats) for i, x in enumerate(texts)]
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
            context, question.text, None, tokenizer.ids, length=40, query_length=9, stride=11,
        )  # fmt: skip
        own = logits[position : position + len(windows)]
        scores = [[part.tolist() for part in pair] for pair in own]
        position += len(windows)
        words, _ = oracle.words_of(context)
        pieces, _, word_of = oracle.pieces_of_words(words, tokenizer.ids)
        text_of = functools.partial(oracle.answer_of, context, pieces, word_of)
        expected, n_best, odds = oracle.answers_of(
            windows, scores, text_of, n_best=rules.n_best, longest=rules.max_answer_length, version_2=rules.version_2, threshold=rules.null_threshold,
        )  # fmt: skip
        assert predictions.answers[question.id] == expected
        unanswered += not expected
        mine = [tuple(entry.values()) for entry in predictions.n_best[question.id]]
        assert [entry[0] for entry in mine] == [entry[0] for entry in n_best], context
        assert len({entry[0] for entry in mine}) == len(mine)
        numbers = [[entry[1:] for entry in entries] for entries in (mine, n_best)]
        np.testing.assert_allclose(*numbers, rtol=1e-6)
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
        kind, place = name.split("_")
        (start if kind == "start" else end)[int(place) + found.offset(0)] = value
    return answers.predict(found, [Logits(start, end)], Rules()).answers["a"]


def test_an_answer_is_the_text_of_the_context_as_it_was_written(tokenizer):
    context = "The  Café\nsat (2,000 cats)."
    assert answered(tokenizer, context, start_0=9, end_1=1, end_4=9) == "The Café"
    assert answered(tokenizer, context, start_6=9, end_10=9).startswith("(2")


def test_a_span_that_ends_before_it_starts_or_lies_in_the_question_is_not_an_answer(
    tokenizer,
):
    assert answered(tokenizer, "cat sat there", start_2=9, end_0=9, end_2=1) == "there"
    scores = {"start_-1": 99, "end_-1": 99, "start_1": 3, "end_1": 3}
    assert answered(tokenizer, "cat sat there", **scores) == "sat"


def test_a_context_without_tokens_has_an_empty_answer(tokenizer):
    dataset = Dataset(["\u0000"], [Question("a", "who", 0)])
    found, _ = make_features(dataset, tokenizer, Limits(), training=False)
    # As published.
    for version, answer in (("1.1", "empty"), ("2.0", "")):
        rules = Rules(squad_version=version)
        predictions = answers.predict(found, random_logits(found, 1), rules)
        assert predictions.answers == {"a": answer}
        assert [entry["probability"] for entry in predictions.n_best["a"]] == [1.0]


def test_the_files_hold_what_the_official_script_reads(tokenizer, dataset, tmp_path):
    found, _ = make_features(dataset, tokenizer, LIMITS, training=False)
    names = ["text", "probability", "start_logit", "end_logit"]
    for version in ("1.1", "2.0"):
        rules = Rules(squad_version=version)
        predictions = answers.predict(found, random_logits(found, 2), rules)
        predictions.write(tmp_path / version)
        paths = (tmp_path / version).iterdir()
        read = {path.name: json.loads(path.read_text("utf-8")) for path in paths}
        assert read.pop("predictions.json") == predictions.answers
        assert read.pop("nbest_predictions.json") == predictions.n_best
        odds = {"null_odds.json": predictions.null_odds}
        assert read == (odds if version == "2.0" else {})
        for entries in predictions.n_best.values():
            assert list(entries[0]) == names
            assert sum(entry["probability"] for entry in entries) == pytest.approx(1)


def questions_and_answers(seed, count, unanswerable=0.0):
    generator = random.Random(seed)
    questions, predictions = [], {}
    for number in range(count):
        # At least one word is no article: of an empty answer torchmetrics takes SQuAD 2.0's view,
        # 1.1's script did not.
        texts = [made_up.prose(generator, generator.randrange(4)) for _ in range(3)]
        given = tuple(Answer(f"{text}cats", 0) for text in texts)
        impossible = generator.random() < unanswerable
        questions.append(Question(str(number), "?", 0, () if impossible else given))
        words = generator.choice(given).text.split()
        kind = generator.random()
        if kind < 0.3:
            said = " ".join(words).upper() + "!"
        elif kind < 0.6:
            said = " ".join([*words[: generator.randrange(len(words) + 1)], "red"])
        elif kind < 0.8:
            said = made_up.prose(generator, 3)
        else:
            said = generator.choice(["", "the", "a."])
        predictions[str(number)] = said
    return questions, predictions


def test_scores_equal_torchmetrics_on_a_thousand_random_answers():
    squad = pytest.importorskip("torchmetrics.functional.text").squad
    questions, predictions = questions_and_answers(1, 1000)
    target = []
    for question in questions:
        texts = [answer.text for answer in question.answers]
        given = {"text": texts, "answer_start": [0] * len(texts)}
        target.append({"id": question.id, "answers": given})
    said = [{"id": id, "prediction_text": text} for id, text in predictions.items()]
    expected = {name: float(value) for name, value in squad(said, target).items()}
    found = score(questions, predictions)
    assert found == pytest.approx(expected, abs=1e-4)
    assert 20 < found["exact_match"] < found["f1"] < 80


def plain_words(text):
    kept = text.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def plain_score_2(question, prediction):
    """Exact match and F1 of SQuAD 2.0, of one question, by lists and loops."""
    texts = [plain_words(answer.text) for answer in question.answers]
    given = [words for words in texts if words] or [[]]
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
    found = score(questions, predictions, "2.0")
    kinds = {"": (True, False), "HasAns_": (True,), "NoAns_": (False,)}
    for prefix, chosen in kinds.items():
        asked = [question for question in questions if bool(question.answers) in chosen]
        rows = [plain_score_2(each, predictions[each.id]) for each in asked]
        exact, f1_mean = 100 * np.mean(rows, axis=0)
        assert found[f"{prefix}exact_match"] == pytest.approx(exact)
        assert found[f"{prefix}f1"] == pytest.approx(f1_mean)
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
    cat = Question("b", "?", 0, (Answer("cat", 0),))
    found = score([question, cat], {"b": "The cat!"})
    assert found == {"exact_match": 50.0, "f1": 50.0}


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
