"""certify.sub on a real Slurm of four separate nodes: a slow network is named, and nobody where nothing is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from review.certify.verdict import Certificate, certify

pytestmark = pytest.mark.slurm

NODES, RANKS = 4, 2
MODEL = {"vocab_size": 1001, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODEL |= {"intermediate_size": 96, "max_position_embeddings": 64}
SETTINGS = {"MAX_SEQ_LENGTH": "64", "BATCHSIZE": "2", "DEVICE": "cpu", "OMP_NUM_THREADS": "1", "DGXNGPU": str(RANKS)}
JOB_SECONDS = 420
GROUPS = Path("/sys/fs/cgroup/cpu")
QUOTA, PERIOD = 2000, 5000  # microseconds of a CPU that a node has in so many: what else runs here changes little


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

    def certify(self, name: str, seconds: float) -> Certificate:
        """A job on all nodes; what its records say."""
        over = threading.Event()
        limit = threading.Thread(target=self.limit, args=(self.folder / "results" / name, over), daemon=True)
        limit.start()
        try:
            return self.run(name, seconds)
        finally:
            over.set()
            limit.join(10)

    def limit(self, results: Path, over: threading.Event) -> None:
        """Gives each node its share of the CPUs once the stages begin."""
        output = results / "output.txt"
        while not over.wait(0.2) and not (output.exists() and "certify: single" in output.read_text()):
            pass
        for node in range(1, NODES + 1):
            group = GROUPS / f"certify_node{node}"
            group.mkdir(exist_ok=True)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(QUOTA))
            for process in self.ranks(node):
                with contextlib.suppress(OSError):
                    (group / "cgroup.procs").write_text(str(process))

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


@pytest.fixture(scope="module")
def nodes(shared: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """The cluster, made once."""
    script = shared / "tools" / "slurm_nodes.sh"
    if os.geteuid() != 0 or not script.is_file() or not (GROUPS / "cgroup.procs").is_file():
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
        for group in GROUPS.glob("certify_node*"):
            with contextlib.suppress(OSError):
                group.rmdir()


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


# What is wrong, and who is to be named: (what, stage, name).
CULPRITS: dict[str, tuple[Disturbance, tuple[str, str, str] | None]] = {
    "nothing": (nothing, None),
    "network": (lambda nodes: slow_network(nodes, 3), ("network", "pairs", "node node3")),
}


@pytest.mark.timeout(4 * JOB_SECONDS)
def test_a_node_with_a_slow_network_is_named_and_nobody_where_nothing_is_wrong(nodes):
    for name, (disturb, expected) in CULPRITS.items():
        with disturb(nodes):
            found = nodes.certify(name, 3)
        said = [(one.what, one.stage, one.name) for one in found.findings]
        assert said == ([] if expected is None else [expected]), f"{name}: {found.reasons()}"
        assert not found.corrupt
