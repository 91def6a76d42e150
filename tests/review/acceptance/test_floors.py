"""One machine without peers is judged by what its GPUs' datasheets say."""

import re
from dataclasses import replace
from itertools import permutations

import pytest

from review.acceptance import coverage
from review.acceptance.floors import PAIRS, TABLE, floor_of, least
from review.acceptance.schema import COPIES, RankInfo
from review.acceptance.verdict import judge, line

from .made_up import add_rates, chosen, make

NAME = "NVIDIA H100 80GB HBM3"
H100 = {
    "name": NAME, "memory MiB": 81559, "NVLinks": 18, "PCIe generation": 5, "PCIe lanes": 16, "ECC": 1,
    "power limit W": 700, "SM MHz": 1980,
}  # fmt: skip
PORT = {"state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)", "type": "MT4129"}
HOST = [*COPIES][:2]


def machine(gpus=8, ports=2, ranks=None, node=(), **changes):
    """One node of equal GPUs and ports. node: its facts; changes: facts of every GPU or port."""
    gpu = {name: changes.get(name, value) for name, value in H100.items()}
    port = {name: changes.get(name, value) for name, value in PORT.items()}
    found = make(1, ranks or gpus, gpu=gpu["name"])
    parts = {"node": {"GPUs": gpus, "GPUs on the PCI bus": gpus} | dict(node)}
    parts |= {f"mlx5_{number}/1": dict(port) for number in range(ports)}
    parts |= {f"GPU {number}": dict(gpu) for number in range(gpus)}
    found.hardware["node0"] = {"parts": parts, "before": {}, "after": {}}
    return found


@pytest.mark.parametrize(
    ("changes", "state", "said"),
    [
        ({}, "pass", ""),
        ({"NVLinks": 0}, "fail", "NVLinks 0, at least 18 expected (NVIDIA H100 datasheet)"),
        ({"PCIe lanes": 8}, "fail", "PCIe lanes 8, at least 16 expected"),
        ({"PCIe generation": 3}, "fail", "PCIe generation 3, at least 5 expected"),
        ({"ECC": 0}, "fail", "ECC is off"),
        ({"memory MiB": 40000}, "fail", "memory MiB 40000, at least 79000 expected"),
        ({"power limit W": 300}, "warn", "power limit W 300, at least 700 expected"),
        ({"SM MHz": 1200}, "warn", "SM MHz 1200, at least 1900 expected"),
        ({"state": "INIT"}, "fail", "state INIT, ACTIVE expected"),
        ({"state": "DOWN"}, "warn", "is down, as is every port of its type"),
        ({"rate": "200 Gb/sec (4X HDR)"}, "warn", "runs at 200 of the 400 Gbit/s"),
        ({"node": {"GPUs": 0}}, "fail", "node node0: the driver runs 0 of the 8 GPUs on the PCI bus"),
        ({"node": {"GPUs": 7}}, "fail", "node node0: the driver runs 7 of the 8 GPUs on the PCI bus"),
    ],
)  # fmt: skip
def test_what_all_parts_of_one_machine_lack_is_seen(changes, state, said):
    judged = judge(machine(**changes))
    assert (judged.state, bool(judged.reasons())) == (state, state != "pass")
    assert said in "".join(judged.reasons()[:1])
    if "node" in changes:
        assert judged.reasons() == [said]


def test_a_port_that_is_down_beside_one_that_is_up_fails():
    found = machine()
    found.hardware["node0"]["parts"]["mlx5_1/1"]["state"] = "DOWN"
    assert judge(found).reasons() == ["mlx5_1/1 of node0: state DOWN, ACTIVE expected"]


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
    assert judge(machine(gpus, ports, node={"system": system})).state == state


def test_gpus_that_cannot_be_asked_for_want_of_nvml_are_not_tested():
    found = machine(node={"GPUs": None})
    own = found.hardware["node0"]
    own["parts"] = {"node": own["parts"]["node"]}
    areas = "inventory, the GPU model's figures, health of GPUs, telemetry of GPUs"
    assert judge(found).state == "pass"
    assert f"{areas} ({coverage.NO_NVML})" in line(judge(found))
    assert judge(found, required=["inventory"]).state == "fail"


@pytest.mark.parametrize("unknown", [(), (0, 3)])
def test_a_gpu_is_judged_by_the_rates_of_its_own_datasheet(unknown):
    for rate, state in ((600e3, "pass"), (300e3, "fail")):
        found = machine()
        for rank in unknown:  # a model without figures leaves the others theirs
            found.ranks[rank] = RankInfo(rank, rank, "node0", "NVIDIA Tomorrow")
        add_rates(found, {(rank, "matmul", -1): rate for rank in range(8)}, 6, 1e12)
        judged = judge(found)
        assert judged.state == state
    slow = [f"rank {rank} on node0" for rank in range(8) if rank not in unknown]
    assert [reason.name for reason in judged.why()] == slow
    assert "300 Tflop/s, at least 445.1 by its datasheet" in judged.reasons()[0]


@pytest.mark.parametrize(
    ("name", "slow"),
    [(HOST[0], range(8)), (HOST[1], range(4)), (HOST[0], range(3, 8))],
)
def test_copies_from_and_to_the_host_below_their_bus_fail_on_one_machine(name, slow):
    found = machine()
    add_rates(found, {(rank, one, -1): 55.0 for rank in range(8) for one in HOST})
    told = {"name": "nvbandwidth", "version": "0.8", "faults": [], "skipped": []}
    found.tools["node0"] = [told]
    assert judge(found, required=["nvbandwidth"]).why() == []
    slowed = chosen(found.probes, probe=[name.encode()], rank=slow)
    found.probes["seconds"][slowed] *= 5
    reasons = judge(found).reasons()
    assert len(reasons) == len(slow)
    assert "11 GB/s, at least 37.8 by its datasheet" in reasons[0]


def pairs(gpus, rate):
    return {(rank, PAIRS, peer): rate for rank, peer in permutations(range(gpus), 2)}


def to_host(*rates):
    return {(rank, HOST[1], -1): rate for rank, rate in enumerate(rates)}


def all_reduce(rate):
    return {(0, "all_reduce_perf", -1): rate}


GB200, GH200 = "NVIDIA GB200", "NVIDIA GH200 480GB"
H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-40GB"
SOCKETS = [26.4] * 4 + [24.2, 24.1, 24.0]


@pytest.mark.parametrize(
    ("name", "gpus", "rates", "amount", "state"),
    [
        # Links of all GPUs at half their rate; four may be connected without a switch.
        (NAME, 8, pairs(8, 250.0), 1e9, "fail"),
        (NAME, 8, pairs(8, 280.0), 1e9, "pass"),
        (NAME, 4, pairs(4, 95.0), 1e9, "pass"),
        # A host that is no PCIe bus; hosts of two sockets, and half a bus.
        (GB200, 4, to_host(*[165] * 4), 1e9, "pass"),
        (GB200, 4, to_host(*[60] * 4), 1e9, "fail"),
        (GH200, 4, to_host(*[295] * 4), 1e9, "pass"),
        (GH200, 4, to_host(*[120] * 4), 1e9, "fail"),
        ("", 8, to_host(*SOCKETS, 23.9), 1e9, "pass"),
        ("", 8, to_host(*SOCKETS, 12.0), 1e9, "fail"),
        (H200, 8, all_reduce(480.0), 1 << 30, "pass"),
        (H200, 8, all_reduce(142.0), 1 << 30, "fail"),
        (A100, 8, all_reduce(230.0), 1 << 30, "pass"),
        (A100, 8, all_reduce(201.0), 1 << 26, "pass"),
        (A100, 8, all_reduce(67.0), 1 << 26, "fail"),
        (A100, 8, all_reduce(24.5), 1 << 20, "pass"),
        ("NVIDIA GeForce RTX 4090", 8, all_reduce(15.0), 1 << 30, "pass"),
    ],
)  # fmt: skip
def test_rates_of_one_machine_have_floors(name, gpus, rates, amount, state):
    found = judge(add_rates(make(1, gpus, gpu=name), rates, amount=amount))
    assert found.state == state
    if len(rates) == gpus * (gpus - 1):
        assert len(found.reasons()) == (gpus if state == "fail" else 0)


def test_pairs_of_gpus_of_which_each_round_lacks_most_are_not_judged():
    found = add_rates(make(1, 8, gpu=NAME), pairs(8, 250.0))
    probes = found.probes
    measured = (probes["rank"] + probes["partner"]) % 3 == probes["round"]
    found = replace(found, probes={name: own[measured] for name, own in probes.items()})
    assert judge(found).state == "pass"


def test_gpus_without_a_rank_are_not_tested_and_show_that_the_machine_has_switches():
    found = add_rates(machine(ranks=4), pairs(4, 280.0))
    assert judge(found).state == "pass"
    assert "4 of its 8 GPUs (no rank ran on them)" in line(judge(found))
    for area in coverage.OF_EVERY_GPU:
        said = "4 of its 8 GPUs: required, not tested: no rank ran on them"
        assert f"node node0: {said}" in judge(found, required=[area]).reasons()
    found.probes["seconds"][found.probes["probe"] == PAIRS.encode()] *= 2
    assert judge(found).state == "fail"
    # Four GPUs beside one that only drives a display are connected without a switch.
    for number in range(4, 8):
        found.hardware["node0"]["parts"][f"GPU {number}"]["name"] = "NVIDIA T400"
    assert not any("datasheet" in one for one in judge(found).reasons())


def test_a_model_without_figures_is_not_tested_against_them():
    found = judge(machine(name="NVIDIA Tomorrow"))
    said = "the GPU model's figures (no figures of NVIDIA Tomorrow)"
    assert (found.state, said in found.tested["not tested"]) == ("pass", True)


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
    slices = "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA GH200 480GB MIG 1g.12gb"
    others = "NVIDIA RTX A3000 Laptop GPU", "NVIDIA A30X", "NVIDIA L4", "NVIDIA GB300"
    assert [floor_of(name) for name in (*slices, *others, "", None)] == [{}] * 8


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
