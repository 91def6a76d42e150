"""The names that users type keep working."""

import os
import re
import sys
from pathlib import Path

import pytest

from input_preprocessing import STAGES
from input_preprocessing.__main__ import main, overview
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.stage import interrupt
from input_preprocessing.stage.cli import OPTIONS, parser_of

from ..forked import Command
from .conftest import run

# As documented and used for as long as the stages exist; a name may be added, none may go.
NAMES = {
    "bins", "clean", "convert_checkpoint", "corpus", "download", "evalset", "export_records", "extract",
    "import_records", "instances", "pack", "prepare", "shuffle", "split", "verify",
}  # fmt: skip


def answer_to(*arguments: str) -> tuple[int | None, str, str]:
    environ = {**os.environ, "COLUMNS": "100"}
    done = Command("input_preprocessing", environ, arguments).finish()
    return done.returncode, done.stdout, done.stderr


def test_every_stage_answers_to_the_name_that_users_know(monkeypatch, capsys):
    """Runs in this process, since new ones would import each stage again."""
    assert NAMES <= set(STAGES) <= set(OPTIONS)
    monkeypatch.setattr(interrupt, "install", lambda program: None)
    monkeypatch.setenv("COLUMNS", "100")
    for name in STAGES:
        monkeypatch.setattr(sys, "argv", ["input_preprocessing", name, "--help"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        said = capsys.readouterr()
        assert said.out.startswith(f"usage: python -m input_preprocessing {name} ")
        assert said.err == ""


def test_the_package_lists_its_stages():
    listed = overview() + "\n"
    assert answer_to() == answer_to("--help") == (0, listed, "")
    assert re.findall(r"^  (\S+) ", listed, re.MULTILINE) == list(STAGES)
    status, printed, told = answer_to("pakc")
    assert (status, printed) == (2, "")
    assert "no stage 'pakc'; python -m input_preprocessing --help lists" in told


def test_every_command_line_is_a_listed_stage(repository):
    root = repository / "input_preprocessing"
    found = set()
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^def (\w*main)\(options", text, re.MULTILINE):
            found.add(".".join((*path.relative_to(root).with_suffix("").parts, name)))
    assert found == {function for function, _ in STAGES.values()}


def test_options_have_their_kinds_and_defaults():
    line = ["--source", "a", "--target", "b", "--format", "nvidia", "--unpack"]
    options = parser_of("export_records").parse_args(line)
    found = options.source, options.unpack, options.max_predictions_per_seq
    assert found == (Path("a"), True, 76)
    assert options.jobs == len(os.sched_getaffinity(0))
    line = ["--outputdir", "a", "--nsp", "0", "--phases"]
    options = parser_of("prepare").parse_args(line)
    assert (options.nsp, options.do_lower_case) == (False, True)
    assert options.phases == ((128, 20), (512, 80))
    assert SamplingConfig() == SamplingConfig(
        max_seq_length=512, max_predictions_per_seq=76, masked_lm_prob=0.15, short_seq_prob=0.1, random_seed=12345,
        dupe_factor=10, do_lower_case=True, nsp=True,
    )  # fmt: skip


@pytest.mark.parametrize(("line", "message"), [
    ("", "--outputdir"),
    ("--outputdir", "--outputdir: expected one argument"),
    ("--outputdir a --packed-data --binned-data", "--binned-data: not allowed with"),
    ("--outputdir a --nsp maybe", "--nsp: "),
    ("--outputdir a --jobs 0", "--jobs: '0': expected a positive integer"),
    ("--outputdir a --shards x", "--shards: 'x': expected a positive integer"),
    ("--outputdir=", "--outputdir: the name is empty; is a variable unset"),
])  # fmt: skip
def test_a_wrong_command_line_is_wrong_usage(line, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parser_of("prepare").parse_args(line.split())
    told = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in told
    assert message in told


@pytest.mark.parametrize("place", ["data", "data/download"])
def test_a_file_where_a_folder_has_to_be_is_named(tmp_path, place):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).touch()
    said = f"{place}.*a file is where a folder has to be"
    with pytest.raises(SystemExit, match=said):
        run("download", "--outputdir", tmp_path / "data", "--mirror", tmp_path)
    assert (tmp_path / place).is_file()
