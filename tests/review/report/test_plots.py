"""Charts show the numbers of the logs: nothing invented, nothing left out."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from review.league.entries import published
from review.league.page import scaling
from review.league.ranking import League
from review.report.chart import WIDTH, Axis, layout
from review.report.plots import accuracy_chart, charts, loss_chart
from review.results.score import load_results

from ..conftest import LogWriter


def result_of(folder, *ruleset):
    (result,) = load_results(folder, *ruleset)
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
    assert steps == pytest.approx(steps[:1] * len(steps), rel=1e-3, abs=slack)


def test_ticks_are_labelled_at_a_length_that_fits():
    values = (0, 500_000, 1_500_000, 0.72, 0.1 + 0.2, 11800.0, 99_000, 2.5, 1250.0)
    labels = "0 500k 1.5M 0.72 0.3 11,800 99,000 2.5 1,250"
    axis = Axis(label="", low=0, high=1)
    assert " ".join(map(axis.text, values)) == labels


def test_every_evaluation_is_a_point_and_the_target_a_line(submission):
    result = result_of(submission)
    chart = accuracy_chart(result)
    assert [line.run for line in chart.series] == list(range(10))
    for line, run in zip(chart.series, result.runs, strict=True):
        expected = [(one.samples, one.accuracy) for one in run.evaluations]
        assert [(point.x, point.y) for point in line.points] == expected
        assert line.dropped == (run.path in result.olympic.dropped)
    assert chart.target == 0.720
    assert chart.y.low < 0.4
    assert chart.y.high > 0.7203


def test_the_open_division_alone_has_the_target_of_its_own_run(tmp_path):
    given = {"open": {None: 0.720, 0.1: 0.1, "0.1": 0.720}, "closed": {0.1: 0.720}}
    for division, targets in given.items():
        LogWriter(division=division, target=0.11).write(tmp_path / "result_0.txt")
        for own, expected in targets.items():
            settings = {"evaluate": {"target": own}} if own else {}
            (tmp_path / "config.json").write_text(json.dumps(settings))
            assert accuracy_chart(result_of(tmp_path)).target == expected
    assert accuracy_chart(result_of(tmp_path, "0.7.0")).target == 0.712


def test_accuracy_is_drawn_over_time_where_no_samples_are_logged(tmp_path):
    log = LogWriter().change("eval_accuracy", metadata={"epoch_num": 1})
    log.write(tmp_path / "result_0.txt")
    chart = accuracy_chart(result_of(tmp_path))
    assert chart.x.label.startswith("minutes")
    assert len(chart.series[0].points) == 17


def test_the_loss_is_drawn_where_it_is_logged(tmp_path):
    log = LogWriter()
    log.write(tmp_path / "result_0.txt")
    assert loss_chart(result_of(tmp_path)) is None
    lines = [line for line in log.lines if line["key"] == "tracked_stats"]
    for index, line in enumerate(lines):
        line["value"] = {"throughput": 1000.0, "loss": 8.0 - 0.1 * index}
    log.write(tmp_path / "result_0.txt")
    (line,) = loss_chart(result_of(tmp_path)).series
    assert [round(point.y, 1) for point in line.points[:3]] == [8.0, 7.9, 7.8]


def test_a_folder_without_a_usable_log_has_no_chart(tmp_path):
    (tmp_path / "result_0.txt").write_text("killed\n")
    assert charts(result_of(tmp_path)) == []


def test_an_axis_by_factors_puts_equal_factors_equally_far():
    axis = Axis(label="x", low=8, high=8 * 4**5, log=True)
    shares = [axis.share(8 * 4**power) for power in range(6)]
    assert shares == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert axis.ticks(4) == [10, 100, 1000]
    assert axis.ticks(8) == [10, 30, 100, 300, 1000, 3000]


def test_names_of_curves_do_not_cover_each_other():
    chart = scaling(League((), published()))
    names = layout(chart)["names"]
    assert {line.label for _, _, line in names} == {line.name for line in chart.series}
    places = [(x, y, 7.2 * len(line.label) / 2) for x, y, line in names]
    for index, (x, y, half) in enumerate(places):
        assert x + half <= WIDTH + 1
        assert y >= 10, "in sight"
        assert all(
            abs(y - b) >= 12.9 or abs(x - a) >= half + other
            for a, b, other in places[:index]
        )
