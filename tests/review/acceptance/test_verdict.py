"""The verdict of an acceptance test: only the culprit is named, with its stage; healthy machines
pass; the slower, the surer.
"""

import re
from itertools import combinations

import numpy as np
import pytest

from review.acceptance.coverage import UNJUDGED
from review.acceptance.outliers import members
from review.acceptance.verdict import judge, line

from .made_up import ROUNDS, add_rates, chosen, make, write

COMPUTING = ("single", "parallel", "node", "pairs", "together")
# Shared with others.
BUSY = {"step": 0.2, "common": 0.3, "disturbed": 0.05, "between": 0.01}
# CPUs that differ, or are shared with other machines.
UNEVEN = {"between": 0.04, "step": 0.1}


def everywhere(*ranks: int, factor: float) -> dict[tuple[str, int], float]:
    """Slow in every stage."""
    return {(stage, rank): factor for stage in COMPUTING for rank in ranks}


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (1, 8), (4, 2), (16, 1)])
@pytest.mark.parametrize("noise", [{}, BUSY], ids=["quiet", "busy"])
def test_on_healthy_machines_nobody_is_named(nodes, per_node, noise):
    for seed in range(4):
        assert judge(make(nodes, per_node, seed, **noise)).reasons() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise", [{}, {"between": 0.01}, BUSY, BUSY | {"starved": {}}],
    ids=["quiet", "uneven", "busy", "busy CPUs"],
)  # fmt: skip
def test_false_alarms_in_400_healthy_tests_are_within_chance(noise):
    named = sum(bool(judge(make(4, 4, seed, **noise)).findings) for seed in range(400))
    # One in a hundred is allowed: more than ten of 400 have a chance of 0.3%.
    assert named <= 10


@pytest.mark.parametrize("stage", ["single", "parallel", "together"])
@pytest.mark.parametrize("noise", [{}, BUSY], ids=["quiet", "busy"])
def test_a_slow_rank_is_named_with_its_stage_and_nobody_else(stage, noise):
    (found,) = judge(make(4, 4, slow={(stage, 5): 1.25}, rounds=16, **noise)).findings
    assert (found.what, found.stage, found.name) == ("slow", stage, "rank 5 on node1")
    assert found.outlier.excess == pytest.approx(0.25, abs=0.06)
    assert found.outlier.chance < 0.01


def named(records):
    return [(one.what, one.stage, one.name) for one in judge(records).findings]


@pytest.mark.parametrize(("machine", "culprits"), [
    ({"slow": everywhere(4, 5, factor=1.1)}, [("slow", "single", "node node2")]),
    (UNEVEN | {"starved": {4: 1.1, 5: 1.1}}, [("starved", "single", "node node2")]),
    (UNEVEN | {"starved": {}}, []),
    ({"starved": {3: 1.2}}, [("slow", "single", "rank 3 on node1")]),
    ({"links": {1: 4.0}}, [("network", "pairs", "node node1")]),
    ({"nodes": 6, "links": {(1, 3): 4.0}}, [("network", "pairs", "link node1 - node3")]),
])  # fmt: skip
def test_a_culprit_is_named_once_without_ranks_nodes_or_partners(machine, culprits):
    assert named(make(**machine)) == culprits
    found = judge(make(**machine)).findings
    if "slow" in machine:
        assert found[0].also == ("parallel", "node", "together")
    if machine.get("starved", {}).get(5):
        assert found[0].outlier.excess == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(("seconds", "where", "culprit"), [
    (0.3, {"rank": 3, "step": range(2, 20, 7)}, "rank 3 on node1"),
    (0.3, {"rank": (2, 3), "step": range(2, 20, 7)}, "node node1"),
    # Of a quarter of the steps: a third longer, and half as long again.
    (0.035, {"rank": 3, "step": range(0, 20, 5)}, None),
    (0.05, {"rank": 3, "step": range(0, 20, 5)}, "rank 3 on node1"),
    (5.0, {"rank": 3, "step": 2, "round": 1}, None),
], ids=["a rank", "a node", "too short", "long enough", "one pause"])  # fmt: skip
def test_who_pauses_in_many_rounds_is_named(seconds, where, culprit):
    records = make(4, 2)
    records.steps["compute"][chosen(records.steps, **where)] += seconds
    assert named(records) == [("hesitates", "single", culprit)] * bool(culprit)


@pytest.mark.parametrize(("rank", "links"), [(3, []), (5, ["link node1 - node3"])])
def test_links_of_a_node_whose_rank_pauses_are_not_accused_with_it(rank, links):
    records = make(6, 2, links={(1, 3): 4.0})
    paused = chosen(records.steps, rank=rank, step=range(2, 20, 7))
    records.steps["compute"][paused] += 0.3
    names = [name for _, _, name in named(records)]
    assert names == [f"rank {rank} on node{rank // 2}", *links]


def half(nodes: int, per_node: int, slow: int) -> dict:
    """A machine on which so many ranks are slow in all stages."""
    of_ranks = everywhere(*range(slow), factor=1.3)
    return {"nodes": nodes, "per_node": per_node, "slow": of_ranks}


def links(nodes: int, *first: int) -> dict:
    """All-reduces of these nodes with the ones after them take twice as long."""
    pairs = combinations(range(nodes), 2)
    return {"nodes": nodes, "links": {pair: 2.0 for pair in pairs if pair[0] in first}}


@pytest.mark.parametrize(("machine", "state", "stage", "group"), [
    (half(1, 4, 2), "fail", "single", [f"rank {rank} on node0" for rank in range(2)]),
    (half(1, 8, 5), "fail", "single", [f"rank {rank} on node0" for rank in range(5)]),
    (half(1, 8, 7), "fail", "single", [f"rank {rank} on node0" for rank in range(7)]),
    (half(1, 4, 3), "fail", "single", [f"rank {rank} on node0" for rank in range(3)]),
    (half(4, 1, 2), "fail", "single", ["node node0", "node node1"]),
    (half(16, 1, 8), "fail", "single", [f"node node{node}" for node in range(8)]),
    ({"starved": dict.fromkeys(range(4), 1.5)}, "fail", "single", ["node node0", "node node1"]),
    # It may be the design.
    (links(4, 0, 1), "warn", "pairs", ["node node0", "node node1"]),
    (links(8, 0, 1, 2, 3), "warn", "pairs", [f"node node{node}" for node in range(4)]),
])  # fmt: skip
def test_where_half_or_most_are_slow_their_group_is_named(machine, state, stage, group):
    found = judge(make(**machine))
    assert (found.state, found.findings[0].stage) == (state, stage)
    assert {tuple(members(one.name)) for one in found.findings} == {tuple(group)}
    nodes = dict.fromkeys(name.split("node")[-1] for name in group)
    drained = f"nodename={','.join(f'node{number}' for number in nodes)} "
    assert (drained in line(found)) == (state == "fail")


def test_slow_links_between_two_halves_are_a_group_of_links():
    apart = {pair: 2.0 for pair in combinations(range(8), 2) if pair[0] < 4 <= pair[1]}
    (group,) = judge(make(8, 2, links=apart)).findings
    assert (group.kind, len(members(group.name))) == ("link", 16)
    assert "link node1 - node7, ...: 10" in group.reason().text()


def test_a_wide_spread_or_bins_of_clocks_are_no_groups():
    generator = np.random.default_rng(0)
    for seed in range(12):
        bins = 1 + 0.03 * generator.integers(2, size=8)
        slow = {("parallel", rank): own for rank, own in enumerate(bins)}
        assert named(make(1, 8, seed, slow=slow)) == []
    ladder = {("parallel", rank): 1 + 0.02 * rank for rank in range(8)}
    assert not any(": " in name for _, _, name in named(make(1, 8, slow=ladder)))


def test_a_rank_with_pauses_in_some_rounds_is_named_with_the_clearest_stage():
    records = make(4, 2, between=0.01, step=0.05)
    rounds = (records.steps["round"] % 3 == 1) | (records.steps["stage"] == 1)
    records.steps["compute"][chosen(records.steps, rank=3, step=5) & rounds] += 2
    assert named(records) == [("hesitates", "parallel", "rank 3 on node1")]
    assert "of 24 rounds" in judge(records).reasons()[0]


def test_a_small_step_at_three_times_its_duration_is_detected():
    records = make(4, 2)
    small = records.steps["step"] % 5 == 0
    records.steps["compute"][small] *= 0.3
    records.steps["wait"][:] = 0
    assert named(records) == []
    records.steps["compute"][small & (records.steps["rank"] == 3)] *= 3
    assert named(records) == [("hesitates", "single", "rank 3 on node1")]


def test_one_disturbed_all_reduce_of_three_names_no_node():
    records = make(4, 2)
    probes = records.probes
    meets = (probes["rank"] // 2 == 1) | (probes["partner"] == 1)
    probes["seconds"][meets & (np.arange(len(meets)) % 3 == 0)] *= 10
    assert named(records) == []


def test_a_small_excess_is_found_over_all_stages():
    noise = {"step": 0.25, "between": 0.01, "seed": 1}
    ((what, _, name),) = named(make(16, 1, slow=everywhere(5, factor=1.08), **noise))
    assert (what, name) == ("slow", "node node5")
    for stage in ("single", "parallel", "node", "together"):
        assert named(make(16, 1, slow={(stage, 5): 1.08}, **noise)) == []


def test_the_stage_with_shared_cpus_is_named():
    records = make(4, 2, starved={})
    steps = records.steps
    steps["cpu"] = (steps["compute"] + steps["wait"]) / 4
    steps["cpu"][chosen(steps, rank=3, stage=0)] /= 1.015
    steps["cpu"][chosen(steps, rank=3, stage=1)] /= 1.3
    assert named(records) == [("starved", "parallel", "rank 3 on node1")]


@pytest.mark.parametrize(("factor", "state"), [(1.0, "pass"), (1.03, "pass"), (1.1, "warn"), (1.3, "warn"), (2.0, "fail"), (10.0, "fail")])  # fmt: skip
def test_the_slower_of_two_ranks_warns_with_an_interval_and_fails_if_gross(
    factor, state
):
    found = judge(make(1, 2, between=0, slow=everywhere(1, factor=factor)))
    assert (found.state, found.as_dict()["compared"]) == (state, False)
    assert "too few to single out" in found.notes[0]
    for one in found.findings if state == "warn" else ():
        interval = re.match(r"(-?[\d.]+)% to ([\d.]+)% behind", one.outlier.measure)
        low, high = map(float, interval.groups())
        assert one.name == "rank 1 on node0"
        assert 3 < low < 100 * (factor - 1) < high


def test_two_equal_noisy_ranks_have_no_warning():
    noise = {"common": 0.1, "step": 0.2, "disturbed": 0.05}
    states = {judge(make(1, 2, seed, **noise)).state for seed in range(20)}
    assert states == {"pass"}


LONG = 16  # rounds
THIRDS = [(0, 5), (3, 8), (7, 16), (11, 16)]


def partly(rounds, factor: float, ranks, nodes=1, per_node=8, seed=0, **noise):
    """Names, state and chances of a test in which ranks are slower in some rounds of a stage."""
    factors = np.ones((LONG, 1))
    factors[slice(*rounds)] = factor
    slow = {("parallel", rank): factors for rank in ranks}
    found = judge(make(nodes, per_node, seed, rounds=LONG, slow=slow, **noise))
    names = {name for one in found.findings for name in members(one.name)}
    return names, found.state, [one.outlier.chance for one in found.findings]


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
@pytest.mark.parametrize("when", THIRDS)
def test_a_third_of_a_stage_is_enough_surer_if_slower(
    nodes, per_node, ranks, names, when
):
    chances = []
    for factor in (1.1, 1.5, 10.0):
        found, state, chance = partly(when, factor, ranks, nodes, per_node)
        assert (found, state) == (names, "fail"), factor
        chances.append(min(chance))
    assert chances == sorted(chances, reverse=True)


@pytest.mark.parametrize(("factor", "names"), [(1.04, 0), (1.07, 1)])
def test_a_third_of_a_stage_less_than_5_percent_slower_does_not_matter(factor, names):
    assert len(partly((0, 5), factor, [1], step=0.001)[0]) == names


def test_half_of_four_ranks_are_named_in_most_tests_although_their_own_step_is_no_noise():
    found = [
        partly(when, 1.1, (0, 1), per_node=4, seed=seed, step=0.04)[0]
        for when in THIRDS
        for seed in range(5)
    ]
    assert sum(len(names) == 2 for names in found) >= len(found) / 2


@pytest.mark.parametrize(("size", "rate", "state"), [(1 << 22, 100.0, "pass"), (1 << 10, 1.0, "fail"), (1 << 22, 33.0, "fail"), (1 << 30, 33.0, "fail")])  # fmt: skip
def test_every_size_of_a_collective_is_compared(size, rate, state):
    records, name = make(4, 2), "all_reduce_perf"
    add_rates(records, {(rank, name, -1): 400.0 for rank in (0, 2, 4, 6)})
    rates = {(0, name, -1): 100.0, (2, name, -1): 100.0, (6, name, -1): 100.0}
    found = judge(add_rates(records, rates | {(4, name, -1): rate}, amount=size))
    names = [one.name for one in found.findings]
    assert (found.state, names) == (state, ["node node2"] * (state == "fail"))


def test_a_node_whose_own_all_reduce_is_slow_is_named():
    records = make(4, 2)
    own = chosen(records.probes, probe=[b"reduce_node"], rank=(6, 7))
    records.probes["seconds"][own] *= 30
    assert [name for *_, name in named(records)] == ["node node3"]


def test_a_rank_with_other_results_fails_the_test_with_its_step(certified):
    records = make(4, 2)
    odd = chosen(records.steps, rank=6, stage=1, round=2, step=range(9, 20))
    records.steps["checksum"][odd] += 4
    status, said = certified(records)
    differs = "rank 6 on node3: its weights differ from those of other ranks or rounds, first in step 10 of round 3"
    assert f"  {differs} (all ranks, each by itself)\n" in said
    assert (status, said.splitlines()[-1]) == (1, "fail")


def test_without_reproducible_steps_corruption_is_not_judged():
    records = make(4, 2)
    sums = records.steps["checksum"]
    sums[:] = np.random.default_rng(0).integers(0, 1 << 40, len(sums))
    said = "silent corruption (steps do not repeat bit for bit on this system)"
    assert judge(records).state == "pass"
    assert said in line(judge(records))
    assert judge(records, required=["corruption"]).state == "fail"


def with_rates(nodes, *slow):
    """Disks and nccl-tests of nodes; of the slow nodes a disk takes twice as long."""
    found = make(nodes, 2)
    for probe in ("disk", "disk_node", "all_reduce_perf"):
        ranks = range(0, 2 * nodes, 1 + (probe == "all_reduce_perf"))
        rates = {(rank, probe, -1): 10.0 for rank in ranks}
        add_rates(found, rates, rounds=6, amount=1e8)
    late = [rank for rank in found.ranks if rank // 2 in slow]
    found.probes["seconds"][chosen(found.probes, probe=[b"disk"], rank=late)] *= 2
    told = {"name": "all_reduce_perf", "version": "2", "faults": [], "skipped": []}
    found.tools.update({node: [told] for node in found.nodes})
    return found


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_rates_of_few_nodes_that_nothing_limits_are_not_tested(nodes):
    records = with_rates(nodes)
    found = judge(records)
    names = {gap.what for gap in found.gaps if gap.why == UNJUDGED}
    assert (found.state, f"({UNJUDGED})" in line(found)) == ("pass", True)
    unjudged = {"read of the data disk", "nccl-tests", "all-reduce of all ranks"}
    unjudged |= {"network between nodes"} if nodes > 1 else set()
    assert unjudged <= names
    assert not names & {*found.tested["tested"].split("; ")}
    areas = ["disk", "nccl", "network"][: 2 + (nodes > 1)]
    for area in areas:
        assert judge(records, required=[area]).state == "fail"
    expected = {"disk": 9e-3, "reduce_together": 1e-3, "all_reduce_perf": 9e-3}
    assert judge(records, None, expected, None, areas).state == "pass"


def test_rates_of_four_nodes_are_compared_and_tested():
    found = judge(with_rates(4), required=["network", "disk", "nccl"])
    assert found.state == "pass"
    limits = {one.name: one.limit for one in found.figures}
    limit = "at most 15% slower than the median, or by chance"
    assert limits["disk"] == limits["disk_node"] == limit
    wanted = {"network between nodes", "read of the data disk, one node at a time"}
    assert wanted <= {*found.tested["tested"].split("; ")}


@pytest.mark.parametrize(
    ("nodes", "slow", "words"),
    [
        (4, [1], "100.0% slower transfers than the median"),
        (2, [1], "100.0% slower than the fastest"),
        (8, [0, 1, 2, 3], "100.0% slower transfers than the median"),
    ],
)
def test_a_slow_disk_is_said_to_be_no_all_reduce(nodes, slow, words):
    (found,) = judge(with_rates(nodes, *slow)).findings
    assert (found.stage, found.reason().what) == ("disk", words)
    assert members(found.name) == [f"node node{node}" for node in slow]


def test_of_two_differing_ranks_neither_is_called_corrupt():
    records = make(1, 2)
    records.steps["checksum"][records.steps["rank"] == 1] += 1
    assert judge(records).corrupt == []


def test_weights_that_differ_between_ranks_by_design_are_compared_round_by_round():
    # As a sharded optimizer's: each rank has its own part of the weights in a step.
    records = make(4, 2)
    together = records.steps["stage"] == 4
    records.steps["checksum"][together] += 1000 * records.steps["rank"][together]
    assert judge(records).state == "pass"
    last = chosen(records.steps, stage=4, rank=2, round=ROUNDS - 1)
    records.steps["checksum"][last] ^= 1
    assert [one.name for one in judge(records).corrupt] == ["rank 2 on node1"]


def without(records, left_out):
    """The records without these steps."""
    for name, column in records.steps.items():
        records.steps[name] = column[~left_out]
    return records


def test_rounds_of_unequal_length_are_compared_over_their_common_steps():
    records = make(4, 2)
    last = chosen(records.steps, stage=3, round=0, step=range(5, 20))
    records = without(records, last)
    assert judge(records).corrupt == []
    odd = chosen(records.steps, stage=3, rank=1, round=4, step=4)
    records.steps["checksum"][odd] += 1
    (found,) = judge(records).corrupt
    assert (found.name, found.step) == ("rank 1 on node0", 4)


def test_a_round_with_fewer_steps_names_nobody():
    records = make(4, 2, slow={("parallel", 5): 1.25})
    last = chosen(records.steps, stage=0, round=1, rank=2, step=range(7, 20))
    records = without(records, last)
    assert named(records) == [("slow", "parallel", "rank 5 on node2")]
    missing = np.isnan(records.seconds("single")).sum(axis=(1, 2))
    assert missing.tolist() == [0, 0, 13, 0, 0, 0, 0, 0]
    assert all(np.isfinite(own).all() for own in judge(records).seconds.values())


def without_a_rank(path):
    records = make(3, 2)
    records.ranks.pop(3)
    write(path.parent / "fewer", records)
    (path.parent / "fewer" / path.name).replace(path)


def with_burn_in(path):
    (path.parent / "burn_in_node1.npz").write_bytes(b"PK")


INVALID = "certify_node1.npz: not the record of a finished test"


@pytest.mark.parametrize(("damage", "said"), [
    (lambda path: path.write_bytes(path.read_bytes()[:1000]), INVALID),
    (lambda path: path.write_bytes(b""), INVALID),
    (lambda path: np.savez(path, about=np.array("{}")), INVALID),
    (lambda path: path.unlink(), "no record of node1: the test did not finish there"),
    (without_a_rank, "no record of some ranks: the test did not finish there"),
    (lambda path: [one.unlink() for one in path.parent.glob("*.npz")], "no certify_<node>.npz"),
    (with_burn_in, "burn_in_node1.npz: not a burn-in's telemetry"),
], ids=["cut", "empty", "other", "no file of a node", "a rank less", "no file", "burn-in"])  # fmt: skip
def test_records_that_are_not_whole_are_one_line(certified, tmp_path, damage, said):
    write(tmp_path, make(3, 2))
    damage(tmp_path / "certify_node1.npz")
    status, shown = certified()
    assert (status, said in shown, shown.count("\n")) == (2, True, 1)
