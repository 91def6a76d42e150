"""The energy of a result is the official summarizer's, to the last digits."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil

import pytest
from mlperf_logging.result_summarizer import result_summarizer

from review.__main__ import main
from review.compare import compare
from review.results.score import load_results


def event(key, value, time_ms, **metadata):
    record = {
        "namespace": "",
        "time_ms": time_ms,
        "event_type": "POINT_IN_TIME",
        "key": key,
        "value": value,
    }
    return f":::MLLOG {json.dumps({**record, 'metadata': metadata})}\n"


def measurement(start, stop, seed, efficiency=None, stops=True):
    """A node's power file: an uneven reading about every second, in disorder as several writers
    leave them.
    """
    chance = random.Random(seed)
    lines = [
        event("power_reading", 8000 + 1000 * chance.random(), time)
        for time in range(start + 700, stop, 970)
    ]
    chance.shuffle(lines)
    lines.insert(0, event("power_measurement_start", None, start))
    lines += [event("conversion_eff", efficiency, start)] if efficiency else []
    return "".join(
        [*lines, event("power_measurement_stop", None, stop)] if stops else lines
    )


def write_measurements(folder, nodes=2, switches=0, **options):
    for index, path in enumerate(sorted(folder.glob("result_*.txt"))):
        events = [
            json.loads(line.split(":::MLLOG ")[1])
            for line in path.read_text().splitlines()
        ]
        start, stop = (
            next(e["time_ms"] for e in events if e["key"] == key)
            for key in ("run_start", "run_stop")
        )
        place = folder / "power" / path.stem
        place.mkdir(parents=True)
        for node in range(nodes):
            content = measurement(
                start - 400, stop + 900, 100 * index + node, **options
            )
            (place / f"node_{node}.txt").write_text(content)
        for switch in range(switches):
            content = event("conversion_eff", 0.9, start) + event(
                "interconnect_power_est", 700.5 + index, start
            )
            (place / f"sw_{switch}.txt").write_text(content)


def official(folder):
    """(minutes, joules) by the official summarizer."""
    with contextlib.redirect_stdout(io.StringIO()):
        score = result_summarizer._compute_strong_score_standalone(
            "bert", "x", True, str(folder), "training", "5.0.0"
        )
    return score[:2]


@pytest.mark.parametrize(
    ("options", "failing"),
    [({"switches": 2, "efficiency": 0.94}, None), ({"nodes": 1, "stops": False}, 4)],
)
def test_the_energy_is_the_official_one(options, failing, submission, writer):
    if failing is not None:
        writer(seed=77, target=0.7).write(submission / f"result_{failing}.txt")
    write_measurements(submission, **options)
    (result,) = load_results(submission)
    (submission / "scaling.json").write_text(
        json.dumps({"scaling_factor": result.scaling_factor})
    )
    assert result.scaling_factor > 1 or failing is not None
    assert (result.score, result.energy.joules) == pytest.approx(
        official(submission), rel=1e-13
    )
    assert result.energy.watts == pytest.approx(
        result.energy.joules / result.score / 60, rel=0.01
    )


def test_without_power_there_is_no_energy(submission):
    (result,) = load_results(submission)
    assert result.energy is None


def test_a_run_without_readings_takes_the_energy_and_the_score_is_not_official(
    submission, power_files, capsys
):
    power_files(submission)
    shutil.rmtree(submission / "power" / "result_4")
    assert main(["show", "--json", str(submission)]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert not result["official"]
    assert result["energy"]["joules"] is None
    assert result["energy"]["reason"] == "power/result_4 has no node_*.txt"
    assert not result["energy"]["official"]
    assert [run["joules"] is None for run in result["runs"]] == [
        index == 4 for index in range(10)
    ]


def test_show_names_the_energy_beside_the_score(submission, power_files, capsys):
    power_files(submission)
    (result,) = load_results(submission)
    assert main(["show", str(submission)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{result.energy.joules:,.2f} J over the same runs" in shown
    assert f"{result.joules(result.runs[0]) / 1000:,.1f} ok" in shown


def test_compare_sees_that_one_result_takes_less_energy(
    submission, tmp_path, power_files
):
    other = tmp_path / "less" / "results" / "dgx" / "bert"
    shutil.copytree(submission, other)
    power_files(submission)
    power_files(other, watts=4000.0)
    (comparison,) = compare(
        [result for folder in (submission, other) for result in load_results(folder)]
    )
    assert comparison.ratios["energy"].value == pytest.approx(1.25, rel=1e-3)
    assert comparison.ratios["energy"].significant


def test_the_page_has_the_energy_of_each_run_and_of_the_result(
    submission, power_files, tmp_path
):
    power_files(submission)
    (result,) = load_results(submission)
    assert main(["report", str(submission), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert f"{result.energy.joules:,.2f} J" in page
    assert all(f"{result.joules(run) / 1000:,.1f}" in page for run in result.runs)
