"""Turns the wikitext of articles into text: one sentence per line, a blank line after each article.

Reads the folder written by `extract`, writes one text-XXXXX.txt for each of its files. Kept:
running text, including the labels of links and the text of formatting templates. Dropped, like in
WikiExtractor: tables, lists, headings, references, other templates, images, categories,
mathematics, comments, sections such as "References", and empty articles. Finished files are kept
when run again; the result does not depend on --jobs.

The mark-up is parsed by mwparserfromhell, sentences are split by nupunkt (the Punkt algorithm, as
in the reference's preparation); both are optional dependencies, see requirements/wiki.txt.
"""

import argparse
import importlib
import importlib.metadata
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from bert.data.format import atomic_file
from bert.data.records import DataError
from common.tables import read_table
from input_preprocessing.stage.cli import say
from input_preprocessing.stage.manifest import (
    StageFolder,
    finished_files,
    is_recorded,
    record,
)
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.wiki.extract import read_pages

MODULES = ("mwparserfromhell", "nupunkt")

# Protects mark-up within nowiki.
_VERBATIM = str.maketrans("{}[]|<", "\ue000\ue001\ue002\ue003\ue004\ue005")
_AS_WRITTEN = {new: old for old, new in _VERBATIM.items()}
_LIST = "\x02"  # marks lines of list items, which are dropped later
_TABLE = read_table(__file__, "wikitext.yaml")
_SPACES = re.compile(r"[\s\u00a0\u200b\ufeff]+")
_MAGIC_WORD = re.compile(r"__[A-Z]+__")
_REPAIRS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in _TABLE["repairs"].items()
]
_UNPARSED = ("{{", "}}", "{|", "|}", "[[", "]]", "<ref", "</")
_TABLE_LINE = re.compile(r"^[|!]|^\{\|")
_LIST_LINE = re.compile(r"^[*#:;]")
_ENDED = re.compile(r"""[.!?…:;]["'”’)\]]*$""")
_WORD = re.compile(r"[^\W\d_]{2,}")
_FEWEST_WORDS = 4  # of a paragraph that does not end like a sentence, to be kept


def require() -> None:
    """Raises DataError if one of the libraries is not installed."""
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            more = " (Python 3.11 or later)" if name == "nupunkt" else ""
            raise DataError(
                f"making text of a Wikipedia dump needs {name}{more}, which is not installed; "
                "run: python -m pip install -r requirements/wiki.txt"
            ) from error


@lru_cache(maxsize=1)
def _libraries() -> tuple[Callable[[str], Any], Any, Callable[[str], list[str]]]:
    require()
    parser = importlib.import_module("mwparserfromhell")
    return parser.parse, parser.nodes, importlib.import_module("nupunkt").sent_tokenize


def sentences_of(wikitext: str) -> list[str] | None:
    """Sentences of an article; None if its mark-up cannot be parsed."""
    parse, nodes, tokenize = _libraries()
    try:
        text = _Text(nodes).of(parse(wikitext))
    except (RecursionError, ValueError, SystemError, AttributeError):
        return None  # bad mark-up must not end a run over six million articles
    sentences = []
    for paragraph in paragraphs_of(text):
        pieces = (
            _SPACES.sub(" ", sentence).strip() for sentence in tokenize(paragraph)
        )
        sentences += [sentence for sentence in pieces if sentence]
    return sentences


def paragraphs_of(text: str) -> list[str]:
    """Paragraphs of an article's text without mark-up, one per line, without lists and unparsed
    mark-up.
    """
    kept = []
    for raw in text.split("\n"):
        line = _MAGIC_WORD.sub("", raw).strip()
        if (
            not line
            or _LIST in line
            or _LIST_LINE.match(line)
            or _TABLE_LINE.match(line)
        ):
            continue
        # Mark-up that the parser left as text was broken: the line is lost rather than trained on.
        if any(mark in line for mark in _UNPARSED):
            continue
        for pattern, replacement in _REPAIRS:
            line = pattern.sub(replacement, line)
        # Last, or what nowiki protects would have been taken for mark-up above.
        line = line.translate(_AS_WRITTEN).strip()
        if _WORD.search(line) and (
            _ENDED.search(line) or len(line.split()) >= _FEWEST_WORDS
        ):
            kept.append(line)
    return kept


class _Text:
    """Converts parsed mark-up to plain text."""

    def __init__(self, nodes: Any) -> None:
        self.by_type: dict[type, Callable[[Any], str]] = {
            nodes.Text: lambda node: str(node.value),
            nodes.HTMLEntity: self._entity,
            nodes.Wikilink: self._link,
            nodes.ExternalLink: lambda node: (
                self.of(node.title) if node.brackets else ""
            ),
            nodes.Tag: self._tag,
            nodes.Template: self._template,
            nodes.Comment: lambda _: "",
            nodes.Argument: lambda node: self.of(node.default),
        }
        self.heading = nodes.Heading

    def of(self, code: Any) -> str:
        """Text of wikicode (None: empty), without headings and the sections to drop."""
        parts: list[str] = []
        dropped_level = 0
        for node in code.nodes if code is not None else ():
            if isinstance(node, self.heading):
                # A dropped section has its subsections with it: only a heading as high ends it.
                if not dropped_level or node.level <= dropped_level:
                    title = self.of(node.title).strip().lower()
                    dropped_level = (
                        node.level if title in _TABLE["dropped_sections"] else 0
                    )
                parts.append("\n")
            elif not dropped_level:
                parts.append(self.by_type[type(node)](node))
        return "".join(parts)

    def _entity(self, node: Any) -> str:
        try:
            return str(node.normalize())
        except (ValueError, OverflowError, KeyError):
            return ""

    def _link(self, node: Any) -> str:
        title = str(node.title).strip()
        # With a colon in front, [[:File:x]] and [[:fr:x]] are links in the text like others.
        if not title.startswith(":") and ":" in title:
            namespace = title.split(":", 1)[0].strip().lower()
            # [[fr:Titre]] stands beside the article, as a link to another Wikipedia.
            of_language = node.text is None and re.fullmatch(
                "[a-z]{2,3}(-[a-z]+)*", namespace
            )
            # Only a file's has several, in whatever language.
            texts = node.text.filter_text(recursive=False) if node.text else ()
            has_options = any("|" in piece.value for piece in texts)
            is_dropped = namespace in _TABLE["dropped_namespaces"]
            if is_dropped or of_language or has_options:
                return ""
        return self.of(node.text) if node.text is not None else title.lstrip(":")

    def _tag(self, node: Any) -> str:
        name = str(node.tag).strip().lower()
        if name in _TABLE["dropped_tags"]:
            return ""
        # The item itself is text after this mark, up to the end of the line.
        if name in ("li", "dt", "dd") and node.wiki_markup:
            return _LIST
        if name == "br":
            return " "
        if name == "nowiki":
            return str(node.contents or "").translate(_VERBATIM)
        inner = self.of(node.contents)
        if name in ("ul", "ol", "dl", "li"):
            return "\n" + _LIST + inner.replace("\n", "\n" + _LIST) + "\n"
        return (
            f"\n{inner}\n"
            if name in ("p", "div", "blockquote", "poem", "center", "hr")
            else inner
        )

    def _template(self, node: Any) -> str:
        name = str(node.name).strip().lower().replace("_", " ")
        text = ""
        for piece in _TABLE["text_templates"].get(name, ()):
            if isinstance(piece, str):
                text += piece
            elif node.has(piece):
                text += self.of(node.get(piece).value).strip()
        return text


_RULES = 3  # increase with any change of code to what is kept


def clean(source: Path, target: Path, *, jobs: int) -> tuple[int, int]:
    """Writes the text of the pages in `source` to `target`; returns (unparsable articles, files).

    Raises:
        DataError: a library is missing, `source` is not finished, or there is no text left.
    """
    require()
    pages = finished_files(source, "extract", jobs)
    # Another version may parse or split otherwise, and its text is not mixed with this one's.
    libraries = [f"{name} {importlib.metadata.version(name)}" for name in MODULES]
    recipe = {
        "pages": {path.name: md5 for path, md5 in pages.items()},
        "libraries": libraries,
        "rules": [_RULES, _TABLE],
    }
    folder = StageFolder(target, "clean", ["text-*.txt"], recipe, jobs=jobs)
    names = [
        path.name.replace("pages", "text").replace(".jsonl.gz", ".txt")
        for path in pages
    ]
    failures = 0
    if not folder.finished:
        tasks = [(path, target / name) for path, name in zip(pages, names, strict=True)]
        failures = sum(run_tasks("clean", _clean_file, tasks, jobs=jobs))
        folder.finish(names)
    if not any((target / name).stat().st_size for name in names):
        raise DataError(
            f"{source} holds no text; is it in another language, or not from Wikipedia?"
        )
    return failures, len(names)


def _clean_file(task: tuple[Path, Path]) -> int:
    """Writes the text of a file of pages unless it exists; returns the number of unparsable
    articles.
    """
    source, target = task
    if is_recorded(target):
        return 0
    failures = 0
    with (
        atomic_file(target) as partial,
        open(partial, "w", encoding="utf-8", newline="\n") as file,
    ):
        for page in read_pages(source):
            sentences = sentences_of(page["text"])
            if sentences is None:
                failures += 1
            elif sentences:
                file.write("\n".join(sentences) + "\n\n")
    record(target)
    return failures


def main(options: argparse.Namespace) -> None:
    failures, files = clean(options.source, options.target, jobs=options.jobs)
    note = f", {failures} articles with unparsable mark-up skipped" if failures else ""
    say(f"{options.target}: {files} files{note}")
