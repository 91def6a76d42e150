"""From Wikipedia dumps to the input text of the preparation: extract, clean and split in one call."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from input_preprocessing.stage.manifest import STAGE_FILE, contents_of, finished_recipe
from input_preprocessing.wiki.clean import clean, require
from input_preprocessing.wiki.extract import extract, find_dumps
from input_preprocessing.wiki.split import split

NOT_THE_BENCHMARK = (
    "its articles were cleaned and split into sentences by other programs in 2020, so a dump yields neither its text "
    "nor its evaluation set; for a submission download results4"
)


def text_is_wanted(download: Path, jobs: int = 1) -> bool:
    """Whether DOWNLOADDIR/wiki has dumps whose text is missing, unfinished, or made from other dumps."""
    results = download / "results4"
    dumps = find_dumps(download / "wiki")
    if not dumps:
        return False
    if not (results / STAGE_FILE).is_file():
        # Text without a record of a stage is the user's, for example the downloaded one: it stays.
        return not any(results.glob("part-*"))
    recipe = finished_recipe(results, jobs)
    if recipe is None:
        return True
    origin = recipe.get("origin")  # None if `split` was run by hand
    return origin is not None and origin != contents_of(dumps, "check dumps", jobs)


def make_text(download: Path, work: Path, *, jobs: int, shards: int | None = None) -> None:
    """Makes DOWNLOADDIR/results4 (part files and eval.txt) from DOWNLOADDIR/wiki/*.xml.bz2; resumes where it stopped.

    Args:
        download: DOWNLOADDIR.
        work: folder for intermediate files, removed at the end.
        jobs: worker processes.
        shards: part files; None: see `split`.

    Raises:
        DataError: a library is missing, or a dump is damaged or has too little text.
    """
    # Before the dumps are extracted, which takes long.
    require()
    target = download / "results4"
    dumps = find_dumps(download / "wiki")
    extract(dumps, work / "pages", jobs=jobs)
    origin = contents_of(dumps, "check dumps", jobs)  # checked by `extract`
    failures, _ = clean(work / "pages", work / "text", jobs=jobs)
    made = split(work / "text", target, jobs=jobs, shards=shards, origin=origin)
    note = f"; {failures} articles with unparsable mark-up skipped" if failures else ""
    print(
        f"{target}: {made.training:,} articles, {made.held_out:,} more for evaluation{note}",
        file=sys.stderr,
    )
    if not made.is_benchmarks:
        print(f"{target}: {made.note}: {NOT_THE_BENCHMARK}", file=sys.stderr)
    # Not before the text is complete: until then a second run goes on with these files.
    shutil.rmtree(work)
