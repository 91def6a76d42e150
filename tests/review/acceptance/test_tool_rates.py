"""Rates of other tools: the slow node, GPU, link or size is named, and what is missing is not tested."""

from __future__ import annotations

import json

import numpy as np

from review.__main__ import main
from review.acceptance.faults import tool_faults
from review.acceptance.schema import COPIES
from review.acceptance.verdict import judge, line

from .made_up import make, write

*HOST, PAIRS = COPIES


def records(nodes=4, per_node=2, slow=(), sizes=(1 << 20, 1 << 30)):
    """Synthetic nodes with measurements of tools. slow: (test, rank) that takes a fifth more
    time.
    """
    found = make(nodes, per_node)
    generator, rows = np.random.default_rng(0), []
    for rank in range(nodes * per_node):
        first = rank % per_node == 0
        tests = [("all_reduce_perf", -1, size) for size in sizes if first] + [
            (name, -1, 1e9) for name in HOST
        ]
        tests += [
            (PAIRS, peer, 1e9) for peer in range(per_node) if peer != rank % per_node
        ]
        tests += [("all_reduce_perf_mpi", -1, 1 << 30)] if rank == 0 else []
        for name, peer, amount in tests:
            for number in range(3):
                seconds = amount / 4e11 * (1 + 0.003 * generator.standard_normal())
                rows.append(
                    (
                        rank,
                        name,
                        number,
                        peer,
                        seconds * (1.2 if (name, rank) in slow else 1),
                        amount,
                    )
                )
    for column, name in enumerate(
        ("rank", "probe", "round", "partner", "seconds", "amount")
    ):
        values = np.array(
            [row[column] for row in rows], "S32" if name == "probe" else None
        )
        found.probes[name] = np.concatenate([found.probes[name], values])
    for node in found.nodes:
        told = {"version": "2.19.6", "faults": [], "skipped": []}
        found.tools[node] = [
            {"name": name, **told} for name in ("all_reduce_perf", "nvbandwidth")
        ]
    return found


def test_equal_measurements_pass_and_a_slow_node_or_gpu_is_named():
    assert judge(records()).why() == []
    (found,) = judge(records(slow={("all_reduce_perf", 4)})).findings
    assert (found.name, found.stage, found.what) == (
        "node node2",
        "all_reduce_perf",
        "slow",
    )
    (found,) = judge(records(slow={(HOST[0], 5)})).findings
    assert (found.name, found.stage) == ("rank 5 on node2", HOST[0])


def test_a_test_that_one_node_lacks_is_not_tested_there_and_fails_where_it_is_required():
    found = records()
    kept = (found.probes["probe"] != b"all_reduce_perf") | (found.probes["rank"] != 6)
    for name, column in found.probes.items():
        found.probes[name] = column[kept]
    wanted = {"all_reduce_perf": 400.0}
    label = "all-reduce of each node, nccl-tests"
    judged = judge(found, expected=wanted)
    assert judged.state == "pass"
    assert f"{label} on node3 (measured on other nodes only)" in line(judged)
    assert "all_reduce_perf=400 on node3 (expected, not measured)" in line(judged)
    assert judge(found, expected=wanted, required=["nccl"]).reasons() == [
        f"node node3: {label}: required, not tested: measured on other nodes only"
    ]
    whole = line(judge(records(), expected=wanted, required=["nccl"]))
    assert "node3 (" not in whole, "a test over all nodes is entered for one of them"


def between_gpus(slow=lambda node, gpu, peer: False):
    """Two nodes of four GPUs; of slow pairs the copy takes 19 times as long."""
    found = records(2, 4)
    chosen = found.probes["probe"] == PAIRS.encode()
    for row in np.flatnonzero(chosen).tolist():
        rank, peer = found.probes["rank"][row], found.probes["partner"][row]
        if slow(rank // 4, rank % 4, peer):
            found.probes["seconds"][row] *= 19
    return found


def test_a_slow_pair_of_gpus_names_its_link_and_a_gpu_with_slow_pairs_the_gpu():
    assert judge(between_gpus()).why() == []
    link = judge(
        between_gpus(lambda node, gpu, peer: (node, gpu, peer) == (1, 2, 0))
    ).findings
    assert [(one.name, one.stage) for one in link] == [
        ("GPU 2 from GPU 0 of node1", PAIRS)
    ]
    gpu = judge(
        between_gpus(lambda node, gpu, peer: node == 1 and 2 in (gpu, peer))
    ).findings
    assert [(one.name, one.stage) for one in gpu] == [("rank 6 on node1", PAIRS)]


def test_small_messages_that_one_node_sends_slowly_are_named():
    found = records(sizes=(1 << 10, 1 << 30))
    chosen = (found.probes["probe"] == b"all_reduce_perf") & (
        found.probes["amount"] == 1 << 10
    )
    found.probes["seconds"][chosen & (found.probes["rank"] == 4)] *= 100
    assert [(one.name, one.what) for one in judge(found).findings] == [
        ("node node2", "network")
    ]


def test_figures_of_tools_are_compared_with_the_config():
    wanted = {"all_reduce_perf": 400.0, "all_reduce_perf_mpi": 500.0}
    found = judge(records(slow={("all_reduce_perf", 4)}), expected=wanted)
    assert [
        (one.name, one.figure, one.state)
        for one in found.reached
        if one.state != "pass"
    ] == [
        ("node node2", "all_reduce_perf", "fail"),
        ("all ranks", "all_reduce_perf_mpi", "fail"),
    ]


def test_a_failed_tool_fails_the_test_and_the_others_are_still_compared():
    found = records(slow={("all_reduce_perf", 4)})
    failed = found.probes["probe"] != b"all_reduce_perf"
    kept = failed | (found.probes["rank"] != 0)
    for name, column in found.probes.items():
        found.probes[name] = column[kept]
    found.tools["node0"][0]["faults"] = [("", "fail", "ended with status 3")]
    told = {
        "name": "dcgmi",
        "version": "4",
        "skipped": [],
        "faults": [("GPU 1", "warn", "PCIe: x8")],
    }
    found.tools["node1"].append(told)
    said = [(one.name, one.what, one.stage) for one in tool_faults(found)]
    assert said == [
        ("all_reduce_perf of node0", "ended with status 3", ""),
        ("GPU 1 of node1", "PCIe: x8", "dcgmi"),
    ]
    judged = judge(found)
    assert judged.state == "fail"
    assert [(one.name, one.outlier.state) for one in judged.findings] == [
        ("node node2", "warn")
    ]  # of three nodes


def test_the_page_has_the_limits_of_a_tools_figures(tmp_path):
    write(tmp_path, records(slow={("all_reduce_perf", 4), (PAIRS, 5)}))
    (tmp_path / "config.json").write_text(
        json.dumps({"expected": {"all_reduce_perf": 300.0}})
    )
    assert main(["certify", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 1
    page = (tmp_path / "page.html").read_text()
    assert (
        "at least 285 (300 expected) and at most 3% slower than the median, or by chance"
        in page
    )
