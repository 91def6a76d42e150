"""PDF's text and subtitles are read as prose, and what was done is said; other text stays as it is."""

import gzip

import pytest

from input_preprocessing.text.laid_out import prose_of

from ..conftest import made_up_documents, run

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
