"""Turns text of any layout into documents of sentences.

Two layouts are told apart (`detect_layout`), or named by the user:
  sentences  one sentence per line, a blank line between documents: taken as it is
  prose      paragraphs, wrapped or not, between blank lines: sentences are found at full stops. A document ends at two
             blank lines or a form feed, and after the paragraph with which it reaches 200 sentences
"""

from __future__ import annotations

import re

LAYOUTS = ("sentences", "prose")
MOST_SENTENCES = 200  # of a prose document

Document = list[str]

_END = re.compile(r"""(?<=[.!?])["')\]”’]*\s+(?=["'(\[“‘]*[A-Z0-9])""")
_RULE = re.compile(r"(?m)^[^\w\s](?:[^\w\n]*[^\w\s])?[^\S\n]*(?:\n|\Z)")  # a line under a heading or between parts
_TERMINATED = re.compile(r"""[.!?:;]["')\]”’]*$""")
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Rev|Gen|Col|Capt|Lt|Hon|vs|e\.g|i\.e|cf|Fig|No|Vol|pp?|ch|sec|ed|al|approx)"
    r"|\b[A-Z])\.$"
)


def detect_layout(text: str) -> str:
    """'sentences' when most lines end a sentence and few hold several; else 'prose'."""
    lines = [line.strip() for line in text[:2_000_000].splitlines() if line.strip()]
    if not lines:
        return "sentences"
    ended = sum(bool(_TERMINATED.search(line)) for line in lines)
    several = sum(len(split_sentences(line)) > 1 for line in lines)
    return "sentences" if ended >= 0.6 * len(lines) and several <= 0.3 * len(lines) else "prose"


def split_sentences(paragraph: str) -> list[str]:
    """Sentences of a paragraph: cut after . ! ? before a capital or digit, but not after abbreviations and initials."""
    sentences = []
    start = 0
    for end in _END.finditer(paragraph):
        if not _ABBREVIATION.search(paragraph, start, end.start()):
            sentences.append(paragraph[start : end.end()].strip())
            start = end.end()
    return [sentence for sentence in [*sentences, paragraph[start:].strip()] if sentence]


def documents_of(text: str, layout: str) -> list[Document]:
    """The documents of a text in the layout given, without empty ones."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _sentence_documents(text) if layout == "sentences" else _prose_documents(text)


def _sentence_documents(text: str) -> list[Document]:
    documents: list[Document] = [[]]
    for line in text.split("\n"):
        if line.strip():
            documents[-1].append(line.strip())
        elif documents[-1]:
            documents.append([])
    return [document for document in documents if document]


def _prose_documents(text: str) -> list[Document]:
    documents = []
    text = _RULE.sub("", text)
    for part in re.split(r"\f|\n[^\S\n]*\n[^\S\n]*\n", text):
        document: Document = []
        for paragraph in re.split(r"\n[^\S\n]*\n", part):
            document += split_sentences(" ".join(paragraph.split()))
            if len(document) >= MOST_SENTENCES:
                documents.append(document)
                document = []
        documents.append(document)
    return [document for document in documents if document]
