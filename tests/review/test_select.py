"""`select` hands in the ten consecutive runs closest to the median, and never the fastest."""

from __future__ import annotations

import json
import statistics

import pytest

from review.__main__ import main
from review.logs.mllog import read_log
from review.results.run import Run
from review.results.score import Result, load_results
from review.select import select

COUNTS = (
    17,
    18,
    17,
    16,
    17,
    14,
    13,
    16,
    16,
    17,
    18,
    18,
    16,
)  # evaluations of thirteen runs, as they ran


@pytest.fixture
def runs(tmp_path, writer):
    """A folder of thirteen runs whose names do not follow the order in which they ran."""
    for index, count in enumerate(COUNTS):
        start, seconds = 1_750_000_000_000 + index * 600_000, 12.5 - 0.1 * (index % 4)
        log = writer(
            seed=100 + index,
            evaluations=count,
            start_ms=start,
            seconds_per_evaluation=seconds,
        )
        log.write(tmp_path / "runs" / f"result_{(5 * index) % 13}.txt")
    return tmp_path / "runs"


def named(index):
    return f"result_{(5 * index) % 13}.txt"


def scores_of_windows(folder):
    """The score of every ten consecutive runs."""
    logs = tuple(Run(read_log(folder / named(index))) for index in range(13))
    return [Result(folder, logs[first : first + 10]).score for first in range(4)]


def test_the_set_closest_to_the_median_is_chosen_by_start_times(runs, capsys):
    scores = scores_of_windows(runs)
    assert len(set(scores)) == 4
    middle = sorted(scores)[1:3]
    assert main(["select", str(runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["score_minutes"] for one in found["sets"]] == scores
    assert found["median_minutes"] == pytest.approx(statistics.median(scores))
    assert found["chosen"]["score_minutes"] == max(
        middle
    )  # both are as close: the slower one
    first = scores.index(max(middle))
    assert found["chosen"]["runs"] == [
        named(index) for index in range(first, first + 10)
    ]


@pytest.mark.parametrize(
    "first_runs",
    [
        {
            0: {"seed": 100, "target": 0.7},
            1: {"seed": 101, "target": 0.7},
        },  # two miss the target, in the next set one
        {0: {"seed": 105, "evaluations": 16}},  # the seed of another run of the set
    ],
)
def test_a_set_that_would_not_count_is_infinitely_slow(first_runs, runs, writer):
    for index, options in first_runs.items():
        writer(start_ms=1_750_000_000_000 + index * 600_000, **options).write(
            runs / named(index)
        )
    (result,) = load_results(runs)
    found = select(result)
    assert [one.score == float("inf") for one in found.sets] == [
        True,
        False,
        False,
        False,
    ]
    assert found.chosen.score == sorted(one.score for one in found.sets)[2]
    assert "1 of which would not count" in found.reason


def test_where_half_of_the_sets_do_not_count_none_is_submitted(
    runs, writer, tmp_path, capsys
):
    for index in (4, 5):  # in every set
        log = writer(
            seed=100 + index, target=0.7, start_ms=1_750_000_000_000 + index * 600_000
        )
        log.write(runs / named(index))
    assert main(["select", str(runs), "-o", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()
    assert "is of a set that would not count" in capsys.readouterr().out


def test_the_folder_to_submit_holds_the_set_its_power_and_the_reason(
    runs, power_files, tmp_path, capsys
):
    power_files(runs)
    (runs / "config.json").write_text("{}")
    output = tmp_path / "submit"
    assert main(["select", str(runs), "-o", str(output)]) == 0
    assert str(output) in capsys.readouterr().out
    (result,) = load_results(runs)
    chosen = select(result).chosen
    for index, run in enumerate(chosen.result.runs):
        assert (output / f"result_{index}.txt").read_bytes() == run.path.read_bytes()
        power = [
            folder / "power" / name / "node_0.txt"
            for folder, name in ((output, f"result_{index}"), (runs, run.path.stem))
        ]
        assert power[0].read_bytes() == power[1].read_bytes()
    (written,) = load_results(output)
    assert (written.score, len(written.runs)) == (chosen.score, 10)
    record = json.loads((output / "selection.json").read_text())
    assert record["renamed"]["result_0.txt"] == chosen.result.runs[0].path.name
    assert record["reason"].startswith("closest to the median of 4 sets")
    assert (output / "config.json").is_file()


def too_few(runs):
    for index in range(4):
        (runs / named(index)).unlink()


def empty_log(runs):
    (runs / named(3)).write_text("")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (too_few, "9 logs, a set needs 10"),
        (empty_log, "its position among the runs is unknown"),
    ],
)
def test_what_cannot_be_chosen_from_is_a_one_line_error(change, says, runs, capsys):
    change(runs)
    assert main(["select", str(runs)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_folder_that_exists_is_left_alone(runs, capsys):
    before = sorted(path.name for path in runs.iterdir())
    assert main(["select", str(runs), "-o", str(runs)]) == 2
    assert "exists: give another folder" in capsys.readouterr().err
    assert sorted(path.name for path in runs.iterdir()) == before
