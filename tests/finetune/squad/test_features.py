"""Windows equal a plain re-statement on made-up articles that hold every trap of SQuAD's contexts
and answers.
"""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from bert.data.tokens import WordPiece
from finetune.squad import data as squad
from finetune.squad.features import (
    Limits,
    collapse,
    has_most_context,
    make_features,
    windows,
)

from ...refused import refused
from .. import made_up
from . import oracle

# (context, answer): the answer is found by its text in the context unless a start is given.
TRAPS = {
    "plain": ("The cat sat on the mat.", "cat"),
    "at the start": ("The cat sat.", "The"),
    "at the end, with the full stop": ("The cat sat.", "sat."),
    "a part of a word": ("In 1895-1943 he lived.", "1895"),
    "punctuation around": ('He said "(cats)" twice.', "cats"),
    "the same word twice within one": ("It is cat-cat here.", "cat"),
    "several words": ("A cat  sat\ton\nthe mat", "cat  sat\ton\nthe"),
    "one space for several": ("A cat   sat here", ("cat sat", 2)),
    "a narrow space": ("About 20\u202f000 cats.", "20\u202f000"),
    "a no-break space is no end of a word": ("About 20\u00a0000 cats.", "000"),
    "accents": ("The Café was red.", "Café"),
    "a combining accent": ("The Cafe\u0301 was red.", "Cafe\u0301"),
    "Chinese": ("He wrote 漢字漢 here.", "字"),
    "control characters": ("The c\u0000at\ufffd sat.", "sat"),
    "an emoji": ("The 😀 cat 😀 sat.", "cat 😀"),
    "unknown characters": ("He wrote ﷽ here.", "﷽"),
    "special tokens spelled out": ("The [SEP] cat [CLS] sat [MASK].", "cat"),
    "a start that is off": ("The cat sat on the mat.", ("mat", 4)),
    "a start behind the end": ("The cat sat.", ("sat", 40)),
    "a start within the last word": ("The cat sat.", ("sat", 10)),
    "white space ahead": ("  The cat sat.", "The"),
    "an answer that starts with a space": ("The cat sat.", (" cat", 3)),
    "an answer that starts ahead of the first word": (" The cat", (" The", 0)),
    "an answer that starts ahead of the only word": (" cat", (" cat", 0)),
}


def dataset_of(items):
    """A dataset of (context, question, answer); answers: text, (text, start) or None."""
    contexts = [context for context, _, _ in items]
    questions = []
    for number, (context, text, answer) in enumerate(items):
        if isinstance(answer, str):
            answer = answer, context.index(answer)
        answers = (squad.Answer(*answer),) if answer else ()
        questions.append(squad.Question(f"q{number}", text, number, answers))
    return squad.Dataset(contexts, questions)


def assert_equal_to_the_restatement(dataset, tokenizer, limits):
    found, left_out = make_features(dataset, tokenizer, limits, training=True)
    names = {number: token for token, number in tokenizer.ids.items()}
    position = 0
    for question in dataset.questions:
        answer = next(((given.text, given.start) for given in question.answers), None)
        expected = oracle.windows_of(
            dataset.contexts[question.context], question.text, answer, tokenizer.ids,
            length=limits.max_seq_length, query_length=limits.max_query_length, stride=limits.doc_stride,
        )  # fmt: skip
        assert (question.id in left_out) == (expected is None), question
        for window in expected or []:
            ids, second = found.sequence(position)
            assert [names[i] for i in ids.tolist()] == window["tokens"], question
            assert window["segments"] == [0] * second + [1] * (len(ids) - second)
            span = found.starts[position], found.ends[position]
            assert span == window["answer"], question
            assert made_up.lengths(found)[position] == len(ids)
            assert found.offset(position) == window["offset"]
            position += 1
        ids = [dataset.questions[number].id for number in found.question]
        rows = [row for row, name in enumerate(ids) if name == question.id]
        if rows:
            sizes = found.window_start, found.window_length
            spans = [tuple(part[row] for part in sizes) for row in rows]
            most = has_most_context(spans, len(found.context_of(rows[0]).ids))
            for span, mine, window in zip(spans, most, expected, strict=True):
                begin, length = span
                assert mine[begin : begin + length].tolist() == window["most"]
    assert position == len(found)
    return found, left_out


def test_every_trap_equals_the_restatement(tokenizer):
    cases = [(text, "Where is the cat?", answer) for text, answer in TRAPS.values()]
    dataset = dataset_of(cases)
    found, left_out = assert_equal_to_the_restatement(dataset, tokenizer, Limits())
    named = zip(TRAPS, dataset.questions, strict=True)
    assert {name for name, question in named if question.id in left_out} == {
        "a start that is off",
        "a start behind the end",
        "a start within the last word",
        "an answer that starts ahead of the first word",
    }
    assert all(found.starts > 0)


@pytest.mark.parametrize("limits", [Limits(), Limits(max_seq_length=40, max_query_length=9, doc_stride=11),
                                    Limits(max_seq_length=33, max_query_length=20, doc_stride=64)])  # fmt: skip
def test_long_articles_equal_the_restatement_across_windows(tokenizer, limits):
    generator = random.Random(limits.max_seq_length)
    items = []
    for _ in range(16):
        context = made_up.prose(generator, generator.randrange(3, 260))
        begin = generator.randrange(len(context) - 1)
        answer = context[begin : begin + generator.randrange(1, 60)], begin
        question = made_up.prose(generator, generator.randrange(1, 30))
        items.append((context, question, answer if generator.random() < 0.9 else None))
    found, _ = assert_equal_to_the_restatement(dataset_of(items), tokenizer, limits)
    if limits.max_seq_length < 384:
        assert np.bincount(found.question).max() > 3
        assert max(made_up.lengths(found)) == limits.max_seq_length
        answered = np.isin(found.question, found.question[found.starts > 0])
        without = (found.starts == 0) & answered
        assert without.any(), "a window without its question's answer is kept"


def test_prediction_needs_no_answers_and_leaves_nothing_out(tokenizer):
    dataset = dataset_of(
        [("The cat sat.", "Who?", ("dog", 0)), ("\u0000 \ufffd", "Who?", None)]
    )
    found, left_out = make_features(dataset, tokenizer, Limits(), training=False)
    assert not left_out
    assert found.starts.tolist() == found.ends.tolist() == [0, 0]
    # A context without tokens is one empty window.
    assert found.window_length.tolist() == [4, 0]


def test_limits_without_room_are_an_error():
    with refused("MAX_SEQ_LENGTH=20 leaves no room"):
        windows(10, 17, Limits(max_seq_length=20))


def file(tmp_path, questions, version="1.1", **article):
    path = tmp_path / "squad.json"
    paragraph = {"context": "The cat sat.", "qas": questions, **article}
    data = [{"title": "x", "paragraphs": [paragraph]}]
    path.write_text(json.dumps({"version": version, "data": data}))
    return path


QUESTION = {
    "id": "a",
    "question": "Who?",
    "answers": [{"text": "cat", "answer_start": 4}],
}


def test_a_file_of_either_version_is_read(tmp_path):
    dataset = squad.read(file(tmp_path, [QUESTION, {**QUESTION, "id": "b"}]))
    assert dataset.contexts == ["The cat sat."]
    assert [question.id for question in dataset.questions] == ["a", "b"]
    assert dataset.questions[1].answers == (squad.Answer("cat", 4),)
    none = {"id": "b", "question": "Why?", "answers": [], "is_impossible": True}
    second = squad.read(file(tmp_path, [QUESTION, none], "v2.0"), "2.0").questions[1]
    assert second.answers == ()
    bare = {"id": "c", "question": "When?"}
    unanswered = squad.read(file(tmp_path, [bare], "mine"), needs_answers=False)
    assert unanswered.questions[0].answers == ()


@pytest.mark.parametrize(
    ("questions", "options", "message"),
    [
        ([{**QUESTION, "answers": []}], {}, r"qas\[0\] \(a\) has no answer, which training"),
        ([{"id": "a", "question": "Who?"}], {}, "has no list 'answers'"),
        ([QUESTION, QUESTION], {}, r"data\[0\].paragraphs\[0\].qas\[1\] repeats the id 'a' of an earlier question"),
        ([{**QUESTION, "is_impossible": True}], {}, "set SQUAD_VERSION=2.0"),
        ([{**QUESTION, "is_impossible": 1}], {}, "has no bool 'is_impossible'"),
        ([{**QUESTION, "id": 7}], {}, "has no str 'id'"),
        ([{**QUESTION, "answers": [{"text": "cat", "answer_start": True}]}], {}, "has no int 'answer_start'"),
        ([], {}, "has no questions"),
        ([QUESTION], {"context": " \n"}, "empty context"),
        ([QUESTION], {"context": None}, r"data\[0\].paragraphs\[0\] has no str 'context'"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line_that_names_the_place(
    tmp_path, questions, options, message
):
    with refused(message) as error:
        squad.read(file(tmp_path, questions, **options))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[1]", r"data\[0\] has no list 'paragraphs'"), ("{}", "no list 'data'"),
                                               ("[" * 100_000, "not JSON"), ('{"data": [3]}', r"data\[0\] has no list 'paragraphs'")])  # fmt: skip
def test_what_is_not_squad_is_one_line(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with refused(message):
        squad.read(tmp_path / "x.json")
    with refused("No such file"):
        squad.read(tmp_path / "none.json")


def test_a_list_of_paragraphs_is_read(tmp_path):
    paragraph = {"context": "The cat sat.", "qas": [QUESTION]}
    (tmp_path / "list.json").write_text(json.dumps([paragraph]))
    assert squad.read(tmp_path / "list.json") == squad.read(file(tmp_path, [QUESTION]))


def test_data_of_version_2_are_not_read_as_1(tmp_path):
    path = file(tmp_path, [QUESTION], "v2.0")
    with refused("is SQuAD 2"):
        squad.read(path)
    assert squad.read(path, "2.0").questions


def test_a_vocabulary_without_special_tokens_is_an_error(tmp_path):
    (tmp_path / "vocab.txt").write_text("a\nb\n[PAD]\n")
    with refused(r"no \[UNK\], \[CLS\], \[SEP\], \[MASK\]: is this a vocab.txt"):
        WordPiece(tmp_path / "vocab.txt")
    with refused("cannot read the vocabulary"):
        WordPiece(tmp_path / "none.txt")


def test_only_five_characters_separate_words():
    assert collapse("a \t b\u202fc\u00a0d\r\n\ne ") == "a b c\u00a0d e"


def test_squad_as_datasets_exports_it_is_the_same_data(tmp_path):
    """A record per question, with an object of lists as answers: one a line, or one JSON list."""
    context = "The cat was red."
    published = {"data": [{"paragraphs": [{"context": context, "qas": [
        {"id": "a", "question": "What?", "answers": [{"text": "red", "answer_start": 12}]},
        {"id": "b", "question": "Who?", "answers": [], "is_impossible": True},
    ]}]}]}  # fmt: skip
    records = [
        {"id": "a", "title": "x", "context": context, "question": "What?",
         "answers": {"text": ["red"], "answer_start": [12]}},
        {"id": "b", "title": "x", "context": context, "question": "Who?",
         "answers": {"text": [], "answer_start": []}},
    ]  # fmt: skip
    texts = [
        json.dumps(published),
        json.dumps(records),
        "\n".join(map(json.dumps, records)),
    ]
    found = []
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.json").write_text(text)
        found.append(squad.read(tmp_path / f"{number}.json", "2.0"))
    assert found[0] == found[1] == found[2]
    records[0]["answers"] = {"text": ["red", "cat"], "answer_start": [12]}
    (tmp_path / "short.json").write_text(json.dumps(records))
    with refused("record 1 has 2 texts of answers, but 1 of answer_start"):
        squad.read(tmp_path / "short.json", "2.0")
    with refused(r"record 2 \(b\) has no answer"):
        squad.read(tmp_path / "2.json", "1.1")
