"""make demo: your own settings reach its runs, and it ends with the commands to try next."""

import shutil
import signal

import pytest

from ..waiting import wait_until
from .captured import Done
from .conftest import CONFIG
from .test_trial import none_left

# Stands in for the preparation: `python -m input_preprocessing...`, and what demo.sh asks Python
# about.
PYTHON = """
case "$*" in
  *input_preprocessing*) exit 0 ;;
  *eval_samples*) echo 321 ;;
  *device_count*) echo "${GPUS:-0}" ;;
  *) exec "$(dirname "$0")/python" "$@" ;;
esac
"""


@pytest.fixture
def demo(checkout):
    """The checkout with a demo that prepares nothing, in the folder demo beside it."""
    folder = checkout.root.parent
    checkout.stand_in("demo_python", PYTHON)
    prepares(checkout, "")
    own = {"PYTHON": f"{folder}/bin/demo_python", "DEMO_DIR": f"{folder}/demo"}
    checkout.env |= own
    checkout.script = "launch/tools/demo.sh"
    return checkout


def prepares(checkout, line: str) -> None:
    """What prepare_data.sh does."""
    script = checkout.root / "input_preprocessing" / "prepare_data.sh"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"#!/usr/bin/env bash\n{line}\n")
    script.chmod(0o755)


def go(demo, script: str = "", status: int = 0, **how: str) -> Done:
    given = {"config": "/dev/null", "after": "unset DGXNGPU"} | how
    return demo.run(script, status=status, **given)


SCRIPTS = [f"launch/tools/{name}demo.sh" for name in ("", "pretrain_", "finetune_")]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_of_a_demo_end_with_it(demo, script, number):
    folder = demo.root.parent
    held = f'touch "{folder}/there"; exec -a "{folder}/held" sleep 900'
    stages = "*input_preprocessing* | *finetune.demo*"
    python = PYTHON.replace("exit 0", held).replace("*input_preprocessing*", stages)
    demo.stand_in("demo_python", python)
    prepares(demo, held)
    process = demo.popen(script, config="/dev/null")
    wait_until((folder / "there").exists)
    process.send_signal(number)
    assert process.wait(240) in (143, -signal.SIGKILL)
    none_left(folder / "held")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_misspelt_name_stops_a_demo_before_it_prepares_anything(demo, script):
    done = go(demo, script, 2, BATCHSZIE="3")
    assert "BATCHSZIE: did you mean BATCHSIZE?" in done.stderr
    calls = " ".join(demo.calls("demo_python"))
    assert "input_preprocessing" not in calls
    assert "finetune" not in calls


def test_the_fine_tuning_demo_saves_and_continues_after_a_kill(demo):
    python = PYTHON.replace("*input_preprocessing*", "*finetune.demo*")
    demo.stand_in("demo_python", python)
    shows = '#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n'
    (demo.root / "run_finetuning.sh").write_text(shows)
    done = go(demo, SCRIPTS[2], DEMO_DIR="d", RUN_NAME="mine")
    given = dict(word.partition("=")[::2] for word in done.stdout.splitlines())
    with_its_run = "d/finetune/results/mine/checkpoints"
    names = ("CHECKPOINT_DIR", "CHECKPOINT_EVERY_STEPS", "RESUME")
    assert [given[name] for name in names] == [with_its_run, "50", "1"]


def test_it_uses_its_own_settings_and_ends_with_the_next_commands(demo):
    """Whatever was sourced in this shell; one GPU is one process."""
    done = go(demo, config=CONFIG, RUN_NAME="mine", GPUS="1")
    ranks = [(rank["LR"], rank["WORLD_SIZE"]) for rank in demo.ranks()]
    assert ranks == [("0.01", "1")] * 2
    assert "stands" not in done.stderr
    _, _, advice = done.stderr.partition("What to do next:")
    for command in ("show", "watch", "report"):
        assert f"python -m review {command} ../demo/results/mine" in advice


def test_your_own_settings_reach_the_runs(demo):
    own = {"LR": "0.02", "NEXP": "1", "NUM_EVAL_EXAMPLES": "99"}
    done = go(demo, after="export DGXNGPU=1", **own)
    (rank,) = demo.ranks()
    assert (rank["LR"], rank["WORLD_SIZE"]) == ("0.02", "1")
    overrides = "LR=0.02 is exported in this shell and overrides '0.01'"
    assert f"config: {overrides} of config_demo_1x2x16x1_pack.sh" in done.stderr
    assert "NUM_EVAL_EXAMPLES=99 is exported" in done.stderr


def test_run_local_uses_the_checkouts_python_where_the_current_has_no_torch(checkout):
    venv = checkout.root / ".venv" / "bin"
    venv.mkdir(parents=True)
    shutil.move(checkout.root.parent / "bin" / "python", venv / "python")
    checkout.stand_in("python", "exit 1")
    checkout.run(status=0)
    assert len(checkout.ranks()) == 2


@pytest.mark.parametrize("word", ["help", "--help", "-h"])
def test_the_doctor_has_help(checkout, word):
    done = checkout.run(f"launch/doctor.sh {word}", config="/dev/null", status=0)
    assert "usage: doctor.sh [help] [slurm]" in done.stdout
