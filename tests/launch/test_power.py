"""POWER=1 samples every node while a trial runs; the readings become files of the power rules."""

import json
import runpy
import time

import pytest

IPMI = """[[ $* == 'dcmi power reading' ]] || exit 1
echo '    Instantaneous power reading:                   512 Watts'
echo '    Average power reading over sample period:      100 Watts'"""
NVML = "for i in 1 2 3; do echo 100.25; done"


@pytest.mark.parametrize(
    ("program", "text", "source", "watts", "kind"),
    [("ipmitool", IPMI, "ipmi", 512.0, "AC"), ("nvidia-smi", NVML, "nvml", 300.8, "DC")],
)  # fmt: skip
def test_power_is_sampled_and_told(checkout, program, text, source, watts, kind):
    checkout.stand_in(program, text)
    checkout.size = "DGXNGPU=1"
    outcomes = {"TRIAL_0": "measured", "TRIAL_1": "measured"}
    done = checkout.run(after="export POWER=1 NEXP=2", **outcomes, status=0)
    for trial in "01":
        (node,) = (checkout.run_dir / "power" / f"result_{trial}").iterdir()
        assert node.name == "node_0.txt"
        lines = node.read_text().splitlines()
        found = [json.loads(line.partition(" ")[2]) for line in lines]
        begin = ["power_measurement_start", "conversion_eff"]
        assert [event["key"] for event in found[:2]] == begin
        assert found[1]["metadata"]["measurement_type"] == kind
        readings = [event for event in found if event["key"] == "power_reading"]
        assert {event["value"] for event in readings} == {watts}
        assert found[-1]["key"] == "power_measurement_stop"
        assert f"{watts:.0f} W ({source}, " in done.stdout
    assert not list(checkout.run_dir.glob("running_*"))


def sampler(repository) -> dict:
    return runpy.run_path(str(repository / "launch" / "node" / "power_sampler.py"))


def test_readings_start_at_fixed_intervals(tmp_path, repository, monkeypatch):
    program, now, slept = sampler(repository), [0.0], []

    def reading() -> str:
        now[0] += 0.4
        return "9"

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))
        if len(slept) == 3:
            (tmp_path / "stop").touch()

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setitem(program["SOURCES"], "nvml", reading)
    program["sample"](tmp_path, "nvml")
    assert slept == [0.6] * 3
    (readings,) = tmp_path.glob("*.csv")
    assert len(readings.read_text().splitlines()) == 1 + 3


def test_ipmi_is_queried_through_sudo_if_needed(repository, checkout, monkeypatch):
    checkout.stand_in("ipmitool", "exit 1")
    checkout.stand_in("sudo", 'shift; [[ $1 == ipmitool ]] || exit 1\necho "Instantaneous power reading: 700 Watts"')  # fmt: skip
    monkeypatch.setenv("PATH", checkout.env["PATH"])
    assert sampler(repository)["ipmi"]() == "700"
    (call,) = checkout.calls("sudo")
    assert call.replace("'", "") == "-n ipmitool dcmi power reading"


def test_a_node_that_cannot_measure_its_power_stops_the_run_before_it_starts(checkout):
    for program in ("ipmitool", "nvidia-smi"):
        checkout.stand_in(program, "echo '[N/A]'")
    why = "POWER=1: not every node can measure its power: "
    done = checkout.refused(why, POWER="1")
    assert ": neither ipmitool dcmi power reading (as root or by sudo" in done.last_line


def test_samples_that_miss_the_run_are_only_a_warning(checkout):
    """And a trial that crashes leaves no sampler behind."""
    checkout.stand_in("ipmitool", IPMI)
    how = {"POWER": "1", "TRIAL_1": "crash"}  # the log of trial 0 has no run_start
    done = checkout.failed("trial 1: the loss is nan at step 3", trials=2, **how)
    assert "run: warning: trial 0 has no power result" in done.stderr
    assert not (checkout.run_dir / "power").exists()
    assert list((checkout.run_dir / "power_0").glob("*.csv"))
