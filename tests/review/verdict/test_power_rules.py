"""Power files that give a run the energy of another, or none, are errors."""

from __future__ import annotations

import shutil

import pytest

from review.logs.findings import ERROR
from review.results.score import load_results
from review.verdict.checking import own_findings


def errors(folder):
    """(file, message) of every error."""
    (result,) = load_results(folder)
    return [(f.file.relative_to(folder).as_posix(), f.message) for f in own_findings(result) if f.severity == ERROR]


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


@pytest.mark.parametrize(
    ("change", "file", "message"),
    [
        (remove_one, "power/result_3", "has no power files"),
        (zero, "power/result_3/node_0.txt", "nothing but 0 W"),
        (cut, "power/result_3/node_0.txt", "lacks power_measurement_stop"),
        (copy, "power/result_3/node_0.txt", "a copy of result_2/node_0.txt"),
        (another_day, "power/result_3/node_0.txt", "s before run_stop of result_3.txt"),
    ],
)
def test_power_of_something_else_is_found(change, file, message, submission, power_files):
    power_files(submission)
    assert errors(submission) == []
    change(submission / "power")
    found = errors(submission)
    assert {name for name, _ in found} == {file}
    assert any(message in said for _, said in found), found
