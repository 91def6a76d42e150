"""Charts show the numbers of the logs: nothing invented, nothing left out."""

from __future__ import annotations

import itertools
import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from review.report.chart import Axis, draw, style_sheet
from review.report.plots import (
    EVALUATION,
    INITIALISATION,
    TRAINING,
    accuracy_chart,
    charts,
    close_to_target_chart,
    loss_chart,
    samples_chart,
    throughput_chart,
    time_chart,
)
from review.results.score import load_results


def result_of(folder):
    """The one result below a folder."""
    (result,) = load_results(folder)
    return result


@given(low=st.floats(-1e9, 1e9), width=st.floats(1e-6, 1e9), count=st.integers(2, 10))
@settings(max_examples=200, deadline=None)
def test_ticks_are_round_even_and_within_the_axis(low, width, count):
    axis = Axis(label="", low=low, high=low + width)
    ticks = axis.ticks(count)
    slack = 1e-6 * max(abs(axis.low), abs(axis.high), axis.high - axis.low)
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in ticks)
    assert len(ticks) <= count + 2
    steps = [second - first for first, second in itertools.pairwise(ticks)]
    assert all(math.isclose(step, steps[0], rel_tol=1e-3, abs_tol=slack) for step in steps)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (500_000, "500k"),
        (1_500_000, "1.5M"),
        (0.72, "0.72"),
        (0.1 + 0.2, "0.3"),
        (11800.0, "11,800"),
        (99_000, "99,000"),
        (2.5, "2.5"),
        (1250.0, "1,250"),
    ],
)
def test_ticks_are_labelled_at_a_length_that_fits(value, shown):
    assert Axis(label="", low=0, high=1).text(value) == shown


def test_every_evaluation_is_a_point_and_the_target_a_line(submission):
    result = result_of(submission)
    chart = accuracy_chart(result)
    assert [line.run for line in chart.series] == list(range(10))
    for line, run in zip(chart.series, result.runs, strict=True):
        assert [(p.x, p.y) for p in line.points] == [
            (e.samples, e.accuracy) for e in run.evaluations
        ]
        assert line.counted == (run.path not in result.dropped)
    assert [mark.value for mark in chart.marks] == [0.720]
    assert chart.y.low < 0.4
    assert chart.y.high > 0.7203


def test_the_open_division_has_the_target_of_its_own_run(tmp_path, writer):
    writer(division="open", target=0.11).write(tmp_path / "result_0.txt")
    assert accuracy_chart(result_of(tmp_path)).marks[0].value == 0.720
    (tmp_path / "config.json").write_text(json.dumps({"evaluate": {"target": 0.1}}))
    assert accuracy_chart(result_of(tmp_path)).marks[0].value == 0.1
    (tmp_path / "config.json").write_text(json.dumps({"evaluate": {"target": "0.1"}}))
    assert accuracy_chart(result_of(tmp_path)).marks[0].value == 0.720


def test_a_closed_run_has_no_target_of_its_own(tmp_path, writer):
    writer().write(tmp_path / "result_0.txt")
    (tmp_path / "config.json").write_text(json.dumps({"evaluate": {"target": 0.1}}))
    assert accuracy_chart(result_of(tmp_path)).marks[0].value == 0.720


def test_accuracy_is_drawn_over_time_where_no_samples_are_logged(tmp_path, writer):
    writer().change("eval_accuracy", metadata={"epoch_num": 1}).write(tmp_path / "result_0.txt")
    result = result_of(tmp_path)
    chart = accuracy_chart(result)
    assert chart.x.label.startswith("minutes")
    assert len(chart.series[0].points) == 17


def test_the_last_stretch_starts_where_a_run_comes_close(submission):
    chart = close_to_target_chart(result_of(submission))
    assert chart.y.low == pytest.approx(0.70)
    for line in chart.series:
        assert line.points[0].y < 0.70 <= line.points[1].y, (
            "one point before, so that the line enters the picture"
        )


def test_samples_stand_against_the_reference(submission):
    result = result_of(submission)
    chart = samples_chart(result)
    assert [bar.spans for bar in chart.series] == [
        ((run.samples, run.samples, "dot"),) for run in result.runs
    ]
    values = {mark.role: mark.value for mark in chart.marks}
    point = result.rcp_point
    assert values == {"minimum": point.minimum, "reference": point.mean, "own": result.mean_samples}
    assert chart.band == (point.minimum, point.mean)
    assert all(
        chart.x.low < value < chart.x.high
        for value in [*values.values(), *(run.samples for run in result.runs)]
    )


def test_the_timeline_tiles_the_clock(submission):
    result = result_of(submission)
    chart = time_chart(result)
    assert chart.parts == (INITIALISATION, TRAINING, EVALUATION)
    for bar, run in zip(chart.series, result.runs, strict=True):
        assert bar.spans[0].start == pytest.approx(-run.init_seconds / 60)
        for before, after in zip(bar.spans, bar.spans[1:], strict=False):
            assert before.stop == after.start
        assert bar.spans[-1].stop == pytest.approx(run.minutes)
        evaluations = sum(s.stop - s.start for s in bar.spans if s.part == EVALUATION)
        assert evaluations / run.minutes == pytest.approx(run.evaluation_share)
    assert chart.marks[0].value == result.olympic_minutes


def test_evaluations_out_of_order_leave_the_clock_tiled(tmp_path, writer):
    log = writer()
    starts = [line for line in log.lines if line["key"] == "eval_start"]
    starts[3]["time_ms"] = starts[9]["time_ms"]
    starts[5]["time_ms"] = 1
    log.write(tmp_path / "result_0.txt")
    (bar,) = time_chart(result_of(tmp_path)).series
    clock = [segment for segment in bar.spans if segment.part != INITIALISATION]
    assert clock[0].start == 0
    for before, after in itertools.pairwise(clock):
        assert before.stop == after.start


def test_throughput_is_what_was_logged_at_the_time_it_was_reached(tmp_path, writer):
    writer(seconds_per_evaluation=15).write(tmp_path / "result_0.txt")
    (line,) = throughput_chart(result_of(tmp_path)).series
    assert {point.y for point in line.points} == {10_000}
    assert [round(point.x, 2) for point in line.points[:2]] == [
        0.25,
        round((15 + 0.6 + 15) / 60, 2),
    ]


def test_throughput_follows_from_evaluations_where_none_was_logged(tmp_path, writer):
    writer(seconds_per_evaluation=15).drop("tracked_stats").write(tmp_path / "result_0.txt")
    (line,) = throughput_chart(result_of(tmp_path)).series
    assert len(line.points) == 17
    assert all(point.y == pytest.approx(10_000, rel=1e-3) for point in line.points)


def test_noise_is_not_blown_up_to_the_height_of_the_chart(tmp_path, writer):
    writer().write(tmp_path / "result_0.txt")
    chart = throughput_chart(result_of(tmp_path))
    assert chart.y.high - chart.y.low > 0.1 * 12_000


def test_the_throughput_axis_spans_what_was_measured_and_at_least_a_tenth_of_it(tmp_path, writer):
    for index, seconds in enumerate((10, 12.5, 20)):
        writer(seed=index, seconds_per_evaluation=seconds).write(tmp_path / f"result_{index}.txt")
    rates = (7_500, 12_000, 15_000)
    chart = throughput_chart(result_of(tmp_path))
    room = 0.05 * (rates[-1] - rates[0])
    assert (chart.y.low, chart.y.high) == pytest.approx((rates[0] - room, rates[-1] + room))
    for name in ("result_0.txt", "result_2.txt"):
        (tmp_path / name).unlink()
    chart = throughput_chart(result_of(tmp_path))
    assert (chart.y.low, chart.y.high) == pytest.approx((12_000 * 0.945, 12_000 * 1.055))


def test_the_loss_is_drawn_where_it_is_logged(tmp_path, writer):
    log = writer()
    log.write(tmp_path / "result_0.txt")
    assert loss_chart(result_of(tmp_path)) is None
    for index, line in enumerate(line for line in log.lines if line["key"] == "tracked_stats"):
        line["value"] = {"throughput": 1000.0, "loss": 8.0 - 0.1 * index}
    log.write(tmp_path / "result_0.txt")
    (line,) = loss_chart(result_of(tmp_path)).series
    assert [round(point.y, 1) for point in line.points[:3]] == [8.0, 7.9, 7.8]


def test_a_folder_without_a_usable_log_has_no_chart(tmp_path):
    (tmp_path / "result_0.txt").write_text("killed\n")
    assert charts(result_of(tmp_path)) == []


def test_pictures_have_the_colours_of_the_page():
    css = style_sheet()
    assert "var(" not in css
    assert ".run-0 { color: #0b63c4; }" in css
    assert re.search(r"\.part\.evaluation { fill: #d9730d; }", css)


def test_curves_are_named_at_their_ends_and_those_that_end_together_once(real_folders):
    chart = next(one for one in charts(result_of(real_folders[0])) if one.key == "target")
    wide, medium, narrow = draw(chart, "x").split("</svg>")[:3]
    for drawn in (wide, medium, narrow):
        said = re.findall(r'class="note end">([^<]*)</text>', drawn)
        assert sorted(re.findall(r"\d", " ".join(said))) == [str(index) for index in range(10)]
        assert len(said) <= 6, "runs that end together are named together"
        assert {"6 fastest", "1 slowest"} <= set(said)
    assert chart.legend() == []


@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_names_of_curves_cover_neither_each_other_nor_the_target(size, real_folders):
    width = {"wide": 1100, "narrow": 360}[size]
    for chart in charts(result_of(real_folders[0])):
        drawn = next(one for one in draw(chart, "x").split("</svg>") if f'class="{size}"' in one)
        places = [
            (float(x), float(y), 7.2 * len(label) / 2)
            for x, y, label in re.findall(
                r'<text x="([\d.]+)" y="([\d.-]+)" [^>]*class="note end">([^<]*)<', drawn
            )
        ]
        for index, (x, y, half) in enumerate(places):
            assert half <= x + 1
            assert y >= 10, "in sight"
            assert x + half <= width + 1
            assert all(
                abs(y - b) >= 12.9 or abs(x - a) >= half + other for a, b, other in places[:index]
            )


def test_the_last_stretch_of_few_evaluations_starts_left_of_where_the_curve_enters(
    tmp_path, writer
):
    log = writer(evaluations=3, interval=1_000_000)
    accuracies = [line for line in log.lines if line["key"] == "eval_accuracy"]
    for line, value in zip(accuracies, (0.4, 0.71, 0.7203), strict=True):
        line["value"] = value
    log.write(tmp_path / "result_0.txt")
    chart = close_to_target_chart(result_of(tmp_path))
    crossing = 1_000_000 + (0.70 - 0.4) / (0.71 - 0.4) * 1_000_000
    assert chart.x.low < crossing < chart.x.low + 0.1 * (chart.x.high - chart.x.low)


def test_an_axis_by_factors_puts_equal_factors_equally_far():
    axis = Axis(label="x", low=8, high=8 * 4**5, log=True)
    assert [axis.share(8 * 4**power) for power in range(6)] == pytest.approx(
        [0, 0.2, 0.4, 0.6, 0.8, 1]
    )
    assert axis.ticks(4) == [10, 100, 1000]
    assert axis.ticks(8) == [10, 30, 100, 300, 1000, 3000]


def test_an_axis_of_names_leaves_out_some_where_there_is_no_room_and_never_the_last():
    axis = Axis(label="round", low=-0.2, high=4.2, names=("a", "b", "c", "d", "e"))
    assert [axis.text(value) for value in axis.ticks(8)] == ["a", "b", "c", "d", "e"]
    assert [axis.text(value) for value in axis.ticks(3)] == ["a", "c", "e"]
