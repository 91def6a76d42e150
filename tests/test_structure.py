"""The structure of the code base: tables and links name what exists, settings are read in one place.

Each rule of structure.py is broken here, too.
"""

import gc
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bert.core import variables

from . import structure


def _none(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


READS = """\
import os; os.environ['LR']
import os as system; system.environ.get('LR')
import os.path; os.getenv('LR')
import os; os.environb
import os; os.putenv('LR', '1')
from os import environ as settings
from os import path, getenv
def f(): import os as o; return o.getenv('LR')
import os; getattr(os, 'environ')
from os import *
"""


def test_only_env_reads_the_environment(repository):
    (ruff,) = Path(sys.executable).parent.glob("ruff")
    rules = ["--select", "TID251,F403,B009", "--output-format", "concise"]
    for path, lines in ("implementations/bert/optim/lamb.py", 10), ("common/env.py", 2):
        command = [ruff, "check", "-q", *rules, "--stdin-filename", path]
        done = subprocess.run(
            command, cwd=repository, input=READS, text=True, stdout=subprocess.PIPE
        )
        assert len({*re.findall(r"py:(\d+):", done.stdout)}) == lines, done.stdout


def test_links_of_the_pages_are_valid(repository, tmp_path):
    pages = structure.tracked(repository, "*.md")
    assert sum("](" in page.read_text(encoding="utf-8") for page in pages) > 5
    _none([line for page in pages for line in structure.dead_links(page)])
    page, text = tmp_path / "page.md", "# A `b`, c\n[1](#a-b-c) [2](page.md#d) [3](other.md) [4](https://a.b/#c) [5](page.md)\n"  # fmt: skip
    page.write_text(text)
    dead = [line.removeprefix(f"{page}: ") for line in structure.dead_links(page)]
    assert dead == ["page.md#d: no such heading", "other.md: no such file"]


def test_the_tree_has_no_large_files_nor_binaries_but_small_data(repository, tmp_path):
    tests = repository / "tests"
    for path in structure.tracked(repository):
        _none(structure.unfit_for_the_tree(path, is_test=path.is_relative_to(tests)))
    for content, is_test, is_fit in (
        (b"x" * 100_000, False, True),
        (b"x" * 100_000, True, False),
        (b"x" * 1_000_000, False, False),
        (b"\0", False, False),
        (b"\0", True, True),
    ):
        (tmp_path / "a").write_bytes(content)
        found = structure.unfit_for_the_tree(tmp_path / "a", is_test)
        assert (found == []) == is_fit


def test_the_suite_refuses_the_packages_of_another_checkout(repository, tmp_path):
    (tmp_path / "tests").mkdir()
    shutil.copy(repository / "tests" / "conftest.py", tmp_path / "tests")
    try:
        with pytest.raises(pytest.UsageError, match=r"another checkout: use the \.v"):
            runpy.run_path(str(tmp_path / "tests" / "conftest.py"))
    finally:
        gc.enable()


def test_only_programs_can_be_run_and_libraries_are_sourced(repository):
    """A program sets its own shell options; a sourced file leaves those of its user."""
    scripts = structure.tracked(repository, "*.sh", "*.sub")
    assert len(scripts) > 50
    for path in scripts:
        text = path.read_text(encoding="utf-8")
        is_program = re.search(r"^set -", text, re.MULTILINE) is not None
        assert os.access(path, os.X_OK) == is_program, path


def test_the_pages_stay_short_enough_to_be_read(repository):
    pages = {*(repository / "docs").glob("*.md")} - {repository / "docs/variables.md"}
    words = {page.name: structure.words(page.read_text("utf-8")) for page in pages}
    assert words["evidence.md"] <= 2_000
    assert sum(words.values()) <= 14_000
    assert structure.words("| a | `b c` |\n|---|---|\nd, e") == 5


PAGE = """
| variable | default |
|---|---|
| `LR` | `0.1` |
| `SEED`, `STEPS` | unset |

| folder | holds |
|---|---|
| `docs` | `a \\| b` |

| variable | default |
|:--|:-:|
| `TRIAL` | `0` |
"""


def test_rows_that_are_missing_wrong_twice_or_of_nothing_are_found():
    rows = structure.tables(PAGE, "variable")
    assert [row[1] for row in rows] == ["`0.1`", "unset", "`0`"]
    assert structure.tables(PAGE, "folder") == [["`docs`", "`a \\| b`"]]
    assert structure.tables(PAGE, "command") == []
    right = {"LR": ["`LR`", "`0.1`"], "SEED": None, "STEPS": None, "TRIAL": None}
    assert structure.table_problems(rows, right) == []
    for given, expected, problem in (
        (rows[:-1], right, "TRIAL: not in the table"),
        ([*rows, rows[0]], right, "LR: twice in the table"),
        ([*rows, ["`NEXP`"]], right, "NEXP: in the table, but nothing"),
        (rows, right | {"LR": ["`LR`", "`0.2`"]}, "LR: the table says"),
    ):
        (found,) = structure.table_problems(given, expected)
        assert found.startswith(problem)


def test_tables_of_variables_have_a_row_for_each_and_no_other(repository):
    groups = variables.groups().values()
    listed = {entry.name: None for entries in groups for entry in entries}
    pages = [repository / "README.md", *(repository / "docs").glob("*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    rows = [row for text in texts for row in structure.tables(text, "variable")]
    assert len(rows) > 100
    _none(structure.table_problems(rows, listed))


def test_other_tables_name_what_exists(repository):
    from review.__main__ import parser

    def rows(page: str, header: str) -> list[list[str]]:
        text = (repository / page).read_text(encoding="utf-8")
        found = structure.tables(text, header)
        assert found, f"{page} has no table of each {header}"
        return found

    (commands,) = parser()._subparsers._group_actions
    named = dict.fromkeys(commands.choices)
    _none(structure.table_problems(rows("docs/review.md", "command"), named))
    folders = rows("CONTRIBUTING.md", "folder")
    names = [name for row in folders for name in structure.names(row)]
    existing = [name for name in names if (repository / name).is_dir()]
    _none(structure.table_problems(folders, dict.fromkeys(existing)))
    for row in rows("docs/evidence.md", "what"):
        # A star: in an earlier commit.
        for name in re.findall(r"`(\w+\.py)[^`]*`(?!\*)", row[1]):
            assert (repository / "bench" / name).is_file(), name


def test_the_validity_tables_name_existing_files_and_tests(repository):
    page = (repository / "docs" / "evidence.md").read_text(encoding="utf-8")
    rows = structure.tables(page, "rule")
    assert len(rows) > 20
    for rule, kept, tested in rows:
        files = re.findall(r"`([\w/]+\.(?:py|sh))`", kept)
        tests = re.findall(r"`(tests/[\w/]+\.py)`((?:[:,]? `test_\w+`)*)", tested)
        assert files, rule
        assert tests, rule
        for name in files:
            assert (repository / name).is_file(), f"{rule}: {name}"
        for name, functions in tests:
            text = (repository / name).read_text(encoding="utf-8")
            for function in re.findall(r"test_\w+", functions) or ["test_"]:
                assert f"def {function}" in text, f"{rule}: {name} has no {function}"
