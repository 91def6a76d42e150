"""make demo: your own settings reach its runs, and it ends with the commands to try next."""

from __future__ import annotations

import shutil
import signal

import pytest

from ..waiting import wait_until
from .test_trial import processes

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
    """demo(**environment) -> the finished launch/tools/demo.sh."""
    checkout.stand_in("demo_python", PYTHON)
    prepare = checkout.root / "input_preprocessing" / "prepare_data.sh"
    prepare.parent.mkdir()
    prepare.write_text("#!/usr/bin/env bash\n")
    prepare.chmod(0o755)
    python = str(checkout.root.parent / "bin" / "demo_python")

    def run(after: str = "unset DGXNGPU", **env: str):
        env.setdefault("DEMO_DIR", str(checkout.root.parent / "demo"))
        return checkout.run(
            "launch/tools/demo.sh", config="/dev/null", after=after, PYTHON=python, **env,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("script", ["demo.sh", "pretrain_demo.sh", "finetune_demo.sh"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_of_a_demo_end_with_it(demo, checkout, script, number):
    folder = checkout.root.parent
    held = f'touch "{folder}/there"; exec -a "{folder}/held" sleep 900'
    python = PYTHON.replace("exit 0", held).replace(
        "*input_preprocessing*", "*input_preprocessing* | *finetune.demo*"
    )
    checkout.stand_in("demo_python", python)
    (checkout.root / "input_preprocessing" / "prepare_data.sh").write_text(
        f"#!/usr/bin/env bash\n{held}\n"
    )
    settings = {
        "PYTHON": str(folder / "bin" / "demo_python"),
        "DEMO_DIR": str(folder / "demo"),
    }
    process = checkout.popen(f"launch/tools/{script}", config="/dev/null", **settings)
    wait_until((folder / "there").exists)
    process.send_signal(number)
    assert process.wait(240) in (143, -signal.SIGKILL)
    wait_until(lambda: not processes(folder / "held"), 60)


@pytest.mark.parametrize("script", ["demo.sh", "pretrain_demo.sh", "finetune_demo.sh"])
def test_a_misspelt_name_stops_a_demo_before_it_prepares_anything(
    demo, checkout, script
):
    settings = {
        "PYTHON": str(checkout.root.parent / "bin" / "demo_python"),
        "BATCHSZIE": "3",
    }
    done = checkout.run(f"launch/tools/{script}", config="/dev/null", **settings)
    assert (done.returncode, "BATCHSZIE: did you mean BATCHSIZE?" in done.stderr) == (
        2,
        True,
    )
    assert not [
        call
        for call in checkout.calls("demo_python")
        if "input_preprocessing" in call or "finetune" in call
    ]


def test_the_fine_tuning_demo_saves_and_continues_after_a_kill(demo, checkout):
    checkout.stand_in(
        "demo_python", PYTHON.replace("*input_preprocessing*", "*finetune.demo*")
    )
    (checkout.root / "run_finetuning.sh").write_text(
        '#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n'
    )
    settings = {
        "PYTHON": str(checkout.root.parent / "bin" / "demo_python"), "DEMO_DIR": "d", "RUN_NAME": "mine",
    }  # fmt: skip
    done = checkout.run("launch/tools/finetune_demo.sh", config="/dev/null", **settings)
    assert done.returncode == 0, done.stderr
    given = dict(word.partition("=")[::2] for word in done.stdout.splitlines())
    assert given["CHECKPOINT_DIR"] == "d/finetune/results/mine/checkpoints", (
        "with its run, not beside it"
    )
    assert (given["CHECKPOINT_EVERY_STEPS"], given["RESUME"]) == ("50", "1")


def test_it_ends_with_the_next_commands(demo, checkout):
    done = demo(RUN_NAME="mine")
    assert done.returncode == 0, done.stderr
    assert [rank["LR"] for rank in checkout.ranks()] == ["0.01"] * 4
    _, _, advice = done.stderr.partition("What to do next:")
    folder = "../demo/results/mine"
    for command in ("show", "watch", "report"):
        assert f"python -m review {command} {folder}" in advice


def test_your_own_settings_reach_the_runs(demo, checkout):
    done = demo("export DGXNGPU=1", LR="0.02", NEXP="1", NUM_EVAL_EXAMPLES="99")
    assert done.returncode == 0, done.stderr
    assert [(rank["LR"], rank["WORLD_SIZE"]) for rank in checkout.ranks()] == [
        ("0.02", "1")
    ]
    assert (
        "config: LR=0.02 is exported in this shell and overrides '0.01' of config_demo_1x2x16x1_pack.sh"
        in done.stderr
    )
    assert "NUM_EVAL_EXAMPLES=99 is exported" in done.stderr


def test_one_gpu_runs_one_process(demo, checkout):
    assert demo(GPUS="1", NEXP="1").returncode == 0
    assert [rank["WORLD_SIZE"] for rank in checkout.ranks()] == ["1"]


def test_a_site_and_a_config_sourced_before_do_not_affect_it(demo, checkout):
    """The demo uses its own data and settings, whatever was sourced in this shell."""
    done = checkout.run(
        "launch/tools/demo.sh", after="unset DGXNGPU", NEXP="1", DEMO_DIR=str(checkout.root.parent / "demo"),
        PYTHON=str(checkout.root.parent / "bin" / "demo_python"), LOOK_FOR="",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [rank["LR"] for rank in checkout.ranks()] == ["0.01"] * 2
    assert "stands" not in done.stderr


def test_run_local_uses_the_checkouts_environment_if_the_current_python_has_no_torch(
    checkout,
):
    venv = checkout.root / ".venv" / "bin"
    venv.mkdir(parents=True)
    shutil.move(checkout.root.parent / "bin" / "python", venv / "python")
    checkout.stand_in("python", "exit 1")
    done = checkout.run("./run_local.sh")
    assert done.returncode == 0, done.stderr
    assert len(checkout.ranks()) == 2


def test_the_doctor_has_help(checkout):
    for word in ("help", "--help", "-h"):
        done = checkout.run(f"launch/doctor.sh {word}", config="/dev/null")
        assert done.returncode == 0
        assert "usage: doctor.sh [help] [slurm]" in done.stdout
