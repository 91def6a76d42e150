"""From Wikipedia dumps to the text that preparation starts from: extract, clean and split in one call."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from .clean import clean
from .extract import extract, find_dumps
from .split import NUM_SHARDS, split
from .stage_folder import NAME as STAGE_FILE
from .stage_folder import is_finished
from .wikitext import require


def dumps_of(outputdir: Path) -> list[Path]:
    """The dumps to make text of: OUTPUTDIR/download/wiki/*.xml.bz2."""
    return find_dumps(outputdir / "download" / "wiki")


def text_is_wanted(outputdir: Path) -> bool:
    """Whether there are dumps, and no text yet or one that `split` has begun and not ended."""
    results = outputdir / "download" / "results4"
    if not dumps_of(outputdir):
        return False
    if (results / STAGE_FILE).is_file():
        return not is_finished(results)
    return not any(results.glob("part-*"))


def make_text(outputdir: Path, *, jobs: int, shards: int = NUM_SHARDS, seed: int = 12345) -> None:
    """Makes OUTPUTDIR/download/results4 (part files and eval.txt) of the dumps; goes on after an interruption.

    Raises:
        DataError: a library is missing, or a dump is damaged or holds too little.
    """
    require()
    work = outputdir / "work" / "wiki"
    target = outputdir / "download" / "results4"
    extract(dumps_of(outputdir), work / "pages", jobs=jobs)
    failures, _ = clean(work / "pages", work / "text", jobs=jobs)
    training, held_out = split(work / "text", target, jobs=jobs, shards=shards, seed=seed)
    note = f"; {failures} articles left out whose mark-up cannot be parsed" if failures else ""
    print(f"{target}: {training:,} articles, {held_out:,} more for evaluation{note}", file=sys.stderr)
    shutil.rmtree(work)
