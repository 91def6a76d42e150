"""The verdict on a burn-in, by its nodes' journals, while it runs and when it is over."""

from __future__ import annotations

import json

import numpy as np
import pytest

from review.__main__ import main
from review.acceptance import schema
from review.acceptance.journal import MAX_ROUNDS, Rounds, read_burn_in
from review.acceptance.verdict import certify, line

from .made_up import make, write

DURATION = 100.0


class Test:
    """An acceptance test that advances."""

    __test__ = False

    def __init__(self, folder):
        self.folder = folder

    def start(self):
        settings = {"expected": {}, "burn_in_seconds": DURATION}
        (self.folder / "config.json").write_text(json.dumps(settings))
        (self.folder / "output.txt").write_text(
            "0: certify: single, parallel: 9 steps in each round\n"
        )

    def stages(self):
        write(self.folder, make(1, 2))

    def repeat(self, number, elapsed, different=None, seconds=None):
        first = self.folder / "burn_in.json"
        if not first.exists():
            first.write_text(json.dumps({"duration": DURATION, "checksums": [1]}))
        journal = self.folder / "burn_in_node0.jsonl"
        with journal.open("a") as file:
            line = {
                "repeat": number,
                "elapsed": elapsed,
                "seconds": seconds or {"0": 0.1, "1": 0.1},
                "different": different or {},
            }
            file.write(json.dumps(line) + "\n")


def test_a_burn_in_is_read_while_a_line_is_being_written(tmp_path):
    test = Test(tmp_path)
    assert read_burn_in(tmp_path, {}) is None
    for number in range(1, 6):
        test.repeat(number, 10.0 * number, {"0": 3} if number in (2, 4) else None)
    with (tmp_path / "burn_in_node0.jsonl").open("a") as file:
        file.write('{"repeat": ')
    found = read_burn_in(tmp_path, {})
    assert (found.repeats, found.elapsed) == (5, 50.0)
    (reason,) = found.different
    assert "first in step 4 of repeat 2" in reason.text()
    assert "2 of 5 repeats" in reason.text()


def test_the_verdict_so_far_fails_from_the_first_different_repeat(tmp_path):
    test = Test(tmp_path)
    test.start()
    test.stages()
    test.repeat(1, 20.0)
    assert certify(tmp_path).state == "warn", "not over"
    test.repeat(2, 60.0, {"1": 4})
    assert certify(tmp_path).state == "fail"
    test.repeat(3, 101.0)
    assert certify(tmp_path).state == "fail"
    assert "rank 1 on node0: its weights differ" in certify(tmp_path).reasons()[0]


def test_any_number_of_repeats_becomes_a_bounded_number_of_rounds():
    rounds = Rounds()
    for repeat in range(1, 1001):
        rounds.add(0, repeat, float(repeat))
        if repeat > 3:
            rounds.add(7, repeat - 3, float(repeat - 3))
    found = rounds.means()
    assert rounds.width == 16
    assert found[0] == [
        np.mean(range(first, min(first + 16, 1001))) for first in range(1, 1001, 16)
    ]
    assert found[7][:-1] == found[0][:-1]
    assert len(found[7]) == len(found[0]) <= MAX_ROUNDS


def test_a_rank_that_is_slow_only_in_the_burn_in_is_named(tmp_path):
    write(tmp_path, make(4, 2))
    test = Test(tmp_path)
    for repeat in range(1, 9):
        test.repeat(
            repeat,
            10.0 * repeat,
            seconds={rank: 0.1 + 0.01 * (rank == 5) for rank in range(8)},
        )
    (found,) = certify(tmp_path).findings
    assert (found.what, found.stage, found.name) == (
        "slow",
        "burn-in",
        "rank 5 on node2",
    )
    assert found.outlier.excess == pytest.approx(0.1)


def test_an_incomplete_burn_in_is_a_warning_with_the_command_to_resume(
    tmp_path, capsys
):
    test = Test(tmp_path)
    test.stages()
    test.repeat(1, 99.0)
    assert main(["certify", str(tmp_path)]) == 3
    said = capsys.readouterr().out.splitlines()
    again = f"resume it with RUN_NAME={tmp_path.name} DURATION=100s, unless it is still running"
    assert [said[-3], said[-1]] == [
        f"  burn-in: ended after 99% of 1:40: {again}",
        "warn",
    ]
    test.repeat(2, 100.5)
    assert main(["certify", str(tmp_path)]) == 0


def burnt(folder, *repeats, elapsed=DURATION):
    """A test of nodes that recorded so many repeats."""
    write(folder, make(len(repeats), 2))
    (folder / "burn_in.json").write_text(json.dumps({"duration": DURATION}))
    most = max(repeats)
    for node, count in enumerate(repeats):
        about = {"node": f"node{node}"}
        schema.write(
            folder / f"burn_in_node{node}.npz",
            about,
            {"telemetry": np.empty(0, schema.SAMPLE)},
        )
        seconds = {str(2 * node): 0.1, str(2 * node + 1): 0.1}
        lines = [
            {
                "repeat": number,
                "elapsed": elapsed * number / most,
                "seconds": seconds,
                "different": {},
            }
            for number in range(1, count + 1)
        ]
        (folder / f"burn_in_node{node}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )


@pytest.mark.parametrize("count", [0, 5, 9])
def test_a_node_that_recorded_fewer_repeats_than_others_fails(tmp_path, count):
    burnt(tmp_path, 10, 10, 10, count)
    reason = f"node node3: recorded {count} of 10 repeats (burn-in)"
    assert certify(tmp_path).reasons() == [reason]
    burnt(tmp_path, 10, 10, 10, 10)
    assert certify(tmp_path).why() == []


def test_a_burn_in_that_was_ended_early_may_lack_its_last_repeat(tmp_path):
    burnt(tmp_path, 10, 10, 10, 9, elapsed=DURATION / 2)
    assert [one.state for one in certify(tmp_path).why()] == ["warn"]
    burnt(tmp_path, 10, 10, 10, 8, elapsed=DURATION / 2)
    assert [one.state for one in certify(tmp_path).why()] == ["fail", "warn"]


def test_a_node_without_telemetry_of_the_burn_in_is_not_tested_by_it(tmp_path):
    burnt(tmp_path, 10, 10)
    assert "telemetry of the burn-in" not in line(certify(tmp_path))
    (tmp_path / "burn_in_node1.npz").unlink()
    judged = certify(tmp_path)
    assert "telemetry of the burn-in on node1 (not recorded)" in line(judged)
    (tmp_path / "config.json").write_text('{"required_tests": "telemetry"}')
    what = "telemetry of the burn-in: required, not tested: not recorded"
    assert f"node node1: {what}" in certify(tmp_path).reasons()


def test_a_burn_in_that_never_started_is_a_warning(tmp_path, capsys):
    test = Test(tmp_path)
    test.start()
    test.stages()
    assert main(["certify", str(tmp_path)]) == 3
    said = capsys.readouterr().out
    assert "burn-in: 0 repeats in 0.00 hours (0%), not started" in said
    assert "burn-in: ended after 0% of 1:40: resume it" in said
