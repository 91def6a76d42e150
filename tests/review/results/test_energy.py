"""The energy of a result is the official summarizer's, to the last digits, which computes the right
one from the power files of a run.
"""

import json
import random
import shutil
import sys

import pytest
from mlperf_logging.compliance_checker.mlp_parser import parse_file
from mlperf_logging.result_summarizer.result_summarizer import _compute_total_power

from review.compare import compare
from review.results import energy
from review.results.score import load_results

from ..conftest import LogWriter, official_score, span_of, write_power


def event(key, value, time_ms, **about):
    record = {"namespace": "", "event_type": "POINT_IN_TIME", "metadata": about}
    record |= {"key": key, "value": value, "time_ms": time_ms}
    return f":::MLLOG {json.dumps(record)}\n"


def measurement(start, stop, seed, efficiency=None, stops=True):
    """A node's power file: an uneven reading about every second, in disorder as several writers leave them."""
    chance = random.Random(seed)
    drawn, times = lambda: 8000 + 1000 * chance.random(), range(start + 700, stop, 970)
    lines = [event("power_reading", drawn(), time) for time in times]
    chance.shuffle(lines)
    lines.insert(0, event("power_measurement_start", None, start))
    lines += [event("conversion_eff", efficiency, start)] if efficiency else []
    lines += [event("power_measurement_stop", None, stop)] * stops
    return "".join(lines)


def write_measurements(folder, nodes=2, switches=0, **options):
    for index, path in enumerate(sorted(folder.glob("result_*.txt"))):
        start, stop = span_of(path)
        place = folder / "power" / path.stem
        place.mkdir(parents=True)
        for node in range(nodes):
            seed = 100 * index + node
            content = measurement(start - 400, stop + 900, seed, **options)
            (place / f"node_{node}.txt").write_text(content)
        watts = event("interconnect_power_est", 700.5 + index, start)
        for switch in range(switches):
            content = event("conversion_eff", 0.9, start) + watts
            (place / f"sw_{switch}.txt").write_text(content)


@pytest.mark.parametrize(
    ("options", "failing"),
    [({"switches": 2, "efficiency": 0.94}, None), ({"nodes": 1, "stops": False}, 4)],
)
def test_the_energy_is_the_official_one(options, failing, submission):
    if failing is not None:
        LogWriter(seed=77, target=0.7).write(submission / f"result_{failing}.txt")
    write_measurements(submission, **options)
    (result,) = load_results(submission)
    factor = {"scaling_factor": result.scaling_factor}
    (submission / "scaling.json").write_text(json.dumps(factor))
    assert result.scaling_factor > 1 or failing is not None
    score, joules = official_score(submission, has_power=True)
    assert result.score == pytest.approx(score, rel=1e-13)
    assert result.energy.joules == pytest.approx(joules, rel=1e-13)
    assert result.energy.watts == pytest.approx(joules / score / 60, rel=0.01)


def test_without_power_there_is_no_energy(submission):
    assert load_results(submission)[0].energy is None


def test_a_run_without_readings_makes_the_score_not_official(submission, command):
    write_power(submission)
    shutil.rmtree(submission / "power" / "result_4")
    (result,) = command("show", "--json", submission).json
    assert not result["official"]
    assert result["energy"]["joules"] is None
    assert result["energy"]["reason"] == "power/result_4 has no node_*.txt"
    assert not result["energy"]["official"]
    without = [run["joules"] is None for run in result["runs"]]
    assert without == [index == 4 for index in range(10)]


def test_compare_sees_that_one_takes_less_energy(submission, tmp_path):
    other = tmp_path / "less" / "results" / "dgx" / "bert"
    shutil.copytree(submission, other)
    write_power(submission)
    write_power(other, watts=4000.0)
    (comparison,) = compare(load_results(submission) + load_results(other))
    assert comparison.ratios["energy"].value == pytest.approx(1.25, rel=1e-3)
    assert comparison.ratios["energy"].significant


def test_table_and_page_have_the_energy_of_each_run(submission, tmp_path, command):
    write_power(submission)
    (result,) = load_results(submission)
    shown = " ".join(command("show", submission).out.split())
    assert f"{result.energy.joules:,.2f} J over the same runs" in shown
    assert f"{result.joules(result.runs[0]) / 1000:,.1f} ok" in shown
    assert command("report", submission, "-o", tmp_path / "page.html").status == 0
    page = (tmp_path / "page.html").read_text()
    assert f"{result.energy.joules:,.2f} J" in page
    assert all(f"{result.joules(run) / 1000:,.1f}" in page for run in result.runs)


START, STOP = 1_750_000_010_000, 1_750_000_110_000  # a run of 100 s


def write_log(path, sustained=None):
    lines = [event("run_start", None, START)]
    lines.append(event("run_stop", None, STOP, status="success"))
    if sustained:
        end = START + 1000 * sustained
        lines.append(event("sustained_training_stop", None, end))
    path.write_text("".join(lines))


@pytest.fixture
def measure(tmp_path):
    """measure({node: [(seconds after run_start, watts)]}) -> folder of a result, as packages hold it."""

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
    log = str(folder / "result_0.txt")
    return _compute_total_power(str(folder), log, STOP - START, "5.0.0")


def test_only_the_time_of_the_run_counts_and_nodes_add_up(measure):
    times = [second + 0.5 for second in range(-60, 200)]
    node = [(at, 1000.0 if 0 < at <= 101 else 50.0) for at in times]  # idle around it
    folder = measure({"dgx1": node, "dgx2": node}, efficiency=0.5)
    assert official_energy(folder) == pytest.approx(0.5 * 2 * 1000.0 * 100)
    names = [path.name for path in (folder / "power" / "result_0").iterdir()]
    assert sorted(names) == ["node_0.txt", "node_1.txt"]


READINGS = [(-1, 9.0), (25, 100.0), (75, 200.0), (101, 400.0)]
SUSTAINED = [(-1, 9.0), (100, 400.0), (300, 550.0), (301, 9.0)]


@pytest.mark.parametrize(("samples", "sustained", "joules"), [
    (READINGS, None, 25 * 100 + 50 * 200 + 25 * 400),
    (SUSTAINED, 300, (400 + 2 * 550) / 3 * 100),
])  # fmt: skip
def test_a_reading_holds_from_the_one_before_it(samples, sustained, joules, measure):
    folder = measure({"n": samples}, sustained=sustained)
    assert official_energy(folder) == pytest.approx(joules)


def test_gpus_alone_are_not_called_a_node(measure):
    folder = measure({"n": [(-1, 1.0), (101, 1.0)]}, source="nvml")
    lines, _ = parse_file(str(folder / "power" / "result_0" / "node_0.txt"), "5.0.0")
    (factor,) = [line.value for line in lines if line.key == "conversion_eff"]
    assert factor["metadata"]["scope"] == "accelerators only"


@pytest.mark.parametrize(
    "samples", [[], [(1, 5.0), (101, 5.0)], [(-1, 5.0), (99, 5.0)]]
)
def test_samples_that_do_not_cover_the_run_write_nothing(measure, tmp_path, samples):
    said = r"n\.csv: the samples cover .*, not the run from"
    with pytest.raises(energy.EnergyError, match=said):
        measure({"n": samples})
    assert not (tmp_path / "power").exists()


def test_foreign_files_are_one_line_each(monkeypatch, capsys, tmp_path):
    result, samples = tmp_path / "result_0.txt", tmp_path / "samples"
    sample = samples / "n.csv"
    samples.mkdir()
    words = ["energy", samples, result, tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    write_log(result)
    for content, says in (
        (None, f"{samples}: holds no samples (*.csv)"),
        ("hello\n", f"{sample}: does not begin with time_ms,watts_SOURCE"),
        ("time_ms,watts_ipmi\n1,two\n3,4\n", f"{sample}:2: '1,two' is not time_ms,watts"),
    ):  # fmt: skip
        if content:
            sample.write_text(content)
        assert energy.main() == 1
        assert capsys.readouterr().err == f"power: error: {says}\n"
    result.write_text("nothing\n")
    assert energy.main() == 1
    assert "has no run_start and run_stop" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_last_line_cut_short_is_no_sample(tmp_path):
    (tmp_path / "n.csv").write_text("time_ms,watts_ipmi\n1,2\n2,")
    assert energy.read_samples(tmp_path / "n.csv") == ("ipmi", [(1.0, 2.0)])
