"""Turns the wikitext of articles into text: one sentence per line, a blank line after each article.

Takes the folder that `extract` wrote, writes text-XXXXX.txt, a file for each of its files. What is kept of an article
is told in `wikitext`. Articles of which nothing remains are left out. Finished files are kept when it is run again; the
result does not depend on --jobs. Needs the libraries of requirements/wiki.txt.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path

from bert.data.format import atomic_file
from bert.data.records import DataError
from input_preprocessing.stage.cli import add_jobs, positive
from input_preprocessing.stage.folder import StageFolder, contents_of, finished_files
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.wiki.extract import read_pages
from input_preprocessing.wiki.wikitext import MODULES, require, sentences_of

PATTERN = "text-*.txt"
_RULES = 2  # raise it with any change to what `wikitext` keeps


def clean(source: Path, target: Path, *, jobs: int, min_sentences: int = 1) -> tuple[int, int]:
    """Writes the text of the pages in `source` to `target`; (articles that could not be parsed, files).

    Raises:
        DataError: a library is missing, `source` is not finished, or nothing remains of it.
    """
    require()
    pages = finished_files(source, "extract")
    libraries = [f"{name} {importlib.metadata.version(name)}" for name in MODULES]
    recipe = {"pages": contents_of(pages, "check pages", jobs), "libraries": libraries, "rules": _RULES}
    recipe["min_sentences"] = min_sentences
    folder = StageFolder(target, "clean", [PATTERN], recipe)
    names = [path.name.replace("pages", "text").replace(".jsonl.gz", ".txt") for path in pages]
    failures = 0
    if not folder.finished:
        tasks = [(path, target / name, min_sentences) for path, name in zip(pages, names, strict=True)]
        costs = [float(path.stat().st_size) for path in pages]
        failures = sum(run_tasks("clean", _clean_file, tasks, jobs=jobs, weights=costs))
        folder.finish(names)
    if not any((target / name).stat().st_size for name in names):
        raise DataError(f"{source} holds no text; is it of another language or not of Wikipedia?")
    return failures, len(names)


def _clean_file(task: tuple[Path, Path, int]) -> int:
    """Writes the text of one file of pages unless it is there already; articles that could not be parsed."""
    source, target, min_sentences = task
    if target.is_file():
        return 0
    failures = 0
    with atomic_file(target) as partial, open(partial, "w", encoding="utf-8", newline="\n") as file:
        for page in read_pages(source):
            sentences = sentences_of(page.text)
            if sentences is None:
                failures += 1
            elif len(sentences) >= min_sentences:
                file.write("\n".join(sentences) + "\n\n")
    return failures


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, required=True, help="folder that `extract` wrote")
    parser.add_argument("--target", type=Path, required=True, help="folder for text-XXXXX.txt")
    parser.add_argument("--min-sentences", type=positive, default=1, help="of an article (default %(default)s)")
    add_jobs(parser)
    options = parser.parse_args()
    failures, files = clean(options.source, options.target, jobs=options.jobs, min_sentences=options.min_sentences)
    note = f", {failures} articles left out whose mark-up cannot be parsed" if failures else ""
    print(f"{options.target}: {files} files{note}", file=sys.stderr)
