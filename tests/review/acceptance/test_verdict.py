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
}  # a machine shared with others


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


def test_a_node_slower_by_ten_percent_is_named_once_without_its_ranks():
    (found,) = judge(make(4, 2, slow=everywhere(4, 5, factor=1.1))).findings
    assert (found.what, found.stage, found.name) == ("slow", "single", "node node2")
    assert found.also == ("parallel", "node", "together")


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


def test_a_node_with_shared_cpus_is_named_although_nodes_differ_in_speed():
    uneven = {
        "between": 0.04,
        "step": 0.1,
    }  # CPUs that differ, or are shared with other machines
    (found,) = judge(make(4, 2, starved={4: 1.1, 5: 1.1}, **uneven)).findings
    assert (found.what, found.stage, found.name) == ("starved", "single", "node node2")
    assert found.outlier.excess == pytest.approx(0.1, abs=0.02)
    assert judge(make(4, 2, starved={}, **uneven)).findings == []


def test_a_slow_rank_with_a_shared_cpu_is_named_once():
    (found,) = judge(make(4, 2, starved={3: 1.2})).findings
    assert (found.what, found.stage, found.name) == (
        "slow",
        "single",
        "rank 3 on node1",
    )


def test_a_node_with_a_slow_network_is_named_without_its_partners():
    (found,) = judge(make(4, 2, links={1: 4.0})).findings
    assert (found.what, found.stage, found.name) == ("network", "pairs", "node node1")


def test_a_single_slow_link_is_named_without_its_nodes():
    (found,) = judge(make(6, 2, links={(1, 3): 4.0})).findings
    assert (found.what, found.kind, found.name) == (
        "network",
        "link",
        "link node1 - node3",
    )


def test_a_rank_with_pauses_is_named_although_its_median_is_normal():
    records = make(4, 2)
    chosen = (records.steps["rank"] == 3) & (records.steps["step"] % 7 == 2)
    records.steps["compute"][chosen] += 0.3
    (found,) = judge(records).findings
    assert (found.what, found.stage, found.name) == (
        "hesitates",
        "single",
        "rank 3 on node1",
    )


def test_a_rank_with_pauses_in_some_rounds_is_named_with_the_clearest_stage():
    records = make(4, 2, between=0.01, step=0.05)
    steps = records.steps
    chosen = (
        (steps["rank"] == 3)
        & (steps["step"] == 5)
        & ((steps["round"] % 3 == 1) | (steps["stage"] == 1))
    )
    steps["compute"][chosen] += 2
    (found,) = judge(records).findings
    assert (found.what, found.stage, found.name) == (
        "hesitates",
        "parallel",
        "rank 3 on node1",
    )
    assert "of 24 rounds" in found.reason().text()


def test_a_node_whose_ranks_all_pause_is_named_instead_of_them():
    records = make(4, 2)
    chosen = np.isin(records.steps["rank"], (2, 3)) & (records.steps["step"] % 7 == 2)
    records.steps["compute"][chosen] += 0.3
    (found,) = judge(records).findings
    assert (found.what, found.stage, found.name) == (
        "hesitates",
        "single",
        "node node1",
    )


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


def test_variation_by_a_fifth_is_not_a_pause():
    records = make(4, 2)
    chosen = (records.steps["rank"] == 3) & (records.steps["step"] % 5 == 0)
    records.steps["compute"][chosen] *= 1.22
    assert judge(records).findings == []


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
    steps["cpu"][(steps["rank"] == 3) & (steps["stage"] == 0)] /= 1.015
    steps["cpu"][(steps["rank"] == 3) & (steps["stage"] == 1)] /= 1.3
    (found,) = judge(records).findings
    assert (found.what, found.stage, found.name) == (
        "starved",
        "parallel",
        "rank 3 on node1",
    )


def test_one_pause_in_one_round_names_nobody():
    records = make(4, 2)
    chosen = (
        (records.steps["rank"] == 3)
        & (records.steps["step"] == 2)
        & (records.steps["round"] == 1)
    )
    records.steps["compute"][chosen] += 5
    assert judge(records).findings == []


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
    steps = records.steps
    steps["checksum"][
        (steps["rank"] == 6)
        & (steps["stage"] == 1)
        & (steps["round"] == 2)
        & (steps["step"] >= 9)
    ] += 4
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
        report = {
            "name": "all_reduce_perf",
            "version": "2",
            "faults": [],
            "skipped": [],
        }
        found.tools[node] = [report]
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
    assert (
        limits["disk"]
        == limits["disk_node"]
        == ("at most 15% slower than the median, or by chance")
    )
    assert {"network between nodes", "read of the data disk, one node at a time"} <= {
        *found.tested["tested"].split("; ")
    }


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
    records = make(
        4, 2
    )  # as a sharded optimizer's: each rank has its own part of the weights in a step
    together = records.steps["stage"] == 4
    records.steps["checksum"][together] += 1000 * records.steps["rank"][together]
    assert judge(records).state == "pass"
    chosen = (
        together & (records.steps["rank"] == 2) & (records.steps["round"] == ROUNDS - 1)
    )
    records.steps["checksum"][chosen] ^= 1
    assert [one.name for one in judge(records).corrupt] == ["rank 2 on node1"]


def test_rounds_of_unequal_length_are_compared_over_their_common_steps():
    records = make(4, 2)
    steps = records.steps
    kept = (steps["stage"] != 3) | (steps["round"] > 0) | (steps["step"] < 5)
    for name, column in steps.items():
        steps[name] = column[kept]
    assert judge(records).corrupt == []
    steps["checksum"][
        (steps["stage"] == 3)
        & (steps["rank"] == 1)
        & (steps["round"] == 4)
        & (steps["step"] == 4)
    ] += 1
    assert [(one.name, one.step) for one in judge(records).corrupt] == [
        ("rank 1 on node0", 4)
    ]


def test_a_round_with_fewer_steps_names_nobody():
    records = make(4, 2, slow={("parallel", 5): 1.25})
    steps = records.steps
    kept = (
        (steps["stage"] != 0)
        | (steps["round"] != 1)
        | (steps["rank"] != 2)
        | (steps["step"] < 7)
    )
    for name, column in steps.items():
        steps[name] = column[kept]
    found = judge(records)
    assert [(one.what, one.stage, one.name) for one in found.findings] == [
        ("slow", "parallel", "rank 5 on node2")
    ]
    assert (
        np.isnan(records.seconds("single")).sum(axis=(1, 2))
        == [0, 0, 13, 0, 0, 0, 0, 0]
    ).all()
    assert all(np.isfinite(own).all() for own in found.seconds.values())


def test_records_are_the_same_after_writing_and_reading(tmp_path):
    records = make(4, 2, slow=everywhere(2, 3, factor=1.2))
    write(tmp_path, records)
    assert certify(tmp_path).reasons() == judge(records).reasons() != []


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_truncated_record_is_one_line(tmp_path, capsys, damage):
    write(tmp_path, make(2, 2))
    path = tmp_path / "certify_node1.npz"
    if damage == "other":
        np.savez(path, about=np.array("{}"))
    else:
        path.write_bytes(path.read_bytes()[:1000] if damage == "cut" else b"")
    assert main(["certify", str(tmp_path)]) == 2
    assert (
        "certify_node1.npz: not the record of a finished test"
        in capsys.readouterr().err
    )


def test_a_node_without_a_file_is_one_line(tmp_path, capsys):
    write(tmp_path, make(3, 2))
    (tmp_path / "certify_node1.npz").unlink()
    assert main(["certify", str(tmp_path)]) == 2
    assert (
        "no record of node1: the test did not finish there" in capsys.readouterr().err
    )


def test_a_node_whose_file_lacks_a_rank_is_one_line(tmp_path, capsys):
    records = make(3, 2)
    write(tmp_path, records)
    records.ranks.pop(3)
    (tmp_path / "fewer").mkdir()
    write(tmp_path / "fewer", records)
    (tmp_path / "fewer/certify_node1.npz").replace(tmp_path / "certify_node1.npz")
    assert main(["certify", str(tmp_path)]) == 2
    assert (
        "no record of some ranks: the test did not finish there"
        in capsys.readouterr().err
    )


def test_a_folder_without_records_is_one_line(tmp_path, capsys):
    assert main(["certify", str(tmp_path)]) == 2
    assert "no certify_<node>.npz" in capsys.readouterr().err
