"""certify.sub on a real Slurm of four separate nodes: each culprit is named with its stage, and nobody without one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from review.certify.verdict import Certificate, certify

pytestmark = pytest.mark.slurm

NODES, RANKS = 4, 1
MODEL = {"vocab_size": 1001, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODEL |= {"intermediate_size": 96, "max_position_embeddings": 64}
SETTINGS = {"MAX_SEQ_LENGTH": "64", "BATCHSIZE": "2", "DEVICE": "cpu", "OMP_NUM_THREADS": "1", "DGXNGPU": str(RANKS)}
JOB_SECONDS = 620
SECONDS = 6  # of a stage
GROUPS = Path("/sys/fs/cgroup")
# Of a node's processes: all nodes share one CPU, before whatever else runs here.
CONTROLS = {"cpu": {"cpu.shares": str(1 << 18)}, "cpuset": {"cpuset.mems": "0", "cpuset.cpus": "1"}}
# Takes what its group leaves, so that a node has its quarter of a CPU and no more, whatever the others do.
FILLER = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
# Takes a tenth of its node's quarter, a millisecond or less at a time.
THIEF = """
import os, time
os.nice(-20)
begin = time.monotonic() - 1
while True:
    while time.process_time() < 0.025 * (time.monotonic() - begin): pass
    time.sleep(0.005)
"""


@dataclass
class Nodes:
    """Four machines of their own: namespaces with a slurmd in each."""

    script: Path
    folder: Path
    repository: Path

    @property
    def env(self) -> dict[str, str]:
        """Of the cluster's script and of Slurm's commands."""
        known = {"SLURM_DIR": str(self.folder), "SLURM_CONF": str(self.folder / "slurm.conf")}
        return os.environ | known | {"NODES": str(NODES), "CPUS": "8"}

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of the cluster's script."""
        return subprocess.run(
            [self.script, *words], env=self.env, capture_output=True, text=True, check=False, timeout=180
        )

    def certify(self, name: str, seconds: float, thieves: Collection[int]) -> Certificate:
        """A job on all nodes; what its records say. thieves: nodes that lose a tenth of their CPU."""
        over = threading.Event()
        limit = threading.Thread(target=self.isolate, args=(self.folder / "results" / name, thieves, over), daemon=True)
        limit.start()
        try:
            return self.run(name, seconds)
        finally:
            over.set()
            limit.join(10)

    def isolate(self, results: Path, thieves: Collection[int], over: threading.Event) -> None:
        """Gives each node a quarter of one CPU while the stages run; what else runs here has the others."""
        output = results / "output.txt"
        while not (output.exists() and "certify: single" in output.read_text()):
            if over.wait(0.2):
                return
        started = []
        try:
            for node in range(1, NODES + 1):
                for controller, settings in CONTROLS.items():
                    group(controller, node).mkdir(exist_ok=True)
                    for name, value in settings.items():
                        (group(controller, node) / name).write_text(value)
                codes = (FILLER, THIEF)[: 1 + (node in thieves)]
                started += [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
                for process in (*self.ranks(node), *(one.pid for one in started[-len(codes) :])):
                    for controller in CONTROLS:
                        (group(controller, node) / "cgroup.procs").write_text(str(process))
            while len([*results.glob("certify_*.npz")]) < NODES and not over.wait(0.2):
                pass
        finally:
            for one in started:
                one.kill()
                one.wait(30)

    def run(self, name: str, seconds: float) -> Certificate:
        """The job itself."""
        (self.folder / "model.json").write_text(json.dumps(MODEL))
        settings = SETTINGS | {"BERT_CONFIG": str(self.folder / "model.json"), "PYTHON": sys.executable}
        settings |= {"LOGDIR": str(self.folder / "results"), "RUN_NAME": name, "CERTIFY_SECONDS": str(seconds)}
        command = [
            "sbatch",
            "--wait",
            "-N",
            str(NODES),
            f"--output={self.folder / name}.out",
            "--time=7",
            "certify.sub",
        ]
        done = subprocess.run(
            command, cwd=self.repository, env=self.env | settings, capture_output=True, text=True, timeout=JOB_SECONDS
        )
        output = (self.folder / f"{name}.out").read_text()
        print(output)
        found = certify(self.folder / "results" / name)
        assert done.returncode == {"pass": 0, "warn": 3, "fail": 1}[found.state], output + done.stderr
        assert output.strip().splitlines()[-1] == found.state
        return found

    def ranks(self, node: int) -> list[int]:
        """Processes of the ranks of a node, by local rank."""
        first = (self.folder / "node" / str(node) / "first").read_text().strip()
        space, found = os.readlink(f"/proc/{first}/ns/pid"), {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (entry / "cmdline").read_bytes().endswith(b"-u\0-m\0bert.certify\0"):
                    environment = dict(
                        item.partition(b"=")[::2] for item in (entry / "environ").read_bytes().split(b"\0")
                    )
                    if os.readlink(entry / "ns" / "pid") == space:
                        found[int(environment[b"LOCAL_RANK"])] = int(entry.name)
        return [found[rank] for rank in sorted(found)]

    @contextlib.contextmanager
    def paused(self, node: int, local_rank: int, seconds: float, every: float) -> Iterator[None]:
        """A rank stands still for so many seconds in each ``every`` seconds."""
        over = threading.Event()

        def pause() -> None:
            found: list[int] = []
            while not over.wait(every - seconds if found else 0.5):
                found = found or self.ranks(node)[local_rank:][:1]
                send(found, signal.SIGSTOP)
                time.sleep(seconds)
                send(found, signal.SIGCONT)

        thread = threading.Thread(target=pause, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(10)


def group(controller: str, node: int) -> Path:
    """The control group of a node's ranks."""
    return GROUPS / controller / f"certify_node{node}"


def send(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


@pytest.fixture(scope="module")
def nodes(shared: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """The cluster, made once."""
    script = shared / "tools" / "slurm_nodes.sh"
    if os.geteuid() != 0 or not script.is_file() or not (GROUPS / "cpu" / "cgroup.procs").is_file():
        pytest.skip("a Slurm of separate nodes needs root, cgroups and slurm_nodes.sh of the reference data")
    made = Nodes(script, tmp_path_factory.mktemp("nodes"), repository)
    up = made.call("up")
    if up.returncode and shutil.which("slurmctld") is None:
        pytest.skip(f"Slurm cannot be installed here: {up.stderr.strip()[-300:]}")
    try:
        assert up.returncode == 0, up.stderr
        yield made
    finally:
        made.call("down")
        for made_group in GROUPS.glob("cpu*/certify_node*"):
            with contextlib.suppress(OSError):
                made_group.rmdir()


@contextlib.contextmanager
def slow_network(nodes: Nodes, node: int) -> Iterator[None]:
    """The node's only card is slow: a delay, or where the kernel has none a rate."""
    card = ("tc", "qdisc", "replace", "dev", "eth0", "root")
    if nodes.call("enter", str(node), *card, "netem", "delay", "20ms").returncode:
        done = nodes.call("enter", str(node), *card, "tbf", "rate", "40mbit", "burst", "32kbit", "latency", "400ms")
        assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        nodes.call("enter", str(node), "tc", "qdisc", "del", "dev", "eth0", "root")


Disturbance = Callable[[Nodes], contextlib.AbstractContextManager[None]]


def nothing(nodes: Nodes) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


# What is wrong, the nodes whose CPUs are others' in part, and who is to be named: (what, stage, name).
CULPRITS: dict[str, tuple[Disturbance, tuple[int, ...], tuple[str, str, str] | None]] = {
    "nothing": (nothing, (), None),
    "CPUs": (nothing, (4,), ("slow", "single", "node node4")),
    "pauses": (lambda nodes: nodes.paused(2, 0, 0.15, 1.0), (), ("hesitates", "single", "rank 1 on node2")),
    "network": (lambda nodes: slow_network(nodes, 3), (), ("network", "pairs", "node node3")),
}


@pytest.mark.timeout(4 * JOB_SECONDS)
def test_each_culprit_is_named_with_its_stage_and_nobody_else(nodes):
    for name, (disturb, thieves, expected) in CULPRITS.items():
        with disturb(nodes):
            found = nodes.certify(name, SECONDS, thieves)
        said = [(one.what, one.stage, one.name) for one in found.findings]
        assert said == ([] if expected is None else [expected]), f"{name}: {found.reasons()}"
        assert not found.corrupt
