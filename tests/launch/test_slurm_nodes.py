"""A run on a real Slurm of separate nodes that lose power, hang or are cut off: it ends like an
undisturbed one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..bert.states import newest, same
from ..waiting import free_ports, wait_until
from ..waiting import running as alive
from .conftest import Job
from .tiny_data import TO_A_TARGET, write

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]

NODES, STEPS = 5, 1200
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


@dataclass
class Nodes:
    """Separate machines: namespaces with a slurmd in each, all on one disk."""

    script: Path
    folder: Path
    repository: Path
    environ: dict[str, str]

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of the cluster's script."""
        line = ["bash", str(self.script), *words]
        return subprocess.run(
            line,
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )

    def enter(self, node: str, *words: str) -> None:
        """Runs a command on a node."""
        assert self.call("enter", node.removeprefix("node"), *words).returncode == 0

    def controller(self, way: str) -> None:
        """Stops Slurm's controller, or starts it again."""
        if way == "down":  # it saves its state
            number = int((self.folder / "pid" / "slurmctld").read_text())
            os.kill(number, signal.SIGTERM)
            wait_until(lambda: not alive(number))
        else:
            subprocess.run(["slurmctld"], env=self.environ, check=True, timeout=60)

    def submit(self, name: str, **settings: str) -> Job:
        """Submits a run of that name, as a user would."""
        output, chosen = (
            self.folder / f"{name}.out",
            SETTINGS | {"RUN_NAME": name} | settings,
        )
        exports = " ".join(f"{key}={value}" for key, value in chosen.items())
        count = int(chosen["DGXNNODES"]) + int(chosen.get("SPARE_NODES", 0))
        line = f"source env.sh; source {CONFIG}; export {exports}; "
        line += f"sbatch --parsable -N {count} --time=10 --output={output} run.sub"
        known = {
            "DATADIR": str(self.folder),
            "PYTHON": sys.executable,
            "LOGDIR": str(self.folder / "results"),
        }
        known |= {
            "CHECKPOINT_DIR": str(self.folder / name),
            "PYTHONPATH": str(self.folder / "site"),
        }
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.repository,
            env=self.environ | known,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return Job(int(done.stdout), output)

    def state(self, node: int) -> str:
        """State of the node in Slurm."""
        line = ["sinfo", "--noheader", f"--nodes=node{node}", "--format=%T"]
        return subprocess.run(
            line,
            env=self.environ,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()

    def names(self, words: str) -> list[str]:
        """Expands Slurm's notation node[1,3-4]."""
        line = ["scontrol", "show", "hostnames", words]
        return subprocess.run(
            line,
            env=self.environ,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.split()

    def begin_again(self, job: Job) -> None:
        """Waits for a requeue and starts the job, as an administrator can; Slurm would hold it for
        two minutes.
        """
        restarts = job.field("Restarts")
        job.wait_for(
            lambda: (
                job.field("JobState") == "PENDING" and job.field("Restarts") != restarts
            )
        )
        subprocess.run(
            ["scontrol", "update", f"JobId={job.number}", "StartTime=now+3"], check=True
        )
        job.wait_for(lambda: job.field("JobState") == "RUNNING")

    def stopped(self, name: str, number: int, job: Job) -> tuple[str, int]:
        """Waits for the rank that stops at a pattern of STOP; returns its node and process."""
        mark = self.folder / f"{name}.{number}"
        job.wait_for(lambda: mark.exists() and mark.read_text())
        node, found = mark.read_text(), list[int]()

        def look() -> bool:
            first = (
                (self.folder / "node" / node.removeprefix("node") / "first")
                .read_text()
                .strip()
            )
            space = os.readlink(f"/proc/{first}/ns/pid")
            for status in Path("/proc").glob("[0-9]*/stat"):
                with suppress(OSError):
                    stands = status.read_text().rsplit(")", 1)[1].split()[0] == "T"
                    if stands and os.readlink(status.parent / "ns" / "pid") == space:
                        found.append(int(status.parent.name))
            return bool(found)

        wait_until(look)
        return node, found[0]

    def cut_off(self, node: str) -> None:
        """Takes the node's network link down."""
        made = next(
            line
            for line in self.script.read_text().splitlines()
            if "ip link add" in line and " type veth " in line
        )
        link = made.split('"')[1].replace("$i", node.removeprefix("node"))
        subprocess.run(["ip", "link", "set", link, "down"], check=True)


@contextmanager
def running(
    shared: Path, repository: Path, folder: Path, **settings: str
) -> Iterator[Nodes]:
    """A cluster in this folder, with settings of its script."""
    source = shared / "tools" / "slurm_nodes.sh"
    if os.geteuid() != 0 or not source.is_file():
        pytest.skip(
            "a Slurm of separate nodes needs root, and slurm_nodes.sh of the reference data"
        )
    port = free_ports(2)  # other clusters may run here
    text = (
        source.read_text().replace("26817", str(port)).replace("26818", str(port + 1))
    )
    text = text.replace("slurm0", f"s{port}").replace("veth$", f"v{port}x$")
    (folder / "cluster.sh").write_text(text)
    known = settings | {
        "SLURM_DIR": str(folder),
        "SLURM_CONF": str(folder / "slurm.conf"),
        "NODES": str(NODES),
        "CPUS": "8",
    }
    known |= {
        "KILLWAIT": "10",
        "SLURMD_TIMEOUT": "10",
        "NET": f"10.{100 + port % 100}.{port // 100 % 250}",
    }
    kept = {name: os.environ[name] for name in ("PATH", "HOME")}
    made, before = (
        Nodes(folder / "cluster.sh", folder, repository, kept | known),
        os.environ.get("SLURM_CONF"),
    )
    up = made.call("up")
    if up.returncode and shutil.which("slurmctld") is None:
        pytest.skip(f"Slurm cannot be installed here: {up.stderr.strip()[-300:]}")
    os.environ["SLURM_CONF"] = known["SLURM_CONF"]
    try:
        assert up.returncode == 0, up.stderr
        yield made
    finally:
        made.call("down")
        subprocess.run(["ip", "link", "del", f"s{port}"], check=False)
        os.environ.pop("SLURM_CONF") if before is None else os.environ.update(
            SLURM_CONF=before
        )


@pytest.fixture(scope="module")
def nodes(
    shared: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    """The cluster, created once, with data."""
    folder = tmp_path_factory.mktemp("nodes")
    write(folder)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    with running(shared, repository, folder) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(nodes: Nodes) -> dict[str, object]:
    """Last checkpoint of an undisturbed run on two nodes."""
    job = nodes.submit("whole").wait()
    assert job.exit_code == 0, job.output
    return newest(nodes.folder / "whole")


def bring_back(nodes: Nodes) -> None:
    """Starts the nodes that earlier tests have lost."""
    for node in range(1, NODES + 1):
        if nodes.state(node) != "idle":
            nodes.call("poweroff", str(node))
            nodes.call("start", str(node))
    wait_until(lambda: all(nodes.state(node) == "idle" for node in range(1, NODES + 1)))


STOP = "step_00000001*,step_00000004*,step_00000007*"
NOT_COME = r"rank 1 on {0} did not reach a collective within DIST_TIMEOUT"
LOST = f"without {{0}}: (lost by Slurm|{NOT_COME})"


def told(job: Job) -> list[str]:
    """The lines about restarts, which must come just before the last line."""
    lines = [
        line
        for line in job.output.splitlines()
        if line.startswith("run: restarted at ")
    ]
    assert job.output.splitlines()[-len(lines) - 1 : -1] == lines
    return [line.split(", ", 1)[1] for line in lines]


def test_a_run_with_three_spares_survives_three_lost_nodes(nodes, undisturbed):
    """One node loses power, a rank of the next hangs, the third is cut off from the network."""
    job = nodes.submit("spares", SPARE_NODES="3", STOP=STOP)
    lost = [nodes.stopped("spares", 0, job)[0]]
    assert nodes.call("poweroff", lost[0].removeprefix("node")).returncode == 0
    lost.append(nodes.stopped("spares", 1, job)[0])  # and stays so
    node, rank = nodes.stopped("spares", 2, job)
    nodes.cut_off(node)
    os.kill(rank, signal.SIGCONT)
    job.wait()
    assert (job.exit_code, job.field("Restarts")) == (0, "0"), job.output
    assert [*lost, node] == ["node2", "node3", "node4"]
    for line, name, step in zip(told(job), [*lost, node], (1, 4, 7), strict=True):
        assert re.fullmatch(
            LOST.format(name) + rf"; continues from step {step}\d\d(, repeating .*)?",
            line,
        )
    assert same(undisturbed, newest(nodes.folder / "spares"))


def test_without_a_spare_the_job_is_requeued_elsewhere_after_a_lost_script_and_a_hang_and_at_the_time_limit(
    nodes, undisturbed
):
    bring_back(nodes)
    job = nodes.submit("requeued", STOP=STOP.rpartition(",")[0])
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
    job.wait()
    assert (job.exit_code, job.field("Restarts")) == (0, "3"), job.output
    first, second, third = told(job)
    assert re.fullmatch(
        rf"without {host}: lost by Slurm, with the job's script; continues from step 1\d\d.*",
        first,
    )
    assert re.fullmatch(LOST.format(hung) + r"; continues from step 4\d\d.*", second)
    assert re.fullmatch(
        r"the job reached its time limit of 00:10:00; continues from step \d+.*", third
    )
    assert same(undisturbed, newest(nodes.folder / "requeued"))


def test_a_script_lost_while_the_run_is_checked_is_requeued_without_its_node(
    nodes, undisturbed
):
    """No rank runs yet that could notice it: only the guards do."""
    bring_back(nodes)
    held = nodes.folder / "held"
    job = nodes.submit("early", HOLD=str(held))
    job.wait_for(held.exists)
    host = job.field("BatchHost")
    nodes.call("poweroff", host.removeprefix("node"))
    nodes.begin_again(job)
    job.wait()
    assert (job.exit_code, job.field("Restarts")) == (0, "1"), job.output
    assert host not in nodes.names(job.field("NodeList"))
    assert told(job) == [
        f"without {host}: lost by Slurm, with the job's script; continues from step 0"
    ]
    assert same(undisturbed, newest(nodes.folder / "early"))


def test_a_rank_that_is_killed_is_restarted_once_where_it_was(nodes, undisturbed):
    bring_back(nodes)
    job = nodes.submit("killed", STOP=STOP.rpartition(",")[0])
    for number in range(2):
        _, rank = nodes.stopped("killed", number, job)
        os.kill(rank, signal.SIGKILL)
    job.wait()
    assert (job.exit_code, job.field("Restarts")) == (0, "0"), job.output
    for line, step in zip(told(job), (1, 4), strict=True):
        assert re.fullmatch(
            rf"rank 1 on node\d was killed by SIGKILL; continues from step {step}\d\d.*",
            line,
        )
    assert same(undisturbed, newest(nodes.folder / "killed"))
