"""A GPU with throttling, errors or a narrow bus is named with the reason; missing data accuse
nobody.
"""

from __future__ import annotations

import numpy as np
import pytest

from review.__main__ import main
from review.acceptance.schema import FIELDS
from review.acceptance.verdict import certify, judge

from .made_up import make, telemetry, write


def with_telemetry(**changes: float):
    """Two nodes of four GPUs; values that GPU 2 of node1 has in the second half of the time."""
    records = make(2, 4)
    for node in records.nodes:
        records.telemetry[node] = telemetry(4, 40)
    samples = records.telemetry["node1"]
    chosen = (samples["device"] == 2) & (samples["time"] >= 1e9 + 20)
    for name, value in changes.items():
        samples[name][chosen] = value
    return records


def test_healthy_gpus_at_their_power_limit_pass():
    found = judge(with_telemetry())
    assert (found.state, found.faults) == ("pass", [])


@pytest.mark.parametrize(
    ("changes", "state", "said"),
    [
        ({"throttle": 0x40, "sm_mhz": 1200}, "warn", "throttles: hardware thermal slowdown 50% of the time, at"),
        ({"ecc_uncorrected": 2}, "fail", "2 uncorrected memory errors during the test"),
        ({"ecc_corrected": 7}, "warn", "7 corrected memory errors during the test"),
        ({"xid_count": 1, "xid_last": 79}, "fail", "1 Xid errors during the test, the last Xid 79"),
        ({"xid_count": 1, "xid_last": 31}, "warn", "1 Xid errors during the test, the last Xid 31"),
        ({"xid_count": 2, "xid_last": 31}, "fail", "2 Xid errors during the test, the last Xid 31"),
        ({"nvlink_errors": 12}, "warn", "12 NVLink errors during the test"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_gpu(changes, state, said):
    found = judge(with_telemetry(**changes))
    (fault,) = found.faults
    assert (found.state, fault.name) == (state, "rank 6 on node1")
    assert fault.what.startswith(said)


def test_an_xid_is_named_although_sampling_ended_with_it():
    records = with_telemetry(xid_count=1, xid_last=79)
    samples = records.telemetry["node1"]
    last = np.flatnonzero(samples["device"] == 2)[-1]
    for name in FIELDS:
        samples[name][last] = np.nan
    said = [fault.what for fault in judge(records).faults]
    assert any("during the test, the last Xid 79" in what for what in said), said


def test_a_bus_that_is_narrower_than_its_slot_is_named():
    records = with_telemetry()
    samples = records.telemetry["node0"]
    samples["pcie_width"][samples["device"] == 1] = 8
    (fault,) = judge(records).faults
    assert (fault.name, fault.what) == (
        "rank 1 on node0",
        "PCIe lanes: 8 of the 16 that GPU and slot support",
    )


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
        records.telemetry[node] = telemetry(4, 40)
        for name in FIELDS:
            records.telemetry[node][name][:] = np.nan
    found = judge(records)
    assert found.faults == []
    assert "telemetry of GPUs" in found.tested["not tested"]


def test_a_gpu_that_stops_reporting_fails():
    found = judge(with_telemetry(**dict.fromkeys(FIELDS, np.nan)))
    assert [(one.name, one.what, one.state) for one in found.faults] == [
        ("rank 6 on node1", "reported nothing any more 0:19 after the start", "fail")
    ]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (FIELDS, "reports nothing, other GPUs do"),
        (("ecc_uncorrected",), "ecc_uncorrected cannot be read, of other GPUs it can"),
    ],
)
def test_a_gpu_that_does_not_report_what_others_do_fails(names, said):
    records = with_telemetry()
    samples = records.telemetry["node0"]
    for name in names:
        samples[name][samples["device"] == 1] = np.nan
    assert [(one.name, one.what, one.state) for one in judge(records).faults] == [
        ("rank 1 on node0", said, "fail")
    ]


def test_errors_and_throttling_in_the_burn_in_count_although_counters_restart(tmp_path):
    records = make(2, 4)
    for node in records.nodes:
        records.telemetry[node] = telemetry(4, 20)
    write(tmp_path, records)
    later = telemetry(4, 40)
    chosen = later["device"] == 2
    later["ecc_corrected"][chosen] = [0] * 5 + [3] * 15 + [0] * 10 + [2] * 10
    later["xid_count"][chosen] = [0] * 10 + [1] * 10 + [0] * 15 + [2] * 5
    about = np.array("{}")
    np.savez(
        tmp_path / "burn_in_node1.npz",
        about=about,
        **{f"telemetry.{name}": column for name, column in later.items()},
    )
    assert [
        (one.name, one.what.partition(" during")[0]) for one in certify(tmp_path).faults
    ] == [
        ("rank 6 on node1", "3 Xid errors"),
        ("rank 6 on node1", "5 corrected memory errors"),
    ]


def test_truncated_telemetry_of_a_burn_in_is_one_line(tmp_path, capsys):
    write(tmp_path, make(2, 2))
    (tmp_path / "burn_in_node1.npz").write_bytes(b"PK")
    assert main(["certify", str(tmp_path)]) == 2
    assert "burn_in_node1.npz: not a burn-in's telemetry" in capsys.readouterr().err
