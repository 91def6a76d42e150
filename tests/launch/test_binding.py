"""Ranks are bound near their GPUs, on synthetic sysfs trees: only to allowed CPUs, and never with a
failure.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest


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
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        half = self.num_cpus // 2
        cores = half // max(self.num_numa, 1)
        for cpu in range(self.num_cpus):
            siblings = f"{cpu % half},{cpu % half + half}"
            write(
                self.sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
                siblings,
            )
        for node in range(self.num_numa):
            write(
                self.sys / f"devices/system/node/node{node}/cpulist",
                self.cpus_of(node, cores, half),
            )
        self.allow(f"0-{self.num_cpus - 1}")

    @property
    def sys(self) -> Path:
        return self.root / "sys"

    @staticmethod
    def cpus_of(node: int, cores: int, half: int) -> str:
        first, last = node * cores, (node + 1) * cores - 1
        return f"{first}-{last},{first + half}-{last + half}"

    def allow(self, cpus: str) -> None:
        write(self.root / "status", f"Name:\tbash\nCpus_allowed_list:\t{cpus}")

    def device(self, address: str, numa: int, under: str = "", **files: str) -> Path:
        """A PCI device behind the bridges ``under``."""
        real = self.sys / "devices/pci0000:00" / under / address
        half = self.num_cpus // 2
        cpus = (
            f"0-{self.num_cpus - 1}"
            if numa < 0
            else self.cpus_of(numa, half // self.num_numa, half)
        )
        for name, text in {
            "numa_node": str(numa),
            "local_cpulist": cpus,
            **files,
        }.items():
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
        real = self.device(
            address, numa, under, vendor="0x15b3", **{"class": "0x020700"}
        )
        write(self.sys / f"class/infiniband/{name}/ports/1/state", state)
        (self.sys / f"class/infiniband/{name}/device").symlink_to(real)

    def call(self, command: str, **env: str) -> str:
        """Output of a command of binding.sh."""
        done = subprocess.run(
            [
                "bash",
                "-c",
                f"set -euo pipefail; source launch/node/binding.sh; {command}",
            ],
            cwd=self.repository,
            env={
                "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
                "SYSFS": str(self.sys),
            }
            | {"PROC_STATUS": str(self.root / "status"), "TOPOLOGY_GPUS": ""}
            | self.env
            | env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return (done.stdout + done.stderr).strip()

    def cpus(self, ranks: int, mode: str, **env: str) -> list[str]:
        """CPU list of each rank."""
        loop = f'for ((r = 0; r < {ranks}; r++)); do echo "=$(binding::cpus $r {ranks} {mode})"; done'
        return [line[1:] for line in self.call(loop, **env).splitlines()]


ADDRESSES = [
    f"0000:{bus:02x}:00.0" for bus in (0x18, 0x2A, 0x3A, 0x5D, 0x9A, 0xAB, 0xBA, 0xDB)
]


@pytest.fixture
def make_node(tmp_path: Path, repository: Path) -> Callable[..., Node]:
    (tmp_path / "bin").mkdir()
    return lambda **sizes: Node(tmp_path, repository, **sizes)


@pytest.fixture
def dgx(make_node) -> Node:
    """Eight GPUs, four per socket, each behind its own switch with a network card."""
    node = make_node()
    for number, address in enumerate(ADDRESSES):
        node.gpu(address, number // 4, under=f"0000:{number:02x}:01.0")
        node.nic(
            f"mlx5_{number}",
            f"0000:{number:02x}:02.0",
            number // 4,
            under=f"0000:{number:02x}:01.0",
        )
    return node


FIRST, SECOND = "0-47,96-143", "48-95,144-191"


def test_numa_binding_gives_each_rank_the_cpus_of_its_gpus_socket(dgx):
    assert dgx.cpus(8, "numa") == [FIRST] * 4 + [SECOND] * 4


def test_cpus_reserved_by_the_cluster_are_left_alone(dgx):
    dgx.allow("0-83,96-179")  # the others serve the file system
    assert dgx.cpus(8, "numa") == [FIRST] * 4 + ["48-83,144-179"] * 4
    dgx.allow("0-191")
    assert (
        dgx.cpus(8, "numa", RESERVED_CPUS="84-95,180-191")
        == [FIRST] * 4 + ["48-83,144-179"] * 4
    )


def test_exclusive_binding_assigns_whole_cores_and_all_of_them(dgx):
    shares = dgx.cpus(8, "exclusive")
    assert shares[:2] == ["0-11,96-107", "12-23,108-119"]
    assert shares[7] == "84-95,180-191"


def test_exclusive_binding_assigns_only_allowed_cpus(dgx):
    dgx.allow("0-83,96-179")
    shares = dgx.cpus(8, "exclusive")
    assert shares[4:] == [
        "48-56,144-152",
        "57-65,153-161",
        "66-74,162-170",
        "75-83,171-179",
    ]


def test_exclusive_binding_of_more_ranks_than_cores_shares_them(make_node):
    node = make_node(num_cpus=4, num_numa=1)
    node.gpu(ADDRESSES[0], 0)
    assert node.cpus(3, "exclusive") == ["0-3"] * 3


def test_ranks_follow_the_order_of_the_visible_devices(dgx):
    assert dgx.cpus(2, "numa", CUDA_VISIBLE_DEVICES="7,0") == [SECOND, FIRST]
    driver = "\n".join(
        f"{i}, GPU-{i}a, 0000{a.upper()}" for i, a in enumerate(ADDRESSES)
    )
    assert dgx.cpus(
        2, "numa", CUDA_VISIBLE_DEVICES="GPU-5a,GPU-1a", TOPOLOGY_GPUS=driver
    ) == [
        SECOND,
        FIRST,
    ]


def test_the_drivers_order_of_gpus_wins_over_that_of_sysfs(dgx):
    driver = "\n".join(
        f"{i}, GPU-{i}a, 0000{a}" for i, a in enumerate(reversed(ADDRESSES))
    )
    assert dgx.cpus(8, "numa", TOPOLOGY_GPUS=driver) == [SECOND] * 4 + [FIRST] * 4


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
    assert node.cpus(2, "numa") == ["", ""]
    assert "is not bound: no CPU near its GPU is allowed here" in node.call(
        "binding::apply 0 2"
    )


def test_threads_of_a_rank_are_its_share_of_the_allowed_cpus(dgx):
    dgx.allow("0-83,96-179")
    assert dgx.call("binding::threads 8") == "21"
    dgx.allow("0")
    assert dgx.call("binding::threads 8") == "1"


def test_each_gpu_is_shown_with_its_nearest_active_card(dgx):
    dgx.nic("mlx5_8", "0000:03:03.0", 0, under="0000:03:01.0", state="1: DOWN")
    dgx.nic("a_storage", "0000:77:00.0", 0, under="0000:77:01.0")
    table = dgx.call("binding::table 8", SLURMD_NODENAME="dgx7").splitlines()
    assert table[0] == "run: binding numa on dgx7"
    rows = [line.split()[1:] for line in table[2:]]
    assert rows == [
        [
            str(number),
            address,
            str(number // 4),
            f"mlx5_{number}",
            FIRST if number < 4 else SECOND,
        ]
        for number, address in enumerate(ADDRESSES)
    ]


def test_a_card_of_the_same_socket_is_nearer_than_one_of_the_other(make_node):
    node = make_node(num_cpus=8)
    node.gpu(ADDRESSES[7], 1, under="0000:05:01.0")
    node.nic("mlx5_0", "0000:01:00.0", 0, under="0000:01:01.0")
    node.nic("mlx5_1", "0000:02:00.0", 1, under="0000:02:01.0")
    assert node.call("topology::nics $(topology::gpu 0)") == "mlx5_1"


def test_a_process_is_bound_to_a_cpu_it_may_use(make_node):
    mine = min(os.sched_getaffinity(0))
    node = make_node(num_cpus=2, num_numa=1)
    node.device(ADDRESSES[0], 0, vendor="0x10de", **{"class": "0x030200"})
    write(node.sys / f"bus/pci/devices/{ADDRESSES[0]}/local_cpulist", f"{mine},100000")
    node.allow(str(mine))
    done = node.call("binding::apply 0 1; taskset -pc $$")
    assert done.endswith(f"current affinity list: {mine}")
    assert "warning" not in done


def test_a_refused_binding_is_a_warning(dgx):
    (dgx.root / "bin" / "taskset").write_text("#!/bin/sh\nexit 1\n")
    (dgx.root / "bin" / "taskset").chmod(0o755)
    assert dgx.call("binding::apply 4 8; echo on") == (
        f"on\nrun: warning: local rank 4 is not bound: taskset rejects the CPUs {SECOND}"
    )


def test_binding_none_binds_nothing(dgx):
    (dgx.root / "bin" / "taskset").write_text("#!/bin/sh\necho called\n")
    (dgx.root / "bin" / "taskset").chmod(0o755)
    assert dgx.call("binding::apply 0 8", BINDING="none") == ""


def nics(node: Node, rank: int, **env: str) -> str:
    return node.call(
        f'binding::nics {rank}; echo "${{NCCL_IB_HCA-unset}}"',
        NIC_BINDING="nearest",
        **env,
    )


def test_a_rank_uses_the_cards_nearest_to_its_gpu_by_exact_name(dgx):
    dgx.nic("mlx5_10", "0000:01:03.0", 0, under="0000:01:01.0")
    assert [nics(dgx, rank) for rank in (0, 1, 7)] == [
        "=mlx5_0",
        "=mlx5_1,mlx5_10",
        "=mlx5_7",
    ]


def test_a_rank_follows_the_visible_devices_to_its_cards(dgx):
    assert nics(dgx, 0, CUDA_VISIBLE_DEVICES="6,2") == "=mlx5_6"


def test_the_users_choice_of_cards_wins_and_none_is_made_by_default(dgx):
    assert nics(dgx, 0, NCCL_IB_HCA="mlx5_5") == "mlx5_5"
    assert dgx.call('binding::nics 0; echo "${NCCL_IB_HCA-unset}"') == "unset"


def test_without_an_active_card_nccl_chooses_with_a_warning(make_node):
    node = make_node(num_cpus=8)
    node.gpu(ADDRESSES[0], 0, under="0000:05:01.0")
    node.nic("mlx5_0", "0000:05:02.0", 0, under="0000:05:01.0", state="1: DOWN")
    said = nics(node, 0)
    assert "NCCL chooses" in said
    assert "unset" in said.split("\n")
