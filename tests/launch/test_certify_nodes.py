"""certify.sub on a real Slurm of four separate nodes: each culprit is named with its stage, and
nobody else.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from review.acceptance.faults import usual_parts
from review.acceptance.verdict import Certificate, certify

from ..certify.test_tools import nccl_tests
from ..waiting import wait_until
from .nodes import Nodes, running

# These tests need a machine without much other load, which may slow some nodes more than others.
pytestmark = [pytest.mark.slurm, pytest.mark.slow]

NODES, RANKS = 4, 1
MODEL = {
    "vocab_size": 1001, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
MODEL |= {"intermediate_size": 512, "max_position_embeddings": 128}
SETTINGS = {
    "MAX_SEQ_LENGTH": "128",
    "BATCHSIZE": "2",
    "DEVICE": "cpu",
    "OMP_NUM_THREADS": "1",
    "DGXNGPU": str(RANKS),
    # The nodes share a name that may resolve to the loopback address.
    "GLOO_SOCKET_IFNAME": "eth0",
}
JOB_SECONDS = 300
SECONDS = 10  # of a stage
GROUPS = Path("/sys/fs/cgroup")
# A node has a quota of one CPU, not a share of what others leave, so it is independent of them. All
# four have the same CPU, so what slows it slows them equally. Everything else has the other CPUs
# and a third of this one, so that a node gets its quota, if not in one period then in the next: each
# other process has 1024 shares, so with fewer than the most a busy machine would take the nodes'.
PERIOD = 10_000  # microseconds; a step takes many of them
QUOTA, SLOWED = 1600, 1440
SHARES = 1 << 18
CPU = (os.cpu_count() or 1) - 1
# Keeps that CPU awake: waking from idle is slow and would delay the node that runs first in a
# period.
FILLER = f"import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); os.sched_setaffinity(0, [{CPU}])"


class Certified(Nodes):
    """Four separate machines, which jobs of certify.sub test."""

    @property
    def prolog(self) -> Path:
        """Script that runs before each job on its nodes, as root; written by tests."""
        return self.folder / "prolog.sh"

    def certify(self, name: str, slowed: int | None = None) -> Certificate:
        """Runs a job on all nodes; returns its records. slowed: a node with a tenth less CPU."""
        over = threading.Event()
        limit = threading.Thread(
            target=self.limit, args=(self.folder / "results" / name, slowed, over), daemon=True,
        )  # fmt: skip
        limit.start()
        filler = subprocess.Popen([sys.executable, "-c", FILLER + "\nwhile True: pass"])
        try:
            return self.run(name)
        finally:
            over.set()
            limit.join(10)
            filler.kill()
            filler.wait(30)

    def limit(self, results: Path, slowed: int | None, over: threading.Event) -> None:
        """Sets each node's share of the CPU once its ranks have connected, until the test is over."""
        while not (results / "config.json").exists():
            if over.wait(0.2):
                return
        for node in range(1, NODES + 1):
            quota = SLOWED if node == slowed else QUOTA
            settings = {
                "cpu.cfs_period_us": PERIOD, "cpu.cfs_quota_us": quota, "cpu.shares": SHARES,
            }  # fmt: skip
            settings |= {"cpuset.mems": 0, "cpuset.cpus": CPU}
            for setting, value in settings.items():
                group(setting, node).mkdir(exist_ok=True)
                (group(setting, node) / setting).write_text(str(value))
            for process in self.ranks(node):
                for setting in ("cpu", "cpuset"):
                    (group(setting, node) / "cgroup.procs").write_text(str(process))
        # Who runs behind whom within a period decides how cold its caches are: it changes.
        while not over.wait(0.05):
            node = random.randint(1, NODES)
            quota = SLOWED if node == slowed else QUOTA
            setting = "cpu.cfs_quota_us"  # begins a new period
            (group(setting, node) / setting).write_text(str(quota))

    def run(self, name: str, **more: str) -> Certificate:
        """Runs the job."""
        (self.folder / "model.json").write_text(json.dumps(MODEL))
        settings = SETTINGS | {
            "BERT_CONFIG": str(self.folder / "model.json"),
            "PYTHON": sys.executable,
        }
        settings |= {
            "LOGDIR": str(self.folder / "results"),
            "RUN_NAME": name,
            "CERTIFY_SECONDS": str(SECONDS),
        } | more
        command = [
            "sbatch", "--parsable", "-N", str(NODES), f"--output={self.folder / name}.out", "--time=7",
        ]  # fmt: skip
        job = self.slurm(*command, "certify.sub", **settings).strip()
        status = self.wait(job)
        output = (self.folder / f"{name}.out").read_text()
        print(output)
        found = certify(self.folder / "results" / name)
        assert status == {"pass": 0, "warn": 3, "fail": 1}[found.state], output
        verdict = output.strip().splitlines()[-1]
        assert verdict == f"{found.state} (software only: the test ran on CPUs)"
        return found

    def wait(self, job: str) -> int:
        """Exit status of a job; sbatch --wait polls only twice a minute."""
        end = time.monotonic() + JOB_SECONDS
        while time.monotonic() < end:
            told = dict(
                (word.split("=", 1) for word in self.slurm("scontrol", "show", "job", job).split() if "=" in word),
            )  # fmt: skip
            if told["JobState"] not in (
                "PENDING",
                "RUNNING",
                "COMPLETING",
                "CONFIGURING",
            ):
                return int(told["ExitCode"].partition(":")[0])
            time.sleep(1)
        self.slurm("scancel", job)
        raise AssertionError(f"job {job} has not ended in {JOB_SECONDS} s")

    def ranks(self, node: int) -> list[int]:
        """Processes of a node's ranks, by local rank."""
        found = dict[int, int]()
        for entry in self.processes(str(node)):
            with contextlib.suppress(OSError):
                if (entry / "cmdline").read_bytes().endswith(b"-u\0-m\0certify\0"):
                    words = (entry / "environ").read_bytes().split(b"\0")
                    known = dict(word.partition(b"=")[::2] for word in words)
                    found[int(known[b"LOCAL_RANK"])] = int(entry.name)
        return [found[rank] for rank in sorted(found)]

    @contextlib.contextmanager
    def paused(self, node: int, seconds: float, every: float) -> Iterator[None]:
        """Stops the first rank of a node for so many seconds in every ``every`` seconds."""
        over = threading.Event()

        def pause() -> None:
            found: list[int] = []
            while not over.wait(every - seconds if found else 0.5):
                found = found or self.ranks(node)[:1]
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


def group(setting: str, node: int) -> Path:
    """Control group of a node's ranks that has the setting."""
    return GROUPS / setting.partition(".")[0] / f"certify_node{node}"


def send(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


@pytest.fixture(scope="module")
def nodes(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Certified]:
    """The cluster, created once."""
    if not (GROUPS / "cpu" / "cgroup.procs").is_file():
        pytest.skip("nodes of equal speed need CPU quotas of cgroups, version 1")
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "prolog.sh").write_text("#!/bin/bash\n")
    (folder / "prolog.sh").chmod(0o755)
    remove_groups()
    extra = f"Prolog={folder}/prolog.sh\nPrologFlags=Alloc"
    with running(repository, folder, NODES, EXTRA=extra) as made:
        yield Certified(made.folder, made.repository, made.environ)
    remove_groups()


def remove_groups() -> None:
    """Control groups without processes, with their settings."""
    for made in GROUPS.glob("cpu*/certify_node*"):
        with contextlib.suppress(OSError):
            made.rmdir()


@contextlib.contextmanager
def slow_network(nodes: Certified, node: int) -> Iterator[None]:
    """Slows the node's only card: by a delay or, if the kernel supports none, a rate limit."""
    card = ("tc", "qdisc", "replace", "dev", "eth0", "root")
    if nodes.call("enter", str(node), *card, "netem", "delay", "5ms").returncode:
        done = nodes.call(
            "enter", str(node), *card, "tbf", "rate", "40mbit", "burst", "32kbit", "latency", "400ms",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        nodes.call("enter", str(node), "tc", "qdisc", "del", "dev", "eth0", "root")


PORTS = ("mlx5_0", "mlx5_1")


def machine(
    nodes: Certified,
    node: int,
    cpus: int = 16,
    gib: int = 64,
    ports: tuple[str, ...] = PORTS,
) -> None:
    """Replaces the kernel's information on CPUs, memory and InfiniBand of a node, in its mount
    namespace.
    """
    told = nodes.folder / f"machine{node}"
    for port in ports:
        folder = told / "class/infiniband" / port / "ports/1"
        folder.mkdir(parents=True)
        (folder / "state").write_text("4: ACTIVE\n")
        (folder / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (told / "cpuinfo").write_text("processor : 0\nmodel name : a CPU\n\n" * cpus)
    (told / "meminfo").write_text(
        f"MemTotal:       {gib << 20} kB\nMemAvailable:   {gib << 19} kB\n"
    )
    for source, target in (
        ("class", "/sys/class"),
        ("cpuinfo", "/proc/cpuinfo"),
        ("meminfo", "/proc/meminfo"),
    ):
        done = nodes.call(
            "enter", str(node), "mount", "--bind", str(told / source), target
        )
        assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def machines(nodes: Certified, odd: dict[int, dict]) -> Iterator[None]:
    """All nodes have the same parts, except the odd ones."""
    for node in range(1, NODES + 1):
        machine(nodes, node, **odd.get(node, {}))
    try:
        yield
    finally:
        for node in range(1, NODES + 1):
            for target in ("/sys/class", "/proc/cpuinfo", "/proc/meminfo"):
                nodes.call("enter", str(node), "umount", target)
            shutil.rmtree(nodes.folder / f"machine{node}")


Disturbance = Callable[[Certified], contextlib.AbstractContextManager[None]]


def nothing(nodes: Certified) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Culprit:
    """A fault, and the expected verdict. slowed: the node with a tenth less CPU."""

    name: str
    what: tuple[str, ...]
    stages: tuple[str, ...]
    disturb: Disturbance = nothing
    slowed: int | None = None


OWN_TIME = ("single", "parallel", "together")  # not the network's
CULPRITS = {
    "nothing": None, "CPUs": Culprit("node node4", ("slow", "starved"), OWN_TIME, slowed=4),
    "pauses": Culprit("rank 1 on node2", ("hesitates",), OWN_TIME, lambda nodes: nodes.paused(2, 0.4, 2.0)),
    "network": Culprit("node node3", ("network",), ("pairs",), lambda nodes: slow_network(nodes, 3)),
}  # fmt: skip


@pytest.mark.timeout(2 * JOB_SECONDS)
def test_a_node_with_a_slow_network_is_named_and_no_node_without_a_fault(nodes):
    check(nodes, "nothing", "network")


@pytest.mark.timeout(2 * JOB_SECONDS)
def test_a_node_with_less_cpu_and_a_rank_that_sleeps_at_times_are_named(nodes):
    check(nodes, "CPUs", "pauses")


def check(nodes: Certified, *names: str) -> None:
    """Each culprit is named with its stage, and nobody else."""
    for name in names:
        culprit = CULPRITS[name]
        with (culprit.disturb if culprit else nothing)(nodes):
            found = nodes.certify(name, culprit.slowed if culprit else None)
        said = [(one.name, one.what, one.stage) for one in found.findings]
        assert [who for who, _, _ in said] == ([culprit.name] if culprit else []), (
            f"{name}: {found.reasons()}"
        )
        assert not found.corrupt
        for _, what, stage in said:
            assert what in culprit.what, found.reasons()
            assert stage in culprit.stages, found.reasons()


@pytest.mark.timeout(2 * JOB_SECONDS)
def test_nodes_with_different_parts_are_named_with_the_difference(nodes):
    odd = {1: {"gib": 48}, 2: {"cpus": 12}, 3: {"ports": PORTS[:1]}}
    for name, parts in {"parts": odd, "alike": {}}.items():
        with machines(nodes, parts):
            found = nodes.run(name, CERTIFY_SECONDS="1")
        # This machine's own kernel log may have others.
        faults = (one.text() for one in found.faults)
        said = [one for one in faults if "kernel log" not in one]
        if parts:
            assert said == [
                "node node1: memory GiB 48.0, elsewhere 64.0",
                "node node2: CPUs 12, elsewhere 16",
                "mlx5_1/1 of node3: state missing, elsewhere ACTIVE",
                "mlx5_1/1 of node3: rate missing, elsewhere 400 Gb/sec (4X NDR)",
            ]
            assert found.state == "fail"
            usual = usual_parts(found.records.hardware)
            (nodes.folder / "good.json").write_text(json.dumps(usual))
        else:
            assert said == []


@pytest.mark.timeout(2 * JOB_SECONDS)
def test_collectives_over_all_nodes_are_started_by_srun_within_the_job(nodes):
    """A stand-in for nccl-tests: each process reports its place, and the first prints the table."""
    words = nccl_tests(ranks=NODES).replace("'", "")
    tool = nodes.folder / "all_reduce_perf_mpi"
    tool.write_text(
        f"#!/bin/bash\necho $SLURMD_NODENAME >>{nodes.folder}/started\n((SLURM_PROCID)) || echo '{words}'\n"
    )
    tool.chmod(0o755)
    settings = {
        "CERTIFY_TOOLS": str(tool),
        "CERTIFY_MPI": f"srun --overlap -N{NODES} -n{NODES}",
    }
    found = nodes.run("tools", CERTIFY_SECONDS="1", **settings)
    assert not [one for one in found.faults if "all_reduce" in one.name], (
        found.reasons()
    )
    started = (nodes.folder / "started").read_text().split()
    assert sorted(started) == sorted(
        3 * [f"node{node}" for node in range(1, NODES + 1)]
    )
    assert {one.name for one in found.figures} >= {"all_reduce_perf_mpi"}


@pytest.mark.timeout(2 * JOB_SECONDS)
def test_as_a_prolog_a_quick_test_keeps_jobs_off_a_node_with_unexpected_parts(nodes):
    good = {"node": {"CPUs": 16, "memory GiB": 64.0}, "mlx5_0/1": {"state": "ACTIVE"}}
    (nodes.folder / "good.json").write_text(json.dumps(good))
    (nodes.folder / "model.json").write_text(json.dumps(MODEL))
    settings = SETTINGS | {
        "BERT_CONFIG": str(nodes.folder / "model.json"),
        "PYTHON": sys.executable,
        "DGXNGPU": "2",
    }
    settings |= {
        "LOGDIR": str(nodes.folder / "quick"),
        "EXPECTED_INVENTORY": str(nodes.folder / "good.json"),
    }
    settings |= {
        "CERTIFY_SECONDS": "0.2", "BINDING": "none", "PATH": os.environ["PATH"],
    }  # fmt: skip
    exports = "\n".join(
        f"export {name}={shlex.quote(value)}" for name, value in settings.items()
    )
    line = nodes.folder / "line"
    script = f"#!/bin/bash\n{exports}\n{nodes.repository}/certify.sh --quick >{line} 2>&1 || (($? == 3))\n"
    nodes.prolog.write_text(script)
    try:
        with machines(nodes, {2: {"cpus": 12}}):
            ran = nodes.slurm(
                "srun", "-N1", "-w", "node1", "hostname", limit=JOB_SECONDS
            )
            # A warning may be of this machine's own kernel log.
            verdict = line.read_text().splitlines()[-1]
            assert ran.strip() == "node1", verdict
            assert verdict.startswith(("pass", "warn")), verdict
            command = [
                "sbatch", "--parsable", "-N1", "-w", "node2", "--output=/dev/null", "--wrap=hostname",
            ]  # fmt: skip
            job = nodes.slurm(*command).strip()
            wait_until(
                lambda: "DRAIN" in nodes.slurm("scontrol", "show", "node", "node2"),
                JOB_SECONDS,
            )
        said = line.read_text().splitlines()[-1]
        assert said.startswith(
            "fail (software only: the test ran on CPUs): node node2: CPUs 12, expected 16"
        )
        drain = said[said.index("scontrol update nodename=node2 state=drain ") :]
        nodes.prolog.write_text("#!/bin/bash\n")
        nodes.slurm("scancel", job)
        nodes.slurm("scontrol", "update", "nodename=node2", "state=resume")
        nodes.slurm("bash", "-c", drain)
        assert "Reason=certify: node node2: CPUs 12, expected 16" in nodes.slurm(
            "scontrol", "show", "node", "node2"
        )
    finally:
        nodes.prolog.write_text("#!/bin/bash\n")
        nodes.slurm("scontrol", "update", "nodename=node2", "state=resume")
