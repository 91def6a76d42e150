"""Power files of another run, or without a usable energy, are errors."""

from __future__ import annotations

import re
import shutil

import pytest

from review.logs.output import ERROR, WARNING
from review.results.score import load_results
from review.verdict.checking import own_findings

from .damage import system


def errors(folder):
    """(file, message) of every error."""
    (result,) = load_results(folder)
    return [
        (f.file.relative_to(folder).as_posix(), f.message)
        for f in own_findings(result)
        if f.severity == ERROR
    ]


NODE = "result_3/node_0.txt"


def swap(old, new, name=NODE):
    """Replaces a pattern in some power files."""

    def change(power):
        for path in power.glob(name):
            path.write_text(re.sub(old, new, path.read_text()))

    return change


def of_lines(keep):
    """Keeps some lines of a file: events from start to stop."""

    def change(power):
        lines = (power / NODE).read_text().splitlines(keepends=True)
        (power / NODE).write_text("".join(keep(lines)))

    return change


def every_second(lines):
    kept = [line for i, line in enumerate(lines[:-1]) if i < 2 or i % 2 == 0]
    return [*kept, lines[-1]]


def stops_at_its_start(lines):
    start = re.search(r'"time_ms": (\d+)', lines[0])[0]
    return [*lines[:-1], re.sub(r'"time_ms": \d+', start, lines[-1])]


def copy(power):
    shutil.copy(power / "result_2" / "node_0.txt", power / NODE)


def another_node(power):
    text = (power / NODE).read_text().replace("5003", "5004")
    (power / "result_3" / "node_1.txt").write_text(text)


def renumbered(power):
    (power / NODE).rename(power / "result_3" / "node_1.txt")


def switch_without_watts(power):
    for folder in power.iterdir():
        (folder / "sw_0.txt").write_text("")


def test_power_of_the_run_itself_is_no_error(submission, power_files):
    power_files(submission)
    assert errors(submission) == []


CASES = [  # what is changed, of which file, what is found
    (of_lines(every_second), NODE, "is read every 2.0"),
    (swap(r'"value": 5(\d\d\d)\.', r'"value": 5.\1', "*/*"), "", "W on average, with 8 ac"),
    (swap('"value": 5003.0', '"value": NaN'), NODE, "readings that are no number"),
    (of_lines(lambda lines: lines[:61] + lines[-1:]), NODE, "has 59 readings"),
    (of_lines(stops_at_its_start), NODE, "gives no energy"),
    (another_node, "result_3", "has 2 nodes, most runs 1"),
    (renumbered, "result_3", "holds node_1.txt, not node_0.txt"),
    (swap('"scope": "node"', '"scope": "accelerators only"'), NODE, "accelerators alone"),
    (swap('"value": 1.0', '"value": 94'), NODE, "has a conversion_eff of 94"),
    (switch_without_watts, "result_", "lacks interconnect_power_est"),
    (lambda power: shutil.rmtree(power / "result_3"), "result_3", "has no power files"),
    (swap('"value": 5003.0', '"value": 0'), NODE, "nothing but 0 W"),
    (swap('"value": 5003.0', '"value": -5', "result_3/*"), NODE, "readings below 0 W"),
    (of_lines(lambda lines: lines[:-1]), NODE, "lacks power_measurement_stop"),
    (copy, NODE, "a copy of result_2/node_0.txt"),
    (swap('"time_ms": 175', '"time_ms": 174'), NODE, "s before run_stop of result_3.txt"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "file", "message"), CASES)
def test_power_of_something_else_is_found(
    change, file, message, submission, power_files
):
    power_files(submission)
    change(submission / "power")
    found = errors(submission)
    assert all(name.startswith(f"power/{file}") for name, _ in found), found
    assert any(message in said for _, said in found), found


def test_a_system_of_two_nodes_needs_the_readings_of_both(submission, power_files):
    power_files(submission)
    system(number_of_nodes="2")(submission)
    assert errors(submission) == [("power", "holds readings of 1 of the 2 nodes")]


def test_a_minute_without_readings_is_seen(submission, power_files):
    power_files(submission)
    of_lines(lambda lines: lines[:70] + lines[90:])(submission / "power")
    (result,) = load_results(submission)
    (found,) = [f for f in own_findings(result) if f.id == "power_gap"]
    said = "has no reading for 21.0 s of the timed part"
    assert (found.severity, found.message) == (WARNING, said)
