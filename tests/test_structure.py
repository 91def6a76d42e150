"""The structure of the code base: imports go one way, tables name what exists.

The rules themselves are in structure.py; test_structure_rules.py breaks each of them.
"""

from __future__ import annotations

import gc
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from bert.core import variables

from . import structure

# Lowest first; a module imports its own layer or lower ones. A name includes its submodules.
LAYERS: dict[str, list[set[str]]] = {
    "common": [
        {"env", "files", "durations", "lists", "missing", "tables", "options"},
        {"process", "foreign"},
    ],
    "implementations/bert": [
        {"core"},
        {"kernels.support"},
        {"kernels.fp8", "kernels.precision"},
        {"kernels.attention", "kernels.operations"},
        {"kernels"},
        {"data"},
        {"model"},
        {"checkpoint"},
        {"optim"},
        {"training"},
        {"deepspeed"},
        {"pretraining"},
        {"commands"},
        {"__main__"},
    ],
    "implementations/certify": [
        {"store_group"},
        {"recorder", "telemetry"},
        {"hardware", "tools"},
        {"load"},
        {"burn_in"},
        {"__main__"},
    ],
    "implementations/finetune": [
        {"batches"},
        {"dialect", "labels"},
        {"tables"},
        {"glue"},
        {"squad"},
        {"models", "config"},
        {"tasks"},
        {"saved"},
        {"train", "files"},
        {"commands", "demo", "__main__"},
    ],
    "input_preprocessing": [
        {"stage"},
        {"text", "tensorflow_files"},
        {"instances", "wiki", "checkpoints"},
        {"records"},
        {"dataset"},
        {"verify"},
        {"__main__"},  # imports a stage's module when it is run
    ],
    "review": [
        {"logs"},
        {"rulebook"},
        {"results"},
        {"verdict"},
        {"report"},
        {"league"},
        {"submission"},
        {"acceptance.schema", "acceptance.journal"},
        {"acceptance.records", "acceptance.floors"},
        {"acceptance.outliers", "acceptance.coverage", "acceptance.faults"},
        {"acceptance.comparisons"},
        {"acceptance.figures"},
        {"acceptance.verdict"},
        {"acceptance.page", "acceptance.fleet"},
        {"acceptance.commands"},
        {"acceptance"},
        {"show", "compare", "watch"},
        {"__main__"},
    ],
}
# Known cycles; remove one from this list when it is gone.
KNOWN_CYCLES: list[frozenset[str]] = []
# Packages that a package must not import, with exceptions by module ("": every module).
FORBIDDEN: dict[str, tuple[set[str], dict[str, list[str]]]] = {
    "common": (
        {
            "bert",
            "certify",
            "finetune",
            "input_preprocessing",
            "mlperf_logging",
            "numpy",
            "review",
            "torch",
        },
        {},
    ),
    "implementations/bert": (
        {"certify", "finetune", "input_preprocessing", "review", "mlperf_logging"},
        {"mlperf_logging": ["bert.training.mlperf"]},
    ),
    "implementations/certify": (
        {"finetune", "input_preprocessing", "mlperf_logging"},
        {},
    ),
    "implementations/finetune": (
        {"certify", "input_preprocessing", "review", "mlperf_logging"},
        {},
    ),
    "input_preprocessing": (
        {"bert", "certify", "finetune", "review", "torch", "mlperf_logging"},
        {
            **{
                f"bert.data.{name}": [""]
                for name in (
                    "kept_digests",
                    "records",
                    "prepared",
                    "format",
                    "digests",
                    "hdf5",
                    "nvidia_format",
                    "packing",
                    "shards",
                    "compiled",
                )
            },
            "torch": ["input_preprocessing.checkpoints"],  # writes PyTorch files
        },
    ),
    "review": (
        {"bert", "certify", "finetune", "input_preprocessing", "torch"},
        {},
    ),
}
READ_THE_ENVIRONMENT = {
    "common.env",
    "bert.core.variables",
    "bert.__main__",
    "bert.commands.allreduce",
    "finetune.__main__",
    "certify.__main__",
}  # commands hand os.environ on


@pytest.fixture(scope="module")
def packages(repository) -> dict[str, dict[str, structure.Module]]:
    """Modules of each package, by its folder."""
    return {folder: structure.modules_of(repository / folder) for folder in LAYERS}


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


def test_every_package_has_layers(repository):
    found = {
        path.relative_to(repository).parts
        for path in _tracked(repository, "*/__init__.py")
    }
    folders = {
        "/".join(parts[:2] if parts[0] == "implementations" else parts[:1])
        for parts in found
    }
    assert folders - {"tests"} == set(LAYERS)


@pytest.mark.parametrize("folder", LAYERS)
def test_imports_run_one_way(packages, folder):
    _none(structure.upward_imports(packages[folder], LAYERS[folder]))


@pytest.mark.parametrize("folder", LAYERS)
def test_no_modules_import_each_other(packages, folder):
    package = Path(folder).name
    _none(
        structure.cycles(
            packages[folder],
            [group for group in KNOWN_CYCLES if min(group).startswith(package)],
        )
    )


def test_no_packages_import_each_other(packages):
    _none(structure.package_cycles(packages.values()))


def test_the_picture_has_every_import_between_packages_and_no_other(
    packages, repository
):
    picture = structure.mermaid_arrows((repository / "CONTRIBUTING.md").read_text())
    assert picture == structure.package_imports(packages.values())


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_packages_stand_apart(packages, folder):
    forbidden, allowed = FORBIDDEN[folder]
    _none(structure.foreign_imports(packages[folder], forbidden, allowed))


def test_only_env_reads_the_environment(packages):
    for folder, modules in packages.items():
        if folder == "common" or folder.startswith("implementations/"):
            _none(structure.environment_readers(modules, READ_THE_ENVIRONMENT))


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
