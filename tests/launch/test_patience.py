"""A hung process on a node, such as a tool of a broken driver, does not keep a run from ending."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ..waiting import running, wait_until
from .test_power import IPMI
from .test_run_sub import pyxis as pyxis
from .test_trial import none_left, processes

HANGS = 'exec -a "$0" sleep 900'  # found by its name


@pytest.mark.parametrize(
    ("job", "seconds", "status"),
    [("exit 7", 100, 7), ("sleep 900 & sleep 900", 1, 124), ("trap '' TERM; while :; do sleep 1; done", 1, 124)],
)  # fmt: skip
def test_a_job_is_ended_with_all_its_processes(repository, job, seconds, status):
    line = f"source launch/run/child.sh; set -m; ({job}) & echo $!; child::wait $! {seconds}"
    how = {"cwd": repository, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["bash", "-c", line], **how) as shell:
        number = int(shell.stdout.readline())
        assert shell.wait(timeout=240) == status
        assert shell.stdout.read() == "", "nobody holds its output"
    wait_until(lambda: not running(number))


def test_a_group_with_only_a_zombie_left_is_not_alive(repository):
    """Such as srun's child if the node's first process does not reap orphans."""
    with subprocess.Popen(["sleep", "900"], start_new_session=True) as child:
        line = ["bash", "-c", f"source launch/run/child.sh; child::lives -{child.pid}"]
        assert subprocess.run(line, cwd=repository, check=False).returncode == 0
        child.kill()
        wait_until(lambda: ") Z " in Path(f"/proc/{child.pid}/stat").read_text())
        assert subprocess.run(line, cwd=repository, check=False).returncode == 1


def test_a_hung_power_reading_and_a_hung_clock_reset_are_abandoned(checkout):
    checkout.edit("run/power.sh", "STOP_SECONDS=60", "STOP_SECONDS=1")
    checkout.edit("node/clocks.sh", "timeout -k 5 60", "timeout -k 5 1")
    hangs = f'if [[ -e "{checkout.logdir}" ]]; then {HANGS}; fi'
    checkout.stand_in("ipmitool", f"{hangs}\n{IPMI}")
    answers = f"*query*) echo 0 ;; *--lock*) echo GPU clocks set to 1410 ;; *--reset*) {HANGS} ;;"
    checkout.stand_in("nvidia-smi", f"case $* in {answers} esac")
    done = checkout.run(POWER="1", GPU_CLOCKS="1410", NCCL_TEST="0", status=0)
    assert "run: warning: power was not sampled to the end on every node" in done.stderr
    none_left(checkout.root.parent)


def enroot(name: str, removal: str) -> str:
    """It lists one container, and removes it so."""
    return f"case $1 in list) echo {name} ;; remove) {removal} ;; esac"


def test_a_hung_guard_is_abandoned(pyxis):
    pyxis.edit("slurm/runner.sh", "UNDO_SECONDS=300", "UNDO_SECONDS=4")
    pyxis.edit("slurm/job.sh", "shutdown_seconds=20", "shutdown_seconds=4")
    pyxis.stand_in("enroot", enroot("pyxis_bert_7_0", HANGS))
    pyxis.stand_in("squeue", "echo 7")
    pyxis.run(status=0)
    assert any("remove" in call for call in pyxis.calls("enroot"))
    end_what_slurm_would(pyxis)


def end_what_slurm_would(checkout) -> None:
    """The processes of a step, which a real Slurm ends."""
    for number in processes(checkout.root.parent).split():
        with suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)


@pytest.fixture
def removing(pyxis):
    """A started job that hangs at the removal of leftovers."""

    def start():
        there = pyxis.root.parent / "there"
        hangs = f'if [[ "$*" == *99_0 ]]; then touch "{there}"; {HANGS}; fi'
        pyxis.stand_in("enroot", enroot("pyxis_bert_99_0", hangs))
        pyxis.stand_in("squeue", "echo 7")
        process = pyxis.popen()
        wait_until(there.exists)
        return process

    yield start
    end_what_slurm_would(pyxis)


def test_a_slow_removal_of_leftovers_is_reported_and_abandoned(pyxis, removing):
    pyxis.edit("slurm/runner.sh", "SWEEP_SECONDS=60", "SWEEP_SECONDS=5")
    lines = pyxis.ended(removing(), 0).stderr.splitlines()
    begun, given_up = (line for line in lines if "pyxis_bert_99_0" in line)
    assert "removing pyxis_bert_99_0, left by a job that has ended" in begun
    left = "pyxis_bert_99_0 was not removed in time: the next job continues"
    assert left in given_up


def test_a_signal_ends_a_slow_removal_of_leftovers(pyxis, removing):
    process = removing()
    process.send_signal(signal.SIGTERM)
    done = pyxis.ended(process, 143)
    assert done.last_line.startswith("run: error: interrupted by SIGTERM")


def test_a_hung_reading_does_not_delay_the_last_line_of_an_interrupted_run(checkout):
    """Without the signal it is waited for 60 s."""
    checkout.edit("run/ending.sh", "shutdown_seconds=20", "shutdown_seconds=1")
    hangs = f'if [[ -e "{checkout.logdir}/stopped" ]]; then {HANGS}; fi'
    checkout.stand_in("ipmitool", f"{hangs}\n{IPMI}")
    begun = time.monotonic()
    done = checkout.interrupted(POWER="1")
    assert time.monotonic() - begun < 55
    assert done.last_line.startswith("run: error: interrupted by SIGTERM; ")
    none_left(checkout.root.parent)


def test_a_signal_that_comes_just_as_the_ranks_start_ends_them(checkout):
    started = checkout.root.parent / "started"
    group = "  group=$!\n"
    checkout.edit("run/ranks.sh", group, f"  touch '{started}'; sleep 1\n{group}")
    process = checkout.popen(TRIAL_0="hang", NCCL_TEST="0")
    wait_until(started.exists)
    process.send_signal(signal.SIGTERM)
    done = checkout.ended(process)
    assert done.last_line.startswith("run: error: interrupted by SIGTERM; ")
    none_left(checkout.root.parent)


def test_a_signal_that_comes_just_as_a_trainer_starts_ends_it(checkout):
    started = checkout.root.parent / "started"
    child = "  child=$!\n"
    checkout.edit("run/child.sh", child, f"touch '{started}'; sleep 1\n{child}")
    checkout.logdir.mkdir()
    checkout.size = "DGXNGPU=1"
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TRIAL": "0"}
    alone["RUN_DIR"] = str(checkout.logdir)
    process = checkout.popen("./launch/run/rank.sh", TRIAL_0="hang", **alone)
    wait_until(started.exists)
    process.send_signal(signal.SIGTERM)
    checkout.ended(process, 143)
    none_left(checkout.root.parent)
