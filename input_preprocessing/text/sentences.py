"""Plain text as documents of sentences.

A text is prose, of which documents end at two blank lines or form feeds, or it has a sentence per
line and a blank line after each document.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain, groupby

# Name: description.
LAYOUTS = {"sentences": "one sentence per line", "prose": "prose, cut into sentences"}
MOST_SENTENCES = 200  # per document of prose
DETECTED_ON = 2_000_000  # characters
_CLOSING = """"')\\]”’“»」』）》】"""
# Full stops of scripts without capitals: they end a sentence whatever follows, also without a space.
_STOPS = "。！？｡।॥؟۔։።፧။។"
_END = re.compile(
    # All of them first, by which the search is twice as fast.
    rf"""[.!?{_STOPS}](?:(?<=[.!?])[{_CLOSING}]*\s+(?=["'(\[“‘„«¿¡]*([^\W_a-z]))"""
    rf"|(?<=[{_STOPS}])[{_CLOSING}]*\s*(?![\s{_CLOSING}{_STOPS}]))"
)
# Thai to Burmese, Khmer, Chinese and Japanese, with their punctuation: they are written without
# spaces, so that each character counts as a word.
_CHARACTERS = r"\u0e00-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uff9f\U00020000-\U0003ffff"
_WORD = rf"(?:[{_CHARACTERS}]|[^\s{_CHARACTERS}]+(?![^\s{_CHARACTERS}]))\s*"
# A sentence of more than 350 words is hardly one, and longer than most sequences: it is cut to
# pieces of at most 100, if possible at the end of a clause.
_PIECE = re.compile(
    rf"""
    \A (?! (?=.{{351}}) (?:{_WORD}){{351}} ) .+  # a whole sentence
    | (?:{_WORD}){{1,100}} $  # the rest
    | (?:{_WORD}){{50,100}} (?: (?<=[,;:،؛、，；：]) | (?<=[,;:،؛]\s) )
    | (?:{_WORD}){{1,100}}
    """,
    re.VERBOSE,
)
# A rule under a heading or between sections.
_RULE = re.compile(r"[^\w\s](?:\W*[^\w\s])?\s*")
_TERMINATED = re.compile(rf"[.!?:;{_STOPS}][{_CLOSING}]*$")
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Rev|Gen|Col|Capt|Lt|Hon|vs|e\.g|i\.e|cf|Fig|No|Vol|pp?|ch|sec|ed|al|approx)"
    r"|\b[^\W\d_a-z])\.$"
)
Document = list[str]


def detect_layout(text: str) -> str:
    """'sentences' if most lines end a sentence and few have several; else 'prose'."""
    lines = [line.strip() for line in text[:DETECTED_ON].splitlines() if line.strip()]
    ended = sum(bool(_TERMINATED.search(line)) for line in lines)
    several = sum(len(split_sentences(line)) > 1 for line in lines)
    return (
        "sentences"
        if ended >= 0.6 * len(lines) and several <= 0.3 * len(lines)
        else "prose"
    )


def split_sentences(paragraph: str) -> list[str]:
    """Splits a paragraph after . ! ? before a digit or a letter that is not lower-case, but not
    after abbreviations and initials, and after the full stops of other scripts.
    """
    sentences = []
    start = 0
    for end in _END.finditer(paragraph):
        letter = end[1] or ""
        # Georgian letters, which begin sentences too, have upper but no title case.
        is_lower = letter != letter.title()
        if not is_lower and not _ABBREVIATION.search(paragraph, start, end.start() + 1):
            sentences.append(paragraph[start : end.end()])
            start = end.end()
    pieces = chain.from_iterable(map(_PIECE.findall, [*sentences, paragraph[start:]]))
    return [piece.strip() for piece in pieces if piece.strip()]


def documents_of(lines: Iterable[str], layout: str) -> Iterator[Document]:
    """Documents of a text's lines in the given layout, without empty ones."""
    if layout == "prose":
        yield from _documents_of_prose(lines)
        return
    for are_sentences, group in groupby(map(str.strip, lines), bool):
        if are_sentences:
            yield list(group)


def _documents_of_prose(lines: Iterable[str]) -> Iterator[Document]:
    """Documents end where the text says so, and at the first paragraph's end from MOST_SENTENCES
    on; one without paragraphs at twice as many.
    """
    document: Document = []
    for paragraph in _paragraphs(lines):
        document += split_sentences(paragraph or "")
        while len(document) >= 2 * MOST_SENTENCES:
            yield document[:MOST_SENTENCES]
            document = document[MOST_SENTENCES:]
        if document and (paragraph is None or len(document) >= MOST_SENTENCES):
            yield document
            document = []


def _paragraphs(lines: Iterable[str]) -> Iterator[str | None]:
    """Paragraphs, each ended by a blank line; None where a document ends: at a second blank line or
    a form feed.
    """
    paragraph: list[str] = []
    blank = 0  # lines in a row
    # Behind the last line, too, a form feed ends paragraph and document.
    for line in chain(lines, "\f"):
        if _RULE.fullmatch(line):
            continue
        for number, piece in enumerate(line.split("\f")):
            # Every piece but the first begins behind a form feed.
            blank = 0 if piece.strip() else blank + 1
            if number or blank:
                yield " ".join(" ".join(paragraph).split())
                paragraph = []
            if number or blank > 1:
                yield None
            paragraph.append(piece)
