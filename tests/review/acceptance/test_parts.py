"""Inventory and health of nodes: the odd one is named, past faults and link errors are reported."""

from __future__ import annotations

import json

import numpy as np
import pytest

from review.__main__ import main
from review.acceptance.schema import COPIES
from review.acceptance.verdict import certify, judge, line

from .made_up import add_rates, make, telemetry, write

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

HOST = "host_to_device_memcpy_ce"


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
        ("mlx5_0/1", "rate", None, "fail", "mlx5_0/1 of node2: rate unknown, elsewhere 400 Gb/sec (4X NDR)"),
        ("mlx5_0/1", None, None, "fail", "mlx5_0/1 of node2: state missing, elsewhere ACTIVE"),
    ],
)  # fmt: skip
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
    said = "node of node0, node1: CPUs 192 (node node0) and 96 (node node1)"
    assert judge(found).reasons() == [said]


@pytest.mark.parametrize(
    ("device", "name", "value", "state", "said"),
    [
        ("node", "memory GiB", 1007.1, "fail", "1007.1 (node node0, node node1) and 2015.4 (node node2, node node3)"),
        ("node", "GPUs", 4, "fail", "4 (node node0, node node1) and 2 (node node2, node node3)"),
        ("node", "driver", None, "warn", "unknown (node node0, node node1) and 560.35.03 (node node2, node node3)"),
        ("mlx5_0/1", "", None, "fail",
         "missing (mlx5_0/1 of node0, mlx5_0/1 of node1) and ACTIVE (mlx5_0/1 of node2, mlx5_0/1 of node3)"),
    ],
)  # fmt: skip
def test_parts_that_differ_on_half_of_the_nodes_name_both_halves(
    device, name, value, state, said
):
    found = records()
    for node in ("node0", "node1"):
        parts = found.hardware[node]["parts"]
        parts[device] = parts[device] | {name: value}
        if not name:
            del parts[device]
    judged = judge(found)
    assert judged.state == state
    assert judged.reasons()[0] == (
        f"{device} of node0, node1, node2, node3: {name or 'state'} {said}"
    )


def test_half_of_the_gpus_of_one_node_with_other_parts_are_named():
    found = records(1)
    parts = found.hardware["node0"]["parts"]
    parts |= {
        f"GPU {number}": GPU | {"PCIe lanes": 4 + 12 * (number % 2)}
        for number in range(18)
    }
    (said,) = judge(found).reasons()
    first = "GPU of node0: PCIe lanes 4 (GPU 0 of node0, GPU 2 of node0, "
    assert said.startswith(first)
    assert ", GPU 14 of node0, ...) and 16 (GPU 1 of node0, " in said
    parts["GPU 2"] = GPU
    odd = "GPU 0 of node0: PCIe lanes 4, elsewhere 16"
    assert judge(found).reasons()[0].startswith(odd)


def test_a_machine_is_compared_with_a_good_machines_parts(tmp_path, capsys):
    write(tmp_path, records(1))
    (tmp_path / "config.json").write_text("{}")
    assert (
        main(["certify", str(tmp_path), "--expect", str(tmp_path / "good.json")]) == 0
    )
    capsys.readouterr()
    good = json.loads((tmp_path / "good.json").read_text())
    assert (
        f"EXPECTED_INVENTORY={tmp_path / 'good.json'}\n"
        in (tmp_path / "good.sh").read_text()
    )
    assert good == {"node": NODE, "GPU": GPU, "mlx5_0/1": PORT}
    good["node"]["GPUs"] = 8
    (tmp_path / "config.json").write_text(json.dumps({"expected_parts": good}))
    found = certify(tmp_path)
    assert (found.state, found.reasons()) == (
        "fail",
        ["node node0: GPUs 2, expected 8"],
    )


@pytest.mark.parametrize(
    ("device", "name", "count", "state", "said"),
    [
        ("GPU 0", "row remappings that failed", 1, "fail", "GPU 0 of node2: 1 row remappings that failed"),
        ("GPU 0", "rows remapped after uncorrected errors", 2, "warn", "GPU 0 of node2: 2 rows remapped after"),
        ("mlx5_0/1", "link_downed", 6, "fail", "mlx5_0/1 of node2: link_downed grew by 2 during the test"),
        ("mlx5_0/1", "symbol_error", 2, "warn", "mlx5_0/1 of node2: symbol_error grew by 1 during the test"),
        ("mlx5_0/1", "link_downed", 1, "fail", "mlx5_0/1 of node2: link_downed grew by 1 during the test"),
    ],
)  # fmt: skip
def test_past_faults_of_devices_and_link_errors_are_named(
    device, name, count, state, said
):
    found = records()
    found.hardware["node2"]["after"][device][name] = count
    judged = judge(found)
    assert judged.state == state
    assert judged.reasons()[0].startswith(said)


XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid=1, more words"
# Before the test; by the log's own clock, here half a minute behind the uptime's.
BEFORE = {"boot": "b0", "read": 430.0, "first": 0.0, "last": 400.0, "lines": []}


def with_log(*lines, before=BEFORE):
    """Records in which the kernel log of node2 has these (time, line) after the test."""
    found = records()
    log = before | {"read": 1000.0, "last": 402.0, "lines": lines}
    found.hardware["node2"] |= {"log_before": before, "kernel_log": log}
    return found


@pytest.mark.parametrize(
    ("line", "during", "old", "what"),
    [
        (XID.format(79), "fail", "warn", "Xid 79 of PCI:0000:3b:00"),
        (XID.format(48), "fail", "warn", "Xid 48 of PCI:0000:3b:00"),
        (XID.format(777), "fail", "warn", "Xid 777 of PCI:0000:3b:00"),
        (XID.format(63), "warn", "warn", "Xid 63 of PCI:0000:3b:00"),
        (XID.format(94), "warn", "warn", "Xid 94 of PCI:0000:3b:00"),
        (XID.format(31), "warn", "pass", "Xid 31 of PCI:0000:3b:00"),
        ("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.", "fail", "warn", "GPU fallen off the bus"),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30", "fail", "warn", "NVSwitch error"),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32", "warn", "pass", "NVSwitch error"),
        ("NVRM: GPU lost from the bus.", "fail", "warn", "GPU fallen off the bus"),
        ("{1}[Hardware Error]: event severity: corrected", "warn", "pass", "corrected hardware error"),
        ("{1}[Hardware Error]: event severity: fatal", "fail", "warn", "hardware error"),
        ("mce: [Hardware Error]: Machine check events logged", "fail", "warn", "machine check"),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0", "fail", "warn", "uncorrected memory error"),
        ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0", "warn", "pass", "corrected memory error"),
        ("pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrected (Fatal)", "fail", "warn", "uncorrected PCIe error"),
        ("pcieport 0000:00:01.0: PCIe Bus Error: severity=Corrected", "warn", "pass", "corrected PCIe error"),
        ("pcieport 0000:00:01.0: PCIe Bus Error: severity=Correctable", "warn", "pass", "corrected PCIe error"),
        ("pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrectable (Fatal)", "fail", "warn", "uncorrected PCIe error"),
        ("pcieport 0000:00:01.0: AER: Correctable error message received", "warn", "pass", "corrected PCIe error"),
        ("pcieport 0000:00:01.0: AER: Uncorrectable (Non-Fatal) error", "fail", "warn", "uncorrected PCIe error"),
        ("EDAC MC1: 262 CE memory read error (syndrome:0x0 - OVERFLOW area:DRAM)", "fail", "warn", "corrected memory errors beyond counting"),
        ("NVRM: GPU3 _kgspIsHeartbeatTimedOut: Heartbeat timed out, diff 5300 timeout 5200", "fail", "warn", "GPU whose system processor (GSP) does not answer"),
        ("CPU7: Core temperature above threshold, cpu clock throttled (total events = 1)", "warn", "pass", "CPU throttled by heat"),
        ("mce: CMCI storm detected: switching to poll mode", "fail", "warn", "storm of corrected machine checks"),
        ("nvme2n1: I/O Cmd(0x2) @ LBA 4096, 8 blocks, I/O Error (sct 0x2 / sc 0x81)", "fail", "warn", "error of an NVMe disk"),
        ("mlx5_core 0000:1a:00.0: poll_health:800:(pid 0): device's health compromised - reached miss count", "fail", "warn", "network adapter in bad health"),
        ("mlx5_core 0000:1a:00.0: Port module event[error]: module 0, Cable error, Bus stuck", "fail", "warn", "network cable or its module"),
        ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:411]", "fail", "pass", "CPU that hung in the kernel"),
        ("Out of memory: Killed process 411 (python)", "warn", "pass", "process killed for want of memory"),
    ],
)  # fmt: skip
def test_a_fault_of_the_kernel_log_fails_in_the_test_warns_before_and_passes_if_over(
    line, during, old, what
):
    day = 86400
    for ago, state, words in (
        (0, during, f"1 {what} in the kernel log during the test"),
        (600, "warn", f"1 {what} in the kernel log, the last 10:00 ago"),
        (day, "warn", f"1 {what} in the kernel log, the last 24:00:00 ago"),
        (day + 1, old, f"1 {what} in the kernel log, the last 24:00:01 ago"),
    ):
        judged = judge(with_log((1000.0 - (ago or 599.9), line)))
        assert judged.state == state
        (said,) = judged.notes if state == "pass" else judged.reasons()
        assert said.partition("; ")[0] == f"node node2: {words}"


def test_the_newest_of_a_kind_decides_whether_it_is_over():
    oom, days = "Out of memory: Killed process 411 (python)", (-5e5, -2e5, 300.0)
    states = [judge(with_log(*((at, oom) for at in days[:n]))).state for n in (1, 2, 3)]
    assert states == ["pass", "pass", "warn"]


SXID = "nvidia-nvswitch2: SXid (PCI:0000:c8:00.0): 12028, "

CHECK = "[Hardware Error]: "


@pytest.mark.parametrize(
    ("lines", "state", "what"),
    [
        ([SXID + "Non-fatal, Link 32 egress", SXID + "Severity 0 Engine instance 32", SXID + "Data {0x1}"], "warn", "1 NVSwitch error"),
        ([SXID + "Data {0x1}", SXID + "Fatal, Link 32 ingress"], "fail", "1 NVSwitch error"),
        ([SXID + "Data {0x1}"], "fail", "1 NVSwitch error"),
        (["mce: " + CHECK + "Machine check events logged", CHECK + "Corrected error, no action required."], "warn", "1 corrected machine check"),
        ([CHECK + "Corrected error, no action required.", CHECK + "Uncorrected, software restartable"], "fail", "1 machine check"),
    ],
)  # fmt: skip
def test_lines_of_one_event_are_judged_together(lines, state, what):
    stamped = [(401.0 + 0.1 * number, line) for number, line in enumerate(lines)]
    judged = judge(with_log(*stamped))
    assert (judged.state, len(judged.why())) == (state, 1)
    assert judged.why()[0].what.startswith(what)


def test_an_older_event_hides_none_of_the_test():
    found = with_log((390.0, SXID + "Non-fatal"), (401.0, SXID + "Fatal"))
    assert [reason.state for reason in judge(found).why()] == ["warn", "fail"]


@pytest.mark.parametrize(
    ("name", "count", "state"),
    [("link_downed", 255, "warn"), ("symbol_error", 65535, "warn"), ("symbol_error", 65534, "pass")],
)  # fmt: skip
def test_a_counter_that_stands_at_its_largest_value_counts_no_more(name, count, state):
    found = records()
    for when in ("before", "after"):
        found.hardware["node1"].setdefault(when, {})["mlx5_0/1"] = {name: count}
    assert judge(found).state == state


def test_a_node_that_does_not_see_the_data_set_of_the_others_is_named():
    found = records()
    for node, facts in found.hardware.items():
        known = {"name": "DATADIR_PHASE2=/d", "needed": 400}
        facts["data_set"] = known | {"blocks": 0 if node == "node2" else 500}
    judged = judge(found)
    (reason,) = judged.reasons()
    assert reason.endswith(" DATADIR_PHASE2=/d is not there, on other nodes it is")
    said = "DATADIR_PHASE2=/d has 0 blocks of 4 MiB, 400 are needed on every node"
    assert f"read of the data disk on node2 ({said})" in judged.tested["not tested"]
    for facts in found.hardware.values():
        facts["data_set"]["blocks"] = 0
    assert judge(found).state == "pass", "no node has one"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ({}, "kernel log on node2 (this user may not read it)"),
        ({"boot": "b0", "first": 500.0, "lines": []}, "kernel log on node2 (its lines of the test are overwritten)"),
        ({"boot": "b1", "first": 0.0, "lines": []}, "kernel log on node2 (its lines of the test are overwritten)"),
    ],
)  # fmt: skip
def test_a_kernel_log_that_was_not_read_whole_is_not_tested(log, said):
    found = records()
    whole = {"boot": "b0", "first": 0.0, "last": 400.0, "lines": []}
    for node, facts in found.hardware.items():
        own = log if node == "node2" else whole
        facts |= {"log_before": whole, "kernel_log": own}
    judged = judge(found)
    assert judged.state == "pass"
    assert said in judged.tested["not tested"].split("; ")
    assert judge(found, required=["kernel_log"]).state == "fail"


def test_a_kernel_log_of_an_unknown_boot_is_not_tested_and_its_faults_count():
    judged = judge(with_log((20.0, XID.format(79)), before=BEFORE | {"boot": ""}))
    assert judged.state == "fail"
    assert "79 of PCI:0000:3b:00 in the kernel log during" in judged.reasons()[0]
    assert "kernel log on node2" in judged.tested["not tested"]


@pytest.mark.parametrize("device", ["GPU 1", "mlx5_0/1"])
def test_a_device_that_is_gone_at_the_end_fails(device):
    found = records()
    for table in ("before", "after"):
        found.hardware["node2"][table]["GPU 1"] = {"row remappings that failed": 0}
    del found.hardware["node2"]["after"][device]
    assert judge(found).reasons() == [f"{device} of node2: gone at the end of the test"]


def test_errors_that_grew_in_the_test_fail_and_a_counter_that_falls_silent_too():
    found = records()
    errors, rows = (
        "uncorrected memory errors",
        "rows remapped after uncorrected errors",
    )
    found.hardware["node2"]["before"]["GPU 0"] = {errors: 2, rows: 7}
    found.hardware["node2"]["after"]["GPU 0"] = {errors: 5, rows: None}
    judged = judge(found)
    grew = f"GPU 0 of node2: 5 {errors}, 3 of them during the test"
    silent = f"GPU 0 of node2: {rows} can no longer be read"
    assert (judged.state, judged.reasons()) == ("fail", [grew, silent])


@pytest.mark.parametrize("lacking", ["node0", "node1"])
def test_of_two_nodes_each_lacks_what_only_the_other_has(lacking):
    found = records(2)
    del found.hardware[lacking]["parts"]["mlx5_0/1"]
    judged = judge(found)
    assert judged.state == "fail"
    assert judged.reasons()[0].startswith("mlx5_0/1 of node0, node1: state ")
    found = records(2)
    found.hardware[lacking]["parts"]["node"]["driver"] = None
    assert judge(found).state == "warn"


def test_expected_parts_add_to_the_comparison_of_peers():
    found = records()
    found.hardware["node2"]["parts"]["node"]["GPUs"] = 1
    for expected in ({}, {"node": {"kernel": "6.8"}}):
        assert judge(found, parts=expected).state == "fail"
    found = records()
    found.hardware["node2"]["parts"]["node"]["GPUs"] = 1
    said = judge(found, parts={"node": {"GPUs": 2}}).reasons()
    assert said == ["node node2: GPUs 1, elsewhere 2", "node node2: GPUs 1, expected 2"]


@pytest.mark.parametrize("device", ["GPU", "GPU 0"])
def test_an_expected_gpu_is_compared_by_its_kind_or_number_and_unknown_is_no_pass(
    device,
):
    found = records(1)
    said = judge(found, parts={device: {"PCIe lanes": 8}}).reasons()
    assert said[0] == "GPU 0 of node0: PCIe lanes 16, expected 8"
    assert len(said) == (2 if device == "GPU" else 1)
    parts = found.hardware["node0"]["parts"]
    found.hardware["node0"]["parts"] = {"node": parts["node"]}
    assert judge(found, parts={device: {"PCIe lanes": 8}}).reasons() == [
        f"{device} of node0: PCIe lanes unknown, expected 8"
    ]


def test_serial_numbers_differ_on_good_machines():
    found = records()
    for number, node in enumerate(found.nodes):
        found.hardware[node]["parts"]["GPU 0"]["serial"] = f"16512{number}"
    judged = judge(found)
    assert judged.why() == []
    assert ("serial numbers of node2", "0 165122") in judged.inventory


def test_a_tool_that_one_node_lacks_is_not_tested_there_and_fails_where_it_is_required():
    found = records()
    for node in found.nodes:
        names = ["dcgmi"] if node == "node2" else ["dcgmi", "nvbandwidth"]
        found.tools[node] = [
            {"name": name, "version": "4", "faults": [], "skipped": []}
            for name in names
        ]
    add_rates(found, {(rank, HOST, -1): 55.0 for rank in (0, 1, 2, 3, 6, 7)})
    judged = judge(found)
    assert judged.state == "pass"
    assert (
        "nvbandwidth on node2 (not installed, or excluded)"
        in judged.tested["not tested"]
    )
    assert "nvbandwidth on node2 (not installed, or excluded)" in line(judged)
    demanded = judge(found, required=["dcgmi", "nvbandwidth"])
    assert demanded.reasons() == [
        "node node2: nvbandwidth: required, not tested: not installed, or excluded"
    ]


def untested(found):
    return judge(found).tested["not tested"].split("; ")


def test_a_program_that_skipped_all_its_tests_has_tested_nothing():
    found = records(2)
    report = {"name": "nvbandwidth", "version": "0.8", "faults": []}
    add_rates(found, {(rank, HOST, -1): 55.0 for rank in found.ranks})
    for node in found.nodes:
        found.tools[node] = [report | {"skipped": [*COPIES]}]
    assert "nvbandwidth (it skipped every test)" in untested(found)
    assert judge(found, required=["nvbandwidth"]).state == "fail"
    for node in found.nodes:
        found.tools[node] = [report | {"skipped": []}]
    assert judge(found, required=["nvbandwidth"]).state == "pass"


@pytest.mark.parametrize(
    ("name", "test", "label"),
    [("nvbandwidth", [*COPIES][2], "copy from another GPU, nvbandwidth"), ("dcgmi", "pcie", "pcie")],
)  # fmt: skip
def test_a_skipped_test_is_in_the_line_and_fails_where_its_program_is_required(
    name, test, label
):
    found = records(2)
    report = {"name": name, "version": "1", "faults": []}
    found.tools["node0"] = [report | {"skipped": [test]}]
    found.tools["node1"] = [report | {"skipped": []}]
    add_rates(found, {(rank, HOST, -1): 55.0 for rank in found.ranks})
    assert f"{label} on node0 (skipped by {name})" in line(judge(found))
    assert judge(found, required=[name]).reasons() == [
        f"node node0: {label}: required, not tested: skipped by {name}"
    ]


@pytest.mark.parametrize(
    ("device", "names", "areas"),
    [
        ("GPU 1", ["memory MiB", "PCIe lanes"], ["inventory", "datasheet"]),
        ("mlx5_0/1", ["state", "rate"], ["inventory"]),
    ],
)
def test_an_unknown_fact_is_in_the_line_and_fails_where_its_area_is_required(
    device, names, areas
):
    found = records(1)
    found.hardware["node0"]["parts"] = {
        part: facts | dict.fromkeys(names if part[:3] == device[:3] else ())
        for part, facts in PARTS.items()
    }
    judged = judge(found)
    assert judged.state == "pass"
    kind = "GPU" if device == "GPU 1" else "mlx5"
    said = ", ".join(f"{name} of {kind}" for name in names)
    assert f"{said}, rated speed of mlx5 (None) (not reported)" in line(judged)
    for area in areas:
        assert any(names[0] in one for one in judge(found, required=[area]).reasons())


def test_a_silent_field_of_telemetry_fails_where_telemetry_is_required():
    found = records(1)
    found.telemetry["node0"] = telemetry(2, 9)
    assert judge(found, required=["telemetry"]).state == "pass"
    found.telemetry["node0"]["nvlink_errors"][:] = np.nan
    assert judge(found, required=["telemetry"]).state == "pass", (
        "not every GPU has them"
    )
    found.telemetry["node0"]["throttle"][:] = np.nan
    assert judge(found, required=["telemetry"]).reasons() == [
        "node node0: throttle of telemetry: required, not tested: not reported"
    ]


def test_what_a_driver_does_not_tell_is_listed_with_the_node_where_others_do():
    found = records()
    for node in found.nodes:
        found.telemetry[node] = telemetry(2, 9)
        found.telemetry[node]["nvlink_errors"][:] = np.nan
    found.telemetry["node3"]["xid_count"][:] = np.nan
    for facts in found.hardware.values():
        facts["before"]["mlx5_0/1"] = {"link_downed": None, "symbol_error": 1}
    found.hardware["node2"]["after"]["GPU 0"] = {"row remappings that failed": None}
    assert {
        "link_downed of mlx5 (not reported)",
        "nvlink_errors of telemetry (not reported)",
        "xid_count of telemetry on node3 (not reported)",
        "row remappings that failed of GPU on node2 (not reported)",
        "rated speed of mlx5 (None) (not reported)",
        "health of GPUs on node2 (not reported)",
    } <= {*untested(found)}
    assert judge(found, required=["health"]).reasons()[-1].startswith("node node2: ")


def test_inventory_and_health_are_listed_as_tested():
    tested = judge(records()).tested["tested"].split("; ")
    assert {"inventory", "health of GPUs"} <= {*tested}


def test_a_test_on_cpus_says_so_and_passes_nothing_but_the_software():
    found = make(1, 4, starved={})
    assert line(judge(found)).startswith(
        "pass (software only: the test ran on CPUs): 4 ranks on 1 node, on CPUs: node0"
    )


def test_each_node_is_drained_for_its_own_reason():
    found = records()
    found.hardware["node1"]["parts"]["node"]["CPUs"] = 96
    found.hardware["node3"]["after"]["GPU 0"]["row remappings that failed"] = 1
    drains = line(judge(found)).split("; scontrol ")[1:]
    assert drains == [
        "update nodename=node1 state=drain 'reason=certify: node node1: CPUs 96, elsewhere 192'",
        "update nodename=node3 state=drain 'reason=certify: GPU 0 of node3: 1 row remappings that failed, "
        "1 of them during the test'",
    ]


def test_the_certificate_lists_what_was_tested_and_what_was_not(tmp_path):
    write(tmp_path, records(1))
    (tmp_path / "environment.json").write_text(
        json.dumps({"packages": {"torch": "2.13"}, "git_commit": "abc"})
    )
    found = certify(tmp_path).tested
    assert "one rank at a time" in found["tested"]
    assert "all-reduce of all ranks" not in found["tested"]
    left = found["not tested"].split("; ")
    assert {"two nodes, gradients reduced", "read of the data disk", "burn-in"} <= {
        *left
    }
    assert "health of GPUs" not in found["not tested"]
    assert (found["versions"], found["commit"]) == ("torch 2.13", "abc")


def test_the_line_has_verdict_first_reason_and_drain_command_and_the_launcher_a_record(
    tmp_path, capsys
):
    found = records()
    said = line(judge(found))
    assert said.startswith(
        "pass: 8 ranks on 4 nodes: node0, node1, node2, node3; not tested: the GPU model's figures"
    )
    assert "nccl-tests, nvbandwidth, dcgmi diag (not installed, or excluded)" in said
    found.hardware["node2"]["parts"]["node"]["CPUs"] = 96
    found.hardware["node2"]["after"]["GPU 0"]["row remappings that failed"] = 1
    write(tmp_path, found)
    records_file = tmp_path / "unfit"
    assert (
        main(["certify", str(tmp_path), "--line", "--records", str(records_file)]) == 1
    )
    reason = "node node2: CPUs 96, elsewhere 192"
    assert records_file.read_text() == f"unfit\t-\tnode2\t-\t{reason}\n"
    said = capsys.readouterr().out
    verdict, _, rest = said.partition("; not tested: ")
    assert f"{verdict}; scontrol{rest.partition('; scontrol')[2]}" == (
        "fail: node node2: CPUs 96, elsewhere 192 and 1 more; scontrol update nodename=node2 state=drain "
        "'reason=certify: node node2: CPUs 96, elsewhere 192'\n"
    )
    found.hardware["node2"]["parts"]["node"] |= {"CPUs": 192, "kernel": "6.9"}
    found.hardware["node2"]["after"]["GPU 0"]["row remappings that failed"] = 0
    assert line(judge(found)).startswith(
        "warn: node node2: kernel 6.9, elsewhere 6.8; not tested: "
    )
