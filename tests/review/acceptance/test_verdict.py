"""The verdict of an acceptance test: only the culprit is named, with its stage; healthy machines
pass.
"""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest

from review.__main__ import main
from review.acceptance.coverage import UNJUDGED
from review.acceptance.outliers import members
from review.acceptance.schema import PARTS
from review.acceptance.verdict import certify, judge, line

from .made_up import ROUNDS, make, write

COMPUTING = ("single", "parallel", "node", "pairs", "together")
BUSY = {
    "step": 0.2,
    "common": 0.3,
    "disturbed": 0.05,
    "between": 0.01,
}  # shared with others
UNEVEN = {
    "between": 0.04,
    "step": 0.1,
}  # CPUs that differ, or are shared with other machines


def everywhere(*ranks: int, factor: float) -> dict[tuple[str, int], float]:
    """Slow in every stage."""
    return {(stage, rank): factor for stage in COMPUTING for rank in ranks}


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (1, 8), (4, 2), (16, 1)])
@pytest.mark.parametrize("noise", [{}, BUSY], ids=["quiet", "busy"])
def test_on_healthy_machines_nobody_is_named(nodes, per_node, noise):
    for seed in range(6):
        assert judge(make(nodes, per_node, seed, **noise)).reasons() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise",
    [{}, {"between": 0.01}, BUSY, BUSY | {"starved": {}}],
    ids=["quiet", "uneven", "busy", "busy CPUs"],
)
def test_false_alarms_in_400_healthy_tests_are_within_chance(noise):
    named = sum(bool(judge(make(4, 4, seed, **noise)).findings) for seed in range(400))
    assert named <= 10, (
        "one in a hundred is allowed: more than ten of 400 have a chance of 0.3%"
    )


@pytest.mark.parametrize("stage", ["single", "parallel", "together"])
@pytest.mark.parametrize("noise", [{}, BUSY], ids=["quiet", "busy"])
def test_a_slow_rank_is_named_with_its_stage_and_nobody_else(stage, noise):
    (found,) = judge(make(4, 4, slow={(stage, 5): 1.25}, rounds=16, **noise)).findings
    assert (found.what, found.stage, found.name) == ("slow", stage, "rank 5 on node1")
    assert found.outlier.excess == pytest.approx(0.25, abs=0.06)
    assert found.outlier.chance < 0.01


def named(certificate):
    return [(one.what, one.stage, one.name) for one in certificate.findings]


def steps_of(records, **wanted):
    """Which steps are of these ranks, stages, rounds and numbers."""
    columns = [np.isin(records.steps[name], own) for name, own in wanted.items()]
    return np.logical_and.reduce(columns)


@pytest.mark.parametrize(
    ("machine", "culprits"),
    [
        ({"slow": everywhere(4, 5, factor=1.1)}, [("slow", "single", "node node2")]),
        (UNEVEN | {"starved": {4: 1.1, 5: 1.1}}, [("starved", "single", "node node2")]),
        (UNEVEN | {"starved": {}}, []),
        ({"starved": {3: 1.2}}, [("slow", "single", "rank 3 on node1")]),
        ({"links": {1: 4.0}}, [("network", "pairs", "node node1")]),
        ({"nodes": 6, "links": {(1, 3): 4.0}}, [("network", "pairs", "link node1 - node3")]),
    ],
)  # fmt: skip
def test_the_culprit_is_named_once_without_its_ranks_nodes_or_partners(
    machine, culprits
):
    found = judge(make(**machine))
    assert named(found) == culprits
    if "slow" in machine:
        assert found.findings[0].also == ("parallel", "node", "together")
    if machine.get("starved", {}).get(5):
        assert found.findings[0].outlier.excess == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    ("seconds", "where", "culprits"),
    [
        (0.3, {"rank": 3, "step": range(2, 20, 7)}, [("hesitates", "single", "rank 3 on node1")]),
        (0.3, {"rank": (2, 3), "step": range(2, 20, 7)}, [("hesitates", "single", "node node1")]),
        (0.02, {"rank": 3, "step": range(0, 20, 5)}, []),
        (5.0, {"rank": 3, "step": 2, "round": 1}, []),
    ],
    ids=["a rank with a normal median", "all ranks of a node", "a fifth longer", "one pause"],
)  # fmt: skip
def test_who_pauses_in_many_rounds_is_named(seconds, where, culprits):
    records = make(4, 2)
    records.steps["compute"][steps_of(records, **where)] += seconds
    assert named(judge(records)) == culprits


@pytest.mark.parametrize(("rank", "links"), [(3, []), (5, ["link node1 - node3"])])
def test_links_of_a_node_whose_rank_pauses_are_not_accused_with_it(rank, links):
    records = make(6, 2, links={(1, 3): 4.0})
    paused = steps_of(records, rank=rank, step=range(2, 20, 7))
    records.steps["compute"][paused] += 0.3
    found = [one.name for one in judge(records).findings]
    assert found == [f"rank {rank} on node{rank // 2}", *links]


@pytest.mark.parametrize(("factor", "is_pause"), [(1.35, False), (1.5, True)])
def test_what_a_quarter_of_steps_lose_beyond_a_quarter_more_is_a_pause(
    factor, is_pause
):
    records = make(4, 2)
    steps = steps_of(records, rank=3, step=range(0, 20, 5))
    records.steps["compute"][steps] *= factor
    assert bool(judge(records).findings) == is_pause


@pytest.mark.parametrize(
    ("nodes", "per_node", "slow"), [(1, 4, 2), (1, 8, 4), (1, 8, 5), (1, 4, 3)]
)
def test_where_half_or_most_ranks_are_slow_the_slow_group_is_named(
    nodes, per_node, slow
):
    found = judge(make(nodes, per_node, slow=everywhere(*range(slow), factor=1.3)))
    assert found.state == "fail"
    (group,) = {
        members(one.name)[0]: members(one.name) for one in found.findings
    }.values()
    assert sorted(group) == [f"rank {rank} on node0" for rank in range(slow)]
    assert "two groups" in found.reasons()[0]


@pytest.mark.parametrize("nodes", [4, 16])
def test_where_half_of_the_nodes_are_slow_they_are_named_and_drained(nodes):
    half = range(nodes // 2)
    found = judge(make(nodes, 1, slow=everywhere(*half, factor=1.3)))
    assert found.state == "fail"
    assert {one for finding in found.findings for one in members(finding.name)} == {
        f"node node{number}" for number in half
    }
    assert f"nodename={','.join(f'node{number}' for number in half)} " in line(found)


@pytest.mark.parametrize("nodes", [4, 8])
def test_half_of_the_nodes_with_a_slow_network_are_a_group(nodes):
    half = range(nodes // 2)
    pairs = {pair: 1.6 for pair in combinations(range(nodes), 2) if pair[0] in half}
    found = judge(make(nodes, 2, links=pairs))
    (group,) = found.findings
    assert (found.state, group.stage) == ("warn", "pairs"), "it may be the design"
    assert members(group.name) == [f"node node{number}" for number in half]


def test_half_of_the_nodes_with_a_slow_disk_fail():
    records = make(8, 1)
    rows = [
        (rank, b"disk", number, -1, 0.01 * (2 if rank < 4 else 1), 1e8)
        for rank in range(8)
        for number in range(6)
    ]
    for column, name in enumerate(records.probes):
        records.probes[name] = np.array([row[column] for row in rows])
    found = judge(records)
    (group,) = found.findings
    assert (found.state, group.stage, len(members(group.name))) == ("fail", "disk", 4)


def test_slow_links_between_two_halves_are_a_group_of_links():
    apart = {pair: 2.0 for pair in combinations(range(8), 2) if pair[0] < 4 <= pair[1]}
    (group,) = judge(make(8, 2, links=apart)).findings
    assert (group.kind, len(members(group.name))) == ("link", 16)
    assert "link node1 - node7, ...: 10" in group.reason().text()


def test_half_of_the_nodes_with_shared_cpus_are_named():
    found = judge(make(4, 2, starved={0: 1.5, 1: 1.5, 2: 1.5, 3: 1.5}))
    assert found.state == "fail"
    assert members(found.findings[0].name) == ["node node0", "node node1"]


def test_a_wide_spread_or_bins_of_clocks_are_no_groups():
    generator = np.random.default_rng(0)
    for _ in range(40):
        bins = {
            ("parallel", rank): 1 + 0.03 * generator.integers(2) for rank in range(8)
        }
        assert (
            judge(make(1, 8, int(generator.integers(1000)), slow=bins)).findings == []
        )
        ladder = {("parallel", rank): 1 + 0.02 * rank for rank in range(8)}
        names = [one.name for one in judge(make(1, 8, slow=ladder)).findings]
        assert not any(": " in name for name in names)


def test_a_rank_with_pauses_in_some_rounds_is_named_with_the_clearest_stage():
    records = make(4, 2, between=0.01, step=0.05)
    rounds = (records.steps["round"] % 3 == 1) | (records.steps["stage"] == 1)
    records.steps["compute"][steps_of(records, rank=3, step=5) & rounds] += 2
    (found,) = judge(records).findings
    culprit = ("hesitates", "parallel", "rank 3 on node1")
    assert (found.what, found.stage, found.name) == culprit
    assert "of 24 rounds" in found.reason().text()


def test_steps_of_unequal_work_are_compared_step_by_step():
    records = make(4, 2, slow=everywhere(5, factor=1.05))
    before = records.relative("parallel")
    work = np.random.default_rng(0).uniform(0.5, 2.0, records.steps["step"].max() + 1)
    for part in PARTS:
        records.steps[part] *= work[records.steps["step"]]
    after = records.relative("parallel")
    assert np.allclose(before, after)
    assert np.median(after[5]) == pytest.approx(1.05, abs=0.02)


def test_a_small_step_at_three_times_its_duration_is_detected():
    records = make(4, 2)
    small = records.steps["step"] % 5 == 0
    records.steps["compute"][small] *= 0.3
    records.steps["wait"][:] = 0
    assert judge(records).findings == []
    records.steps["compute"][small & (records.steps["rank"] == 3)] *= 3
    (found,) = judge(records).findings
    assert (found.what, found.name) == ("hesitates", "rank 3 on node1")


def test_one_disturbed_all_reduce_of_three_names_no_node():
    records = make(4, 2)
    probes = records.probes
    meets = (probes["rank"] // 2 == 1) | (probes["partner"] == 1)
    probes["seconds"][meets & (np.arange(len(meets)) % 3 == 0)] *= 10
    assert judge(records).findings == []


def test_a_small_excess_is_found_over_all_stages():
    noise = {"step": 0.25, "between": 0.01, "seed": 1}
    (found,) = judge(make(16, 1, slow=everywhere(5, factor=1.08), **noise)).findings
    assert (found.what, found.name) == ("slow", "node node5")
    for stage in ("single", "parallel", "node", "together"):
        assert judge(make(16, 1, slow={(stage, 5): 1.08}, **noise)).findings == []


def test_the_stage_with_shared_cpus_is_named():
    records = make(4, 2, starved={})
    steps = records.steps
    steps["cpu"] = (steps["compute"] + steps["wait"]) / 4
    steps["cpu"][steps_of(records, rank=3, stage=0)] /= 1.015
    steps["cpu"][steps_of(records, rank=3, stage=1)] /= 1.3
    assert named(judge(records)) == [("starved", "parallel", "rank 3 on node1")]


@pytest.mark.parametrize(
    ("factor", "state"), [(1.0, "pass"), (1.03, "pass"), (1.1, "warn"), (1.3, "warn")]
)
def test_the_slower_of_two_ranks_is_a_warning_with_an_interval(factor, state):
    found = judge(make(1, 2, between=0, slow=everywhere(1, factor=factor)))
    assert found.state == state
    assert not found.as_dict()["compared"]
    assert "too few to single out" in found.notes[0]
    for one in found.findings:
        low, high = (
            float(share)
            for share in re.match(
                r"(-?[\d.]+)% to ([\d.]+)% behind rank 0", one.outlier.measure
            ).groups()
        )
        assert one.name == "rank 1 on node0"
        assert 3 < low < 100 * (factor - 1) < high


def test_two_equal_noisy_ranks_have_no_warning():
    assert [
        judge(make(1, 2, seed=seed, common=0.1, step=0.2, disturbed=0.05)).state
        for seed in range(20)
    ] == ["pass"] * 20


def test_a_rank_with_other_results_fails_the_test_with_its_step(tmp_path, capsys):
    records = make(4, 2)
    odd = steps_of(records, rank=6, stage=1, round=2, step=range(9, 20))
    records.steps["checksum"][odd] += 4
    write(tmp_path, records)
    assert main(["certify", str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()
    differs = "rank 6 on node3: its weights differ from those of other ranks or rounds, first in step 10 of round 3"
    assert f"  {differs} (all ranks, each by itself)" in said
    assert said[-1] == "fail"


def test_without_reproducible_steps_corruption_is_not_judged():
    records = make(4, 2)
    records.steps["checksum"][:] = np.random.default_rng(0).integers(
        0, 1 << 40, len(records.steps["checksum"])
    )
    found = judge(records)
    assert found.state == "pass"
    said = "silent corruption (steps do not repeat bit for bit on this system)"
    assert said in found.tested["not tested"]
    assert said in line(found)
    assert judge(records, required=["corruption"]).state == "fail"


def with_network_disk_and_nccl(nodes):
    found = make(nodes, 2)
    for probe in (b"disk", b"disk_node", b"all_reduce_perf"):
        rows = [
            (rank, probe, number, -1, 0.01, 1e8)
            for rank in range(0, 2 * nodes, 1 + (probe == b"all_reduce_perf"))
            for number in range(6)
        ]
        for column, name in enumerate(found.probes):
            values = np.array([row[column] for row in rows])
            found.probes[name] = np.concatenate([found.probes[name], values])
    for node in found.nodes:
        report = {"name": "all_reduce_perf", "version": "2"}
        found.tools[node] = [report | {"faults": [], "skipped": []}]
    return found


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_rates_of_few_nodes_that_nothing_limits_are_not_tested(nodes):
    found = judge(with_network_disk_and_nccl(nodes))
    assert found.state == "pass"
    names = {gap.what for gap in found.gaps if gap.why == UNJUDGED}
    assert f"({UNJUDGED})" in line(found)
    unjudged = {"read of the data disk", "nccl-tests", "all-reduce of all ranks"}
    unjudged |= {"network between nodes"} if nodes > 1 else set()
    assert unjudged <= names
    assert not names & {*found.tested["tested"].split("; ")}
    areas = ["disk", "nccl", "network"][: 2 + (nodes > 1)]
    for area in areas:
        assert judge(with_network_disk_and_nccl(nodes), required=[area]).state == "fail"
    expected = {"disk": 9e-3, "reduce_together": 1e-3, "all_reduce_perf": 9e-3}
    judged = judge(with_network_disk_and_nccl(nodes), None, expected, None, areas)
    assert judged.state == "pass"


def test_rates_of_four_nodes_are_compared_and_tested():
    found = judge(with_network_disk_and_nccl(4), required=["network", "disk", "nccl"])
    assert found.state == "pass"
    limits = {one.name: one.limit for one in found.figures}
    limit = "at most 15% slower than the median, or by chance"
    assert limits["disk"] == limits["disk_node"] == limit
    wanted = {"network between nodes", "read of the data disk, one node at a time"}
    assert wanted <= {*found.tested["tested"].split("; ")}


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (4, "100.0% slower transfers than the median"),
        (2, "100.0% slower than the fastest"),
    ],
)
def test_a_slow_disk_is_said_to_be_no_all_reduce(nodes, words):
    records = with_network_disk_and_nccl(nodes)
    slow = (records.probes["probe"] == b"disk") & (records.probes["rank"] // 2 == 1)
    records.probes["seconds"][slow] *= 2
    (found,) = judge(records).findings
    assert found.reason().what == words
    assert (found.name, found.stage) == ("node node1", "disk")


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
    last = steps_of(records, stage=4, rank=2, round=ROUNDS - 1)
    records.steps["checksum"][last] ^= 1
    assert [one.name for one in judge(records).corrupt] == ["rank 2 on node1"]


def test_rounds_of_unequal_length_are_compared_over_their_common_steps():
    records = make(4, 2)
    steps = records.steps
    kept = (steps["stage"] != 3) | (steps["round"] > 0) | (steps["step"] < 5)
    for name, column in steps.items():
        steps[name] = column[kept]
    assert judge(records).corrupt == []
    steps["checksum"][steps_of(records, stage=3, rank=1, round=4, step=4)] += 1
    (found,) = judge(records).corrupt
    assert (found.name, found.step) == ("rank 1 on node0", 4)


def test_a_round_with_fewer_steps_names_nobody():
    records = make(4, 2, slow={("parallel", 5): 1.25})
    steps = records.steps
    kept = ~steps_of(records, stage=0, round=1, rank=2, step=range(7, 20))
    for name, column in steps.items():
        steps[name] = column[kept]
    found = judge(records)
    assert named(found) == [("slow", "parallel", "rank 5 on node2")]
    missing = np.isnan(records.seconds("single")).sum(axis=(1, 2))
    assert missing.tolist() == [0, 0, 13, 0, 0, 0, 0, 0]
    assert all(np.isfinite(own).all() for own in found.seconds.values())


def test_records_are_the_same_after_writing_and_reading(tmp_path):
    records = make(4, 2, slow=everywhere(2, 3, factor=1.2))
    write(tmp_path, records)
    assert certify(tmp_path).reasons() == judge(records).reasons() != []


def without_a_rank(folder):
    records = make(3, 2)
    records.ranks.pop(3)
    (folder / "fewer").mkdir()
    write(folder / "fewer", records)
    (folder / "fewer/certify_node1.npz").replace(folder / "certify_node1.npz")


INVALID = "certify_node1.npz: not the record of a finished test"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: cut_off(folder, 1000), INVALID),
        (lambda folder: cut_off(folder, 0), INVALID),
        (lambda folder: np.savez(folder / "certify_node1.npz", about=np.array("{}")), INVALID),
        (lambda folder: (folder / "certify_node1.npz").unlink(), "no record of node1: the test did not finish there"),
        (without_a_rank, "no record of some ranks: the test did not finish there"),
        (lambda folder: [path.unlink() for path in folder.glob("*.npz")], "no certify_<node>.npz"),
    ],
    ids=["cut", "empty", "other", "no file of a node", "a rank less", "no file"],
)  # fmt: skip
def test_records_that_are_not_whole_are_one_line(tmp_path, capsys, damage, said):
    write(tmp_path, make(3, 2))
    damage(tmp_path)
    assert main(["certify", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def cut_off(folder, length):
    path = folder / "certify_node1.npz"
    path.write_bytes(path.read_bytes()[:length])
