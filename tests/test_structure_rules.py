"""Each structure rule finds violations: small source trees with one fault each, and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import structure

LAYERS = [{"low"}, {"room"}, {"high"}]
SOUND = {
    "__init__": "",
    "low": "import math",
    "room.__init__": "",
    "room.a": "from pack.low import thing\nfrom .b import other",
    "room.b": "from .. import low",
    "high": "import pack.room.a\nfrom pack import room",
}


def tree(folder: Path, **changed: str) -> dict[str, structure.Module]:
    """Modules of the valid package ``pack``, with other text for some modules (``__`` in a name for
    a dot).
    """
    for name, text in {
        **SOUND,
        **{name.replace("__", "."): text for name, text in changed.items()},
    }.items():
        path = (
            folder
            / "pack"
            / Path(*name.replace(".init.", ".__init__").split(".")).with_suffix(".py")
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return structure.modules_of(folder / "pack")


def test_a_sound_tree_breaks_no_rule(tmp_path):
    modules = tree(tmp_path)
    assert set(modules) == {
        "pack",
        "pack.low",
        "pack.room",
        "pack.room.a",
        "pack.room.b",
        "pack.high",
    }
    assert structure.upward_imports(modules, LAYERS) == []
    assert structure.cycles(modules) == []
    assert structure.foreign_imports(modules, {"torch"}, {}) == []
    assert structure.environment_readers(modules, ()) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pack.high",
        "import pack.high as h",
        "from pack import high",
        "from pack.high import thing",
        "from pack.high import *",
        "from . import high",
        "from .high import thing",
        "def f():\n    from pack.high import thing",
        "def f():\n    from .high import thing",
        "class A:\n    def f(self):\n        import pack.high",
        "try:\n    from . import high\nexcept ImportError:\n    high = None",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .high import Thing",
        "import importlib\nhigh = importlib.import_module('pack.high')",
        "from importlib import import_module\nhigh = import_module('.high', __package__)",
        "high = __import__('pack.high')",
    ],
)
def test_an_import_of_a_higher_layer_is_found_however_it_is_written(tmp_path, text):
    (problem,) = structure.upward_imports(tree(tmp_path, low=text), LAYERS)
    assert problem.startswith("pack.low:")
    assert "imports pack.high" in problem


@pytest.mark.parametrize("text", ["from ..high import thing", "from .. import high"])
def test_an_upward_import_out_of_a_folder_is_found(tmp_path, text):
    (problem,) = structure.upward_imports(tree(tmp_path, room__b=text), LAYERS)
    assert problem == "pack.room.b:1 imports pack.high, a layer above it"


def test_an_upward_import_of_a_folders_own_init_is_found(tmp_path):
    (tmp_path / "pack/room").mkdir(parents=True)
    modules = tree(tmp_path)
    (tmp_path / "pack/room/__init__.py").write_text("from ..high import thing")
    modules = structure.modules_of(tmp_path / "pack")
    assert structure.upward_imports(modules, LAYERS) == [
        "pack.room:1 imports pack.high, a layer above it"
    ]


def test_the_longest_name_of_the_table_counts(tmp_path):
    layers = [{"low", "room.b"}, {"room"}, {"high"}]
    assert structure.upward_imports(tree(tmp_path), layers) == []
    (problem,) = structure.upward_imports(
        tree(tmp_path, room__b="from . import a"), layers
    )
    assert problem == "pack.room.b:1 imports pack.room.a, a layer above it"


def test_a_module_without_a_layer_and_a_layer_without_a_module_are_found(tmp_path):
    assert structure.upward_imports(tree(tmp_path, new=""), LAYERS) == [
        "pack.new belongs to no layer: add it to LAYERS"
    ]
    ghost = structure.upward_imports(tree(tmp_path), [*LAYERS, {"new", "gone"}])
    assert ghost == ["LAYERS names gone, which does not exist"]


@pytest.mark.parametrize(
    ("changed", "members"),
    [
        (
            {"room__b": "from .a import thing"},
            "pack.room.a, pack.room.b",
        ),  # within a layer
        (
            {"room__b": "def f():\n    from . import a"},
            "pack.room.a, pack.room.b",
        ),  # put off until called
        (
            {"low": "from .room.a import thing"},
            "pack.low, pack.room.a, pack.room.b",
        ),  # of three
        ({"low": "from .room import b"}, "pack.low, pack.room.b"),
    ],
)
def test_an_import_cycle_is_found(tmp_path, changed, members):
    assert structure.cycles(tree(tmp_path, **changed)) == [
        f"an import cycle: {members}"
    ]


def test_a_cycle_through_the_package_of_a_module_is_found(tmp_path):
    tree(tmp_path, room__a="", room__b="", low="from .room.a import thing")
    (tmp_path / "pack/room/__init__.py").write_text(
        "from .. import low"
    )  # runs when room.a is imported
    modules = structure.modules_of(tmp_path / "pack")
    assert structure.cycles(modules) == ["an import cycle: pack.low, pack.room"]


def test_a_known_cycle_is_allowed_and_must_leave_the_list_when_it_is_gone(tmp_path):
    known = [frozenset({"pack.room.a", "pack.room.b"})]
    assert structure.cycles(tree(tmp_path, room__b="from .a import thing"), known) == []
    assert structure.cycles(tree(tmp_path, room__b=""), known) == [
        "no longer a cycle: pack.room.a, pack.room.b"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "import torch.nn as nn",
        "from torch import nn",
        "from torch.nn import functional",
        "def f():\n    import torch",
        "import importlib\nimportlib.import_module('torch.nn')",
    ],
)
def test_an_import_of_a_forbidden_package_is_found_except_where_allowed(tmp_path, text):
    modules = tree(tmp_path, low=text)
    (problem,) = structure.foreign_imports(modules, {"torch"}, {"torch": ["pack.high"]})
    assert problem.startswith("pack.low:")
    assert structure.foreign_imports(modules, {"torch"}, {"torch": ["pack.low"]}) == []


def test_only_the_parts_of_a_forbidden_package_that_are_allowed_pass(tmp_path):
    allowed = {"bert.data.format": [""]}
    modules = tree(
        tmp_path,
        low="from bert.data import format\nfrom bert.data.format import Reader\nimport torchvision",
    )
    assert structure.foreign_imports(modules, {"bert", "torch"}, allowed) == []
    modules = tree(
        tmp_path,
        low="from bert.data import format, batch\nimport bert\nfrom bert.data import formatter",
    )
    found = [
        problem.split(" imports ")[1]
        for problem in structure.foreign_imports(modules, {"bert"}, allowed)
    ]
    assert found == ["bert.data.batch", "bert", "bert.data.formatter"]


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['LR']",
        "import os as system\nsystem.environ.get('LR')",
        "import os.path\nos.getenv('LR')",
        "import os\nos.environb",
        "import os\nos.putenv('LR', '1')",
        "from os import environ",
        "from os import environ as settings",
        "from os import path, getenv",
        "from os import *",
        "def f():\n    import os as o\n    return o.getenv('LR')",
        "import os\ngetattr(os, 'environ')",
        "import importlib\nimportlib.import_module('os').environ",
        "__import__('os').environ",
    ],
)
def test_reading_the_environment_is_found_however_it_is_written(tmp_path, text):
    modules = tree(tmp_path, low=text)
    (problem,) = structure.environment_readers(modules, {"pack.high"})
    assert problem.startswith("pack.low:")
    assert structure.environment_readers(modules, {"pack.low"}) == []


def test_other_uses_of_os_and_of_the_word_are_allowed(tmp_path):
    lines = [
        "import os",
        "import os.path as p",
        "from os import path",
        "os.replace('a', 'b')",
        "self.environ",
        "p.environ",
    ]
    assert structure.environment_readers(tree(tmp_path, low="\n".join(lines)), ()) == []


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
        (
            {"LR": None, "SEED": None, "STEPS": None},
            "TRIAL: in the table, but nothing has this name",
        ),
        (
            {"LR": None, "SEED": None, "STEPS": None, "TRIAL": None, "NEXP": None},
            "NEXP: not in the table",
        ),
        (
            {"LR": ["`LR`", "`0.2`"], "SEED": None, "STEPS": None, "TRIAL": None},
            "LR: the table says",
        ),
    ],
)
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


@pytest.mark.parametrize(
    "back", ["import one", "def f():\n    from one.a import thing"]
)
def test_packages_that_import_each_other_are_found_also_by_way_of_a_third(
    tmp_path, back
):
    texts = {"one": "from two.a import thing", "two": "import three.a", "three": back}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text(text)
    packages = {name: structure.modules_of(tmp_path / name) for name in texts}
    assert structure.package_cycles([packages["one"], packages["two"]]) == []
    assert structure.package_cycles(packages.values()) == [
        "packages in a circle: one, three, two"
    ]
