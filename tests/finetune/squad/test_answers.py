"""Answers, their probabilities, "no answer" and scores equal a plain re-statement."""

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
from finetune.squad.score import best_threshold, f1, score

from .. import made_up
from . import oracle

LIMITS = Limits(max_seq_length=40, max_query_length=9, doc_stride=11)


ODD = [
    "İ", "ﬁ", "é", "ß", "\u200b", "\xad", "\u2028", "\u3000", "ẞ", "가", "ǅ", "①", "😀", "\u0600",
    "Ａ", "\u0344", "\ufeff", "\x85", "—", "½", "་", "ﷺ",
]  # fmt: skip


def odd(generator, text):
    """The text with characters that normalisation changes in number, case or place."""
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
    questions = [Question(f"q{i}", x, i // 2) for i, x in enumerate(texts)]
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
def test_answers_and_files_equal_the_restatement(tokenizer, dataset, tmp_path, rules):
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
        # What the official script reads.
        names = "text", "probability", "start_logit", "end_logit"
        assert (*predictions.n_best[question.id][0],) == names
        assert [entry[0] for entry in mine] == [entry[0] for entry in n_best], context
        assert len({entry[0] for entry in mine}) == len(mine)
        numbers = [[entry[1:] for entry in entries] for entries in (mine, n_best)]
        np.testing.assert_allclose(*numbers, rtol=1e-6)
        if rules.version_2:
            assert predictions.null_odds[question.id] == pytest.approx(odds)
    assert unanswered < len(dataset.questions)
    assert unanswered or not rules.version_2
    assert bool(predictions.null_odds) == rules.version_2
    predictions.write(tmp_path)
    files = {
        "predictions": predictions.answers,
        "nbest_predictions": predictions.n_best,
    }
    files |= {"null_odds": predictions.null_odds} if rules.version_2 else {}
    written = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert written == files


def test_a_context_without_tokens_has_an_empty_answer(tokenizer):
    dataset = Dataset(["\u0000"], [Question("a", "who", 0)])
    found, _ = make_features(dataset, tokenizer, Limits(), training=False)
    # As published.
    for version, answer in (("1.1", "empty"), ("2.0", "")):
        rules = Rules(squad_version=version)
        predictions = answers.predict(found, random_logits(found, 1), rules)
        assert predictions.answers == {"a": answer}
        assert [entry["probability"] for entry in predictions.n_best["a"]] == [1.0]


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
        predictions[str(number)] = generator.choice([
            " ".join(words).upper() + "!",
            " ".join([*words[: generator.randrange(len(words) + 1)], "red"]),
            made_up.prose(generator, 3),
            generator.choice(["", "the", "a."]),
        ])  # fmt: skip
    return questions, predictions


def test_scores_equal_torchmetrics_on_random_answers():
    squad = pytest.importorskip("torchmetrics.functional.text").squad
    questions, predictions = questions_and_answers(1, 300)
    texts = {each.id: [answer.text for answer in each.answers] for each in questions}
    target = [
        {"id": id, "answers": {"text": given, "answer_start": [0] * len(given)}}
        for id, given in texts.items()
    ]
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
    the, cat = Answer("the", 0), Answer("cat", 4)
    question = Question("a", "?", 0, (the,))
    # An article alone is no answer.
    assert score([question], {"a": ""}, "2.0")["exact_match"] == 100
    # Beside a real one it does not count.
    several = Question("a", "?", 0, (the, cat))
    assert score([several], {"a": ""}, "2.0")["f1"] == 0
    assert (f1("", "the"), f1("", "the", version_2=True)) == (0, 1)
    found = score([question, Question("b", "?", 0, (cat,))], {"b": "The cat!"})
    assert found == {"exact_match": 50.0, "f1": 50.0}


def test_the_best_threshold_is_the_one_that_trying_them_all_finds():
    generator, some = random.Random(5), (Answer("red cat", 0),)
    for _ in range(60):
        given = generator.choices([some, ()], [6, 4], k=generator.randrange(1, 9))
        questions = [Question(str(n), "?", 0, each) for n, each in enumerate(given)]
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
