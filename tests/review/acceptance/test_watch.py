"""`watch` on an acceptance test: its stages, then the burn-in with the verdict so far, to the
end.
"""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from review.__main__ import main
from review.acceptance import schema
from review.acceptance.journal import MAX_ROUNDS, Journal, Rounds
from review.acceptance.live import AcceptanceTail
from review.acceptance.verdict import certify, line
from review.logs.output import follow
from review.watch import wait_for_log

from .made_up import make, write

DURATION = 100.0


class Test:
    """An acceptance test that advances whenever the watcher sleeps."""

    __test__ = False

    def __init__(self, folder, moves):
        self.folder, self.moves, self.now = folder, list(moves), 1e9

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        assert self.moves, "the watcher goes on after the end of the test"
        self.moves.pop(0)(self)

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
        os.utime(journal, (self.now, self.now))


def repeat(*arguments):
    return lambda test: test.repeat(*arguments)


def states(folder, *moves):
    test = Test(folder, moves)
    test.start()
    tail = AcceptanceTail(folder)
    return list(
        follow(
            tail.poll,
            lambda state: state.done or state.broken is not None,
            5.0,
            test.clock,
            test.sleep,
        )
    )


def test_a_burn_in_is_followed_from_its_stages_to_its_end(tmp_path):
    found = states(
        tmp_path, Test.stages, repeat(1, 20.0), repeat(2, 60.0), repeat(3, 101.0)
    )
    assert [", ".join(state.parts()) for state in found] == [
        "certify: single, parallel",
        "certify: single, parallel, so far: pass",
        "burn-in: 1 repeats in 0.01 hours (20%), identical bit for bit, so far: pass",
        "burn-in: 2 repeats in 0.02 hours (60%), identical bit for bit, so far: pass",
        "burn-in: 3 repeats in 0.03 hours (100%), identical bit for bit, pass",
    ]
    assert [state.done for state in found] == [False] * 4 + [True]


def test_the_verdict_so_far_fails_from_the_first_different_repeat(tmp_path):
    found = states(
        tmp_path,
        Test.stages,
        repeat(1, 20.0),
        repeat(2, 60.0, {"1": 4}),
        repeat(3, 101.0),
    )
    assert [state.verdict for state in found] == ["", "pass", "pass", "fail", "fail"]
    assert (
        found[3]
        .parts()[2]
        .startswith("rank 1 on node0: its weights differ from the first")
    )
    assert found[-1].verdict == "fail"


def test_each_poll_parses_only_new_lines(tmp_path, monkeypatch):
    taken = []
    take = Journal._parse
    monkeypatch.setattr(
        Journal,
        "_parse",
        lambda journal, line: taken.append(line["repeat"]) or take(journal, line),
    )
    journal, test = Journal(tmp_path), Test(tmp_path, [])
    for number in range(1, 6):
        test.repeat(number, 10.0 * number, {"0": 3} if number in (2, 4) else None)
        with (tmp_path / "burn_in_node0.jsonl").open("a") as file:
            file.write('{"repeat": ')  # the line after it is just being written
        found = journal.read({})
        whole = (tmp_path / "burn_in_node0.jsonl").read_bytes().rpartition(b"\n")[
            0
        ] + b"\n"
        (tmp_path / "burn_in_node0.jsonl").write_bytes(whole)
    assert taken == [1, 2, 3, 4, 5]
    assert (found.repeats, found.elapsed) == (5, 50.0)
    assert "first in step 4 of repeat 2" in found.different[0].text()
    assert "2 of 5 repeats" in found.different[0].text()


def test_a_new_burn_in_in_the_same_folder_is_read_from_its_start(tmp_path):
    journal, test = Journal(tmp_path), Test(tmp_path, [])
    for number in (1, 2, 3):
        test.repeat(number, 10.0 * number, {"1": 0})
    assert journal.read({}).different
    for path in tmp_path.glob("burn_in*"):
        path.unlink()
    assert journal.read({}) is None
    test.repeat(1, 10.0)
    os.utime(tmp_path / "burn_in.json", (2e9, 2e9))
    found = journal.read({})
    assert (found.repeats, found.different) == (1, [])


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
    test = Test(tmp_path, [])
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


def test_a_stalled_burn_in_is_reported(tmp_path):
    still = [lambda test: None] * 13
    found = states(tmp_path, Test.stages, repeat(1, 20.0), *still, lambda test: setattr(test, "now", test.now + 300),
                   repeat(2, 101.0))  # fmt: skip
    assert [state.stalled for state in found] == [False] * 16 + [True, False]
    assert found[16].parts()[1].startswith("no new repeat for")
    assert [state.verdict for state in found[15:]] == ["pass", "warn", "pass"]


def test_an_incomplete_burn_in_is_a_warning_with_the_command_to_resume(
    tmp_path, capsys
):
    test = Test(tmp_path, [])
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
    followed = AcceptanceTail(tmp_path)
    assert not followed.poll(1e9).done, "its lines may be on their way"
    burnt(tmp_path, 10, 10, 10, 10)
    assert certify(tmp_path).why() == []
    assert AcceptanceTail(tmp_path).poll(1e9).done


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
    test = Test(tmp_path, [])
    test.start()
    test.stages()
    assert main(["certify", str(tmp_path)]) == 3
    said = capsys.readouterr().out
    assert "burn-in: 0 repeats in 0.00 hours (0%), not started" in said
    assert "burn-in: ended after 0% of 1:40: resume it" in said


def test_a_failed_load_ends_the_watch_with_its_reason(tmp_path, capsys):
    Test(tmp_path, []).start()
    (tmp_path / "error_0.txt").write_text("RuntimeError: rank 3 did not come\n")
    assert main(["watch", str(tmp_path)]) == 2
    assert "did not run: RuntimeError: rank 3 did not come" in capsys.readouterr().err


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (1.5, 1)])
def test_a_test_without_burn_in_ends_with_its_verdict(tmp_path, capsys, factor, status):
    write(tmp_path, make(1, 4, slow={("parallel", 2): factor}))
    assert main(["watch", str(tmp_path)]) == status
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(
        f"certify: over, {['pass', 'fail, rank 2 on node0: '][status]}"
    )


def test_json_has_the_verdict_so_far(tmp_path, capsys):
    test = Test(tmp_path, [])
    test.start()
    test.stages()
    test.repeat(1, 20.0)
    os.utime(tmp_path / "burn_in_node0.jsonl")
    assert main(["watch", "--once", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["stage"], found["done"]) == ("pass", "burn-in", False)
    assert found["burn_in"]["repeats"] == 1


def test_watch_waits_for_a_test_that_has_not_started(tmp_path):
    test = Test(tmp_path, [lambda one: None, Test.start])
    assert wait_for_log(tmp_path, 1.0, test.sleep) == tmp_path
