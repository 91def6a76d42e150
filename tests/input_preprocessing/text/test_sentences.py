"""Text becomes sentences and documents, in any script."""

import io

import pytest

from input_preprocessing.text.sentences import (
    MOST_SENTENCES,
    detect_layout,
    documents_of,
    split_sentences,
)


def documents_in(prose: str) -> list[list[str]]:
    return [*documents_of(io.StringIO(prose, newline=None), "prose")]


def test_prose_is_cut_into_documents_and_paragraphs():
    text = "---\nOne. Two\r\nthree.\n \nFour. ---\n* * *\nFive.\n\n\t\nSix.\fSeven.\n\f\n\nEight.\n\n\n\n\nNine."
    cut = [["One.", "Two three.", "Four. --- Five."], ["Six."], ["Seven."], ["Eight."]]
    assert documents_in(text) == [*cut, ["Nine."]]


def test_a_document_without_an_end_is_cut_after_so_many_sentences():
    numbers = range(4 * MOST_SENTENCES + 1)
    text = "\n\n".join(f"Sentence {number}." for number in numbers)
    assert [*map(len, documents_in(text))] == [MOST_SENTENCES] * 4 + [1]


@pytest.mark.parametrize("sentences", [
    ["А. С. Пушкин родился в Москве.", "Он писал!", "«Да?»", "Это и др. ещё есть."],
    ["Das Haus etc. über alles.", "Über die Brücke.", "„Äpfel“ sind gut, u. a. hier."],
    ["שלום עולם.", "מה שלומך?", "טוב."],
    ["هل أنت هنا؟", "نعم، أنا هنا.", "حسنا."],
    ["यह एक वाक्य है।", "यह दूसरा है।"],
    ["ეს ერთია.", "ეს მეორეა."],
    ["See U.S. Navy vs. the rest, e.g. here.", "It was 5.", "(Then 3.5 left.)"],
])  # fmt: skip
def test_sentences_of_any_script_end_at_its_full_stops(sentences):
    assert split_sentences(" ".join(sentences)) == sentences
    assert detect_layout(" ".join(sentences)) == "prose"
    assert detect_layout("\n".join(sentences)) == "sentences"


def test_sentences_of_scripts_without_spaces_end_without_one():
    sentences = ["今日は良い天気です。", "「そうですね。」", "本当？！", "好。", "再见"]
    assert split_sentences("".join(sentences)) == sentences


@pytest.mark.parametrize(("sentence", "sizes"), [
    ("word " * 350, [350]),
    ("word " * 351, [100, 100, 100, 51]),
    ("seven words and then a comma follows, " * 60, [98] * 4 + [28]),
    ("ไทย" * 150, [100] * 4 + [50]),
    ("中文不写空格，" * 60, [98] * 4 + [28]),
    ("x" * 5000, [1]),
])  # fmt: skip
def test_a_sentence_of_hundreds_of_words_is_cut_at_clauses_or_words(sentence, sizes):
    pieces = split_sentences(sentence)
    has_spaces = " " in sentence or sentence.isascii()
    count = [len(piece.split()) if has_spaces else len(piece) for piece in pieces]
    assert count == sizes
    assert (" " if has_spaces else "").join(pieces) == sentence.strip()
