"""Rates of other tools: the slow node, GPU, link or size is named, and what is missing is not tested."""

import numpy as np
import pytest

from review.acceptance.faults import tool_faults
from review.acceptance.schema import COPIES
from review.acceptance.verdict import judge, line

from .made_up import add_rates, chosen, make

*HOST, PAIRS = COPIES
NCCL, SIZES = "all_reduce_perf", (1 << 20, 1 << 30)


def records(nodes=4, per_node=2, slow=()):
    """Synthetic nodes with measurements of tools. slow: (test, rank) that takes a fifth more time."""
    found, noise = make(nodes, per_node), np.random.default_rng(0)
    copies = [(name, -1) for name in HOST]
    copies += [(PAIRS, peer) for peer in range(per_node)]
    tests = [(rank, *one, 1e9) for rank in found.ranks for one in copies]
    tests += [(rank, NCCL, -1, one) for rank in found.ranks for one in SIZES]
    for rank, name, peer, amount in [*tests, (0, f"{NCCL}_mpi", -1, 1 << 30)]:
        if peer != rank % per_node and (name != NCCL or rank % per_node == 0):
            rate = 400 / (1.2 if (name, rank) in slow else 1)
            rate *= 1 + 0.003 * noise.standard_normal()
            add_rates(found, {(rank, name, peer): rate}, amount=amount)
    told = {"version": "2.19.6", "faults": [], "skipped": []}
    for node in found.nodes:
        found.tools[node] = [{"name": one} | told for one in (NCCL, "nvbandwidth")]
    return found


def without_nccl(found, rank):
    """As if that node had not run it."""
    left = chosen(found.probes, probe=[NCCL.encode()], rank=rank)
    found.probes.update({name: own[~left] for name, own in found.probes.items()})
    return found


def late(found, factor, where):
    """Measurements of (test, GPU, peer) that take that much longer."""
    rows = zip(
        *(found.probes[one] for one in ("probe", "rank", "partner")), strict=True
    )
    found.probes["seconds"] *= [factor if where(*row) else 1 for row in rows]
    return found


@pytest.mark.parametrize(
    ("found", "culprits"),
    [
        (records(), []),
        (records(slow={(NCCL, 4)}), [("node node2", NCCL, "slow")]),
        (records(slow={(HOST[0], 5)}), [("rank 5 on node2", HOST[0], "slow")]),
        (late(records(2, 4), 19, lambda name, *pair: (name, *pair) == (PAIRS.encode(), 6, 0)),
         [("GPU 2 from GPU 0 of node1", PAIRS, "slow")]),
        # Slow with all others.
        (late(records(2, 4), 19, lambda name, rank, peer: name == PAIRS.encode() and rank > 3 and 2 in (rank - 4, peer)),
         [("rank 6 on node1", PAIRS, "slow")]),
    ],
    ids=["equal", "node", "GPU", "link", "GPU with slow links"],
)  # fmt: skip
def test_the_slow_node_gpu_or_link_is_named(found, culprits):
    judged = judge(found)
    assert [(one.name, one.stage, one.what) for one in judged.findings] == culprits
    assert bool(judged.why()) == bool(culprits)


def test_a_test_that_one_node_lacks_is_not_tested_there_and_fails_where_it_is_required():
    found, wanted = without_nccl(records(), 6), {NCCL: 400.0}
    label, why = "all-reduce of each node, nccl-tests", "measured on other nodes only"
    judged = judge(found, expected=wanted)
    assert judged.state == "pass"
    assert f"{label} on node3 ({why})" in line(judged)
    assert f"{NCCL}=400 on node3 (expected, not measured)" in line(judged)
    assert judge(found, expected=wanted, required=["nccl"]).reasons() == [
        f"node node3: {label}: required, not tested: {why}"
    ]
    whole = line(judge(records(), expected=wanted, required=["nccl"]))
    assert "node3 (" not in whole, "a test over all nodes is entered for one of them"


def test_figures_of_tools_are_compared_with_the_config():
    wanted = {NCCL: 400.0, f"{NCCL}_mpi": 500.0}
    found = judge(records(slow={(NCCL, 4)}), expected=wanted).reached
    missed = [(one.name, one.figure) for one in found if one.state == "fail"]
    assert missed == [("node node2", NCCL), ("all ranks", f"{NCCL}_mpi")]


def test_a_failed_tool_fails_the_test_and_the_others_are_still_compared():
    found = without_nccl(records(slow={(NCCL, 4)}), 0)
    found.tools["node0"][0]["faults"] = [("", "fail", "ended with status 3")]
    told = {"name": "dcgmi", "version": "4", "skipped": []}
    found.tools["node1"].append(told | {"faults": [("GPU 1", "warn", "PCIe: x8")]})
    assert [(one.name, one.what, one.stage) for one in tool_faults(found)] == [
        (f"{NCCL} of node0", "ended with status 3", ""),
        ("GPU 1 of node1", "PCIe: x8", "dcgmi"),
    ]
    judged = judge(found)
    (slow,) = judged.findings
    # Of three nodes.
    assert (judged.state, slow.name, slow.outlier.state) == (
        "fail",
        "node node2",
        "warn",
    )


def test_the_page_has_the_limits_of_a_tools_figures(certified, tmp_path):
    page = tmp_path / "page.html"
    found = records(slow={(NCCL, 4), (PAIRS, 5)})
    assert certified(found, "-o", str(page), expected={NCCL: 300.0})[0] == 1
    limits = "at least 285 (300 expected) and at most 3% slower than the median"
    assert limits in page.read_text()
