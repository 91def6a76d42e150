"""One machine without peers is judged by what its GPUs' datasheets say."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from review.acceptance import coverage
from review.acceptance.floors import PAIRS, TABLE, floor_of, least
from review.acceptance.schema import RankInfo
from review.acceptance.verdict import judge, line

from .made_up import add_rates, make

H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory MiB": 81559,
    "NVLinks": 18,
    "PCIe generation": 5,
    "PCIe lanes": 16,
    "ECC": 1,
    "power limit W": 700,
    "SM MHz": 1980,
}
PORT = {"state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)", "type": "MT4129"}


def machine(**changes):
    """One node of eight equal GPUs and two ports; changes: facts of every GPU or port, by name."""
    found = make(1, 8)
    name = changes.get("name", H100["name"])
    found.ranks.update({rank: RankInfo(rank, rank, "node0", name) for rank in range(8)})
    gpu = H100 | {name: value for name, value in changes.items() if name in H100}
    port = PORT | {name: value for name, value in changes.items() if name in PORT}
    parts = {
        "node": {"GPUs": 8, "GPUs on the PCI bus": 8},
        "mlx5_0/1": port,
        "mlx5_1/1": port,
    }
    parts |= {f"GPU {number}": gpu for number in range(8)}
    found.hardware["node0"] = {"parts": parts, "before": {}, "after": {}}
    return found


def test_a_machine_that_has_what_its_datasheet_says_passes():
    assert judge(machine()).why() == []


@pytest.mark.parametrize(
    ("fact", "value", "state", "said"),
    [
        ("NVLinks", 0, "fail", "NVLinks 0, at least 18 expected (NVIDIA H100 datasheet)"),
        ("PCIe lanes", 8, "fail", "PCIe lanes 8, at least 16 expected"),
        ("PCIe generation", 3, "fail", "PCIe generation 3, at least 5 expected"),
        ("ECC", 0, "fail", "ECC is off"),
        ("memory MiB", 40000, "fail", "memory MiB 40000, at least 79000 expected"),
        ("power limit W", 300, "warn", "power limit W 300, at least 700 expected"),
        ("SM MHz", 1200, "warn", "SM MHz 1200, at least 1900 expected"),
        ("state", "INIT", "fail", "state INIT, ACTIVE expected"),
        ("state", "DOWN", "warn", "is down, as is every port of its type"),
        ("rate", "200 Gb/sec (4X HDR)", "warn", "runs at 200 of the 400 Gbit/s"),
    ],
)  # fmt: skip
def test_what_all_parts_of_one_machine_lack_is_seen(fact, value, state, said):
    judged = judge(machine(**{fact: value}))
    assert judged.state == state
    assert said in judged.reasons()[0]


def test_a_port_that_is_down_beside_one_that_is_up_fails():
    found = machine()
    found.hardware["node0"]["parts"]["mlx5_1/1"] = PORT | {"state": "DOWN"}
    assert judge(found).reasons() == ["mlx5_1/1 of node0: state DOWN, ACTIVE expected"]


@pytest.mark.parametrize("seen", [0, 7])
def test_gpus_on_the_bus_that_no_driver_runs_fail(seen):
    found = machine()
    found.hardware["node0"]["parts"]["node"]["GPUs"] = seen
    words = f"node node0: the driver runs {seen} of the 8 GPUs on the PCI bus"
    assert judge(found).reasons() == [words]


def test_gpus_that_cannot_be_asked_for_want_of_nvml_are_not_tested():
    found = machine()
    own = found.hardware["node0"]["parts"]
    own["node"]["GPUs"] = None
    found.hardware["node0"]["parts"] = {"node": own["node"]}
    judged = judge(found)
    assert judged.state == "pass"
    assert (
        f"inventory, the GPU model's figures, health of GPUs, telemetry of GPUs ({coverage.NO_NVML})"
        in line(judged)
    )
    assert judge(found, required=["inventory"]).state == "fail"


@pytest.mark.parametrize("unknown", [(), (0, 3)])
def test_a_gpu_is_judged_by_the_rates_of_its_own_datasheet(unknown):
    found = machine()
    for rank in unknown:  # a model without figures leaves the others theirs
        found.ranks[rank] = RankInfo(rank, rank, "node0", "NVIDIA Tomorrow")
    for rate, state in ((600e12, "pass"), (300e12, "fail")):
        rows = [
            (rank, b"matmul", number, -1, 1e12 / rate, 1e12)
            for rank in range(8)
            for number in range(6)
        ]
        for column, name in enumerate(
            ("rank", "probe", "round", "partner", "seconds", "amount")
        ):
            found.probes[name] = np.array([row[column] for row in rows])
        judged = judge(found)
        assert judged.state == state
    assert [reason.partition(":")[0] for reason in judged.reasons()] == [
        f"rank {rank} on node0" for rank in range(8) if rank not in unknown
    ]
    assert "300 Tflop/s, at least 445.1 by its datasheet" in judged.reasons()[0]


@pytest.mark.parametrize(
    ("gpus", "rate", "state"),
    [(8, 250.0, "fail"), (8, 280.0, "pass"), (4, 95.0, "pass")],
)
def test_links_of_all_gpus_at_half_their_rate_are_seen_on_one_machine(
    gpus, rate, state
):
    found = make(1, gpus)
    name = H100["name"]
    found.ranks.update(
        {rank: RankInfo(rank, rank, "node0", name) for rank in range(gpus)}
    )
    rows = [
        (rank, PAIRS.encode(), number, peer, 1 / rate, 1e9)
        for rank, peer in permutations(range(gpus), 2)
        for number in range(3)
    ]
    for column, name in enumerate(found.probes):
        found.probes[name] = np.array([row[column] for row in rows])
    judged = judge(found)
    assert judged.state == state
    assert len(judged.reasons()) == (gpus if state == "fail" else 0)
    # Of most pairs each round lacks the time: there is no typical one to judge.
    numbers = (found.probes["rank"] + found.probes["partner"]) % 3
    measured = found.probes["round"] == numbers
    for name, values in found.probes.items():
        found.probes[name] = values[measured]
    assert judge(found).state


HOST = ("host_to_device_memcpy_ce", "device_to_host_memcpy_ce")


@pytest.mark.parametrize("name", HOST)
@pytest.mark.parametrize("slow", [range(8), range(4), range(3, 8)])
def test_copies_from_and_to_the_host_below_their_bus_fail_on_one_machine(name, slow):
    found = machine()
    rates = {(rank, one, -1): 55.0 for rank in range(8) for one in HOST}
    add_rates(found, rates)
    found.tools["node0"] = [{"name": "nvbandwidth", "faults": [], "skipped": []}]
    found.tools["node0"][0]["version"] = "0.8"
    assert judge(found, required=["nvbandwidth"]).why() == []
    slowed = found.probes["probe"] == name.encode()
    slowed &= np.isin(found.probes["rank"], slow)
    found.probes["seconds"][slowed] *= 5
    reasons = judge(found).reasons()
    assert len(reasons) == len(slow)
    assert "11 GB/s, at least 37.8 by its datasheet" in reasons[0]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [("NVIDIA GB200", 165, 60), ("NVIDIA GH200 480GB", 295, 120)],
)
def test_a_host_that_is_no_pcie_bus_has_a_floor_of_its_own(name, good, bad):
    for rate, state in ((good, "pass"), (bad, "fail")):
        found = make(1, 4)
        found.ranks.update(
            {rank: RankInfo(rank, rank, "node0", name) for rank in range(4)}
        )
        add_rates(found, {(rank, HOST[1], -1): rate for rank in range(4)})
        assert judge(found).state == state


def test_gpus_without_a_rank_are_not_tested_and_show_that_the_machine_has_switches():
    found = machine()
    parts = found.hardware["node0"]["parts"]
    found = make(1, 4)
    found.hardware["node0"] = {"parts": parts, "before": {}, "after": {}}
    found.ranks.update(
        {rank: RankInfo(rank, rank, "node0", H100["name"]) for rank in range(4)}
    )
    add_rates(found, {(a, PAIRS, b): 280.0 for a, b in permutations(range(4), 2)})
    judged = judge(found)
    assert judged.state == "pass"
    assert "4 of its 8 GPUs (no rank ran on them)" in line(judged)
    for area in ("telemetry", "datasheet", "nvbandwidth", "nccl"):
        said = "4 of its 8 GPUs: required, not tested: no rank ran on them"
        assert f"node node0: {said}" in judge(found, required=[area]).reasons()
    found.probes["seconds"][found.probes["probe"] == PAIRS.encode()] *= 2
    assert judge(found).state == "fail"
    # Four GPUs beside one that only drives a display are connected without a switch.
    for number in range(4, 8):
        parts[f"GPU {number}"] = parts[f"GPU {number}"] | {"name": "NVIDIA T400"}
    assert not any("datasheet" in one for one in judge(found).reasons())


def test_a_model_without_figures_is_not_tested_against_them():
    found = judge(machine(name="NVIDIA Tomorrow"))
    assert found.state == "pass"
    assert (
        "the GPU model's figures (no figures of NVIDIA Tomorrow)"
        in found.tested["not tested"]
    )


def test_names_of_the_published_gpus_have_a_row_of_their_own():
    names = {
        "NVIDIA A100-SXM4-40GB": 39000, "NVIDIA A100-SXM4-80GB": 79000, "NVIDIA A100-PCIE-40GB": 39000,
        "NVIDIA A100 80GB PCIe": 79000, "NVIDIA A30": 23500, "NVIDIA H100 80GB HBM3": 79000, "NVIDIA H100 PCIe": 79000,
        "NVIDIA H200": 138000, "NVIDIA H200 NVL": 138000, "NVIDIA B200": 176000, "NVIDIA GB200": 180000,
        "NVIDIA B300 SXM6 AC": 264000,
        "NVIDIA GH200 480GB": 92000, "NVIDIA GH200 144G HBM3e": 92000, "NVIDIA L40S": 45000, "NVIDIA L40": 45000,
    }  # fmt: skip
    assert {name: floor_of(name).get("memory") for name in names} == names
    assert all(row["source"] for row in TABLE["gpus"].values())


@pytest.mark.parametrize(
    ("probe", "measured"),
    [("matmul", 1850), ("matmul_fp8", 3980), ("copy", 6900), (PAIRS, 710), ("host_copy", 58)],
)  # fmt: skip
def test_what_others_measured_of_a_b300_is_above_its_floor_and_a_third_of_it_is_not(
    probe, measured
):
    assert measured / 3 < least(probe, "NVIDIA B300 SXM6 AC", 8) < measured


def test_the_docs_name_every_model_with_figures(repository):
    docs = (repository / "docs/certify.md").read_text()
    row = docs.partition("| datasheet |")[2].partition("\n")[0]
    models = {re.search(r"[A-Z]+\d+S?", model)[0] for model in TABLE["gpus"]}
    assert models <= {*re.findall(r"\w+", row)}


@pytest.mark.parametrize(
    "name", ["NVIDIA RTX A3000 Laptop GPU", "NVIDIA A30X", "NVIDIA L4", "NVIDIA GB300", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA GH200 480GB MIG 1g.12gb", "", None]
)  # fmt: skip
def test_another_model_or_a_slice_of_a_gpu_has_no_row(name):
    assert floor_of(name) == {}


@pytest.mark.parametrize(
    ("system", "gpus", "ports", "state"),
    [
        ("NVIDIA DGXH100", 8, 8, "pass"),
        ("NVIDIA DGXH100", 7, 8, "fail"),
        ("NVIDIA DGXH100", 4, 8, "fail"),
        ("NVIDIA DGXH100", 8, 7, "warn"),
        ("A server of another maker", 8, 2, "pass"),
        ("A server of another maker", 7, 2, "fail"),
        ("A server of another maker", 4, 2, "pass"),
    ],
)
def test_a_known_system_has_its_gpus_and_ports(system, gpus, ports, state):
    found = machine()
    ranks = {rank: info for rank, info in found.ranks.items() if rank < gpus}
    found = replace(found, ranks=ranks)
    for table in (found.steps, found.probes):
        chosen = table["rank"] < gpus
        table.update({name: column[chosen] for name, column in table.items()})
    parts = found.hardware["node0"]["parts"]
    for number in range(gpus, 8):
        del parts[f"GPU {number}"]
    parts["node"] |= {"system": system, "GPUs": gpus, "GPUs on the PCI bus": gpus}
    parts |= {f"mlx5_{number}/1": PORT for number in range(2, ports)}
    if ports < 2:
        del parts["mlx5_1/1"]
    assert judge(found).state == state


@pytest.mark.parametrize(
    ("name", "size", "rate", "state"),
    [
        ("NVIDIA H200", 1 << 30, 480.0, "pass"),
        ("NVIDIA H200", 1 << 30, 142.0, "fail"),
        ("NVIDIA H200", 1 << 30, 15.0, "fail"),
        ("NVIDIA A100-SXM4-40GB", 1 << 30, 230.0, "pass"),
        ("NVIDIA A100-SXM4-40GB", 1 << 26, 201.0, "pass"),
        ("NVIDIA A100-SXM4-40GB", 1 << 26, 67.0, "fail"),
        ("NVIDIA A100-SXM4-40GB", 1 << 20, 24.5, "pass"),
        ("NVIDIA GeForce RTX 4090", 1 << 30, 15.0, "pass"),
    ],
)
def test_the_all_reduce_of_one_node_has_a_floor(name, size, rate, state):
    found = make(1, 8)
    found.ranks.update({rank: RankInfo(rank, rank, "node0", name) for rank in range(8)})
    add_rates(found, {(0, "all_reduce_perf", -1): rate})
    new = found.probes["probe"] == b"all_reduce_perf"
    found.probes["seconds"][new] *= size / 1e9
    found.probes["amount"][new] = size
    assert judge(found).state == state


def test_host_copies_of_two_sockets_pass_and_half_a_bus_does_not():
    for slow, state in ((23.9, "pass"), (12.0, "fail")):
        found = make(1, 8)
        rates = [26.4] * 4 + [24.2, 24.1, 24.0, slow]
        add_rates(
            found,
            {
                (rank, "host_to_device_memcpy_ce", -1): rate
                for rank, rate in enumerate(rates)
            },
        )
        assert judge(found).state == state
