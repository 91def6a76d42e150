"""certify.sub on four separate nodes: each culprit is named with its stage, and nobody else."""

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
from collections.abc import Iterator
from pathlib import Path

import pytest

from review.acceptance.faults import usual_parts
from review.acceptance.verdict import Certificate, certify

from ..certify.test_tools import nccl_tests
from ..waiting import wait_until
from .conftest import Job
from .nodes import Nodes, running

# These tests need a machine without much other load, which may slow some nodes more than others.
pytestmark = [pytest.mark.slurm, pytest.mark.slow]

NODES, RANKS = 4, 1
EVERY = range(1, NODES + 1)
MODEL = {
    "vocab_size": 1001, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
SETTINGS = {
    "MAX_SEQ_LENGTH": "128", "BATCHSIZE": "2", "DEVICE": "cpu", "OMP_NUM_THREADS": "1", "DGXNGPU": str(RANKS),
    "PYTHON": sys.executable,
    # The nodes share a name that may resolve to the loopback address.
    "GLOO_SOCKET_IFNAME": "eth0",
}  # fmt: skip
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
        over, results = threading.Event(), self.folder / "results" / name
        given = (results, slowed, over)
        limit = threading.Thread(target=self.limit, args=given, daemon=True)
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
        quotas = dict.fromkeys(EVERY, QUOTA) | ({slowed: SLOWED} if slowed else {})
        quota_of = "cpu.cfs_quota_us"  # begins a new period
        settings = {"cpu.cfs_period_us": PERIOD, "cpu.shares": SHARES}
        settings |= {"cpuset.mems": 0, "cpuset.cpus": CPU}
        for node, quota in quotas.items():
            for setting, value in (settings | {quota_of: quota}).items():
                group(setting, node).mkdir(exist_ok=True)
                (group(setting, node) / setting).write_text(str(value))
            for process in self.ranks(node):
                for setting in ("cpu", "cpuset"):
                    (group(setting, node) / "cgroup.procs").write_text(str(process))
        # Who runs behind whom within a period decides how cold its caches are: it changes.
        while not over.wait(0.05):
            node = random.choice(EVERY)
            (group(quota_of, node) / quota_of).write_text(str(quotas[node]))

    def run(self, name: str, **more: str) -> Certificate:
        """Runs the job."""
        given = self.settings() | {"CERTIFY_SECONDS": str(SECONDS)}
        given |= {"LOGDIR": str(self.folder / "results"), "RUN_NAME": name} | more
        output = self.folder / f"{name}.out"
        line = f"sbatch --parsable -N {NODES} --output={output} --time=7 certify.sub"
        job = Job(int(self.slurm(*line.split(), **given)), output).wait()
        print(job.output)
        found = certify(self.folder / "results" / name)
        assert job.exit_code == {"pass": 0, "warn": 3, "fail": 1}[found.state]
        assert job.last_line == f"{found.state} (software only: the test ran on CPUs)"
        return found

    def settings(self) -> dict[str, str]:
        model = self.folder / "model.json"
        model.write_text(json.dumps(MODEL))
        return SETTINGS | {"BERT_CONFIG": str(model)}

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
def nodes(repository, tmp_path_factory) -> Iterator[Certified]:
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
    name = str(node)
    card = "tc qdisc replace dev eth0 root"
    if nodes.enter(name, *f"{card} netem delay 5ms".split()).returncode:
        rate = f"{card} tbf rate 40mbit burst 32kbit latency 400ms"
        done = nodes.enter(name, *rate.split())
        assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        nodes.enter(name, *["tc", "qdisc", "del", "dev", "eth0", "root"])


PORTS = ("mlx5_0", "mlx5_1")
TOLD = {"class": "/sys/class", "cpuinfo": "/proc/cpuinfo", "meminfo": "/proc/meminfo"}


def machine(nodes: Certified, node: int, cpus: int = 16, gib: int = 64, ports=PORTS) -> None:  # fmt: skip
    """Replaces what a node's kernel tells of CPUs, memory and InfiniBand, in its mount namespace."""
    told = nodes.folder / f"machine{node}"
    for port in ports:
        folder = told / "class/infiniband" / port / "ports/1"
        folder.mkdir(parents=True)
        (folder / "state").write_text("4: ACTIVE\n")
        (folder / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (told / "cpuinfo").write_text("processor : 0\nmodel name : a CPU\n\n" * cpus)
    memory = f"MemTotal:       {gib << 20} kB\nMemAvailable:   {gib << 19} kB\n"
    (told / "meminfo").write_text(memory)
    for source, target in TOLD.items():
        done = nodes.enter(str(node), "mount", "--bind", str(told / source), target)
        assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def machines(nodes: Certified, odd: dict[int, dict]) -> Iterator[None]:
    """All nodes have the same parts, except the odd ones."""
    for node in EVERY:
        machine(nodes, node, **odd.get(node, {}))
    try:
        yield
    finally:
        for node in EVERY:
            for target in TOLD.values():
                nodes.enter(str(node), "umount", target)
            shutil.rmtree(nodes.folder / f"machine{node}")


OWN_TIME = ("single", "parallel", "together")  # not the network's
# A fault: who is named for what, at which stages; how it is made, and the node with a tenth less CPU.
CULPRITS = {
    "nothing": (None, (), (), None, None),
    "CPUs": ("node node4", ("slow", "starved"), OWN_TIME, None, 4),
    "pauses": ("rank 1 on node2", ("hesitates",), OWN_TIME, lambda nodes: nodes.paused(2, 0.4, 2.0), None),
    "network": ("node node3", ("network",), ("pairs",), lambda nodes: slow_network(nodes, 3), None),
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
        who, whats, stages, disturb, slowed = CULPRITS[name]
        with disturb(nodes) if disturb else contextlib.nullcontext():
            found = nodes.certify(name, slowed)
        named = [one.name for one in found.findings]
        assert named == ([who] if who else []), f"{name}: {found.reasons()}"
        assert not found.corrupt
        for one in found.findings:
            assert one.what in whats, found.reasons()
            assert one.stage in stages, found.reasons()


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
    begun = f"echo $SLURMD_NODENAME >>{nodes.folder}/started"
    tool.write_text(f"#!/bin/bash\n{begun}\n((SLURM_PROCID)) || echo '{words}'\n")
    tool.chmod(0o755)
    mpi = f"srun --overlap -N{NODES} -n{NODES}"
    given = {"CERTIFY_TOOLS": str(tool), "CERTIFY_MPI": mpi, "CERTIFY_SECONDS": "1"}
    found = nodes.run("tools", **given)
    blamed = [one for one in found.faults if "all_reduce" in one.name]
    assert not blamed, found.reasons()
    started = (nodes.folder / "started").read_text().split()
    assert sorted(started) == sorted(3 * [f"node{node}" for node in EVERY])
    assert {one.name for one in found.figures} >= {"all_reduce_perf_mpi"}


@pytest.mark.timeout(2 * JOB_SECONDS)
def test_as_a_prolog_a_quick_test_keeps_jobs_off_a_node_with_unexpected_parts(nodes):
    good = {"node": {"CPUs": 16, "memory GiB": 64.0}, "mlx5_0/1": {"state": "ACTIVE"}}
    (nodes.folder / "good.json").write_text(json.dumps(good))
    settings = nodes.settings() | {
        "DGXNGPU": "2", "LOGDIR": str(nodes.folder / "quick"), "EXPECTED_INVENTORY": str(nodes.folder / "good.json"),
        "CERTIFY_SECONDS": "0.2", "BINDING": "none", "PATH": os.environ["PATH"],
    }  # fmt: skip
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in settings.items())  # fmt: skip
    line = nodes.folder / "line"
    test = f"{nodes.repository}/certify.sh --quick >{line} 2>&1 || (($? == 3))"
    nodes.prolog.write_text(f"#!/bin/bash\n{exports}\n{test}\n")
    show = ("scontrol", "show", "node", "node2")
    try:
        with machines(nodes, {2: {"cpus": 12}}):
            one = ["srun", "-N1", "-w", "node1", "hostname"]
            ran = nodes.slurm(*one, limit=JOB_SECONDS)
            # A warning may be of this machine's own kernel log.
            verdict = line.read_text().splitlines()[-1]
            assert ran.strip() == "node1", verdict
            assert verdict.startswith(("pass", "warn")), verdict
            two = "sbatch --parsable -N1 -w node2 --output=/dev/null --wrap=hostname"
            job = nodes.slurm(*two.split()).strip()
            wait_until(lambda: "DRAIN" in nodes.slurm(*show), JOB_SECONDS)
        said = line.read_text().splitlines()[-1]
        why = "node node2: CPUs 12, expected 16"
        where = "fail (software only: the test ran on CPUs)"
        assert said.startswith(f"{where}: {why}")
        drain = said[said.index("scontrol update nodename=node2 state=drain ") :]
        nodes.prolog.write_text("#!/bin/bash\n")
        nodes.slurm("scancel", job)
        nodes.slurm("scontrol", "update", "nodename=node2", "state=resume")
        nodes.slurm("bash", "-c", drain)
        assert f"Reason=certify: {why}" in nodes.slurm(*show)
    finally:
        nodes.prolog.write_text("#!/bin/bash\n")
        nodes.slurm("scontrol", "update", "nodename=node2", "state=resume")
