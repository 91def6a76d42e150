"""``python -m bert`` and ``python -m finetune``: commands listed, settings as options, a one-line
error for others; what launchers give them.
"""

import os
import re
import subprocess
import sys

import pytest

from bert.__main__ import COMMANDS, main
from finetune.__main__ import main as finetune

from ..forked import Command
from .states import events, values

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
def test_a_closed_pipe_is_no_error(words, quick_python):
    read, written = os.pipe()
    os.close(read)
    with os.fdopen(written, "wb") as output:
        python = quick_python if words.startswith("bert") else sys.executable
        line = [python, "-m", *words.split()]
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


@pytest.mark.parametrize("words", ["--lr 0.02", "--lr=0.02", "--LR 0.02"])
def test_an_option_wins_over_the_variable_of_its_name(words, capsys):
    environ = {"LR": "0.001", "SEED": "3"}
    words += " --max_steps 9 --start-warmup-step -76 --seed= --variables"
    assert main(words.split(), environ) == 0
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
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("bert: error: LR='-1': ")
    assert second.startswith("bert: error: MAX_STEPS='many': ")


def test_fine_tuning_takes_its_own_settings_and_the_rules_of_the_learning_rate(capfd):
    words = "--task TSV --data /no --init-checkpoint /no --batchsize=4"
    words += " --warmup-proportion 0.2 --check --epochs 0"
    assert finetune(words.split(), {"EPOCHS": "3", "DEVICE": "cpu"}) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("finetune: error: EPOCHS='0': ")


ALIKE = {
    "--batchsze 8": "--batchsze: did you mean --batchsize?",
    "--lr 1 --batchsze=8": "--batchsze: did you mean --batchsize?",
    "--learning_rate 1": "--learning_rate: did you mean --lr?",
    "--chek": "--chek: did you mean --check?",
    "--xyzzy 1": "--xyzzy: no such setting: ",
    "--lr": "--lr: its value is missing",
    "--lr --check": "--lr: its value is missing",
    "--lr --seed 1": "--lr: its value is missing",
    "--nexp 3": "--nexp: NEXP is read only by the launch scripts",
    "--certify-flip 3": "CERTIFY_FLIP is not read here",
}
REFUSED = [(program, *one) for program in PROGRAMS for one in ALIKE.items()]
REFUSED += [
    ("bert", "evalute x", "evalute: did you mean evaluate?"),
    ("finetune", "seed x", "seed: did you mean seeds?"),
    ("bert", "--epochs 2", "EPOCHS is not read here"),
    ("finetune", "--evaldir 2", "EVALDIR is not read here"),
]


@pytest.mark.parametrize(("program", "words", "message"), REFUSED)
def test_an_unknown_setting_is_one_line(program, words, message, capsys):
    assert PROGRAMS[program](words.split(), {}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{program}: error: {message}")


CERTIFYS = "EXPECTED_FIGURES"


@pytest.mark.parametrize(
    ("program", "names", "more", "refused"),
    [
        ("bert", "LR NEXP TASK", {}, ["TASK"]),  # the scripts' own NEXP is theirs
        ("finetune", "LR NEXP EVALDIR", {}, ["EVALDIR"]),
        ("bert", CERTIFYS, {}, [CERTIFYS]),
        ("finetune", CERTIFYS, {}, [CERTIFYS]),
        ("bert", CERTIFYS, {"START_TEST": "1"}, []),
        ("finetune", CERTIFYS, {"START_TEST": "1"}, []),
    ],
)
def test_a_setting_that_others_read_stops(program, names, more, refused, capsys):
    assert PROGRAMS[program](["--check"], {"GIVEN_NAMES": names} | more) == 2
    said = capsys.readouterr().err
    assert re.findall(r"error: (\S+) is not read here", said) == refused


@pytest.mark.parametrize(
    "words", ["--deepspeed", "--deepspeed_config ds.json", "--deepspeed-config=ds.json"]
)
def test_what_the_deepspeed_launcher_appends_means_its_engine(words, capsys):
    line = ["--local_rank=1", *words.split(), "--variables"]
    assert main(line, {"ENGINE": "own"}) == 0
    found = _set(capsys)
    assert (found["ENGINE"], found["LOCAL_RANK"]) == ("deepspeed", "1")


def test_the_deepspeed_launchers_file_is_what_is_set_but_a_ranks_place(capsys):
    environ = {"BATCHSIZE": "4", "LR": " 1e-3", "DATADIR": "/a b", "SEED": ""}
    environ |= {"RUN_DIR": "/results/run", "PATH": "/bin"}
    environ |= {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "elsewhere"}
    assert main(["deepspeed-config", "--environment"], environ) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == ["BATCHSIZE=4", "DATADIR=/a b", "LR=1e-3", "RUN_DIR=/results/run"]
    assert main(["deepspeed-config", "--environment"], {}) == 0
    # Not an empty line, on which the launcher would fail.
    assert capsys.readouterr().out == ""
    for value in ("a\nb", "$HOME/data", "a%nb", 'a"b'):  # would not arrive unchanged
        assert main(["deepspeed-config", "--environment"], {"DATADIR": value}) == 2
        assert ": DATADIR has " in capsys.readouterr().err


def test_a_plain_torchrun_trains_to_the_target(prepared, repository, quick_python):
    environment = prepared | {"TARGET_MLM_ACCURACY": "0.001"}
    environment |= {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    path = f"{repository / 'implementations'}:{repository}"
    environment |= {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    torchrun = [quick_python, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--no-python"]
    options = {"capture_output": True, "text": True, "timeout": 900}
    command = [*torchrun, quick_python, "-m", "bert"]
    done = subprocess.run(command, env=environment, **options)
    assert done.returncode == 0, done.stderr
    (stop,) = [event for event in events(prepared) if event["key"] == "run_stop"]
    assert stop["metadata"]["status"] == "success"
    # Two ranks of 3 rows that count for 2 sequences.
    assert values(prepared, "global_batch_size") == [12]
