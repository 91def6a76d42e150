"""A hung process on a node, such as a tool of a broken driver, does not keep a run from ending."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from ..waiting import running, wait_until
from .test_power import IPMI
from .test_run_sub import pyxis as pyxis
from .test_run_sub import slurm as slurm
from .test_trial import processes

LOCAL = "./run_local.sh"
HANGS = 'exec -a "$0" sleep 900'  # found by its name


def shorten(checkout, name: str, text: str, shorter: str) -> None:
    """Shortens a time limit in a file of launch/."""
    path = checkout.root / "launch" / name
    assert text in path.read_text()
    path.write_text(path.read_text().replace(text, shorter))


@pytest.mark.parametrize(
    ("job", "seconds", "status"),
    [
        ("exit 7", 100, 7),
        ("sleep 900 & sleep 900", 1, 124),
        ("trap '' TERM; while :; do sleep 1; done", 1, 124),
    ],
    ids=["ends", "hangs", "ignores SIGTERM"],
)
def test_a_job_that_exceeds_its_time_is_ended_with_all_its_processes(
    job, seconds, status, repository
):
    line = f"source launch/run/child.sh; set -m; ({job}) & echo $!; child::wait $! {seconds}"
    with subprocess.Popen(
        ["bash", "-c", line], cwd=repository, stdout=subprocess.PIPE, text=True
    ) as shell:
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


def test_a_hung_power_reading_is_abandoned(checkout):
    shorten(checkout, "run/power.sh", "STOP_SECONDS=60", "STOP_SECONDS=1")
    checkout.stand_in(
        "ipmitool", f'if [[ -e "{checkout.logdir}" ]]; then {HANGS}; fi\n{IPMI}'
    )
    done = checkout.run(LOCAL, after="export POWER=1")
    assert done.returncode == 0, done.stderr
    assert "run: warning: power was not sampled to the end on every node" in done.stderr
    wait_until(lambda: not processes(checkout.root.parent))


def test_an_nvidia_smi_that_hangs_at_the_clock_reset_is_abandoned(checkout):
    shorten(checkout, "node/clocks.sh", "timeout -k 5 60", "timeout -k 5 1")
    said = "echo GPU clocks set to 1410"
    checkout.stand_in(
        "nvidia-smi",
        f"case $* in *query*) echo 0 ;; *--lock*) {said} ;; *--reset*) {HANGS} ;; esac",
    )
    done = checkout.run(LOCAL, GPU_CLOCKS="1410", BINDING="none", NCCL_TEST="0")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not processes(checkout.root.parent))


def test_a_hung_guard_is_abandoned(pyxis):
    shorten(pyxis, "slurm/runner.sh", "UNDO_SECONDS=300", "UNDO_SECONDS=4")
    shorten(pyxis, "slurm/job.sh", "shutdown_seconds=20", "shutdown_seconds=4")
    pyxis.stand_in(
        "enroot", f"case $1 in list) echo pyxis_bert_7_0 ;; remove) {HANGS} ;; esac"
    )
    pyxis.stand_in("squeue", "echo 7")
    done = pyxis.run("./run.sub")
    assert done.returncode == 0, done.stderr
    assert any("remove" in call for call in pyxis.calls("enroot"))
    for number in processes(
        pyxis.root.parent
    ).split():  # a real step would be ended by Slurm
        with suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)


@pytest.mark.parametrize("signalled", [False, True])
def test_a_slow_removal_of_leftovers_is_reported_and_abandoned_also_at_a_signal(
    pyxis, signalled
):
    if not signalled:
        shorten(pyxis, "slurm/runner.sh", "SWEEP_SECONDS=60", "SWEEP_SECONDS=1")
    there = pyxis.root.parent / "there"
    hangs = f'if [[ "$*" == *99_0 ]]; then touch "{there}"; {HANGS}; fi'
    pyxis.stand_in(
        "enroot", f"case $1 in list) echo pyxis_bert_99_0 ;; remove) {hangs} ;; esac"
    )
    pyxis.stand_in("squeue", "echo 7")
    process = pyxis.popen("./run.sub")
    wait_until(there.exists)
    if signalled:
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    told = [line for line in errors.splitlines() if "pyxis_bert_99_0" in line]
    if signalled:
        assert process.returncode == 143
        assert errors.splitlines()[-1].startswith(
            "run: error: interrupted by SIGTERM"
        ), errors
    else:
        assert process.returncode == 0, errors
        assert "removing pyxis_bert_99_0, left by a job that has ended" in told[0]
        assert (
            "pyxis_bert_99_0 was not removed in time: the next job continues" in told[1]
        )
    subprocess.run(["pkill", "-KILL", "-f", str(pyxis.root.parent)], check=False)


def test_a_hung_reading_does_not_delay_the_last_line_of_an_interrupted_run(checkout):
    shorten(checkout, "run/ending.sh", "shutdown_seconds=20", "shutdown_seconds=1")
    checkout.stand_in(
        "ipmitool", f'if [[ -e "{checkout.logdir}/ended" ]]; then {HANGS}; fi\n{IPMI}'
    )
    process = checkout.popen(
        LOCAL, after="export POWER=1 RUN_NAME=ended", TRIAL_0="hang"
    )
    wait_until((checkout.logdir / "ended" / "running_0" / "result_0.txt").exists)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(
        timeout=50
    )  # without the signal it is waited for 60 s
    assert errors.splitlines()[-1] == (
        "run: error: interrupted by SIGTERM; RUN_NAME=ended continues with the missing trials"
    )
    wait_until(lambda: not processes(checkout))


def test_a_signal_that_comes_just_as_the_ranks_start_ends_them(checkout):
    started = checkout.root.parent / "started"
    shorten(
        checkout, "run/ranks.sh", "  group=$!\n", f"  touch '{started}'; sleep 1\n  group=$!\n",
    )  # fmt: skip
    process = checkout.popen(
        LOCAL, after="export RUN_NAME=ended", TRIAL_0="hang", NCCL_TEST="0"
    )
    wait_until(started.exists)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    assert errors.splitlines()[-1].startswith("run: error: interrupted by SIGTERM; ")
    wait_until(lambda: not processes(checkout.root.parent))


def test_a_signal_that_comes_just_as_a_trainer_starts_ends_it(checkout):
    started = checkout.root.parent / "started"
    shorten(
        checkout, "run/child.sh", "  child=$!\n", f"touch '{started}'; sleep 1\n  child=$!\n",
    )  # fmt: skip
    checkout.logdir.mkdir()
    alone = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "RUN_DIR": str(checkout.logdir), "TRIAL": "0",
    }  # fmt: skip
    process = checkout.popen(
        "./launch/run/rank.sh", after="export DGXNGPU=1", TRIAL_0="hang", BINDING="none", **alone,
    )  # fmt: skip
    wait_until(started.exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == 143
    wait_until(lambda: not processes(checkout.root.parent))
