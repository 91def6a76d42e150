"""The official summarizer computes the right energy from the power files of a run."""

from __future__ import annotations

import json
import sys

import pytest
from mlperf_logging.compliance_checker.mlp_parser import parse_file
from mlperf_logging.result_summarizer.result_summarizer import _compute_total_power

from review.results import energy

START, STOP = 1_750_000_010_000, 1_750_000_110_000  # a run of 100 s


def write_log(path, sustained=None) -> None:
    events = [("run_start", START, {}), ("run_stop", STOP, {"status": "success"})]
    if sustained:
        events.append(("sustained_training_stop", START + 1000 * sustained, {}))
    head = {"namespace": "", "event_type": "INTERVAL_END", "value": None}
    lines = [
        json.dumps(head | {"time_ms": at, "key": key, "metadata": about})
        for key, at, about in events
    ]
    path.write_text("".join(f":::MLLOG {line}\n" for line in lines))


@pytest.fixture
def measure(tmp_path):
    """measure({node: [(seconds after run_start, watts)]}) -> folder of a result, as packages hold
    it.
    """

    def measure(nodes, source="ipmi", efficiency=1.0, sustained=None):
        (tmp_path / "samples").mkdir()
        write_log(tmp_path / "result_0.txt", sustained)
        for node, samples in nodes.items():
            rows = [f"{START + round(1000 * at)},{watts}\n" for at, watts in samples]
            text = "".join([f"time_ms,watts_{source}\n", *rows])
            (tmp_path / "samples" / f"{node}.csv").write_text(text)
        names = "samples", "result_0.txt", "power/result_0"
        energy.write(*(tmp_path / name for name in names), efficiency)
        return tmp_path

    return measure


def official_energy(folder) -> float:
    """Joules of the run, by the official code."""
    log = str(folder / "result_0.txt")
    return _compute_total_power(str(folder), log, STOP - START, "5.0.0")


def test_constant_power_gives_power_times_time(measure):
    folder = measure({"dgx1": [(second + 0.3, 500.0) for second in range(-5, 110)]})
    assert official_energy(folder) == pytest.approx(500.0 * 100)


def test_only_the_time_of_the_run_counts_and_nodes_add_up(measure):
    def watts(second: float) -> float:
        return 1000.0 if 0 < second <= 101 else 50.0  # idle before and after

    node = [(second + 0.5, watts(second + 0.5)) for second in range(-60, 200)]
    folder = measure({"dgx1": node, "dgx2": node}, efficiency=0.5)
    assert official_energy(folder) == pytest.approx(0.5 * 2 * 1000.0 * 100)
    names = [path.name for path in (folder / "power" / "result_0").iterdir()]
    assert sorted(names) == ["node_0.txt", "node_1.txt"]


def test_a_reading_holds_from_the_one_before_it(measure):
    folder = measure({"n": [(-1, 9.0), (25, 100.0), (75, 200.0), (101, 400.0)]})
    assert official_energy(folder) == pytest.approx(25 * 100 + 50 * 200 + 25 * 400)


def test_training_that_is_sustained_lends_its_mean_power_to_the_run(measure):
    samples = [(-1, 9.0), (100, 400.0), (300, 550.0), (301, 9.0)]
    folder = measure({"n": samples}, sustained=300)
    assert official_energy(folder) == pytest.approx((400 + 2 * 550) / 3 * 100)


def test_gpus_alone_are_not_called_a_node(measure):
    folder = measure({"n": [(-1, 1.0), (101, 1.0)]}, source="nvml")
    lines, _ = parse_file(str(folder / "power" / "result_0" / "node_0.txt"), "5.0.0")
    (factor,) = [line.value for line in lines if line.key == "conversion_eff"]
    assert factor["metadata"]["scope"] == "accelerators only"


@pytest.mark.parametrize(
    "samples", [[], [(1, 5.0), (101, 5.0)], [(-1, 5.0), (99, 5.0)]]
)
def test_samples_that_do_not_cover_the_run_are_an_error_and_write_nothing(
    measure, tmp_path, samples
):
    said = r"n\.csv: the samples cover .*, not the run from"
    with pytest.raises(energy.EnergyError, match=said):
        measure({"n": samples})
    assert not (tmp_path / "power").exists()


def run(monkeypatch, capsys, *arguments) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["review.results.energy", *map(str, arguments)])
    return energy.main(), capsys.readouterr().err


def test_foreign_files_are_one_line_each(monkeypatch, capsys, tmp_path):
    result, samples = tmp_path / "result_0.txt", tmp_path / "samples"
    sample = samples / "n.csv"
    write_log(result)
    samples.mkdir()

    def said() -> str:
        status, text = run(monkeypatch, capsys, samples, result, tmp_path / "out")
        assert status == 1
        return text

    assert said() == f"power: error: {samples}: holds no samples (*.csv)\n"
    sample.write_text("hello\n")
    no_head = "does not begin with time_ms,watts_SOURCE"
    assert said() == f"power: error: {sample}: {no_head}\n"
    sample.write_text("time_ms,watts_ipmi\n1,two\n3,4\n")
    assert said() == f"power: error: {sample}:2: '1,two' is not time_ms,watts\n"
    result.write_text("nothing\n")
    assert "has no run_start and run_stop" in said()
    assert not (tmp_path / "out").exists()


def test_a_last_line_cut_short_is_no_sample(tmp_path):
    (tmp_path / "n.csv").write_text("time_ms,watts_ipmi\n1,2\n2,")
    assert energy.read_samples(tmp_path / "n.csv") == ("ipmi", [(1.0, 2.0)])
