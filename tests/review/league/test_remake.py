"""The table of published results is made from checkouts alone, and says what they lack."""

from __future__ import annotations

import shutil

import pytest

from review.league.entries import PUBLISHED, published
from review.logs.output import ReviewError

from ..conftest import git
from ..verdict.damage import duplicate
from .remake import COLUMNS, remade


@pytest.fixture
def checkouts(real_folders, tmp_path):
    """A folder with a checkout of round 5.0: the published results that are here."""
    checkout = tmp_path / "training_results_v5.0"
    duplicate(real_folders[0].parents[3], checkout)
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "results")
    return tmp_path


def test_the_rows_of_the_stored_table_are_made_again_byte_for_byte(checkouts):
    made = remade(checkouts).splitlines(keepends=True)
    stored = PUBLISHED.read_text(encoding="utf-8").splitlines(keepends=True)
    heading = next(i for i, line in enumerate(stored) if not line.startswith("#"))
    assert made[1] == stored[heading]
    assert len(made) == 4
    assert set(made[2:]) <= set(stored)
    log = next(checkouts.rglob("result_3.txt"))
    shutil.rmtree(log.parent)
    lacks = remade(checkouts).splitlines()[1]
    place = log.parent.relative_to(checkouts / "training_results_v5.0")
    assert lacks == f"# round 5.0 lacks 10 logs of {place}"


def test_the_stored_table_names_its_commits_and_what_they_lacked():
    lines = PUBLISHED.read_text(encoding="utf-8").splitlines()
    about = [line.split() for line in lines if line.startswith("#")]
    commits = {words[2].rstrip(":") for words in about if len(words) == 4}
    assert commits == {one.round for one in published()}
    lacked = {(words[2], words[-1]) for words in about if "lacks" in words}
    here = {(one.round, one.folder) for one in published()}
    assert len(lacked - here) == 7
    assert len(here) + 7 == 353
    assert lines[len(about)].startswith(",".join(COLUMNS))


def test_what_is_no_checkout_is_an_error_of_one_line(tmp_path):
    with pytest.raises(ReviewError, match="no training_results_v"):
        remade(tmp_path)
    (tmp_path / "training_results_v5.0").mkdir()
    with pytest.raises(ReviewError, match="a git checkout is expected"):
        remade(tmp_path)
