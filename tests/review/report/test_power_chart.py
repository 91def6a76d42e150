"""The power chart shows the watts of all nodes together over the time of the run."""

from __future__ import annotations

import json

import pytest

from review.report.plots import MOST_POINTS, charts, power_chart
from review.results.score import load_results


def result_of(folder):
    """The one result below a folder."""
    (result,) = load_results(folder)
    return result


def write_node(path, readings, efficiency=None):
    """A power file of (time_ms, watts), in disorder, that starts at the first time given."""
    start, *rest = readings
    events = [("power_measurement_start", None, start[0])]
    events += [("conversion_eff", efficiency, start[0])] * (efficiency is not None)
    events += [("power_reading", watts, time) for time, watts in reversed(rest)]
    lines = [
        {
            "namespace": "",
            "time_ms": time,
            "event_type": "POINT_IN_TIME",
            "key": key,
            "value": value,
            "metadata": {},
        }
        for key, value, time in events
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f":::MLLOG {json.dumps(line)}\n" for line in lines))


@pytest.fixture
def run(tmp_path, writer):
    """One run; the folder of its power files and its run_start in ms."""
    writer().write(tmp_path / "result_0.txt")
    start = result_of(tmp_path).runs[0].run_start.time_ms
    return tmp_path, tmp_path / "power" / "result_0", start


def test_without_power_files_there_is_no_chart(submission):
    assert power_chart(result_of(submission)) is None
    assert all(chart.key != "power" for chart in charts(result_of(submission)))


def test_each_run_has_its_readings_over_its_minutes(submission, power_files):
    power_files(submission)
    result = result_of(submission)
    chart = next(chart for chart in charts(result) if chart.key == "power")
    assert [line.run for line in chart.series] == list(range(10))
    for line, run in zip(chart.series, result.runs, strict=True):
        assert len(line.points) <= MOST_POINTS
        assert [point.y for point in line.points] == pytest.approx(
            [5000 + line.run] * len(line.points)
        )
        assert 0 < line.points[0].x < line.points[-1].x < run.minutes
        assert line.counted == (run.path not in result.dropped)
    assert "10 runs together: between 5,000 and 5,009 W" in chart.alt


def test_nodes_add_up_over_the_time_they_share_and_each_has_its_efficiency(run):
    folder, power, start = run
    write_node(
        power / "node_0.txt", [(start, None), (start + 60_000, 100.0), (start + 120_000, 300.0)]
    )
    write_node(
        power / "node_1.txt",
        [(start, None), (start + 60_000, 40.0), (start + 150_000, 40.0)],
        efficiency=0.5,
    )
    (line,) = power_chart(result_of(folder)).series
    assert [(point.x, point.y) for point in line.points] == [(0.5, 120.0), (1.5, 320.0)]
    assert line.points[1].tip == "result_0.txt: 320 W at 1.50 min"


def test_a_switch_adds_its_estimated_power(run):
    folder, power, start = run
    write_node(power / "node_0.txt", [(start, None), (start + 60_000, 100.0)])
    event = {
        "namespace": "",
        "time_ms": start,
        "event_type": "POINT_IN_TIME",
        "key": "interconnect_power_est",
    }
    (power / "sw_0.txt").write_text(
        f":::MLLOG {json.dumps({**event, 'value': 7.5, 'metadata': {}})}\n"
    )
    assert [point.y for point in power_chart(result_of(folder)).series[0].points] == [107.5]


def test_many_readings_are_averaged_without_losing_energy(run):
    folder, power, start = run
    readings = [(start + 1000 * i, float(i * 7919 % 1000)) for i in range(1, 1001)]
    write_node(power / "node_0.txt", [(start, None), *readings])
    (line,) = power_chart(result_of(folder)).series
    assert len(line.points) == MOST_POINTS
    mean = sum(watts for _, watts in readings) / len(readings)
    assert sum(point.y for point in line.points) / MOST_POINTS == pytest.approx(mean)


@pytest.mark.parametrize(
    "readings", [[], [(0, "hot")], [(0, 5.0)], [(60_000, 1e300)], [(10**30, 5.0)]], ids=str
)
def test_files_that_give_no_power_leave_the_page_as_it_is(run, readings):
    folder, power, start = run
    write_node(
        power / "node_0.txt", [(start, None), *((start + time, watts) for time, watts in readings)]
    )
    assert power_chart(result_of(folder)) is None
