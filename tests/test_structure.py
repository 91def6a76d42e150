"""The structure of the code base: imports go one way, tables name what exists.

The rules of imports are in pyproject.toml, those of pages in structure.py, which test_structure_rules.py breaks.
"""

from __future__ import annotations

import gc
import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path

import grimp
import pytest
from importlinter import api

from bert.core import variables

from . import structure

ROOT = Path(__file__).resolve().parents[1]
RULES = api.read_configuration(str(ROOT / "pyproject.toml"))
PACKAGES: list[str] = RULES["session_options"]["root_packages"]
# A line that breaks each contract of imports in pyproject.toml, and what is then said.
BROKEN = {
    "packages": ("review.league.estimate", "import bert.core", "review.league.estimate -> bert.core"),
    "circles": ("bert.core.software", "def f(): from . import rundir", ".software -> .rundir"),
    "common": ("common.env", "from .process import x", "common.env -> common.process"),
    "bert": ("bert.core.software", "class A:\n    def f(self): import bert.data.batch", "bert.core.software -> bert.data.batch"),
    "kernels": ("bert.kernels.support.dropout", "from .. import fp8", "bert.kernels.support.dropout -> bert.kernels.fp8"),
    "certify": ("certify.recorder", "from .load import x", "certify.recorder -> certify.load"),
    "finetune": ("finetune.labels", "from finetune import glue", "finetune.labels -> finetune.glue"),
    "input_preprocessing": ("input_preprocessing.new", "", "input_preprocessing.new"),
    "review": ("review.logs.new", "import review.show", "review.logs.new -> review.show"),
    "acceptance": ("review.acceptance.floors", "from . import page", "review.acceptance.floors -> review.acceptance.page"),
    "light": ("review.show", "import torch.nn", "review.show -> torch"),
    "floor": ("common.durations", "try:\n    import numpy\nexcept ImportError: pass", "common.durations -> numpy"),
    "log": ("bert.training.loop", "from mlperf_logging import mllog", "bert.training.loop -> mlperf_logging"),
    "judges": ("finetune.saved", "import review", "finetune.saved -> review"),
    "records": ("input_preprocessing.wiki.clean", "import bert.data.batch", "input_preprocessing.wiki.clean -> bert.data.batch"),
}  # fmt: skip


def _tracked(repository: Path, *patterns: str) -> list[Path]:
    command = [
        "git",
        "-C",
        str(repository),
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        *patterns,
    ]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [
        path for name in listed.stdout.split() if (path := repository / name).is_file()
    ]


def _none(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def _imports_checked(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports as lint; exit(lint(no_cache=True))"]  # fmt: skip
    path = os.pathsep.join([str(folder / "implementations"), str(folder)])
    return subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)  # fmt: skip


def test_every_package_has_rules(repository):
    folders = [path.parent for path in _tracked(repository, "*/__init__.py")]
    tops = {one.name for one in folders if not (one.parent / "__init__.py").exists()}
    assert tops - {"tests"} == set(PACKAGES)


def test_imports_run_one_way(repository):
    done = _imports_checked(repository)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_rule_of_imports_is_broken_by_one_line(repository, tmp_path):
    for name in PACKAGES:
        home = Path(*find_spec(name).submodule_search_locations)
        copy = tmp_path / home.relative_to(repository)
        shutil.copytree(home, copy, ignore=lambda _, names: {n for n in names if n.endswith((".yaml", ".json", ".csv"))})  # fmt: skip
    shutil.copy(repository / "pyproject.toml", tmp_path)
    for module, line, _ in BROKEN.values():
        home = Path(*find_spec(module.partition(".")[0]).submodule_search_locations)
        path = tmp_path / home.parent.relative_to(repository) / f"{module.replace('.', '/')}.py"  # fmt: skip
        with path.open("a") as file:
            file.write(f"\n{line}\n")
    said = _imports_checked(tmp_path).stdout
    contracts = RULES["contracts_options"]
    assert {one["id"] for one in contracts} == BROKEN.keys()
    assert all("exhaustive" in one for one in contracts if "containers" in one)
    assert " 0 kept," in said.replace("Contracts:", " ")
    for one in contracts:
        told = said.rpartition(f"{one['name']}\n---")[2]
        assert BROKEN[one["id"]][2] in told.partition("\n\n\n")[0], one["name"]


def test_no_import_goes_by_the_rules_of_imports_or_of_the_environment(repository):
    hidden = rf"(import_module|__import__)\(\s*[\"'](\.|(os|torch|mlperf_logging|{'|'.join(PACKAGES)})\b)"
    for path in _tracked(repository, "*.py"):
        if not path.is_relative_to(repository / "tests"):
            assert not re.search(hidden, path.read_text(encoding="utf-8")), path


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
    for path, number in (("implementations/bert/optim/lamb.py", 1), ("common/env.py", 0)):
        command = [ruff, "check", "-q", "--select", "TID251,F403,B009", "--stdin-filename", path]  # fmt: skip
        done = subprocess.run(command, cwd=repository, input=text, text=True, stdout=-1)
        assert done.returncode == number or re.search("F403|B009", done.stdout), text


def test_the_picture_has_every_import_between_packages_and_no_other(repository):
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    arrows = {(one, other) for one, other in permutations(PACKAGES, 2)
              if graph.direct_import_exists(importer=one, imported=other, as_packages=True)}  # fmt: skip
    page = (repository / "CONTRIBUTING.md").read_text()
    assert structure.mermaid_arrows(page) == arrows


def test_links_of_the_pages_are_valid(repository, tmp_path):
    pages = _tracked(repository, "*.md")
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
    for path in _tracked(repository):
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
    scripts = _tracked(repository, "*.sh", "*.sub")
    assert len(scripts) > 50
    for path in scripts:
        is_program = (
            re.search(r"^set -", path.read_text(encoding="utf-8"), re.MULTILINE)
            is not None
        )
        assert os.access(path, os.X_OK) == is_program, path


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
