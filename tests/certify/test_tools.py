"""nccl-tests, nvbandwidth and dcgmi diag: their documented output becomes figures or named faults.

The stand-ins are programs that print what the real ones do: the table of nccl-tests 2.19, the JSON
of nvbandwidth 0.8, and that of DCGM 4 and 3.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from certify import tools
from common.env import ConfigError, from_env
from review.acceptance.figures import expectations
from review.acceptance.schema import COPIES, Expected
from review.acceptance.verdict import certify

from ..waiting import running, wait_until
from .test_certify import run

*HOST, PAIRS = COPIES

HEADER = """# nccl-tests version 2.19.6 nccl-headers=23103 nccl-library=23103
# Collective test starting: all_reduce_perf
# nThread 1 nGpus {ranks} minBytes 1024 maxBytes 1073741824 step: 2(factor) warmup iters: 1 iters: 20
#
# Using devices
{devices}
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
"""
ROW = "{size:12}  {count:12}     float     sum      -1  {us:7.2f}  {alg:6.2f}  {bus:6.2f}  {wrong:>6}"
ROW += "  {us:7.2f}  {alg:6.2f}  {bus:6.2f}     N/A\n"
FOOTER = """# Out of bounds values : {wrong} {verdict}
# Avg bus bandwidth    : 123.4{space}
#
# Collective test concluded: all_reduce_perf
"""


SIZES = [1 << power for power in range(10, 31)]


def nccl_tests(ranks=2, peak=400.0, wrong=0, sizes=SIZES):
    """The whole output of an nccl-tests program."""
    line = "#  Rank {0:2} Group  0 Pid {1:6} on      node1 device {0:2} [0000:{0:02x}:00] NVIDIA H100 80GB HBM3"
    devices = "\n".join(line.format(rank, 4711 + rank) for rank in range(ranks))
    text = HEADER.format(ranks=ranks, devices=devices)
    for size in sizes:
        bus = peak * size / (size + (1 << 22))
        text += ROW.format(
            size=size,
            count=size // 4,
            us=size / (bus / 1.75) / 1e3 if bus else 0,
            alg=bus / 1.75,
            bus=bus,
            wrong=wrong,
        )
    return text + FOOTER.format(
        wrong=wrong, verdict="FAILED" if wrong else "OK", space=" "
    )


def nvbandwidth(gpus=2, slow_pair=None, **other):
    """Output of `nvbandwidth -j`: cells are text, N/A for a GPU with itself."""
    host = [[f"{55.4 + column:.2f}" for column in range(gpus)]]
    pairs = [["370.0"] * gpus for _ in range(gpus)]
    for number in range(gpus):
        pairs[number][number] = "N/A"
    if slow_pair:
        pairs[slow_pair[0]][slow_pair[1]] = "40.0"
    matrices = {name: pairs if name == PAIRS else host for name in COPIES}
    cases = [
        {"name": name, "status": "Passed", "bandwidth_matrix": rows, "sum": 1.0}
        for name, rows in matrices.items()
    ]
    about = {"CUDA Runtime Version": 12080, "git_version": "v0.8", "version": "v0.8"}
    return {"nvbandwidth": about | {"testcases": cases} | other}


def dcgm4(*tests, **other):
    """Output of `dcgmi diag -j` since DCGM 4: a test is (name, state of each GPU, text of a
    warning).
    """
    found = []
    for name, states, words in tests:
        warning = {"error_category": 7, "error_id": 95, "error_severity": 2}
        warned = {"warnings": [warning | {"warning": words}]} if words else {}
        results = [
            {"entity_group": "GPU", "entity_id": number, "status": state}
            | (warned if state == "Fail" or {*states} == {"Pass"} else {})
            for number, state in enumerate(states)
        ]
        worst = "Fail" if "Fail" in states else states[0]
        summary = {"status": worst} | warned
        found.append({"name": name, "results": results, "test_summary": summary})
    categories = [{"category": "Hardware", "tests": found}]
    report = {"test_categories": categories} | other
    return {"DCGM Diagnostic": report, "metadata": {"version": "4.2.3"}}


def dcgm3(state, words=""):
    """The same for DCGM 3."""
    warned = {"warnings": [{"warning": words, "error_id": 35}]} if words else {}
    results = [{"gpu_id": "0", "status": "Pass"}]
    results.append({"gpu_id": "1", "status": state} | warned)
    tests = [{"name": "PCIe", "results": results}]
    report = {"test_categories": [{"category": "Integration", "tests": tests}]}
    return {"DCGM GPU Diagnostic": report, "version": "3.3.8"}


def dcgmi(told, status=0, gpus=2):
    """The reading of a diagnosis."""
    return tools.read("dcgmi", status, json.dumps(told), gpus)


def refused(name, status, text):
    """Why an output is no reading."""
    with pytest.raises(tools.ToolError) as error:
        tools.read(name, status, text, 2)
    return str(error.value)


def test_the_table_of_nccl_tests_is_a_curve_of_bus_bandwidth_with_versions():
    found = tools.read("all_reduce_perf", 0, nccl_tests(), 2)
    assert found.version == "2.19.6 with NCCL 2.31.3"
    measured = [(name, gpu, size) for name, gpu, _, size, _ in found.rates]
    assert measured == [("all_reduce_perf", 0, size) for size in SIZES]
    rates = [found.rates[number][-1] for number in (0, 10, 20)]
    # The first by its time.
    assert rates == pytest.approx([0.0976, 80.0, 398.44], rel=1e-3)
    assert found.faults == []
    older = re.sub(r"# nccl-tests version.*\n", "", nccl_tests())
    older = older.replace(" Group  0", "")
    assert tools.read("all_reduce_perf", 0, older, 2).rates == found.rates


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (0, nccl_tests(ranks=1) * 2, "had 1 ranks instead of 2: for several processes, build it with MPI=1"),
        (0, nccl_tests().partition("# Out of")[0], "its output is truncated or has an unknown format"),
        (0, nccl_tests(peak=0.0), "measured no bandwidth"),
        (0, "", "its output is truncated or has an unknown format"),
        (3, "node1: Test NCCL failure common.cu:1279 'unhandled cuda error / '\n .. node1 pid 7: done\n",
         "ended with status 3: node1: Test NCCL failure common.cu:1279 'unhandled cuda error / '"),
        (-11, "", "ended by signal 11"),
        (1, nccl_tests(), "ended with status 1"),
    ],
)  # fmt: skip
def test_a_failed_collective_says_why(status, text, said):
    assert refused("all_reduce_perf", status, text) == said


@pytest.mark.parametrize("status", [0, 1])
def test_wrong_values_are_a_fault_whatever_the_exit_status(status):
    found = tools.read("all_reduce_perf", status, nccl_tests(wrong=4), 2)
    assert found.faults == [("", "fail", "4 wrong values in its results")]


def test_nvbandwidth_gives_a_rate_for_each_gpu_and_pair():
    text = f"a line before\n{json.dumps(nvbandwidth(slow_pair=(0, 1)))}\nand after"
    found = tools.read("nvbandwidth", 0, text, 2)
    assert found.version == "v0.8"
    rates = [(name, gpu, peer, rate) for name, gpu, peer, _, rate in found.rates]
    host, _, pairs = COPIES
    assert [one for one in rates if one[0] == host] == [
        (host, 0, -1, 55.4),
        (host, 1, -1, 56.4),
    ]
    assert [one for one in rates if one[0] == pairs] == [
        (pairs, 0, 1, 40.0),
        (pairs, 1, 0, 370.0),
    ]


def test_a_failed_case_of_nvbandwidth_is_a_fault_and_a_waived_one_is_skipped():
    told = nvbandwidth()
    states = [{"status": "Error", "error": "invalid argument"}]
    states += [{"status": "Waived"}, {"status": "Running"}]
    for case, state in zip(told["nvbandwidth"]["testcases"], states, strict=True):
        case |= state
    found = tools.read("nvbandwidth", 0, json.dumps(told), 2)
    one, two, three = COPIES
    assert [what for *_, what in found.faults] == [
        f"{one}: Error: invalid argument",
        f"{three}: Running",
    ]
    assert {fault[:2] for fault in found.faults} == {("", "fail")}
    assert (found.skipped, found.rates) == ([two], [])
    told["nvbandwidth"]["testcases"] = []
    found = tools.read("nvbandwidth", 0, json.dumps(told), 2)
    assert [what for *_, what in found.faults] == [f"{x}: Not Found" for x in COPIES]


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (json.dumps(nvbandwidth(error="[CUDA_ERROR_NO_DEVICE]\n no device")), 1, "[CUDA_ERROR_NO_DEVICE] no device"),
        (json.dumps(nvbandwidth())[:300], 0, "its output is truncated or has an unknown format"),
        (json.dumps(nvbandwidth())[:300], 134, "ended with status 134"),
        ("nvbandwidth: error while loading shared libraries: libcuda.so.1", 127,
         "ended with status 127: nvbandwidth: error while loading shared libraries: libcuda.so.1"),
        ("[]", 0, "its output is truncated or has an unknown format"),
    ],
)  # fmt: skip
def test_nvbandwidth_that_did_not_measure_says_why(text, status, said):
    assert refused("nvbandwidth", status, text) == said


def test_dcgms_findings_are_reported_by_test_and_gpu():
    words = "GPU 1 uncorrectable memory error"
    told = dcgm4(
        ("memory", ["Pass", "Fail"], words),
        ("pcie", ["Skip", "Skip"], ""),
        ("nvlink", ["Pass", "Pass"], "slow"),
    )
    found = dcgmi(told, 226)
    assert found.faults == [
        ("GPU 1", "fail", f"memory: {words}"), ("GPU 0", "warn", "nvlink: slow"), ("GPU 1", "warn", "nvlink: slow")
    ]  # fmt: skip
    assert (found.skipped, found.version) == (["pcie"], "4.2.3")
    found = dcgmi(dcgm3("Fail", "width 8"))
    faults = [("GPU 1", "fail", "PCIe: width 8")]
    assert (found.faults, found.version) == (faults, "3.3.8")
    assert dcgmi(dcgm3("Pass")).faults == []


BROKEN = {"runtime_error": "Error: no GPUs found", "version": "4.2.3"}


@pytest.mark.parametrize(("status", "told", "said"), [
    (226, {"DCGM Diagnostic": BROKEN}, "Error: no GPUs found"),
    (205, dcgm4(("memory", ["Pass"], "")), "ended with status 205"),
    (0, {"entity_groups": []}, "its output is truncated or has an unknown format"),
])  # fmt: skip
def test_dcgm_that_fails_as_a_whole_says_why(status, told, said):
    assert said in refused("dcgmi", status, json.dumps(told))


def cut_row(text, size, cells):
    """nccl-tests output with other last eight cells in the row of one size."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.split()[:1] == [str(size)])
    lines[at] = " ".join([*lines[at].split()[:5], *cells.split()])
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (nccl_tests(sizes=SIZES[:-1]), "measured 20 of 21 sizes, the largest 536,870,912 bytes"),
        (nccl_tests(sizes=SIZES[:1]), "measured 1 of 21 sizes, the largest 1,024 bytes"),
        (nccl_tests(sizes=SIZES[1:]), "measured 20 of 21 sizes, the largest 1,073,741,824 bytes"),
        (cut_row(nccl_tests(), SIZES[-1], "9.0 0.00 0.00 0 9.0 5.0 5.0 0"), "0 GB/s at 1,073,741,824 bytes"),
        (cut_row(nccl_tests(), SIZES[-1], "9.0 nan nan 0 9.0 5.0 5.0 0"), "nan GB/s at 1,073,741,824 bytes"),
        (cut_row(nccl_tests(), SIZES[-1], "9.0 inf inf 0 9.0 5.0 5.0 0"), "inf GB/s at 1,073,741,824 bytes"),
        (cut_row(nccl_tests(), SIZES[-1], "9.0 -1 -1 0 9.0 5.0 5.0 0"), "-1 GB/s at 1,073,741,824 bytes"),
        (cut_row(nccl_tests(), 1 << 20, "9.0 0.00 0.00 0 9.0 5.0 5.0 0"), "0 GB/s at 1,048,576 bytes"),
        (cut_row(nccl_tests(), 1024, "nan 0.00 0.00 0 9.0 5.0 5.0 0"), "nan GB/s at 1,024 bytes"),
        (cut_row(nccl_tests(), 1024, "0.00 0.00 0.00 0 9.0 5.0 5.0 0"), "nan GB/s at 1,024 bytes"),
        (cut_row(nccl_tests(), 1024, "9.0 0.05 0.05 3 9.0 5.0 5.0 0"), "3 wrong values in its results"),
        (nccl_tests(sizes=[*SIZES[:-2], SIZES[3], SIZES[-1]]), "measured 20 of 21 sizes, the largest 1,073,741,824 bytes"),
        (nccl_tests(sizes=[1024] * 20 + [1 << 30]), "measured 2 of 21 sizes, the largest 1,073,741,824 bytes"),
        (cut_row(nccl_tests(), 1 << 20, "9.0 5.0 5.0 0 9.0 5.0 5.0 7"), "7 wrong values in its results"),
        (cut_row(nccl_tests(), 1 << 20, "9.0 5.0 5.0 0 nan 5.0 0.00 0"), "0 GB/s at 1,048,576 bytes in place"),
        (nccl_tests().replace(": 0 OK", ": 0 FAILED"), "its values: FAILED"),
    ],
)  # fmt: skip
def test_a_collective_that_did_not_measure_every_size_is_a_fault(text, said):
    found = tools.read("all_reduce_perf", 0, text, 2)
    assert ("", "fail", said) in found.faults
    assert all(0 < rate < 1e6 for *_, rate in found.rates)


@pytest.mark.parametrize(
    ("gpus", "cell", "said"),
    [
        *((2, cell, f"GPU 1 from GPU 0: {cell} GB/s") for cell in ("0", "nan", "inf", "-1", "N/A")),
        (3, "370", "measured 2 of 3 GPUs"),
    ],
)  # fmt: skip
def test_a_pair_of_gpus_that_was_not_measured_is_a_fault_that_names_it(
    gpus, cell, said
):
    told = nvbandwidth()
    told["nvbandwidth"]["testcases"][2]["bandwidth_matrix"][1][0] = cell
    found = tools.read("nvbandwidth", 0, json.dumps(told), gpus)
    failed = [what for _, state, what in found.faults if state == "fail"]
    assert failed[-1] == f"{PAIRS}: {said}"


def test_a_passed_case_without_figures_and_a_warning_of_nvbandwidth_are_faults():
    told = nvbandwidth(warning="the driver is old")
    for case in told["nvbandwidth"]["testcases"]:
        case["bandwidth_matrix"] = []
    found = tools.read("nvbandwidth", 0, json.dumps(told), 2)
    assert found.faults[0] == ("", "warn", "the driver is old")
    assert [what for _, _, what in found.faults[1:]] == [
        f"{name}: measured 0 of 2 GPUs" for name in COPIES
    ]


DISABLED = "Persistence mode disabled"
SETTING = [
    {"error_category": 3, "error_id": 41, "error_severity": 5, "warning": DISABLED},
]


def diagnosis(results, summary=None, gpus=2):
    """Output of DCGM 4 with one test of these results, beside one that every GPU passes."""
    told = dcgm4(("memory", ["Pass"] * gpus, ""))
    of_gpus = [
        {"entity_group": "GPU", "entity_id": number} | one
        for number, one in enumerate(results)
    ]
    test = {"name": "software", "results": of_gpus}
    test |= {"test_summary": summary} if summary else {}
    told["DCGM Diagnostic"]["test_categories"][0]["tests"].append(test)
    return told


OFF, FAILED = {"status": "Fail", "warnings": SETTING}, {"status": "Fail"}


@pytest.mark.parametrize(
    ("results", "summary", "status", "states"),
    [
        ([OFF], FAILED, 226, ["warn"]),
        ([OFF], FAILED | {"warnings": [{"warning": DISABLED}]}, 226, ["warn"]),
        ([OFF], FAILED | {"warnings": [{"warning": "ECC"}]}, 226, ["warn", "fail"]),
        ([{"status": "Warn"}], FAILED, 226, ["warn", "fail"]),
        ([{"status": "Pass"}], {"status": "Exploded"}, 0, ["fail"]),
        ([{"status": "Exploded"}], None, 0, ["fail"]),
        ([{}], None, 0, ["fail"]),
        ([], None, 0, ["fail"]),
    ],
)
def test_only_a_setting_is_a_warning_and_an_unknown_status_fails(
    results, summary, status, states
):
    found = dcgmi(diagnosis(results, summary), status)
    assert [state for _, state, _ in found.faults] == states


def test_a_signals_status_of_dcgmi_is_no_setting():
    why = refused("dcgmi", 139, json.dumps(diagnosis([OFF])))
    assert "ended with status 139" in why


@pytest.mark.parametrize("categories", [[], [{"category": "Hardware", "tests": []}]])
def test_a_diagnosis_without_tests_is_none(categories):
    told = dcgm4() | {"DCGM Diagnostic": {"test_categories": categories}}
    assert "ran no test" in refused("dcgmi", 0, json.dumps(told))


def test_a_gpu_that_dcgm_leaves_out_is_a_fault_and_one_that_it_skips_is_not_tested():
    found = dcgmi(diagnosis([{"status": "Pass"}, {"status": "Skip"}]), gpus=3)
    assert found.faults == [("", "fail", "tested 2 of 3 GPUs")]
    assert found.skipped == ["software of GPU 1"]


def test_a_size_that_is_printed_twice_and_a_collective_without_in_place_results_pass():
    text = nccl_tests(sizes=[*SIZES, SIZES[-1]])
    assert tools.read("all_reduce_perf", 0, text, 2).faults == []
    text = cut_row(nccl_tests(), 1 << 20, "9.0 5.0 5.0 0 N/A N/A N/A N/A")
    assert tools.read("all_reduce_perf", 0, text, 2).faults == []


def test_tests_that_dcgm_skips_on_some_gpus_are_not_all_tests():
    states = [{"status": state} for state in ("Pass", "Skip", "Skip")]
    found = dcgmi(diagnosis(states, gpus=3), gpus=3)
    assert found.skipped == ["software of GPU 1", "software of GPU 2"]


@pytest.mark.parametrize("instead", [[], [None]])
def test_a_gpu_that_one_test_of_dcgm_leaves_out_is_not_tested_by_it(instead):
    told = dcgm4(*((name, ["Pass"] * 4, "") for name in ("memory", "pcie", "power")))
    tests = told["DCGM Diagnostic"]["test_categories"][0]["tests"]
    tests[1]["results"][2:3] = instead
    found = dcgmi(told, gpus=4)
    assert (found.faults, found.skipped) == ([], ["pcie of GPU 2"])


def test_a_test_of_the_system_that_complains_of_one_gpu_leaves_none_out():
    told = dcgm3("Pass")
    for name, own in (
        ("NVML", {"status": "Pass"}),
        ("Persistence", OFF | {"gpu_id": 0}),
    ):
        tests = [{"name": name, "results": [own]}]
        deployment = {"category": "Deployment", "tests": tests}
        told["DCGM GPU Diagnostic"]["test_categories"].append(deployment)
    found = dcgmi(told, 226)
    assert [state for _, state, _ in found.faults] == ["warn"]
    assert found.skipped == []


def test_one_gpu_has_no_other_to_copy_from_and_skips_nothing():
    told = nvbandwidth(gpus=1)
    told["nvbandwidth"]["testcases"][2]["status"] = "Waived"
    assert tools.read("nvbandwidth", 0, json.dumps(told), 1).skipped == []


def test_a_node_without_programs_waits_as_long_as_the_others_need(tmp_path):
    asked, limits = [], []
    peers = SimpleNamespace(
        config=SimpleNamespace(timeout_seconds=600),
        node_ranks=[0],
        size=1,
        rank=0,
        barrier=lambda: None,
        max=lambda own: (asked.append(own), 3600.0)[1],
        store=SimpleNamespace(
            set_timeout=lambda time: limits.append(time.total_seconds())
        ),
    )
    tools.run(from_env(tools.ToolsConfig, {}), {}, peers, tmp_path, {})
    assert (asked, limits) == ([600], [3600, 600])


def program(
    folder: Path, name: str, *texts: str, status: int = 0, more: str = ""
) -> Path:
    """A stand-in that prints its next output at each start, and then repeats the last."""
    path = folder / name
    for number, text in enumerate(texts):
        (folder / f"{name}.{number}").write_text(text)
    path.write_text(
        f"#!{sys.executable}\nimport os, pathlib, sys, time\nown = pathlib.Path({str(path)!r})\n"
        "turn = sum(1 for _ in own.parent.glob(own.name + '.turn*'))\n"
        "own.with_name(own.name + f'.turn{turn}').write_text(repr((sys.argv[1:], sorted(os.environ))))\n"
        f"print(own.with_name(own.name + f'.{{min(turn, {len(texts) - 1})}}').read_text(), flush=True)\n"
        f"{more}\nsys.exit({status})\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_tool_that_does_not_end_is_killed_with_its_children(tmp_path):
    more = "child = os.fork() or os.execvp('sleep', ['sleep', '1000'])\nown.with_name('child').write_text(str(child))\n"
    more += "time.sleep(1000)"
    path = program(tmp_path, "all_reduce_perf", nccl_tests(), more=more)
    about, rates = tools.test(
        "all_reduce_perf", [str(path)], 2, tmp_path / "tools_a", 2, os.environ
    )
    assert (about["faults"], rates) == ([("", "fail", "did not end in 2 s")], [])
    wait_until(
        lambda: not running(int((tmp_path / "child").read_text()))
    )  # which takes the kernel a moment
    assert "busbw" in (tmp_path / "tools_a" / "all_reduce_perf_0.txt").read_text()


def test_a_program_that_cannot_start_is_a_fault(tmp_path):
    (tmp_path / "nvbandwidth").write_text("no program")
    (tmp_path / "nvbandwidth").chmod(0o755)
    about, _ = tools.test(
        "nvbandwidth", [str(tmp_path / "nvbandwidth")], 2, tmp_path / "a", 2, os.environ
    )
    assert about["faults"] == [("", "fail", "did not start: Exec format error")]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("bandwidthTest", "CERTIFY_TOOLS: bandwidthTest: expected `none` or some of dcgmi, nvbandwidth, all_reduce_perf, "),
        ("/none/nvbandwidth", "CERTIFY_TOOLS: /none/nvbandwidth is not installed: give its path, or remove it"),
        ("/bin/all_reduce_perf_mpi", "needs CERTIFY_MPI|is not installed"),
    ],
)  # fmt: skip
def test_a_requested_tool_that_cannot_run_is_one_line(asked, said):
    with pytest.raises(ConfigError, match=said):
        from_env(tools.ToolsConfig, {"CERTIFY_TOOLS": asked}).programs(on_gpus=True)


def test_by_default_installed_tools_run_on_gpus_and_none_runs_none(
    tmp_path, monkeypatch
):
    path = program(tmp_path, "all_reduce_perf", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    unset = from_env(tools.ToolsConfig, {})
    assert unset.programs(on_gpus=True) == {"all_reduce_perf": str(path)}
    assert unset.programs(on_gpus=False) == {}
    assert (
        from_env(tools.ToolsConfig, {"CERTIFY_TOOLS": "none"}).programs(on_gpus=True)
        == {}
    )


def test_over_all_nodes_the_users_command_starts_one_process_per_gpu():
    found = from_env(tools.ToolsConfig, {"CERTIFY_MPI": "srun --mpi=pmix -n 16"})
    sizes = ["-b", "1K", "-e", "1G", "-f", "2"]
    over_all = ["srun", "--mpi=pmix", "-n", "16"]
    assert dict(found.commands({"all_reduce_perf": "/a"}, 8, 2)) == {
        "all_reduce_perf": ["/a", *sizes, "-g", "8"], "all_reduce_perf_mpi": [*over_all, "/a", *sizes, "-g", "1"]
    }  # fmt: skip
    both = dict(
        found.commands({"all_reduce_perf": "/a", "all_reduce_perf_mpi": "/b"}, 8, 2)
    )
    assert both["all_reduce_perf_mpi"] == [*over_all, "/b", *sizes, "-g", "1"]
    assert (
        dict(from_env(tools.ToolsConfig, {}).commands({"all_reduce_perf": "/a"}, 1, 2))
        == {}
    )


def test_a_long_burn_in_has_the_thorough_diagnosis():
    for level in (2, 3):
        found = dict(
            from_env(tools.ToolsConfig, {}).commands({"dcgmi": "/d"}, 8, level)
        )
        assert found == {"dcgmi": ["/d", "diag", "-j", "-r", str(level)]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("all_reduce_prf=5", "did you mean all_reduce_perf?"),
        ("TFLOPS=600", "expected one of parallel, together, matmul, "),
        *((f"copy={value}", "expected copy= a number above 0") for value in ("0", "-1", "nan", "")),
    ],
)  # fmt: skip
def test_a_malformed_expected_figure_is_one_line(words, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        from_env(Expected, {"EXPECTED_FIGURES": f"matmul=600 {words}"}).figures()


def test_certify_runs_tools_and_judges_their_results(
    repository, tmp_path, quick_python
):
    gave = [nccl_tests(peak=peak) for peak in (400.0, 401.0, 399.0)]
    paths = [
        program(tmp_path, "all_reduce_perf", *gave),
        program(tmp_path, "nvbandwidth", json.dumps(nvbandwidth())),
        program(
            tmp_path,
            "dcgmi",
            json.dumps(
                dcgm4(("memory", ["Pass", "Pass"], ""), ("pcie", ["Skip", "Skip"], ""))
            ),
        ),
    ]
    settings = {
        "CERTIFY_TOOLS": " ".join(map(str, paths)),
        "EXPECTED_FIGURES": "all_reduce_perf=398,sendrecv_perf=9",
    }
    settings |= {"PMI_RANK": "0", "SLURM_PROCID": "0", "PYTHON": str(quick_python)}
    done = run(repository, tmp_path, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "results/test"
    arguments, environment = eval((tmp_path / "all_reduce_perf.turn2").read_text())
    assert arguments == ["-b", "1K", "-e", "1G", "-f", "2", "-g", "2"]
    assert not {"PMI_RANK", "SLURM_PROCID"} & {*environment}
    found = certify(folder)
    assert re.search(
        r"all-reduce of each node, nccl-tests +398.4 GB/s +at least 378.1 \(398 expected\)",
        done.stdout,
    )
    assert "sendrecv_perf=9 (expected, not measured)" in done.stdout
    said = found.tested
    versions = {"nccl-tests 2.19.6 with NCCL 2.31.3", "nvbandwidth v0.8", "dcgmi 4.2.3"}
    assert versions <= {*said["versions"].split(", ")}
    assert {"pcie (skipped by dcgmi)", "all-to-all of each node, nccl-tests"} <= {
        *said["not tested"].split("; ")
    }
    assert "nvbandwidth (measured, nothing to judge it by)" in said["not tested"]
    assert {"all-reduce of each node, nccl-tests", "dcgmi diag"} <= {
        *said["tested"].split("; ")
    }
    assert expectations(found.records).endswith(
        " all_reduce_perf=398.4 host_to_device_memcpy_ce=55.9 device_to_host_memcpy_ce=55.9 "
        "device_to_device_memcpy_read_ce=370"
    )


def of_2021(text: str, redop: bool = True, error: str = "0e+00") -> str:
    """The same table as an nccl-tests of 2021 prints it: no version and root, errors for counts."""
    text = re.sub(r"# nccl-tests version.*\n", "", text).replace("#wrong", " error")
    text = text.replace("   root ", "   " if redop else "").replace(
        "sum      -1", "sum"
    )
    lines = []
    for row in text.splitlines():
        words = row.split()
        if words and words[0].isdigit():
            words[7], words[-1] = error, error
            words = words if redop else [*words[:3], *words[4:]]
            lines.append("  ".join(words))
        else:
            lines.append(row)
    return "\n".join(lines)


@pytest.mark.parametrize("redop", [True, False])
def test_the_format_of_2021_is_read(redop):
    found = tools.read("all_reduce_perf", 0, of_2021(nccl_tests(), redop), 2)
    now = tools.read("all_reduce_perf", 0, nccl_tests(), 2)
    assert (found.rates, found.faults, found.skipped) == (now.rates, [], [])
    cut = of_2021(nccl_tests(), redop).replace("\n# Out of", " \n# Out of", 1)
    row = cut.splitlines()[-6]
    with pytest.raises(tools.ToolError, match="truncated"):
        tools.read("all_reduce_perf", 0, cut.replace(row, row[:30]), 2)


def test_sums_that_were_not_checked_are_not_tested():
    found = tools.read("all_reduce_perf", 0, of_2021(nccl_tests(), error="N/A"), 2)
    assert (found.faults, found.skipped) == ([], ["sums of all_reduce_perf"])
