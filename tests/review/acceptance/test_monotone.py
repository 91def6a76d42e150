"""The slower, the surer it is named: part of a stage, half or most of the ranks, two or three peers."""

from __future__ import annotations

import numpy as np
import pytest

from review.acceptance.outliers import members
from review.acceptance.verdict import judge

from .made_up import add_rates, make

ROUNDS = 16
FACTORS = (1.1, 1.5, 2.0, 10.0)


def slow_from(first: int, last: int, factor: float, ranks, stages=("parallel",)):
    """Slower in some rounds of some stages."""
    factors = np.ones((ROUNDS, 1))
    factors[first:last] = factor
    return {(stage, rank): factors for stage in stages for rank in ranks}


def named(certificate) -> set[str]:
    return {name for one in certificate.findings for name in members(one.name)}


@pytest.mark.parametrize(
    ("nodes", "per_node", "ranks", "names"),
    [
        (1, 8, (1,), {"rank 1 on node0"}),
        (1, 8, (1, 6), {"rank 1 on node0", "rank 6 on node0"}),
        (4, 2, (2, 3), {"node node1"}),
        (1, 8, (0, 1, 2, 3), {f"rank {rank} on node0" for rank in range(4)}),
        (1, 4, (0, 1), {"rank 0 on node0", "rank 1 on node0"}),
    ],
    ids=["rank", "two ranks", "node", "half", "half of four"],
)
@pytest.mark.parametrize("when", [(0, 5), (3, 8), (7, 16), (11, 16)])
def test_a_third_of_a_stage_is_enough_and_surer_the_slower(
    nodes, per_node, ranks, names, when
):
    chances = []
    for factor in FACTORS:
        slow = slow_from(*when, factor, ranks)
        found = judge(make(nodes, per_node, rounds=ROUNDS, slow=slow))
        assert (found.state, named(found)) == ("fail", names), factor
        chances.append(min(one.outlier.chance for one in found.findings))
    assert chances == sorted(chances, reverse=True)


@pytest.mark.parametrize(("factor", "names"), [(1.04, 0), (1.07, 1)])
def test_a_third_of_a_stage_less_than_5_percent_slower_does_not_matter(factor, names):
    slow = slow_from(0, 5, factor, [1])
    found = judge(make(1, 8, rounds=ROUNDS, step=0.001, slow=slow))
    assert len(named(found)) == names


def test_half_of_four_ranks_are_named_in_most_tests_although_their_own_step_is_no_noise():
    tests = [
        make(1, 4, seed, rounds=ROUNDS, step=0.04, slow=slow_from(*when, 1.1, (0, 1)))
        for when in [(0, 5), (3, 8), (7, 16), (11, 16)]
        for seed in range(5)
    ]
    assert sum(len(named(judge(test))) == 2 for test in tests) >= len(tests) / 2


@pytest.mark.parametrize("factor", [1.1, 1.5, 5.0])
def test_seven_of_eight_slow_ranks_are_a_group(factor):
    slow = slow_from(0, ROUNDS, factor, range(7), ("single", "parallel", "together"))
    found = judge(make(1, 8, rounds=ROUNDS, slow=slow))
    assert (found.state, len(named(found))) == ("fail", 7)


@pytest.mark.parametrize(
    ("factor", "state"), [(1.0, "pass"), (1.1, "warn"), (2.0, "fail"), (10.0, "fail")]
)
def test_of_two_ranks_a_gross_difference_fails(factor, state):
    slow = slow_from(0, ROUNDS, factor, [1], ("single", "parallel", "together"))
    assert judge(make(1, 2, rounds=ROUNDS, slow=slow)).state == state


@pytest.mark.parametrize(
    ("size", "rate", "state"),
    [(1 << 22, 100.0, "pass"), (1 << 22, 33.0, "fail"), (1 << 30, 33.0, "fail")],
)
def test_every_size_of_a_collective_is_compared(size, rate, state):
    records = make(4, 2)
    add_rates(records, {(rank, "all_reduce_perf", -1): 400.0 for rank in (0, 2, 4, 6)})
    before = {name: column.copy() for name, column in records.probes.items()}
    add_rates(records, {(rank, "all_reduce_perf", -1): 100.0 for rank in (0, 2, 6)})
    add_rates(records, {(4, "all_reduce_perf", -1): rate})
    new = np.arange(len(records.probes["amount"])) >= len(before["amount"])
    # The same rates, of messages of another size.
    records.probes["seconds"][new] *= size / 1e9
    records.probes["amount"][new] = size
    found = judge(records)
    assert found.state == state
    assert named(found) == ({"node node2"} if state == "fail" else set())


def test_a_node_whose_own_all_reduce_is_slow_is_named():
    records = make(4, 2)
    own = (records.probes["probe"] == b"reduce_node") & (
        records.probes["rank"] // 2 == 3
    )
    records.probes["seconds"][own] *= 30
    assert named(judge(records)) == {"node node3"}
