"""Power files of another run, or without a usable energy, are errors."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from review.logs.output import ERROR, WARNING
from review.results.score import load_results
from review.verdict.checking import own_findings


def errors(folder):
    """(file, message) of every error."""
    (result,) = load_results(folder)
    return [
        (f.file.relative_to(folder).as_posix(), f.message)
        for f in own_findings(result)
        if f.severity == ERROR
    ]


def remove_one(power):
    shutil.rmtree(power / "result_3")


def zero(power):
    path = power / "result_3" / "node_0.txt"
    path.write_text(path.read_text().replace('"value": 5003.0', '"value": 0'))


def cut(power):
    path = power / "result_3" / "node_0.txt"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def copy(power):
    shutil.copy(power / "result_2" / "node_0.txt", power / "result_3" / "node_0.txt")


def another_day(power):
    path = power / "result_3" / "node_0.txt"
    path.write_text(path.read_text().replace('"time_ms": 175', '"time_ms": 174'))


def thinned(every, first=0):
    """Keeps one reading of so many, from the first one on."""

    def thin(power):
        path = power / "result_3" / "node_0.txt"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text(
            "".join(
                line
                for i, line in enumerate(lines[:-1])
                if i < 2 + first or i % every == 0
            )
            + lines[-1]
        )

    return thin


def short(power):
    path = power / "result_3" / "node_0.txt"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:61] + lines[-1:]))


def stops_at_its_start(power):
    path = power / "result_3" / "node_0.txt"
    *lines, stop = path.read_text().splitlines(keepends=True)
    start = re.search(r'"time_ms": (\d+)', lines[0])[0]
    path.write_text("".join([*lines, re.sub(r'"time_ms": \d+', start, stop)]))


def more_nodes_than_one(power):
    path = power / "result_3" / "node_0.txt"
    (power / "result_3" / "node_1.txt").write_text(
        path.read_text().replace("5003", "5004")
    )


def renumbered(power):
    (power / "result_3" / "node_0.txt").rename(power / "result_3" / "node_1.txt")


def accelerators_only(power):
    path = power / "result_3" / "node_0.txt"
    path.write_text(
        path.read_text().replace('"scope": "node"', '"scope": "accelerators only"')
    )


def impossible_efficiency(power):
    path = power / "result_3" / "node_0.txt"
    path.write_text(
        path.read_text().replace(
            '"key": "conversion_eff", "value": 1.0',
            '"key": "conversion_eff", "value": 94',
        )
    )


def kilowatts(power):
    for path in power.rglob("node_0.txt"):
        path.write_text(
            re.sub(r'"value": 5(\d\d\d)\.', r'"value": 5.\1', path.read_text())
        )


def no_number(power):
    path = power / "result_3" / "node_0.txt"
    path.write_text(path.read_text().replace('"value": 5003.0', '"value": NaN'))


def switch_without_watts(power):
    for folder in power.iterdir():
        (folder / "sw_0.txt").write_text("")


def test_power_of_the_run_itself_is_no_error(submission, power_files):
    power_files(submission)
    assert errors(submission) == []


@pytest.mark.parametrize(
    ("change", "file", "message"),
    [
        (thinned(2), "power/result_3/node_0.txt", "is read every 2.0"),
        (kilowatts, "power/result_", "W on average, with 8 accelerators"),
        (no_number, "power/result_3/node_0.txt", "readings that are no number"),
        (short, "power/result_3/node_0.txt", "has 59 readings"),
        (stops_at_its_start, "power/result_3/node_0.txt", "gives no energy"),
        (more_nodes_than_one, "power/result_3", "has 2 nodes, most runs 1"),
        (renumbered, "power/result_3", "holds node_1.txt, not node_0.txt"),
        (
            accelerators_only,
            "power/result_3/node_0.txt",
            "is of the accelerators alone",
        ),
        (
            impossible_efficiency,
            "power/result_3/node_0.txt",
            "has a conversion_eff of 94",
        ),
        (switch_without_watts, "power/result_", "lacks interconnect_power_est"),
        (remove_one, "power/result_3", "has no power files"),
        (zero, "power/result_3/node_0.txt", "nothing but 0 W"),
        (cut, "power/result_3/node_0.txt", "lacks power_measurement_stop"),
        (copy, "power/result_3/node_0.txt", "a copy of result_2/node_0.txt"),
        (another_day, "power/result_3/node_0.txt", "s before run_stop of result_3.txt"),
    ],
)
def test_power_of_something_else_is_found(
    change, file, message, submission, power_files
):
    power_files(submission)
    change(submission / "power")
    found = errors(submission)
    assert all(name.startswith(file) for name, _ in found), found
    assert any(message in said for _, said in found), found


def test_a_system_of_two_nodes_needs_the_readings_of_both(submission, power_files):
    power_files(submission)
    path = submission.parents[2] / "systems" / "dgx.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "number_of_nodes": "2"})
    )
    assert errors(submission) == [("power", "holds readings of 1 of the 2 nodes")]


def test_a_minute_without_readings_is_seen(submission, power_files):
    power_files(submission)
    path = submission / "power" / "result_3" / "node_0.txt"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:70] + lines[90:]))
    (result,) = load_results(submission)
    (found,) = [
        f
        for f in own_findings(result)
        if f.key == "power" and "no reading" in f.message
    ]
    assert (found.severity, found.message) == (
        WARNING,
        "has no reading for 21.0 s of the timed part",
    )
