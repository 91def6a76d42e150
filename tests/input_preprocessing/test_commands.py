"""The names that users type keep working."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from input_preprocessing import STAGES
from input_preprocessing.__main__ import overview

from ..forked import Command

# As documented and used for as long as the stages exist; a name may be added, none may go.
NAMES = {
    "bins", "clean", "convert_checkpoint", "corpus", "download", "evalset", "export_records", "extract",
    "import_records", "instances", "pack", "prepare", "shuffle", "split", "verify",
}  # fmt: skip


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return Command(module, {**os.environ, "COLUMNS": "100"}, arguments).finish()


def test_every_stage_answers_to_the_name_that_users_know() -> None:
    assert set(STAGES) >= NAMES
    for name in STAGES:
        answer, same = run("input_preprocessing", name, "--help"), run(f"input_preprocessing.{name}", "--help")
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.startswith(f"usage: python -m input_preprocessing {name} "), name
        assert not answer.stderr
        assert (same.returncode, same.stdout, same.stderr) == (0, answer.stdout, "")


def test_the_package_lists_its_stages() -> None:
    answer = run("input_preprocessing")
    assert answer.returncode == 0
    assert answer.stdout == overview() + "\n"
    lines = [line.split(None, 1) for line in answer.stdout.splitlines() if line.startswith("  ")]
    assert [name for name, _ in lines] == list(STAGES)
    assert run("input_preprocessing", "--help").stdout == answer.stdout
    mistaken = run("input_preprocessing", "pakc")
    assert (mistaken.returncode, mistaken.stdout) == (2, "")
    assert mistaken.stderr == "python -m input_preprocessing: no stage 'pakc'; did you mean pack?\n"


def test_every_command_line_is_a_listed_stage(repository: Path) -> None:
    root = repository / "input_preprocessing"
    found = set()
    for path in root.rglob("*.py"):
        for name in re.findall(r"^def (\w*main)\(options", path.read_text(encoding="utf-8"), re.MULTILINE):
            found.add(".".join((*path.relative_to(root).with_suffix("").parts, name)))
    assert found == {function for function, _ in STAGES.values()}
