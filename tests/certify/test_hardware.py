"""Inventory and health of nodes: the odd one is named, past faults and link errors are reported."""

from __future__ import annotations

import json

import pytest

from certify import hardware
from certify.telemetry import Gpus
from review.__main__ import main
from review.acceptance.verdict import certify, judge, line

from ..review.acceptance.made_up import make, write
from .test_telemetry import nvml  # noqa: F401

NODE = {
    "kernel": "6.8",
    "CPUs": 192,
    "CPU": "a CPU",
    "memory GiB": 2015.4,
    "driver": "560.35.03",
    "GPUs": 2,
}
GPU = {"name": "H100", "memory MiB": 81559, "VBIOS": "96.00.74", "PCIe lanes": 16}
PORT = {"state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)"}
PARTS = {"node": NODE, "GPU 0": GPU, "GPU 1": GPU, "mlx5_0/1": PORT}
HEALTH = {
    "GPU 0": {"row remappings that failed": 0},
    "mlx5_0/1": {"link_downed": 4, "symbol_error": 1},
    "node": {},
}


def records(nodes=4):
    """Equal nodes of two GPUs."""
    found = make(nodes, 2)
    for node in found.nodes:
        found.hardware[node] = json.loads(
            json.dumps({"parts": PARTS, "before": HEALTH, "after": HEALTH})
        )
    return found


def test_equal_nodes_pass_although_firmware_reserves_different_amounts_of_memory():
    found = records()
    found.hardware["node2"]["parts"]["node"]["memory GiB"] = 2013.9
    assert judge(found).why() == []


@pytest.mark.parametrize(
    ("device", "name", "value", "state", "said"),
    [
        ("node", "memory GiB", 1951.0, "fail", "node node2: memory GiB 1951.0, elsewhere 2015.4"),
        ("node", "CPUs", 96, "fail", "node node2: CPUs 96, elsewhere 192"),
        ("node", "driver", "550.1", "warn", "node node2: driver 550.1, elsewhere 560.35.03"),
        ("node", "GPUs", 1, "fail", "node node2: GPUs 1, elsewhere 2"),
        ("GPU 1", "PCIe lanes", 8, "fail", "GPU 1 of node2: PCIe lanes 8, elsewhere 16"),
        (
            "mlx5_0/1",
            "rate",
            None,
            "fail",
            "mlx5_0/1 of node2: rate unknown, elsewhere 400 Gb/sec (4X NDR)",
        ),
        ("mlx5_0/1", None, None, "fail", "mlx5_0/1 of node2: state missing, elsewhere ACTIVE"),
    ],
)
def test_the_odd_node_is_named_with_what_differs(device, name, value, state, said):
    found = records()
    parts = found.hardware["node2"]["parts"]
    if name is None:
        del parts[device]
    else:
        parts[device][name] = value
        if value is None:
            del parts[device][name]
    judged = judge(found)
    assert judged.state == state
    assert judged.reasons()[0] == said


def test_of_two_differing_nodes_neither_is_called_odd():
    found = records(2)
    found.hardware["node1"]["parts"]["node"]["CPUs"] = 96
    assert judge(found).reasons() == ["node of node0 and node1: CPUs 192 and 96"]


def test_a_machine_is_compared_with_a_good_machines_parts(tmp_path, capsys):
    write(tmp_path, records(1))
    (tmp_path / "config.json").write_text("{}")
    assert main(["certify", str(tmp_path), "--expect", str(tmp_path / "good.json")]) == 0
    capsys.readouterr()
    good = json.loads((tmp_path / "good.json").read_text())
    assert good == {"node": NODE, "GPU": GPU, "mlx5_0/1": PORT}
    good["node"]["GPUs"] = 8
    (tmp_path / "config.json").write_text(json.dumps({"expected_parts": good}))
    found = certify(tmp_path)
    assert (found.state, found.reasons()) == ("fail", ["node node0: GPUs 2, expected 8"])


@pytest.mark.parametrize(
    ("device", "name", "count", "state", "said"),
    [
        (
            "GPU 0",
            "row remappings that failed",
            1,
            "fail",
            "GPU 0 of node2: 1 row remappings that failed",
        ),
        (
            "GPU 0",
            "rows remapped after uncorrected errors",
            2,
            "warn",
            "GPU 0 of node2: 2 rows remapped after",
        ),
        (
            "node",
            "Xid 79 in the kernel's log",
            3,
            "warn",
            "node node2: 3 Xid 79 in the kernel's log",
        ),
        (
            "mlx5_0/1",
            "link_downed",
            6,
            "fail",
            "mlx5_0/1 of node2: link_downed grew by 2 during the test",
        ),
        (
            "mlx5_0/1",
            "symbol_error",
            2,
            "warn",
            "mlx5_0/1 of node2: symbol_error grew by 1 during the test",
        ),
        (
            "mlx5_0/1",
            "link_downed",
            1,
            "fail",
            "mlx5_0/1 of node2: link_downed grew by 1 during the test",
        ),
    ],
)
def test_past_faults_of_devices_and_link_errors_are_named(device, name, count, state, said):
    found = records()
    found.hardware["node2"]["after"][device][name] = count
    judged = judge(found)
    assert judged.state == state
    assert judged.reasons()[0].startswith(said)


@pytest.mark.usefixtures("nvml")
def test_parts_and_past_faults_of_gpus_are_read_through_nvml(tmp_path):
    parts, told = hardware.inventory(Gpus([]), tmp_path), hardware.health(Gpus([]), tmp_path)
    assert (parts["node"]["driver"], parts["node"]["GPUs"]) == ("560.35.03", 2)
    assert parts["GPU 1"] == {
        "name": "H100", "memory MiB": 81920, "VBIOS": "96.00.74", "PCIe generation": 5, "PCIe lanes": 16,
        "NVLinks": 2, "ECC": 1, "power limit W": 700,
    }  # fmt: skip
    assert told["GPU 1"]["row remappings that wait for a reset"] == 1
    assert told["GPU 0"]["uncorrected memory errors before the test"] == 99


def test_ports_and_network_cards_are_read_from_sysfs(tmp_path):
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    (port / "counters").mkdir(parents=True)
    for name, text in {
        "state": "4: ACTIVE",
        "rate": "400 Gb/sec (4X NDR)",
        "counters/link_downed": "3",
    }.items():
        (port / name).write_text(text + "\n")
    card = tmp_path / "sys/class/net/eth0"
    (card / "device").mkdir(parents=True)
    for name, text in {"operstate": "up", "carrier_changes": "2"}.items():
        (card / name).write_text(text + "\n")
    assert hardware.inventory(Gpus([]), tmp_path)["mlx5_0/1"] == PORT
    assert hardware.inventory(Gpus([]), tmp_path)["eth0"] == {"state": "up"}
    told = hardware.health(Gpus([]), tmp_path)
    assert (told["mlx5_0/1"], told["eth0"]) == ({"link_downed": 3}, {"carrier_changes": 2})


def test_xids_of_the_kernels_log_are_counted_by_number(monkeypatch, tmp_path):
    line = "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
    monkeypatch.setattr(hardware, "_kernel_log", lambda: 2 * line)
    assert hardware.health(Gpus([]), tmp_path) == {"node": {"Xid 79 in the kernel's log": 2}}


def test_the_certificate_lists_what_was_tested_and_what_was_not(tmp_path):
    write(tmp_path, records(1))
    (tmp_path / "environment.json").write_text(
        json.dumps({"packages": {"torch": "2.13"}, "git_commit": "abc"})
    )
    found = certify(tmp_path).tested
    assert "one rank at a time" in found["tested"]
    assert "all-reduce of all ranks" in found["tested"]
    left = found["not tested"].split("; ")
    assert {"two nodes, gradients reduced", "read of the data disk", "burn-in"} <= {*left}
    assert "health of GPUs" not in found["not tested"]
    assert (found["versions"], found["commit"]) == ("torch 2.13", "abc")


def test_the_line_has_verdict_first_reason_and_drain_command(tmp_path, capsys):
    found = records()
    assert line(judge(found)) == "pass: 8 ranks of node0, node1, node2, node3"
    found.hardware["node2"]["parts"]["node"]["CPUs"] = 96
    found.hardware["node2"]["after"]["GPU 0"]["row remappings that failed"] = 1
    write(tmp_path, found)
    assert main(["certify", str(tmp_path), "--line"]) == 1
    said = capsys.readouterr().out
    assert said == (
        "fail: node node2: CPUs 96, elsewhere 192 and 1 more; scontrol update nodename=node2 state=drain "
        "'reason=certify: node node2: CPUs 96, elsewhere 192'\n"
    )
    found.hardware["node2"]["parts"]["node"] |= {"CPUs": 192, "kernel": "6.9"}
    found.hardware["node2"]["after"]["GPU 0"]["row remappings that failed"] = 0
    assert line(judge(found)) == "warn: node node2: kernel 6.9, elsewhere 6.8"
