"""Text becomes sentences and documents, in any script; PDF's text and subtitles become prose first."""

import gzip
import io

import pytest

from input_preprocessing.text.laid_out import prose_of
from input_preprocessing.text.sentences import (
    MOST_SENTENCES,
    detect_layout,
    documents_of,
    split_sentences,
)

from ..conftest import made_up_documents, run


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


WORDS = "the committee met for several pur-\nposes that\nthe report names. It de-\ncided little"
PAGES = [f"ANNUAL REPORT\n\n{letter} {WORDS} {letter}" for letter in "abcde"]
SRT = "\n\n".join(
    f"{n}\n00:00:0{n},000 --> 00:00:0{n},900\n<i>Line {n}</i> goes\non."
    for n in range(1, 6)
)
VTT = "WEBVTT\n\nNOTE by hand\n\n" + SRT.replace(",", ".").replace("00:00:", "00:")
ROLLS = "\n\n".join(
    f"00:0{n}.000 --> 00:0{n}.900\nLine {n}\nLine {n + 1}" for n in range(1, 6)
)
CHAPTERS = [f"CHAPTER {n}\n\nIt was a dark night. Nobody came." for n in range(5)]
# Text -> what is in its prose, what is not, and what was done.
CASES = {
    "pages": ("\f".join(PAGES), ["several purposes that", "It decided little"], ["ANNUAL", "\f", "- "], (5, 5, 10)),
    "pages with numbers alone": ("\f".join(f"{n * 'X'} {WORDS} {n * 'X'}.\n\n{n}" for n in range(4)), ["purposes"], ["\n2\n", "\f"], (4, 4, 8)),
    "pages that end with a form feed": ("\f".join([*PAGES, ""]), ["purposes"], ["ANNUAL"], (5, 5, 10)),
    "chapters' heads": ("\f".join(f"{n} HEAD {n // 2}\n{n * 'x'} {WORDS} on {n * 'y'}" for n in range(8)), ["decided little on"], ["HEAD"], (8, 8, 16)),
    "broken words without pages": ((WORDS + ".\n") * 9, ["purposes", "decided"], ["pur-"], (1, 0, 18)),
    "a word with a hyphen of its own": (("A well-\nknown man. A well-known pur-\npose.\n") * 9, ["A well-known man", "purpose"], ["wellknown"], (1, 0, 18)),
    "SubRip": (SRT, ["Line 1 goes\non.\nLine 2"], ["-->", "00:", "<i>", "\n3\n"], (5,)),
    "WebVTT": (VTT, ["Line 1 goes\non.\nLine 2"], ["-->", "WEBVTT", "by hand"], (5,)),
    "a line of tags within": (SRT.replace("\non.", ""), ["Line 1 goes\nLine 2"], ["\n\n"], (5,)),
    "lines that roll up": (ROLLS, ["Line 1\nLine 2\nLine 3\nLine 4\nLine 5\nLine 6\n"], ["2\nLine 2"], (5,)),
    "Windows' line ends": (SRT.replace("\n", "\r\n"), ["Line 1 goes\non.\nLine 2"], ["-->", "\r"], (5,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_text_that_was_laid_out_becomes_prose_and_is_counted(name):
    text, present, absent, counts = CASES[name]
    prose, done = prose_of(text)
    assert [part for part in present if part not in prose] == []
    assert [part for part in absent if part in prose] == []
    assert tuple(done.values()) == counts


@pytest.mark.parametrize("text", [
    "\f".join(CHAPTERS),
    "\f".join(CHAPTERS[:2]),
    "\n\n".join(CHAPTERS),
    "Prose with a well-\nknown word. Then more.\n" * 2,
    "At 00:01:02,000 --> 00:02:03,000 it was.\n",
    "",
])  # fmt: skip
def test_other_text_stays_as_it_is(text):
    assert prose_of(text) == (text, {})


def test_a_corpus_of_pages_and_subtitles_says_what_was_done(tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    sentences = [sentence for each in made_up_documents(40) for sentence in each]
    pages = [" ".join(sentences[n : n + 20]) for n in range(0, len(sentences), 20)]
    report = "\f".join(f"REPORT\n{page}\n{n}" for n, page in enumerate(pages))
    (folder / "report.txt").write_text(report)
    (folder / "film.srt.gz").write_bytes(gzip.compress(SRT.encode()))
    for n in range(4):
        (folder / f"{n}.txt").write_text(" ".join(sentences[n::5]))
    out = tmp_path / "out"
    run("corpus", "--outputdir", out, "--input", folder, "--vocab-size", 200)
    done = f"5 cues of subtitles joined, {len(pages)} pages joined"
    assert f"2 files were laid out: {done}" in capsys.readouterr().err
    parts = (out / "download/results4").iterdir()
    made = "".join(path.read_text() for path in parts)
    assert not {"REPORT", "-->"} & {*made.split()}
