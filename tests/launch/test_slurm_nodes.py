"""A run on a real Slurm of nodes that lose power, hang or are cut off ends like an undisturbed one."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..bert.states import newest, same
from ..waiting import state, wait_until
from .conftest import Job
from .nodes import Nodes, running
from .tiny_data import TO_A_TARGET, write

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]

NODES, STEPS = 5, 1200
QUICK = {"KILLWAIT": "10", "SLURMD_TIMEOUT": "10"}
SETTINGS = TO_A_TARGET | {
    "DGXNNODES": "2", "DGXNGPU": "1", "BATCHSIZE": "6", "MAX_STEPS": str(STEPS), "SEED": "3", "LR": "0.01",
    "TARGET_MLM_ACCURACY": "0", "EVAL_ITER_SAMPLES": "0", "LOG_EVERY_STEPS": "100", "CHECK_COMPLIANCE": "0",
    "CLEAR_CACHES": "0", "NCCL_TEST": "0", "RESUME": "1", "CHECKPOINT_EVERY_STEPS": "10", "CHECKPOINT_KEEP": "999",
    "DIST_TIMEOUT": "30", "GLOO_SOCKET_IFNAME": "eth0",
}  # fmt: skip
CONFIG = "configs/config_demo_1x2x16x1_pack.sh"
# Rank 1 stops when a checkpoint matches a pattern in STOP, once for each, and records its node.
SITE = """
import glob, os, signal, sys, threading, time

if os.environ.get("HOLD") and "--check" in sys.orig_argv and "SLURM_RESTART_COUNT" not in os.environ:
    open(os.environ["HOLD"], "x").close()
    time.sleep(900)

def look(folder, patterns):
    for number, pattern in enumerate(patterns):
        if os.path.exists(f"{folder}.{number}"):
            continue
        while not glob.glob(os.path.join(folder, pattern)):
            time.sleep(0.01)
        with open(f"{folder}.{number}", "x") as mark:
            mark.write(os.environ["SLURMD_NODENAME"])
        os.kill(os.getpid(), signal.SIGSTOP)

if os.environ.get("RANK") == "1":
    arguments = os.environ["CHECKPOINT_DIR"], list(filter(None, os.environ.get("STOP", "").split(",")))
    threading.Thread(target=look, args=arguments, daemon=True).start()
"""


class Runs(Nodes):
    """The cluster, on which users submit runs of a tiny model."""

    def submit(self, name: str, **settings: str) -> Job:
        """Submits a run of that name, as a user would."""
        output = self.folder / f"{name}.out"
        chosen = SETTINGS | {"RUN_NAME": name} | settings
        exports = " ".join(f"{key}={value}" for key, value in chosen.items())
        count = int(chosen["DGXNNODES"]) + int(chosen.get("SPARE_NODES", 0))
        line = f"source env.sh; source {CONFIG}; export {exports}; "
        line += f"sbatch --parsable -N {count} --time=10 --output={output} run.sub"
        known = {
            "DATADIR": str(self.folder), "PYTHON": sys.executable, "LOGDIR": str(self.folder / "results"),
            "CHECKPOINT_DIR": str(self.folder / name), "PYTHONPATH": str(self.folder / "site"),
        }  # fmt: skip
        return Job(int(self.slurm("bash", "-c", line, **known)), output)

    def begin_again(self, job: Job) -> None:
        """Waits for a requeue and starts the job, as an administrator can; Slurm would hold it."""
        restarts = job.field("Restarts")
        job.wait_for(lambda: job.field("Restarts") != restarts)
        job.wait_for(lambda: job.field("JobState") == "PENDING")
        self.slurm("scontrol", "update", f"JobId={job.number}", "StartTime=now+3")
        job.wait_for(lambda: job.field("JobState") == "RUNNING")

    def stopped(self, name: str, number: int, job: Job) -> tuple[str, int]:
        """Waits for the rank that stops at a pattern of STOP; returns its node and process."""
        mark = self.folder / f"{name}.{number}"
        job.wait_for(lambda: mark.exists() and mark.read_text())
        node, found = mark.read_text(), list[int]()

        def look() -> bool:
            numbers = [int(process.name) for process in self.processes(node)]
            found.extend(pid for pid in numbers if state(pid) == "T")
            return bool(found)

        wait_until(look)
        return node, found[0]

    def ended(self, name: str, job: Job, restarts: int, undisturbed: dict) -> list[str]:
        """It ends like an undisturbed run; the lines about restarts, just before the last one."""
        job.wait()
        assert (job.exit_code, job.field("Restarts")) == (0, str(restarts)), job.output
        assert same(undisturbed, newest(self.folder / name))
        begin, every = "run: restarted at ", job.output.splitlines()
        lines = [line for line in every if line.startswith(begin)]
        assert every[-len(lines) - 1 : -1] == lines
        return [line.split(", ", 1)[1] for line in lines]


@pytest.fixture(scope="module")
def nodes(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The cluster, created once, with data."""
    folder = tmp_path_factory.mktemp("nodes")
    write(folder)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    with running(repository, folder, NODES, **QUICK) as made:
        yield Runs(made.folder, made.repository, made.environ)


@pytest.fixture(scope="module")
def undisturbed(nodes: Runs) -> dict[str, object]:
    """Last checkpoint of an undisturbed run on two nodes."""
    job = nodes.submit("whole").wait()
    assert job.exit_code == 0, job.output
    return newest(nodes.folder / "whole")


STOP = "step_00000001*,step_00000004*,step_00000007*"
TWICE = STOP.rpartition(",")[0]
NOT_COME = r"rank 1 on {0} did not reach a collective, DIST_TIMEOUT=30 s"
LOST = f"without {{0}}: (lost by Slurm|{NOT_COME})"


def test_a_run_with_three_spares_survives_three_lost_nodes(nodes, undisturbed):
    """One node loses power, a rank of the next hangs, the third is cut off from the network."""
    job = nodes.submit("spares", SPARE_NODES="3", STOP=STOP)
    lost = [nodes.stopped("spares", 0, job)[0]]
    assert nodes.call("poweroff", lost[0].removeprefix("node")).returncode == 0
    lost.append(nodes.stopped("spares", 1, job)[0])  # and stays so
    node, rank = nodes.stopped("spares", 2, job)
    nodes.call("cut", node.removeprefix("node"))
    os.kill(rank, signal.SIGCONT)
    told = nodes.ended("spares", job, 0, undisturbed)
    assert [*lost, node] == ["node2", "node3", "node4"]
    for line, name, step in zip(told, [*lost, node], (1, 4, 7), strict=True):
        expected = LOST.format(name) + rf"; continues from step {step}\d\d(, rep.*)?"
        assert re.fullmatch(expected, line)


def test_without_a_spare_the_job_is_requeued_elsewhere(nodes, undisturbed):
    """After a lost script and a hang, and at the time limit."""
    nodes.bring_back()
    job = nodes.submit("requeued", STOP=TWICE)
    nodes.stopped("requeued", 0, job)
    host = job.field("BatchHost")
    nodes.call("poweroff", host.removeprefix("node"))
    nodes.begin_again(job)
    hung, _ = nodes.stopped("requeued", 1, job)
    nodes.begin_again(job)
    assert not {host, hung} & set(nodes.names(job.field("NodeList")))
    job.wait_for(lambda: list((nodes.folder / "requeued").glob("step_00000008*")))
    subprocess.run(["scancel", "--batch", "--signal=USR1", str(job.number)], check=True)
    nodes.begin_again(job)
    expected = [
        rf"without {host}: lost by Slurm, with the job's script; continues from step 1\d\d.*",
        LOST.format(hung) + r"; continues from step 4\d\d.*",
        r"the job reached its time limit of 00:10:00; continues from step \d+.*",
    ]
    told = nodes.ended("requeued", job, 3, undisturbed)
    for pattern, line in zip(expected, told, strict=True):
        assert re.fullmatch(pattern, line)


def test_a_script_lost_at_the_checks_is_requeued_without_its_node(nodes, undisturbed):
    """No rank runs yet that could notice it: only the guards do."""
    nodes.bring_back()
    held = nodes.folder / "held"
    job = nodes.submit("early", HOLD=str(held))
    job.wait_for(held.exists)
    host = job.field("BatchHost")
    nodes.call("poweroff", host.removeprefix("node"))
    nodes.begin_again(job)
    told = nodes.ended("early", job, 1, undisturbed)
    assert host not in nodes.names(job.field("NodeList"))
    why = f"without {host}: lost by Slurm, with the job's script"
    assert told == [f"{why}; continues from step 0"]


def test_a_rank_that_is_killed_is_restarted_once_where_it_was(nodes, undisturbed):
    nodes.bring_back()
    job = nodes.submit("killed", STOP=TWICE)
    for number in range(2):
        _, rank = nodes.stopped("killed", number, job)
        os.kill(rank, signal.SIGKILL)
    told = nodes.ended("killed", job, 0, undisturbed)
    killed = r"rank 1 on node\d was killed by SIGKILL; continues from step"
    for line, step in zip(told, (1, 4), strict=True):
        assert re.fullmatch(rf"{killed} {step}\d\d.*", line)
