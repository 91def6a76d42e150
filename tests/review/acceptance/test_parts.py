"""Inventory and health of nodes: the odd one is named, past faults and link errors are reported."""

import json

import numpy as np
import pytest

from review.acceptance.schema import COPIES
from review.acceptance.verdict import certify, judge, line

from .made_up import add_rates, make, telemetry, write

NODE = {
    "kernel": "6.8", "CPUs": 192, "CPU": "a CPU", "memory GiB": 2015.4, "driver": "560.35.03", "GPUs": 2,
}  # fmt: skip
GPU = {"name": "H100", "memory MiB": 81559, "VBIOS": "96.00.74", "PCIe lanes": 16}
PORT = {"state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)"}
PARTS = {"node": NODE, "GPU 0": GPU, "GPU 1": GPU, "mlx5_0/1": PORT}
FAILED, REMAPPED = (
    "row remappings that failed",
    "rows remapped after uncorrected errors",
)
ERRORS = "uncorrected memory errors"
HEALTH = {
    "GPU 0": {FAILED: 0}, "mlx5_0/1": {"link_downed": 4, "symbol_error": 1}, "node": {}
}  # fmt: skip
HOST = "host_to_device_memcpy_ce"


def records(nodes=4):
    """Equal nodes of two GPUs, whose speed nobody asks: two rounds are quick to judge."""
    found = make(nodes, 2, rounds=2)
    for node in found.nodes:
        whole = {"parts": PARTS, "before": HEALTH, "after": HEALTH}
        found.hardware[node] = json.loads(json.dumps(whole))
    return found


@pytest.mark.parametrize(
    ("nodes", "odd", "device", "name", "value", "state", "said"),
    [
        # Firmware reserves different amounts.
        (4, (2,), "node", "memory GiB", 2013.9, "pass", ""),
        (4, (2,), "node", "memory GiB", 1951.0, "fail", "node node2: memory GiB 1951.0, elsewhere 2015.4"),
        (4, (2,), "node", "CPUs", 96, "fail", "node node2: CPUs 96, elsewhere 192"),
        (4, (2,), "node", "driver", "550.1", "warn", "node node2: driver 550.1, elsewhere 560.35.03"),
        (4, (2,), "node", "kernel", "6.9", "warn", "node node2: kernel 6.9, elsewhere 6.8"),
        (4, (2,), "GPU 1", "PCIe lanes", 8, "fail", "GPU 1 of node2: PCIe lanes 8, elsewhere 16"),
        (4, (2,), "mlx5_0/1", "rate", None, "fail", "mlx5_0/1 of node2: rate unknown, elsewhere 400 Gb/sec (4X NDR)"),
        (4, (2,), "mlx5_0/1", "", None, "fail", "mlx5_0/1 of node2: state missing, elsewhere ACTIVE"),
        # Without a majority nobody is odd, and both halves are named.
        (2, (1,), "node", "CPUs", 96, "fail", "node of node0, node1: CPUs 192 (node node0) and 96 (node node1)"),
        (2, (0,), "node", "driver", None, "warn", "node of node0, node1: driver unknown (node node0) and 560.35.03 (node node1)"),
        (2, (1,), "node", "driver", None, "warn", "node of node0, node1: driver 560.35.03 (node node0) and unknown (node node1)"),
        (2, (0,), "mlx5_0/1", "", None, "fail", "mlx5_0/1 of node0, node1: state missing (mlx5_0/1 of node0) and ACTIVE (mlx5_0/1 of node1)"),
        (2, (1,), "mlx5_0/1", "", None, "fail", "mlx5_0/1 of node0, node1: state ACTIVE (mlx5_0/1 of node0) and missing (mlx5_0/1 of node1)"),
        (4, (0, 1), "node", "memory GiB", 1007.1, "fail",
         "node of node0, node1, node2, node3: memory GiB 1007.1 (node node0, node node1) and 2015.4 (node node2, node node3)"),
    ],
)  # fmt: skip
def test_the_odd_node_is_named_with_what_differs_and_of_two_halves_both(
    nodes, odd, device, name, value, state, said
):
    found = records(nodes)
    for number in odd:
        parts = found.hardware[f"node{number}"]["parts"]
        parts[device][name] = value
        if not name:
            del parts[device]
    judged = judge(found)
    assert (judged.state, "".join(judged.reasons()[:1])) == (state, said)


def test_half_of_the_gpus_of_one_node_with_other_parts_are_named():
    found = records(1)
    parts = found.hardware["node0"]["parts"]
    for number in range(18):
        parts[f"GPU {number}"] = GPU | {"PCIe lanes": 4 + 12 * (number % 2)}
    (said,) = judge(found).reasons()
    first = "GPU of node0: PCIe lanes 4 (GPU 0 of node0, GPU 2 of node0, "
    assert said.startswith(first)
    assert ", GPU 14 of node0, ...) and 16 (GPU 1 of node0, " in said
    parts["GPU 2"] = GPU
    odd = "GPU 0 of node0: PCIe lanes 4, elsewhere 16"
    assert judge(found).reasons()[0].startswith(odd)


def test_a_machine_is_compared_with_a_good_machines_parts(certified, tmp_path):
    path = tmp_path / "good.json"
    assert certified(records(1), "--expect", str(path))[0] == 0
    assert f"EXPECTED_INVENTORY={path}\n" in (tmp_path / "good.sh").read_text()
    good = json.loads(path.read_text())
    assert good == {"node": NODE, "GPU": GPU, "mlx5_0/1": PORT}
    write(tmp_path, records(1), expected_parts=good | {"node": NODE | {"GPUs": 8}})
    assert certify(tmp_path).reasons() == ["node node0: GPUs 2, expected 8"]


ELSEWHERE = "node node2: CPUs 96, elsewhere 192"
LANES = {"PCIe lanes": 8}


@pytest.mark.parametrize(
    ("cpus", "expected", "said"),
    [
        (96, {"node": {"kernel": "6.8"}}, [ELSEWHERE]),
        (96, {"node": {"CPUs": 192}}, [ELSEWHERE, "node node2: CPUs 96, expected 192"]),
        (192, {"GPU 0": LANES}, [f"GPU 0 of node{n}: PCIe lanes 16, expected 8" for n in range(4)]),
        (192, {"GPU": LANES}, [f"GPU {gpu} of node{n}: PCIe lanes 16, expected 8" for n in range(4) for gpu in (0, 1)]),
        (192, {"GPU": {"NVLinks": 4}}, [f"GPU {gpu} of node{n}: NVLinks unknown, expected 4" for n in range(4) for gpu in (0, 1)]),
        (192, {"GPU 7": LANES}, [f"GPU 7 of node{n}: PCIe lanes unknown, expected 8" for n in range(4)]),
    ],
)  # fmt: skip
def test_expected_parts_add_to_the_comparison_of_peers(cpus, expected, said):
    found = records()
    found.hardware["node2"]["parts"]["node"]["CPUs"] = cpus
    assert judge(found, parts=expected).reasons() == said


@pytest.mark.parametrize(
    ("device", "before", "after", "state", "said"),
    [
        ("GPU 0", {FAILED: 0}, {FAILED: 1}, "fail", "1 row remappings that failed, 1 of them during the test"),
        ("GPU 0", {ERRORS: 2}, {ERRORS: 5}, "fail", "5 uncorrected memory errors, 3 of them during the test"),
        ("GPU 0", {}, {REMAPPED: 2}, "warn", "2 rows remapped after uncorrected errors, before the test"),
        ("GPU 0", {REMAPPED: 7}, {REMAPPED: None}, "fail", "rows remapped after uncorrected errors can no longer be read"),
        ("GPU 1", {FAILED: 0}, None, "fail", "gone at the end of the test"),
        ("mlx5_0/1", {"link_downed": 4}, None, "fail", "gone at the end of the test"),
        ("mlx5_0/1", {"link_downed": 4}, {"link_downed": 6}, "fail", "link_downed grew by 2 during the test"),
        ("mlx5_0/1", {"symbol_error": 1}, {"symbol_error": 2}, "warn", "symbol_error grew by 1 during the test"),
        # A counter restarts with its driver; one at its largest value counts no more.
        ("mlx5_0/1", {"link_downed": 4}, {"link_downed": 1}, "fail", "link_downed grew by 1 during the test"),
        ("mlx5_0/1", {"link_downed": 255}, {"link_downed": 255}, "warn", "link_downed stands at 255"),
        ("mlx5_0/1", {"symbol_error": 65535}, {"symbol_error": 65535}, "warn", "symbol_error stands at 65535"),
        ("mlx5_0/1", {"symbol_error": 65534}, {"symbol_error": 65534}, "pass", None),
    ],
)  # fmt: skip
def test_faults_of_devices_and_of_links_are_named(device, before, after, state, said):
    found = records()
    own = found.hardware["node2"]
    own["before"][device], own["after"][device] = before, after
    if after is None:
        del own["after"][device]
    judged = judge(found)
    assert judged.state == state
    words = [f"{device} of node2: {said}"] * (said is not None)
    assert [one.partition(", its")[0] for one in judged.reasons()] == words


XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid=1, more words"
SXID = "nvidia-nvswitch2: SXid (PCI:0000:c8:00.0): 12028, "
CHECK = "[Hardware Error]: "
# Before the test; by the log's own clock, here half a minute behind the uptime's.
BEFORE = {"boot": "b0", "read": 430.0, "first": 0.0, "last": 400.0, "lines": []}


def with_log(*lines, before=BEFORE, **log):
    """Records in which the kernel log of node2 has these (time, line) after the test."""
    found = records()
    for facts in found.hardware.values():
        facts |= {"log_before": BEFORE, "kernel_log": BEFORE}
    after = before | {"read": 1000.0, "last": 402.0, "lines": lines} | log
    found.hardware["node2"] |= {"log_before": before, "kernel_log": after}
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
    (reason,) = judge(with_log(*stamped)).why()
    assert (reason.state, reason.what.partition(" in the")[0]) == (state, what)


def test_an_older_event_hides_none_of_the_test():
    found = with_log((390.0, SXID + "Non-fatal"), (401.0, SXID + "Fatal"))
    assert [reason.state for reason in judge(found).why()] == ["warn", "fail"]


def untested(found):
    return judge(found).tested["not tested"].split("; ")


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ({"boot": None, "first": None, "lines": None}, "this user may not read it"),
        ({"first": 500.0}, "its lines of the test are overwritten"),
        ({"boot": "b1"}, "its lines of the test are overwritten"),
    ],
)
def test_a_kernel_log_that_was_not_read_whole_is_not_tested(log, why):
    found = with_log(**log)
    assert judge(found).state == "pass"
    assert f"kernel log on node2 ({why})" in untested(found)
    assert judge(found, required=["kernel_log"]).state == "fail"


def test_a_kernel_log_of_an_unknown_boot_is_not_tested_and_its_faults_count():
    judged = judge(with_log((20.0, XID.format(79)), before=BEFORE | {"boot": ""}))
    assert judged.state == "fail"
    assert "79 of PCI:0000:3b:00 in the kernel log during" in judged.reasons()[0]
    assert "kernel log on node2" in judged.tested["not tested"]


def test_a_node_that_does_not_see_the_data_set_of_the_others_is_named():
    found = records()
    for node, facts in found.hardware.items():
        known = {"name": "DATADIR_PHASE2=/d", "needed": 400}
        facts["data_set"] = known | {"blocks": 0 if node == "node2" else 500}
    assert [one.name for one in judge(found).why()] == ["node node2"]
    why = "DATADIR_PHASE2=/d has 0 blocks of 4 MiB, 400 are needed on every node"
    assert f"read of the data disk on node2 ({why})" in untested(found)
    for facts in found.hardware.values():
        facts["data_set"]["blocks"] = 0
    assert judge(found).state == "pass", "no node has one"


def test_serial_numbers_differ_on_good_machines():
    found = records()
    for number, node in enumerate(found.nodes):
        found.hardware[node]["parts"]["GPU 0"]["serial"] = f"16512{number}"
    judged = judge(found)
    assert judged.why() == []
    assert ("serial numbers of node2", "0 165122") in judged.inventory


def reported(*skipped, name="nvbandwidth"):
    """A node for each entry, whose program skipped these tests; None: it lacks the program."""
    found = records(len(skipped))
    for number, tests in enumerate(skipped):
        skips = {"dcgmi": []} | ({} if tests is None else {name: tests})
        told = {"version": "4", "faults": []}
        found.tools[f"node{number}"] = [
            told | {"name": program, "skipped": own} for program, own in skips.items()
        ]
    measured = [rank for rank in found.ranks if skipped[rank // 2] is not None]
    return add_rates(found, {(rank, HOST, -1): 55.0 for rank in measured})


@pytest.mark.parametrize(
    ("skipped", "name", "gap", "required"),
    [
        (([], [], None, []), "nvbandwidth", "nvbandwidth on node2 (not installed, or excluded)",
         ["node node2: nvbandwidth: required, not tested: not installed, or excluded"]),
        (([[*COPIES][2]], []), "nvbandwidth", "copy from another GPU, nvbandwidth on node0 (skipped by nvbandwidth)",
         ["node node0: copy from another GPU, nvbandwidth: required, not tested: skipped by nvbandwidth"]),
        ((["pcie"], []), "dcgmi", "pcie on node0 (skipped by dcgmi)",
         ["node node0: pcie: required, not tested: skipped by dcgmi"]),
        (([], []), "nvbandwidth", "", []),
    ],
)  # fmt: skip
def test_what_a_program_did_not_test_is_in_the_line_and_fails_where_it_is_required(
    skipped, name, gap, required
):
    found = reported(*skipped, name=name)
    judged = judge(found)
    assert (judged.state, gap in line(judged)) == ("pass", True)
    assert judge(found, required=["dcgmi", name]).reasons() == required


def test_a_program_that_skipped_all_its_tests_has_tested_nothing():
    found = reported([*COPIES], [*COPIES])
    assert "nvbandwidth (it skipped every test)" in untested(found)
    assert judge(found, required=["nvbandwidth"]).state == "fail"


@pytest.mark.parametrize(
    ("kind", "names", "areas"),
    [
        ("GPU", ["memory MiB", "PCIe lanes"], ["inventory", "datasheet"]),
        ("mlx5", ["state", "rate"], ["inventory"]),
    ],
)
def test_an_unknown_fact_is_told_and_fails_where_its_area_is_required(
    kind, names, areas
):
    found = records(1)
    for part, facts in found.hardware["node0"]["parts"].items():
        facts |= dict.fromkeys(names if part.startswith(kind) else ())
    judged = judge(found)
    assert judged.state == "pass"
    said = ", ".join(f"{name} of {kind}" for name in names)
    assert f"{said}, rated speed of mlx5 (None) (not reported)" in line(judged)
    for area in areas:
        assert any(names[0] in one for one in judge(found, required=[area]).reasons())


def test_a_silent_field_of_telemetry_fails_where_telemetry_is_required():
    found = records(1)
    samples = found.telemetry["node0"] = telemetry(2, 9)
    samples["nvlink_errors"][:] = np.nan
    optional = judge(found, required=["telemetry"])
    assert optional.state == "pass", "not every GPU has them"
    samples["throttle"][:] = np.nan
    what = "throttle of telemetry: required, not tested: not reported"
    reasons = judge(found, required=["telemetry"]).reasons()
    assert reasons == [f"node node0: {what}"]


def test_what_a_driver_does_not_tell_is_listed_with_the_node_where_others_do():
    found = records()
    for node in found.nodes:
        found.telemetry[node] = telemetry(2, 9)
        found.telemetry[node]["nvlink_errors"][:] = np.nan
        counts = {"link_downed": None, "symbol_error": 1}
        found.hardware[node]["before"]["mlx5_0/1"] = counts
    found.telemetry["node3"]["xid_count"][:] = np.nan
    found.hardware["node2"]["after"]["GPU 0"] = {FAILED: None}
    assert {
        "link_downed of mlx5 (not reported)",
        "nvlink_errors of telemetry (not reported)",
        "xid_count of telemetry on node3 (not reported)",
        "row remappings that failed of GPU on node2 (not reported)",
        "health of GPUs on node2 (not reported)",
    } <= {*untested(found)}
    assert judge(found, required=["health"]).reasons()[-1].startswith("node node2: ")


def test_a_test_on_cpus_says_so_and_passes_nothing_but_the_software():
    said = line(judge(make(1, 4, starved={})))
    software = "pass (software only: the test ran on CPUs)"
    assert said.startswith(f"{software}: 4 ranks on 1 node, on CPUs: node0")


def test_the_certificate_lists_what_was_tested_and_what_was_not(tmp_path):
    environment = {"packages": {"torch": "2.13"}, "git_commit": "abc"}
    write(tmp_path, records(1))
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    found = certify(tmp_path).tested
    done, left = (found[name].split("; ") for name in ("tested", "not tested"))
    assert {"one rank at a time", "inventory", "health of GPUs"} <= {*done}
    assert "all-reduce of all ranks" not in done
    others = {"two nodes, gradients reduced", "read of the data disk", "burn-in"}
    assert others <= {*left}
    assert (found["versions"], found["commit"]) == ("torch 2.13", "abc")


def test_the_line_has_verdict_first_reason_and_drains_and_the_launcher_a_record(
    certified, tmp_path
):
    said = line(judge(records()))
    who = "pass: 8 ranks on 4 nodes: node0, node1, node2, node3"
    assert said.startswith(f"{who}; not tested: the GPU model's figures")
    assert "nccl-tests, nvbandwidth, dcgmi diag (not installed, or excluded)" in said
    found = records()
    found.hardware["node2"]["parts"]["node"] |= {"CPUs": 96, "kernel": "6.9"}
    found.hardware["node3"]["after"]["GPU 0"][FAILED] = 1
    unfit = tmp_path / "unfit"
    status, said = certified(found, "--line", "--records", str(unfit))
    lost = f"GPU 0 of node3: 1 {FAILED}, 1 of them during the test"
    reasons = {"node2": "node node2: CPUs 96, elsewhere 192", "node3": lost}
    written = [f"unfit\t-\t{node}\t-\t{why}\n" for node, why in reasons.items()]
    assert unfit.read_text() == "".join(written)
    verdict, _, rest = said.partition("; not tested: ")
    assert (status, verdict) == (1, f"fail: {reasons['node2']} and 2 more")
    assert rest.strip().split("; scontrol ")[1:] == [
        f"update nodename={node} state=drain 'reason=certify: {why}'"
        for node, why in reasons.items()
    ]
