"""Windows equal a plain re-statement on articles that hold every trap of SQuAD's."""

import json
import random

import numpy as np
import pytest

from bert.data.tokens import WordPiece
from finetune.squad import data as squad
from finetune.squad import features
from finetune.squad.features import Limits, make_features

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
            most = features.has_most_context(spans, len(found.context_of(rows[0]).ids))
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
    items = ("The cat sat.", "Who?", ("dog", 0)), ("\u0000 \ufffd", "Who?", None)
    found, left_out = make_features(
        dataset_of(items), tokenizer, Limits(), training=False
    )
    assert not left_out
    assert found.starts.tolist() == found.ends.tolist() == [0, 0]
    # A context without tokens is one empty window.
    assert found.window_length.tolist() == [4, 0]


def test_limits_without_room_are_an_error():
    with refused("MAX_SEQ_LENGTH=20 leaves no room"):
        features.windows(10, 17, Limits(max_seq_length=20))


CAT = {"text": "cat", "answer_start": 4}
QUESTION = {"id": "a", "question": "Who?", "answers": [CAT]}
NONE = {"id": "b", "question": "Why?", "answers": [], "is_impossible": True}
PARAGRAPH = {"context": "The cat sat.", "qas": [QUESTION, NONE]}


def published(*questions, version="1.1", **paragraph):
    paragraph = {"context": "The cat sat.", "qas": questions, **paragraph}
    data = [{"title": "x", "paragraphs": [paragraph]}]
    return json.dumps({"version": version, "data": data})


def record(question, texts, starts):
    """As datasets exports a question: with an object of lists as answers."""
    answers = {"text": texts, "answer_start": starts}
    return question | {"title": "x", "context": "The cat sat.", "answers": answers}


RECORDS = [
    record(QUESTION, ["cat"], [4]),
    record({"id": "b", "question": "Why?"}, [], []),
]


@pytest.mark.parametrize(("text", "options"), [
    (published(QUESTION, NONE, version="v2.0"), {}),
    (published(QUESTION, NONE, version="2.0"), {}),
    (published(QUESTION, {"id": "b", "question": "Why?"}, version="mine"), {"needs_answers": False}),
    (json.dumps([PARAGRAPH]), {}),
    (json.dumps(RECORDS), {}),
    ("\n".join(map(json.dumps, RECORDS)), {}),
])  # fmt: skip
def test_a_file_is_read_as_published_and_as_datasets_export_it(tmp_path, text, options):
    (tmp_path / "squad.json").write_text(text)
    dataset = squad.read(tmp_path / "squad.json", "2.0", **options)
    assert dataset.contexts == ["The cat sat."]
    answers = {question.id: question.answers for question in dataset.questions}
    assert answers == {"a": (squad.Answer("cat", 4),), "b": ()}


@pytest.mark.parametrize(("text", "message"), [
    (published(QUESTION | {"answers": []}), r"qas\[0\] \(a\) has no answer, which training"),
    (published({"id": "a", "question": "Who?"}), "has no list 'answers'"),
    (published(QUESTION, QUESTION), r"data\[0\].paragraphs\[0\].qas\[1\] repeats the id 'a' of an earlier question"),
    (published(QUESTION | {"is_impossible": True}), "set SQUAD_VERSION=2.0"),
    (published(QUESTION, version="v2.0"), "is SQuAD 2"),
    (published(QUESTION | {"is_impossible": 1}), "has no bool 'is_impossible'"),
    (published(QUESTION | {"id": 7}), "has no str 'id'"),
    (published(QUESTION | {"answers": [CAT | {"answer_start": True}]}), "has no int 'answer_start'"),
    (published(), "has no questions"),
    (published(QUESTION, context=" \n"), "empty context"),
    (published(QUESTION, context=None), r"data\[0\].paragraphs\[0\] has no str 'context'"),
    (json.dumps([record(QUESTION, ["red", "cat"], [4])]), "record 1 has 2 texts of answers, but 1 of answer_start"),
    (json.dumps(RECORDS), r"record 2 \(b\) has no answer"),
    ("{", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("[1]", r"data\[0\] has no list 'paragraphs'"),
    ('{"data": [3]}', r"data\[0\] has no list 'paragraphs'"),
    ("{}", "no list 'data'"),
    (None, "No such file"),
])  # fmt: skip
def test_a_wrong_file_is_one_line_that_names_the_place(tmp_path, text, message):
    if text is not None:
        (tmp_path / "squad.json").write_text(text)
    with refused(message) as error:
        squad.read(tmp_path / "squad.json")
    assert "\n" not in str(error.value)


def test_a_vocabulary_without_special_tokens_is_an_error(tmp_path):
    (tmp_path / "vocab.txt").write_text("a\nb\n[PAD]\n")
    with refused(r"no \[UNK\], \[CLS\], \[SEP\], \[MASK\]: is this a vocab.txt"):
        WordPiece(tmp_path / "vocab.txt")
    with refused("cannot read the vocabulary"):
        WordPiece(tmp_path / "none.txt")


def test_only_five_characters_separate_words():
    assert features.collapse("a \t b\u202fc\u00a0d\r\n\ne ") == "a b c\u00a0d e"
