"""The code base keeps its shape: imports run one way, files and functions stay short, every variable is documented."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_SHELL_LINES = 400, 60, 100

# Lowest first; a module imports its own layer or lower ones.
LAYERS = [
    {"env", "dist"},
    {"kernels", "data.format", "data.nvidia_format", "data.packing"},
    {"model", "optim", "schedule", "precision", "data", "mlperf", "rundir"},
    {"step", "graph", "evaluate", "checkpoint"},
    {"config"},
    {"resume", "kernel_choice"},
    {"train", "check", "allreduce"},
    {"__main__"},
]


def _tracked(repository: Path, *patterns: str) -> list[Path]:
    command = ["git", "-C", str(repository), "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split() if (path := repository / name).is_file()]


def _layer(module: str) -> int:
    """Layer of bert.<module>: the longest name that is listed."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        for number, names in enumerate(LAYERS):
            if name in names:
                return number
    raise AssertionError(f"bert.{module} belongs to no layer: add it to LAYERS")


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_of_the_trainer_run_one_way(repository):
    root = repository / "implementations" / "bert"
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
        if path != root / "__init__.py"
    }
    for module, path in modules.items():
        for imported in _imports(path):
            if not imported.startswith("bert."):
                continue
            target = imported.removeprefix("bert.")
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target:
                assert _layer(target) <= _layer(module), f"bert.{module} imports bert.{target}, a layer above it"


def test_preparation_and_review_stand_apart_from_the_trainer(repository):
    for path in (repository / "input_preprocessing").rglob("*.py"):
        names = ("format", "digests", "nvidia_format", "packing", "index", "compiled")
        allowed = tuple(f"bert.data.{name}" for name in names)
        wrong = {i for i in _imports(path) if i.split(".")[0] == "bert" and not i.startswith(allowed)}
        wrong |= {i for i in _imports(path) if i == "torch" or i.startswith("torch.")}
        if path.name in ("convert_checkpoint.py", "checkpoint_names.py"):
            wrong = {i for i in wrong if not i.startswith("torch")}  # writes PyTorch files
        assert not wrong, f"{path.name} imports {wrong}"
    for path in (repository / "review").rglob("*.py"):
        wrong = {i for i in _imports(path) if i.split(".")[0] in ("bert", "torch", "input_preprocessing")}
        assert not wrong, f"review/{path.name} imports {wrong}"


def test_only_env_reads_the_environment_and_only_mlperf_logs(repository):
    root = repository / "implementations" / "bert"
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name not in ("env.py", "__main__.py", "allreduce.py"):  # main hands os.environ to env.py
            assert "os.environ" not in text, path
            assert "getenv" not in text, path
        if path.name != "mlperf.py":
            assert "mlperf_logging" not in text.replace('"mlperf-logging"', ""), path


def test_files_and_functions_stay_short(repository):
    for path in _tracked(repository, "*.py"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MAX_FILE_LINES, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, f"{path}: {node.name}"
    for path in _tracked(repository, "*.sh", "*.sub"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_SHELL_LINES, path


def test_public_things_say_what_they_are(repository):
    for folder in ("implementations", "input_preprocessing", "review"):
        for path in _tracked(repository, f"{folder}/**.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert ast.get_docstring(tree), path
            for node in tree.body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                    assert ast.get_docstring(node), f"{path}: {node.name}"


def test_the_tree_holds_no_large_file_and_no_binary_but_small_test_data(repository):
    for path in _tracked(repository):
        data = path.read_bytes()
        assert len(data) < 1_000_000, path
        if path.is_relative_to(repository / "tests"):
            assert len(data) < 100_000, path
        else:
            assert b"\0" not in data, f"{path} is binary"


def test_readme_lists_every_variable_of_the_trainer(repository):
    from bert.check import variable_table

    readme = (repository / "README.md").read_text(encoding="utf-8")
    missing = [line for line in variable_table().splitlines() if line not in readme]
    assert not missing, "README.md's table differs from `python -m bert --variables`: " + "\n".join(missing)
