"""``python -m bert`` and ``python -m finetune``: commands listed, settings as options, a one-line
error for others.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from bert.__main__ import COMMANDS, main
from finetune.__main__ import main as finetune

from ..forked import Command

PROGRAMS = {"bert": main, "finetune": finetune}


def test_help_lists_every_command_with_a_line(capsys):
    own = "predict", "embed", "benchmark", "seeds"
    for program, names in ((main, COMMANDS), (finetune, own)):
        with pytest.raises(SystemExit) as caught:
            program(["--help"], {})
        assert caught.value.code == 0
        said = capsys.readouterr().out
        for name in names:
            assert re.search(rf"^  {name} +\w.{{20,}}$", said, re.M), name


def test_certify_tells_how_to_start_it_and_see_its_results():
    said = Command("certify", os.environ, ("--help",)).finish().stdout
    assert "./certify.sh" in said
    assert "python -m review certify" in said


@pytest.mark.parametrize("words", ["bert --variables", "review --help"])
def test_a_closed_pipe_is_no_error(words):
    read, written = os.pipe()
    os.close(read)
    with os.fdopen(written, "wb") as output:
        line = [sys.executable, "-m", *words.split()]
        done = subprocess.run(line, stdout=output, stderr=-1, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_rank_with_a_wrong_option_tells_its_launcher(program, tmp_path, capsys):
    environ = {"RUN_DIR": str(tmp_path), "TRIAL": "3"}
    assert PROGRAMS[program](["--lrr", "1"], environ) == 2
    said = (tmp_path / "error_3.txt").read_text()
    assert said.startswith("--lrr: did you mean --lr")
    assert capsys.readouterr().err == f"{program}: error: {said}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_of_its_own(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"], {})
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m bert {command} ")


@pytest.mark.parametrize("words", [["--lr", "0.02"], ["--lr=0.02"], ["--LR", "0.02"]])
def test_an_option_is_the_variable_of_its_name_and_wins_over_the_environment(
    words, capsys
):
    environ, steps = {"LR": "0.001", "SEED": "3"}, ["--max_steps", "9"]
    words = [*words, *steps, "--start-warmup-step", "-76", "--seed="]
    assert main([*words, "--variables"], environ) == 0
    given = {"LR": "0.02", "MAX_STEPS": "9", "START_WARMUP_STEP": "-76"}
    assert _set(capsys) == given
    assert environ == {"LR": "0.001", "SEED": "3"}


def _set(capsys):
    """What the table of variables says is set."""
    rows = map(str.split, capsys.readouterr().out.splitlines())
    return {row[1]: row[2] for row in rows if row[:1] == ["*"]}


def test_the_run_and_its_check_are_given_the_options(prepared, capfd):
    assert main(["--check", "--lr", "-1"], prepared) == 2
    assert main(["--max-steps", "many"], prepared) == 2
    said = capfd.readouterr().err.splitlines()
    assert said == [
        "bert: error: LR='-1': expected a number, at most 10, above 0",
        "bert: error: MAX_STEPS='many': expected an integer, at least 1",
    ]


def test_fine_tuning_takes_its_own_settings_and_the_rules_of_the_learning_rate(capfd):
    task = ["--task", "TSV", "--data", "/no", "--init-checkpoint", "/no"]
    task += ["--batchsize=4", "--warmup-proportion", "0.2", "--check", "--epochs", "0"]
    assert finetune(task, {"EPOCHS": "3", "DEVICE": "cpu"}) == 2
    error = "finetune: error: EPOCHS='0': expected a number, above 0\n"
    assert capfd.readouterr().err == error


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batchsze", "8"], "--batchsze: did you mean --batchsize?"),
        (["--lr", "1", "--batchsze=8"], "--batchsze: did you mean --batchsize?"),
        (["--learning_rate", "1"], "--learning_rate: did you mean --lr?"),
        (["--chek"], "--chek: did you mean --check?"),
        (["--xyzzy", "1"], "--xyzzy: no such setting: docs/variables.md lists them"),
        (["--lr"], "--lr: its value is missing"),
        (["--lr", "--check"], "--lr: its value is missing"),
        (["--lr", "--seed", "1"], "--lr: its value is missing"),
        (["--nexp", "3"], "--nexp: NEXP is read only by the launch scripts: export it for them"),
        (["--certify-flip", "3"], "CERTIFY_FLIP is not read here: remove it"),
    ],
)  # fmt: skip
def test_an_unknown_setting_stops_with_one_line(program, words, message, capsys):
    assert PROGRAMS[program](words, {}) == 2
    assert capsys.readouterr().err == f"{program}: error: {message}\n"


@pytest.mark.parametrize(
    ("program", "names"), [("bert", "LR NEXP TASK"), ("finetune", "LR NEXP EVALDIR")]
)
def test_a_setting_after_a_script_that_only_others_read_stops_the_run(
    program, names, capsys
):
    """The scripts' own NEXP is theirs."""
    assert PROGRAMS[program](["--check"], {"GIVEN_NAMES": names}) == 2
    *_, last = names.split()
    expected = f"{program}: error: {last} is not read here: remove it\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_setting_of_certify_is_read_by_the_start_test_alone(program, capsys):
    given = {"GIVEN_NAMES": "EXPECTED_FIGURES"}
    for more, refused in (({}, True), ({"START_TEST": "1"}, False)):
        assert PROGRAMS[program](["--check"], given | more) == 2
        assert ("EXPECTED_FIGURES is not" in capsys.readouterr().err) == refused


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        ("bert", ["evalute", "x"], "evalute: did you mean evaluate?"),
        ("finetune", ["seed", "x"], "seed: did you mean seeds?"),
        ("bert", ["--epochs", "2"], "EPOCHS is not read here: remove it"),
        ("finetune", ["--evaldir", "2"], "EVALDIR is not read here: remove it"),
    ],
)
def test_a_setting_of_another_program_stops_with_one_line(
    program, words, message, capsys
):
    assert PROGRAMS[program](words, {}) == 2
    assert capsys.readouterr().err == f"{program}: error: {message}\n"


@pytest.mark.parametrize(
    "words", ["--deepspeed", "--deepspeed_config ds.json", "--deepspeed-config=ds.json"]
)
def test_what_the_deepspeed_launcher_appends_means_its_engine(words, capsys):
    line = ["--local_rank=1", *words.split(), "--variables"]
    assert main(line, {"ENGINE": "own"}) == 0
    found = _set(capsys)
    assert (found["ENGINE"], found["LOCAL_RANK"]) == ("deepspeed", "1")
