"""From Wikipedia dumps to the text that preparation starts from: extract, clean and split in one call."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from input_preprocessing.stage.folder import NAME as STAGE_FILE
from input_preprocessing.stage.folder import is_finished
from input_preprocessing.wiki.clean import clean
from input_preprocessing.wiki.extract import extract, find_dumps
from input_preprocessing.wiki.split import split
from input_preprocessing.wiki.wikitext import require


def text_is_wanted(download: Path) -> bool:
    """Whether there are dumps in DOWNLOADDIR/wiki, and no text yet or one that `split` has begun and not ended."""
    results = download / "results4"
    if not find_dumps(download / "wiki"):
        return False
    if (results / STAGE_FILE).is_file():
        return not is_finished(results)
    return not any(results.glob("part-*"))


def make_text(download: Path, work: Path, *, jobs: int, shards: int | None = None, seed: int = 12345) -> None:
    """Makes DOWNLOADDIR/results4 (part files and eval.txt) of DOWNLOADDIR/wiki/*.xml.bz2; goes on where it stopped.

    Args:
        download: DOWNLOADDIR.
        work: folder for what lies between, removed at the end.
        jobs: worker processes.
        shards: part files; None: see `split`.
        seed: of the choice of evaluation text.

    Raises:
        DataError: a library is missing, or a dump is damaged or holds too little.
    """
    require()
    target = download / "results4"
    extract(find_dumps(download / "wiki"), work / "pages", jobs=jobs)
    failures, _ = clean(work / "pages", work / "text", jobs=jobs)
    _, training, held_out = split(work / "text", target, jobs=jobs, shards=shards, seed=seed)
    note = f"; {failures} articles left out whose mark-up cannot be parsed" if failures else ""
    print(f"{target}: {training:,} articles, {held_out:,} more for evaluation{note}", file=sys.stderr)
    shutil.rmtree(work)
