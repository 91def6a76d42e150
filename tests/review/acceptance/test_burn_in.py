"""The verdict on a burn-in, by its nodes' journals, while it runs and when it is over."""

import json

import numpy as np
import pytest

from review.acceptance import schema
from review.acceptance.journal import MAX_ROUNDS, Rounds, read_burn_in
from review.acceptance.verdict import certify, line

from .made_up import make, write

DURATION = 100.0


def repeat(folder, number, elapsed, different=None, slow=None, node=0, ranks=(0, 1)):
    """A repeat that a node has finished. different: first step by rank; slow: seconds by rank."""
    first = folder / "burn_in.json"
    if not first.exists():
        first.write_text(json.dumps({"duration": DURATION, "checksums": [1]}))
    seconds = {str(rank): (slow or {}).get(rank, 0.1) for rank in ranks}
    told = {"repeat": number, "elapsed": elapsed, "seconds": seconds}
    with (folder / f"burn_in_node{node}.jsonl").open("a") as file:
        file.write(json.dumps(told | {"different": different or {}}) + "\n")


def test_a_burn_in_is_read_while_a_line_is_being_written(tmp_path):
    assert read_burn_in(tmp_path, {}) is None
    for number in range(1, 6):
        repeat(tmp_path, number, 10.0 * number, {"0": 3} if number in (2, 4) else None)
    with (tmp_path / "burn_in_node0.jsonl").open("a") as file:
        file.write('{"repeat": ')
    found = read_burn_in(tmp_path, {})
    assert (found.repeats, found.elapsed) == (5, 50.0)
    (reason,) = found.different
    assert "first in step 4 of repeat 2" in reason.text()
    assert "2 of 5 repeats" in reason.text()


def test_the_verdict_so_far_fails_from_the_first_different_repeat(tmp_path):
    write(tmp_path, make(1, 2), burn_in_seconds=DURATION)
    different, states = {2: {"1": 4}}, []
    for number, elapsed in ((1, 20.0), (2, 60.0), (3, 101.0)):
        repeat(tmp_path, number, elapsed, different.get(number))
        states.append(certify(tmp_path).state)
    assert states == ["warn", "fail", "fail"], "at first, not over"
    assert "rank 1 on node0: its weights differ" in certify(tmp_path).reasons()[0]


def test_any_number_of_repeats_becomes_a_bounded_number_of_rounds():
    rounds = Rounds()
    for number in range(1, 1001):
        rounds.add(0, number, float(number))
        if number > 3:
            rounds.add(7, number - 3, float(number - 3))
    found, firsts = rounds.means(), range(1, 1001, 16)
    assert rounds.width == 16
    assert found[0] == [np.mean(range(one, min(one + 16, 1001))) for one in firsts]
    assert found[7][:-1] == found[0][:-1]
    assert len(found[7]) == len(found[0]) <= MAX_ROUNDS


def test_a_rank_that_is_slow_only_in_the_burn_in_is_named(tmp_path):
    write(tmp_path, make(4, 2))
    for number in range(1, 9):
        repeat(tmp_path, number, 10.0 * number, slow={5: 0.11}, ranks=range(8))
    (found,) = certify(tmp_path).findings
    named = (found.what, found.stage, found.name)
    assert named == ("slow", "burn-in", "rank 5 on node2")
    assert found.outlier.excess == pytest.approx(0.1)


def test_an_incomplete_burn_in_warns_with_the_command_to_resume(certified, tmp_path):
    status, said = certified(make(1, 2), burn_in_seconds=DURATION)
    assert status == 3
    assert "burn-in: 0 repeats in 0.00 hours (0%), not started" in said
    assert "burn-in: ended after 0% of 1:40: resume it" in said
    repeat(tmp_path, 1, 99.0)
    status, said = certified()
    again = f"RUN_NAME={tmp_path.name} DURATION=100s, unless it is still running"
    last = f"  burn-in: ended after 99% of 1:40: resume it with {again}"
    assert (status, *said.splitlines()[-3::2]) == (3, last, "warn")
    repeat(tmp_path, 2, 100.5)
    assert certified()[0] == 0


def burnt(folder, *repeats, elapsed=DURATION):
    """A test of nodes that recorded so many repeats."""
    for path in folder.glob("burn_in_*"):
        path.unlink()
    write(folder, make(len(repeats), 2))
    samples = {"telemetry": np.empty(0, schema.SAMPLE)}
    for node, count in enumerate(repeats):
        about, ranks = {"node": f"node{node}"}, (2 * node, 2 * node + 1)
        schema.write(folder / f"burn_in_node{node}.npz", about, samples)
        for number in range(1, count + 1):
            time = elapsed * number / max(repeats)
            repeat(folder, number, time, node=node, ranks=ranks)


@pytest.mark.parametrize("count", [0, 5, 9])
def test_a_node_that_recorded_fewer_repeats_than_others_fails(tmp_path, count):
    burnt(tmp_path, 10, 10, 10, count)
    reason = f"node node3: recorded {count} of 10 repeats (burn-in)"
    assert certify(tmp_path).reasons() == [reason]


def test_a_burn_in_that_was_ended_early_may_lack_its_last_repeat(tmp_path):
    burnt(tmp_path, 10, 10, 10, 9, elapsed=DURATION / 2)
    assert [one.state for one in certify(tmp_path).why()] == ["warn"]
    burnt(tmp_path, 10, 10, 10, 8, elapsed=DURATION / 2)
    assert [one.state for one in certify(tmp_path).why()] == ["fail", "warn"]


def test_a_node_without_telemetry_of_the_burn_in_is_not_tested_by_it(tmp_path):
    burnt(tmp_path, 10, 10)
    assert certify(tmp_path).why() == []
    assert "telemetry of the burn-in" not in line(certify(tmp_path))
    (tmp_path / "burn_in_node1.npz").unlink()
    judged = certify(tmp_path)
    assert "telemetry of the burn-in on node1 (not recorded)" in line(judged)
    (tmp_path / "config.json").write_text('{"required_tests": "telemetry"}')
    what = "telemetry of the burn-in: required, not tested: not recorded"
    assert f"node node1: {what}" in certify(tmp_path).reasons()
