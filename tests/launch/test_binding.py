"""Ranks are bound near their GPUs, only to allowed CPUs, and never with a failure."""

import contextlib
import io
import os
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from .captured import captured

PROGRAM = "launch/node/binding.py"


class Said(NamedTuple):
    stdout: str
    stderr: str


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@dataclass
class Node:
    """sysfs of a node: sockets of cores with two hardware threads each, numbered as by Linux."""

    root: Path
    repository: Path
    num_cpus: int = 192
    num_numa: int = 2

    def __post_init__(self) -> None:
        half, system = self.num_cpus // 2, self.sys / "devices/system"
        for cpu in range(self.num_cpus):
            siblings = f"{cpu % half},{cpu % half + half}"
            write(system / f"cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
        for node in range(self.num_numa):
            write(system / f"node/node{node}/cpulist", self.cpus_of(node))
        self.allow(f"0-{self.num_cpus - 1}")

    @property
    def sys(self) -> Path:
        return self.root / "sys"

    def cpus_of(self, node: int) -> str:
        half = self.num_cpus // 2
        cores = half // self.num_numa
        first, last = node * cores, (node + 1) * cores - 1
        return f"{first}-{last},{first + half}-{last + half}"

    def allow(self, cpus: str) -> None:
        write(self.root / "status", f"Name:\tbash\nCpus_allowed_list:\t{cpus}")

    def device(self, address: str, numa: int, under: str = "", **files: str) -> Path:
        """A PCI device behind the bridges ``under``."""
        real = self.sys / "devices/pci0000:00" / under / address
        cpus = self.cpus_of(numa) if numa >= 0 else f"0-{self.num_cpus - 1}"
        files |= {"numa_node": str(numa), "local_cpulist": cpus}
        for name, text in files.items():
            write(real / name, text)
        link = self.sys / "bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(real)
        return real

    def gpu(self, address: str, numa: int, under: str = "") -> None:
        self.device(address, numa, under, vendor="0x10de", **{"class": "0x030200"})

    def nic(
        self, name: str, address: str, numa: int, under: str, state: str = "4: ACTIVE"
    ) -> None:
        card = {"vendor": "0x15b3", "class": "0x020700"}
        real = self.device(address, numa, under, **card)
        write(self.sys / f"class/infiniband/{name}/ports/1/state", state)
        (self.sys / f"class/infiniband/{name}/device").symlink_to(real)

    def given(self, **env: str) -> dict[str, str]:
        given = {"SYSFS": str(self.sys), "PROC_STATUS": str(self.root / "status")}
        return given | {"TOPOLOGY_GPUS": "", "RANK": "1"} | env

    def bind(self, rank: int, ranks: int, **env: str) -> Said:
        """What is said, without binding this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            patch.setattr(os, "environ", self.given(**env))
            patch.setattr(os, "sched_setaffinity", lambda process, cpus: None)
            program = runpy.run_path(str(self.repository / PROGRAM))
            program["main"](0, rank, ranks)
        return Said(out.getvalue(), err.getvalue())

    def bind_itself(self, rank: int, ranks: int) -> Said:
        """A process of its own: its CPUs are the last line of stdout."""
        bound = f"python3 -I -S {PROGRAM} $$ {rank} {ranks} && taskset -pc $$"
        given = self.given(PATH=os.environ["PATH"])
        done = captured(["bash", "-c", bound], 0, cwd=self.repository, env=given)
        return Said(done.stdout, done.stderr)

    def table(self, ranks: int, **env: str) -> list[list[str]]:
        """Columns of each rank: number, GPU, NUMA node, cards, CPUs."""
        shown = self.bind(0, ranks, RANK="0", **env).stderr.splitlines()
        assert shown[1].split() == ["run:", "rank", "GPU", "NUMA", "NIC", "CPUs"]
        return [line.split(maxsplit=5)[1:] for line in shown[2 : 2 + ranks]]

    def cpus(self, ranks: int, mode: str, **env: str) -> list[str]:
        """CPU list of each rank."""
        return [row[-1] for row in self.table(ranks, BINDING=mode, **env)]


BUSES = (0x18, 0x2A, 0x3A, 0x5D, 0x9A, 0xAB, 0xBA, 0xDB)
ADDRESSES = [f"0000:{bus:02x}:00.0" for bus in BUSES]


@pytest.fixture
def make_node(tmp_path: Path, repository: Path):
    return lambda **sizes: Node(tmp_path, repository, **sizes)


@pytest.fixture
def dgx(make_node) -> Node:
    """Eight GPUs, four per socket, each behind its own switch with a network card."""
    node = make_node()
    for n, address in enumerate(ADDRESSES):
        switch = f"0000:{n:02x}:01.0"
        node.gpu(address, n // 4, under=switch)
        node.nic(f"mlx5_{n}", f"0000:{n:02x}:02.0", n // 4, under=switch)
    return node


FIRST, SECOND = "0-47,96-143", "48-95,144-191"
OTHERS = [FIRST] * 4 + ["48-83,144-179"] * 4  # without those that serve the file system
SHARES = [f"{12 * n}-{12 * n + 11},{12 * n + 96}-{12 * n + 107}" for n in range(8)]
FEWER = ["48-56,144-152", "57-65,153-161", "66-74,162-170", "75-83,171-179"]


def driver(order: list[str]) -> str:
    """What nvidia-smi lists."""
    return "\n".join(f"{i}, GPU-{i}a, 0000{a.upper()}" for i, a in enumerate(order))


@pytest.mark.parametrize(
    ("mode", "allowed", "env", "cpus"),
    [
        ("numa", "0-191", {}, [FIRST] * 4 + [SECOND] * 4),
        ("numa", "0-83,96-179", {}, OTHERS),
        ("numa", "0-191", {"RESERVED_CPUS": "84-95,180-191"}, OTHERS),
        ("exclusive", "0-191", {}, SHARES),  # whole cores, and all of them
        ("exclusive", "0-83,96-179", {}, SHARES[:4] + FEWER),
        ("numa", "0-191", {"CUDA_VISIBLE_DEVICES": "7,0"}, [SECOND, FIRST]),
        ("numa", "0-191", {"CUDA_VISIBLE_DEVICES": "GPU-5a,GPU-1a", "TOPOLOGY_GPUS": driver(ADDRESSES)}, [SECOND, FIRST]),
        ("numa", "0-191", {"TOPOLOGY_GPUS": driver(ADDRESSES[::-1])}, [SECOND] * 4 + [FIRST] * 4),
        ("none", "1000-1999", {}, ["as given"] * 8),
    ],
)  # fmt: skip
def test_ranks_have_allowed_cpus_near_their_gpus(dgx, mode, allowed, env, cpus):
    dgx.allow(allowed)
    assert dgx.cpus(len(cpus), mode, **env) == cpus


def test_exclusive_binding_of_more_ranks_than_cores_shares_them(make_node):
    node = make_node(num_cpus=4, num_numa=1)
    node.gpu(ADDRESSES[0], 0)
    assert node.cpus(3, "exclusive") == ["0-3"] * 3


def test_a_gpu_of_unknown_numa_node_leaves_all_cpus(make_node):
    node = make_node(num_cpus=8)
    node.gpu(ADDRESSES[0], -1)
    assert node.cpus(1, "numa") == ["0-7"]


def test_cpu_ranks_spread_over_the_sockets(make_node):
    node = make_node(num_cpus=16)
    write(node.sys / "devices/system/node/node2/cpulist", "")  # memory only
    assert node.cpus(4, "numa") == ["0-3,8-11"] * 2 + ["4-7,12-15"] * 2


def test_without_sysfs_nothing_is_bound_and_nothing_fails(tmp_path, repository):
    node = Node(tmp_path, repository, num_cpus=0, num_numa=0)
    node.allow("0-3")
    said = node.bind(0, 2).stderr
    why = "no CPU near its GPU is allowed here"
    assert said == f"run: warning: local rank 0 is not bound: {why}\n"


def test_threads_of_a_rank_are_its_share_of_the_allowed_cpus(dgx):
    asked = (
        f"PROC_STATUS={dgx.root}/status; . launch/node/binding.sh; binding::threads 8"
    )
    for cpus, threads in (("0-83,96-179", "21"), ("0", "1")):
        dgx.allow(cpus)
        done = captured(["bash", "-c", asked], 0, cwd=dgx.repository)
        assert done.stdout == f"{threads}\n"


def test_each_gpu_is_shown_with_its_nearest_active_card(dgx):
    dgx.nic("mlx5_8", "0000:03:03.0", 0, under="0000:03:01.0", state="1: DOWN")
    dgx.nic("a_storage", "0000:77:00.0", 0, under="0000:77:01.0")
    said = dgx.bind(0, 8, RANK="0", SLURMD_NODENAME="dgx7").stderr
    assert "run: binding numa on dgx7\n" in said
    assert dgx.table(8) == [
        [str(n), address, str(n // 4), f"mlx5_{n}", (FIRST, SECOND)[n // 4]]
        for n, address in enumerate(ADDRESSES)
    ]


def test_a_card_of_the_same_socket_is_nearer_than_one_of_the_other(make_node):
    node = make_node(num_cpus=8)
    node.gpu(ADDRESSES[7], 1, under="0000:05:01.0")
    node.nic("mlx5_0", "0000:01:00.0", 0, under="0000:01:01.0")
    node.nic("mlx5_1", "0000:02:00.0", 1, under="0000:02:01.0")
    assert node.table(1)[0][3] == "mlx5_1"


def test_a_process_is_bound_to_a_cpu_it_may_use(make_node):
    mine = min(os.sched_getaffinity(0))
    node = make_node(num_cpus=2, num_numa=1)
    node.gpu(ADDRESSES[0], 0)
    write(node.sys / f"bus/pci/devices/{ADDRESSES[0]}/local_cpulist", f"{mine},100000")
    node.allow(str(mine))
    done = node.bind_itself(0, 1)
    assert done.stdout.endswith(f"current affinity list: {mine}\n")
    assert done.stderr == ""


def test_a_refused_binding_is_a_warning(make_node):
    node = make_node(num_cpus=2000, num_numa=1)
    node.allow("1000-1999")  # of which this machine has none
    why = "local rank 1 is not bound: the kernel rejects the CPUs 1000-1999"
    assert node.bind_itself(1, 2).stderr == f"run: warning: {why}\n"


def test_binding_none_binds_nothing(dgx):
    dgx.allow("1000-1999")
    assert dgx.bind(1, 8, BINDING="none").stderr == ""


def test_a_rank_that_is_not_bound_and_shows_no_table_starts_no_program(checkout):
    checkout.stand_in("asked", "")
    for mode in ("numa", "none"):
        given = {"PYTHON": "asked", "RANK": "1", "BINDING": mode}
        checkout.run("./run_and_time.sh", status=0, **given)
    bound = [call.count("binding.py") for call in checkout.calls("asked")]
    assert bound == [1, 0, 0], "before the first of two trainers"


def nics(node: Node, rank: int, **env: str) -> str:
    """What is printed for NCCL_IB_HCA, and said."""
    done = node.bind(rank, 8, **{"NIC_BINDING": "nearest", "BINDING": "none"} | env)
    return done.stdout.strip() + done.stderr


def test_a_rank_uses_the_cards_nearest_to_its_gpu_by_exact_name(dgx):
    """By default none is chosen; and the user's choice wins."""
    dgx.nic("mlx5_10", "0000:01:03.0", 0, under="0000:01:01.0")
    found = [nics(dgx, rank) for rank in (0, 1, 7)]
    assert found == ["=mlx5_0", "=mlx5_1,mlx5_10", "=mlx5_7"]
    assert nics(dgx, 0, CUDA_VISIBLE_DEVICES="6,2") == "=mlx5_6"
    assert nics(dgx, 0, NCCL_IB_HCA="mlx5_5") == ""
    assert nics(dgx, 0, NIC_BINDING="none") == ""


def test_without_an_active_card_nccl_chooses_with_a_warning(make_node):
    node = make_node(num_cpus=8)
    node.gpu(ADDRESSES[0], 0, under="0000:05:01.0")
    node.nic("mlx5_0", "0000:05:02.0", 0, under="0000:05:01.0", state="1: DOWN")
    why = "local rank 0 has no GPU or no active card in sysfs"
    assert nics(node, 0) == f"run: warning: NIC_BINDING=nearest: {why}: NCCL chooses\n"
