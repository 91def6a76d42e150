"""A GPU with throttling, errors or a narrow bus is named with the reason; missing data accuse nobody."""

import numpy as np
import pytest

from review.acceptance.schema import FIELDS
from review.acceptance.verdict import certify, judge

from .made_up import chosen, make, telemetry, write

LAST_HALF = {"device": 2, "time": 1e9 + np.arange(20, 40)}


def with_telemetry(node="node1", where=LAST_HALF, **changes: float):
    """Two nodes of four GPUs; values that a GPU has, by default in the second half of the time."""
    records = make(2, 4)
    records.telemetry.update({one: telemetry(4, 40) for one in records.nodes})
    samples = records.telemetry[node]
    for name, value in changes.items():
        samples[name][chosen(samples, **where)] = value
    return records


FIRST = {"node": "node0", "where": {"device": 1}}
SILENT = dict.fromkeys(FIELDS, np.nan)


@pytest.mark.parametrize(
    ("changes", "state", "said"),
    [
        # At their power limit.
        ({}, "pass", None),
        ({"throttle": 0x40, "sm_mhz": 1200}, "warn", "throttles: hardware thermal slowdown 50% of the time, at"),
        ({"ecc_uncorrected": 2}, "fail", "2 uncorrected memory errors during the test"),
        ({"ecc_corrected": 7}, "warn", "7 corrected memory errors during the test"),
        ({"xid_count": 1, "xid_last": 79}, "fail", "1 Xid errors during the test, the last Xid 79"),
        ({"xid_count": 1, "xid_last": 31}, "warn", "1 Xid errors during the test, the last Xid 31"),
        ({"xid_count": 2, "xid_last": 31}, "fail", "2 Xid errors during the test, the last Xid 31"),
        ({"nvlink_errors": 12}, "warn", "12 NVLink errors during the test"),
        (SILENT, "fail", "reported nothing any more 0:19 after the start"),
        (FIRST | {"pcie_width": 8}, "warn", "PCIe lanes: 8 of the 16 that GPU and slot support"),
        (FIRST | SILENT, "fail", "reports nothing, other GPUs do"),
        (FIRST | {"ecc_uncorrected": np.nan}, "fail", "ecc_uncorrected cannot be read, of other GPUs it can"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_gpu(changes, state, said):
    found = judge(with_telemetry(**changes))
    name = "rank 1 on node0" if "node" in changes else "rank 6 on node1"
    faults = [(fault.name, fault.what[: len(said)]) for fault in found.faults]
    assert (found.state, faults) == (state, [(name, said)] * (said is not None))


def test_an_xid_is_named_although_sampling_ended_with_it():
    records = with_telemetry(xid_count=1, xid_last=79)
    for name in FIELDS:
        last = chosen(records.telemetry["node1"], device=2, time=1e9 + 39)
        records.telemetry["node1"][name][last] = np.nan
    said = [fault.what for fault in judge(records).faults]
    assert any("during the test, the last Xid 79" in what for what in said), said


def test_a_slow_gpu_that_throttles_is_named_with_its_reason():
    records = with_telemetry(throttle=0x40, sm_mhz=1200)
    slow = make(2, 4, slow={("single", 6): 1.3, ("parallel", 6): 1.3})
    records.steps.update(slow.steps)
    found = judge(records)
    assert found.state == "fail"
    assert "throttles: hardware thermal slowdown" in found.findings[0].reason().text()


def test_a_driver_that_reports_nothing_accuses_nobody():
    records = make(2, 4)
    for node in records.nodes:
        nothing = {name: np.full(160, np.nan) for name in FIELDS}
        records.telemetry[node] = telemetry(4, 40) | nothing
    found = judge(records)
    assert found.faults == []
    assert "telemetry of GPUs" in found.tested["not tested"]


def test_errors_and_throttling_in_the_burn_in_count_although_counters_restart(tmp_path):
    records = make(2, 4)
    records.telemetry.update({node: telemetry(4, 20) for node in records.nodes})
    write(tmp_path, records)
    later = telemetry(4, 40)
    own = later["device"] == 2
    later["ecc_corrected"][own] = [0] * 5 + [3] * 15 + [0] * 10 + [2] * 10
    later["xid_count"][own] = [0] * 10 + [1] * 10 + [0] * 15 + [2] * 5
    tables = {f"telemetry.{name}": column for name, column in later.items()}
    np.savez(tmp_path / "burn_in_node1.npz", about=np.array("{}"), **tables)
    faults = certify(tmp_path).faults
    assert {one.name for one in faults} == {"rank 6 on node1"}
    said = [one.what.partition(" during")[0] for one in faults]
    assert said == ["3 Xid errors", "5 corrected memory errors"]
