"""Each rule of pages and files finds violations."""

from __future__ import annotations

import pytest

from . import structure


def test_large_files_and_binaries_are_found(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x" * 100_000)
    assert structure.unfit_for_the_tree(path, is_test=False) == []
    assert structure.unfit_for_the_tree(path, is_test=True)
    path.write_bytes(b"x" * 1_000_000)
    assert structure.unfit_for_the_tree(path, is_test=False)
    path.write_bytes(b"\0")
    assert structure.unfit_for_the_tree(path, is_test=False) == [f"{path} is binary"]
    assert structure.unfit_for_the_tree(path, is_test=True) == []


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


def test_tables_are_read_by_the_first_cell_of_their_header():
    assert structure.tables(PAGE, "variable") == [
        ["`LR`", "`0.1`"],
        ["`SEED`, `STEPS`", "unset"],
        ["`TRIAL`", "`0`"],
    ]
    assert structure.tables(PAGE, "folder") == [["`docs`", "`a \\| b`"]]
    assert structure.tables(PAGE, "command") == []


@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        ({"LR": None, "SEED": None, "STEPS": None}, "TRIAL: in the table, but nothing has this name"),
        ({"LR": None, "SEED": None, "STEPS": None, "TRIAL": None, "NEXP": None}, "NEXP: not in the table"),
        ({"LR": ["`LR`", "`0.2`"], "SEED": None, "STEPS": None, "TRIAL": None}, "LR: the table says"),
    ],
)  # fmt: skip
def test_ghost_rows_missing_rows_and_wrong_rows_are_found(expected, problem):
    (found,) = structure.table_problems(structure.tables(PAGE, "variable"), expected)
    assert found.startswith(problem)


def test_a_valid_table_has_no_problem_and_a_duplicate_row_is_found():
    rows = structure.tables(PAGE, "variable")
    expected = {"LR": ["`LR`", "`0.1`"], "SEED": None, "STEPS": None, "TRIAL": None}
    assert structure.table_problems(rows, expected) == []
    assert structure.table_problems([*rows, rows[0]], expected) == [
        "LR: twice in the table"
    ]
