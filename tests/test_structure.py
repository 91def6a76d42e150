"""The structure of the code base: tables and links name what exists, settings are read in one place.

The rules are in structure.py, and test_structure_rules.py breaks each of them.
"""

from __future__ import annotations

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


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['LR']",
        "import os as system\nsystem.environ.get('LR')",
        "import os.path\nos.getenv('LR')",
        "import os\nos.environb",
        "import os\nos.putenv('LR', '1')",
        "from os import environ as settings",
        "from os import path, getenv",
        "from os import *",
        "def f():\n    import os as o\n    return o.getenv('LR')",
        "import os\ngetattr(os, 'environ')",
    ],
)
def test_only_env_reads_the_environment(text, repository):
    (ruff,) = Path(sys.executable).parent.glob("ruff")
    for path, number in (
        ("implementations/bert/optim/lamb.py", 1),
        ("common/env.py", 0),
    ):
        command = [ruff, "check", "-q", "--select", "TID251,F403,B009", "--stdin-filename", path]  # fmt: skip
        done = subprocess.run(command, cwd=repository, input=text, text=True, stdout=-1)
        assert done.returncode == number or re.search("F403|B009", done.stdout), text


def test_links_of_the_pages_are_valid(repository, tmp_path):
    pages = structure.tracked(repository, "*.md")
    assert sum("](" in page.read_text(encoding="utf-8") for page in pages) > 5
    _none([line for page in pages for line in structure.dead_links(page)])
    (tmp_path / "page.md").write_text(
        "# A `b`, c\n[1](#a-b-c) [2](page.md#d) [3](other.md) [4](https://a.b/#c) [5](page.md)\n"
    )
    assert [
        line.partition(": ")[2] for line in structure.dead_links(tmp_path / "page.md")
    ] == [
        "page.md#d: no such heading",
        "other.md: no such file",
    ]


def test_the_tree_has_no_large_files_and_no_binaries_except_small_test_data(repository):
    tests = repository / "tests"
    for path in structure.tracked(repository):
        _none(structure.unfit_for_the_tree(path, is_test=path.is_relative_to(tests)))


def test_the_suite_refuses_the_packages_of_another_checkout(repository, tmp_path):
    (tmp_path / "tests").mkdir()
    shutil.copy(repository / "tests" / "conftest.py", tmp_path / "tests")
    try:
        with pytest.raises(
            pytest.UsageError, match=r"another checkout: use the \.venv of this one"
        ):
            runpy.run_path(str(tmp_path / "tests" / "conftest.py"))
    finally:
        gc.enable()


def test_only_programs_can_be_run_and_libraries_are_sourced(repository):
    """A program sets its own shell options; a sourced file leaves those of its user."""
    scripts = structure.tracked(repository, "*.sh", "*.sub")
    assert len(scripts) > 50
    for path in scripts:
        is_program = (
            re.search(r"^set -", path.read_text(encoding="utf-8"), re.MULTILINE)
            is not None
        )
        assert os.access(path, os.X_OK) == is_program, path


def test_the_pages_stay_short_enough_to_be_read(repository):
    pages = {*(repository / "docs").glob("*.md")} - {repository / "docs/variables.md"}
    words = {page.name: structure.words(page.read_text("utf-8")) for page in pages}
    assert words["evidence.md"] <= 2_000
    assert sum(words.values()) <= 14_000
    assert structure.words("| a | `b c` |\n|---|---|\nd, e") == 5


def test_tables_of_variables_have_a_row_for_each_and_no_other(repository):
    listed = [
        entry.name for entries in variables.groups().values() for entry in entries
    ]
    pages = [repository / "README.md", *(repository / "docs").glob("*.md")]
    rows = [
        row
        for page in pages
        for row in structure.tables(page.read_text(encoding="utf-8"), "variable")
    ]
    assert len(rows) > 100
    _none(structure.table_problems(rows, dict.fromkeys(listed)))


def test_other_tables_name_what_exists(repository):
    from review.__main__ import parser

    def rows(page: str, header: str) -> list[list[str]]:
        found = structure.tables(
            (repository / page).read_text(encoding="utf-8"), header
        )
        assert found, f"{page} has no table of each {header}"
        return found

    (commands,) = parser()._subparsers._group_actions
    _none(
        structure.table_problems(
            rows("docs/review.md", "command"), dict.fromkeys(commands.choices)
        )
    )
    folders = rows("CONTRIBUTING.md", "folder")
    existing = [
        name
        for row in folders
        for name in structure.names(row)
        if (repository / name).is_dir()
    ]
    _none(structure.table_problems(folders, dict.fromkeys(existing)))
    scripts = {
        name
        for row in rows("docs/evidence.md", "what")
        # A star: in an earlier commit.
        for name in re.findall(r"`(\w+\.py)[^`]*`(?!\*)", row[1])
    }
    _none(
        [
            f"bench/{name}: no such script"
            for name in scripts
            if not (repository / "bench" / name).is_file()
        ]
    )


def test_the_validity_tables_name_existing_files_and_tests(repository):
    rows = structure.tables(
        (repository / "docs" / "evidence.md").read_text(encoding="utf-8"), "rule"
    )
    assert len(rows) > 20
    problems = []
    for rule, kept, tested in rows:
        files = re.findall(r"`([\w/]+\.(?:py|sh))`", kept)
        tests = re.findall(r"`(tests/[\w/]+\.py)`((?:[:,]? `test_\w+`)*)", tested)
        if not files or not tests:
            problems.append(f"{rule}: names no file or no test")
        problems += [
            f"{rule}: {name} does not exist"
            for name in files
            if not (repository / name).is_file()
        ]
        for name, functions in tests:
            text = (
                (repository / name).read_text(encoding="utf-8")
                if (repository / name).is_file()
                else ""
            )
            wanted = [
                f"{function}(" for function in re.findall(r"test_\w+", functions)
            ] or ["test_"]
            problems += [
                f"{rule}: {name} has no {function}"
                for function in wanted
                if f"def {function}" not in text
            ]
    _none(problems)
