"""Imports go one way, by the rules in pyproject.toml; each rule is broken here once."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path

import pytest

from . import structure
from .structure import PACKAGES

api = pytest.importorskip("importlinter.api")
RULES = api.read_configuration(str(Path(__file__).parents[1] / "pyproject.toml"))
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


def _imports_checked(folder: Path) -> subprocess.CompletedProcess[str]:
    script = (
        "from importlinter.cli import lint_imports as lint; exit(lint(no_cache=True))"
    )
    path = os.pathsep.join([str(folder / "implementations"), str(folder)])
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip


def test_every_package_has_rules(repository):
    folders = [path.parent for path in structure.tracked(repository, "*/__init__.py")]
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
    for path in structure.tracked(repository, "*.py"):
        if not path.is_relative_to(repository / "tests"):
            assert not re.search(hidden, path.read_text(encoding="utf-8")), path


def test_the_picture_has_every_import_between_packages_and_no_other(repository):
    import grimp

    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    arrows = {(one, other) for one, other in permutations(PACKAGES, 2)
              if graph.direct_import_exists(importer=one, imported=other, as_packages=True)}  # fmt: skip
    page = (repository / "CONTRIBUTING.md").read_text()
    assert structure.mermaid_arrows(page) == arrows
