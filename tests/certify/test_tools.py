"""nccl-tests, nvbandwidth and dcgmi diag: their documented output becomes figures or named faults.

The stand-ins are programs that print what the real ones do: the table of nccl-tests 2.19, the JSON
of nvbandwidth 0.8, and that of DCGM 4 and 3.
"""

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
# Avg bus bandwidth    : 123.4\x20
#
# Collective test concluded: all_reduce_perf
"""
DEVICE = "#  Rank {0:2} Group  0 Pid {1:6} on      node1 device {0:2} [0000:{0:02x}:00] NVIDIA H100 80GB HBM3"
SIZES = [1 << power for power in range(10, 31)]


def nccl_tests(ranks=2, peak=400.0, wrong=0, sizes=SIZES):
    """The whole output of an nccl-tests program."""
    devices = "\n".join(DEVICE.format(rank, 4711 + rank) for rank in range(ranks))
    text = HEADER.format(ranks=ranks, devices=devices)
    for size in sizes:
        bus = peak * size / (size + (1 << 22))
        row = {"size": size, "count": size // 4, "alg": bus / 1.75, "bus": bus}
        row["us"] = size / row["alg"] / 1e3 if bus else 0
        text += ROW.format(**row, wrong=wrong)
    return text + FOOTER.format(wrong=wrong, verdict="FAILED" if wrong else "OK")


def nvbandwidth(gpus=2, slow_pair=None, **other):
    """Output of `nvbandwidth -j`: cells are text, N/A for a GPU with itself."""
    host = [[f"{55.4 + column:.2f}" for column in range(gpus)]]
    pairs = [["370.0"] * gpus for _ in range(gpus)]
    for number in range(gpus):
        pairs[number][number] = "N/A"
    if slow_pair:
        pairs[slow_pair[0]][slow_pair[1]] = "40.0"
    matrices = {name: pairs if name == PAIRS else host for name in COPIES}
    passed = {"status": "Passed", "sum": 1.0}
    cases = [passed | {"name": n, "bandwidth_matrix": m} for n, m in matrices.items()]
    about = {"CUDA Runtime Version": 12080, "git_version": "v0.8", "version": "v0.8"}
    return {"nvbandwidth": about | {"testcases": cases} | other}


def of_gpus(results):
    """Results of the GPUs by number, as DCGM 4 names them."""
    named = [{"entity_group": "GPU", "entity_id": number} for number in range(99)]
    return [who | result for who, result in zip(named, results, strict=False)]


def dcgm4(*tests, **other):
    """Output of `dcgmi diag -j` since DCGM 4: a test is (name, state of each GPU, text of a warning)."""
    found, warning = [], {"error_category": 7, "error_id": 95, "error_severity": 2}
    for name, states, words in tests:
        warned = {"warnings": [warning | {"warning": words}]} if words else {}
        results = of_gpus([{"status": state} for state in states])
        for result in results:
            if result["status"] == "Fail" or {*states} == {"Pass"}:
                result |= warned
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


def read(told, status=0, gpus=2):
    """The reading of an output of nccl-tests, nvbandwidth or dcgmi."""
    if isinstance(told, str):
        return tools.read("all_reduce_perf", status, told, gpus)
    name = "nvbandwidth" if "nvbandwidth" in told else "dcgmi"
    return tools.read(name, status, json.dumps(told), gpus)


def test_the_table_of_nccl_tests_is_a_curve_of_bus_bandwidth_with_versions():
    found = read(nccl_tests())
    assert (found.version, found.faults) == ("2.19.6 with NCCL 2.31.3", [])
    measured = [(name, gpu, size) for name, gpu, _, size, _ in found.rates]
    assert measured == [("all_reduce_perf", 0, size) for size in SIZES]
    rates = [found.rates[number][-1] for number in (0, 10, 20)]
    # The first by its time.
    assert rates == pytest.approx([0.0976, 80.0, 398.44], rel=1e-3)
    older = re.sub(r"# nccl-tests version.*\n", "", nccl_tests())
    assert read(older.replace(" Group  0", "")).rates == found.rates


def test_nvbandwidth_gives_a_rate_for_each_gpu_and_pair():
    told = nvbandwidth(slow_pair=(0, 1), warning="the driver is old")
    text = f"a line before\n{json.dumps(told)}\nand after"
    found = tools.read("nvbandwidth", 0, text, 2)
    rates = [(name, gpu, peer, rate) for name, gpu, peer, _, rate in found.rates]
    host = [(name, gpu, -1, 55.4 + gpu) for name in HOST for gpu in (0, 1)]
    assert rates == [*host, (PAIRS, 0, 1, 40.0), (PAIRS, 1, 0, 370.0)]
    assert found.version == "v0.8"
    assert found.faults == [("", "warn", "the driver is old")]


ERROR = {"status": "Error", "error": "invalid argument"}
WAIVED, RUNNING = {"status": "Waived"}, {"status": "Running"}


@pytest.mark.parametrize(
    ("changes", "gpus", "faults", "skipped"),
    [
        ([ERROR, WAIVED, RUNNING], 2, [f"{HOST[0]}: Error: invalid argument", f"{PAIRS}: Running"], [HOST[1]]),
        ([{"name": "another"}] * 3, 2, [f"{name}: Not Found" for name in COPIES], []),
        ([{"bandwidth_matrix": []}] * 3, 2, [f"{name}: measured 0 of 2 GPUs" for name in COPIES], []),
        ([], 3, [f"{name}: measured 2 of 3 GPUs" for name in COPIES], []),
        *(([{}, {}, {"bandwidth_matrix": [["N/A", "370"], [cell, "N/A"]]}], 2, [f"{PAIRS}: GPU 1 from GPU 0: {cell} GB/s"], [])
          for cell in ("0", "nan", "inf", "-1", "N/A")),
        # One GPU has no other to copy from.
        ([{}, {}, WAIVED], 1, [], []),
    ],
)  # fmt: skip
def test_a_case_of_nvbandwidth_that_did_not_measure_is_a_fault_and_a_waived_one_skipped(
    changes, gpus, faults, skipped
):
    told = nvbandwidth(min(gpus, 2))
    for case, change in zip(told["nvbandwidth"]["testcases"], changes, strict=False):
        case |= change
    found = read(told, gpus=gpus)
    assert [what for *_, what in found.faults] == faults
    assert {state for _, state, _ in found.faults} <= {"fail"}
    assert found.skipped == skipped


def test_dcgms_findings_are_reported_by_test_and_gpu():
    words, slow = "memory: GPU 1 uncorrectable memory error", "nvlink: slow"
    memory = ("memory", ["Pass", "Fail"], words.removeprefix("memory: "))
    pcie, nvlink = ("pcie", ["Skip"] * 2, ""), ("nvlink", ["Pass"] * 2, "slow")
    found = read(dcgm4(memory, pcie, nvlink), 226)
    warned = [("GPU 0", "warn", slow), ("GPU 1", "warn", slow)]
    assert found.faults == [("GPU 1", "fail", words), *warned]
    assert (found.skipped, found.version) == (["pcie"], "4.2.3")
    found = read(dcgm3("Fail", "width 8"))
    faults = [("GPU 1", "fail", "PCIe: width 8")]
    assert (found.faults, found.version) == (faults, "3.3.8")
    assert read(dcgm3("Pass")).faults == []


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
        (nccl_tests(wrong=4), "4 wrong values in its results"),
    ],
)  # fmt: skip
def test_a_collective_that_did_not_measure_every_size_is_a_fault(text, said):
    for status in (0, 1):
        found = read(text, status)
        assert ("", "fail", said) in found.faults
        assert all(0 < rate < 1e6 for *_, rate in found.rates)


DISABLED = "Persistence mode disabled"
SETTING = [{"error_category": 3, "error_severity": 5, "warning": DISABLED}]


def diagnosis(results, summary=None, gpus=2):
    """Output of DCGM 4 with one test of these results, beside one that every GPU passes."""
    told = dcgm4(("memory", ["Pass"] * gpus, ""))
    test = {"name": "software", "results": of_gpus(results)}
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
    found = read(diagnosis(results, summary), status)
    assert [state for _, state, _ in found.faults] == states


def test_a_size_that_is_printed_twice_and_a_collective_without_in_place_results_pass():
    text = nccl_tests(sizes=[*SIZES, SIZES[-1]])
    assert read(text).faults == []
    text = cut_row(nccl_tests(), 1 << 20, "9.0 5.0 5.0 0 N/A N/A N/A N/A")
    assert read(text).faults == []


PASS, SKIP = {"status": "Pass"}, {"status": "Skip"}


def without_gpu_2(*instead):
    """A diagnosis of four GPUs, of which one test leaves one out."""
    told = dcgm4(*((name, ["Pass"] * 4, "") for name in ("memory", "pcie", "power")))
    tests = told["DCGM Diagnostic"]["test_categories"][0]["tests"]
    tests[1]["results"][2:3] = instead
    return told


def of_the_system():
    """A test of the whole system that complains of one GPU."""
    told = dcgm3("Pass")
    for name, own in (("NVML", PASS), ("Persistence", OFF | {"gpu_id": 0})):
        tests = [{"name": name, "results": [own]}]
        told["DCGM GPU Diagnostic"]["test_categories"].append({"tests": tests})
    return told


@pytest.mark.parametrize(
    ("told", "status", "gpus", "faults", "skipped"),
    [
        (diagnosis([PASS, SKIP]), 0, 3, [("", "fail", "tested 2 of 3 GPUs")], ["software of GPU 1"]),
        (diagnosis([PASS, SKIP, SKIP], gpus=3), 0, 3, [], ["software of GPU 1", "software of GPU 2"]),
        (without_gpu_2(), 0, 4, [], ["pcie of GPU 2"]),
        (without_gpu_2(None), 0, 4, [], ["pcie of GPU 2"]),
        (of_the_system(), 226, 2, [("GPU 0", "warn", f"Persistence: {DISABLED}")], []),
    ],
)  # fmt: skip
def test_a_gpu_that_dcgm_leaves_out_is_a_fault_and_one_that_it_skips_is_not_tested(
    told, status, gpus, faults, skipped
):
    found = read(told, status, gpus)
    assert (found.faults, found.skipped) == (faults, skipped)


NO_GPUS = {"DCGM Diagnostic": {"runtime_error": "no GPUs found", "version": "4.2.3"}}
NO_TESTS = [[], [{"category": "Hardware", "tests": []}]]
UNKNOWN = "its output is truncated or has an unknown format"
NCCL_FAILED = "node1: Test NCCL failure common.cu:1279 'unhandled cuda error / '"
NO_LIBRARY = "nvbandwidth: error while loading shared libraries: libcuda.so.1"


@pytest.mark.parametrize(
    ("name", "status", "told", "said"),
    [
        ("all_reduce_perf", 0, nccl_tests(ranks=1) * 2, "had 1 ranks instead of 2: for several processes, build it with MPI=1"),
        ("all_reduce_perf", 0, nccl_tests().partition("# Out of")[0], UNKNOWN),
        ("all_reduce_perf", 0, nccl_tests(peak=0.0), "measured no bandwidth"),
        ("all_reduce_perf", 0, "", UNKNOWN),
        ("all_reduce_perf", 3, f"{NCCL_FAILED}\n .. node1 pid 7: done\n", f"ended with status 3: {NCCL_FAILED}"),
        ("all_reduce_perf", -11, "", "ended by signal 11"),
        ("all_reduce_perf", 1, nccl_tests(), "ended with status 1"),
        ("nvbandwidth", 1, nvbandwidth(error="[CUDA_ERROR_NO_DEVICE]\n no device"), "[CUDA_ERROR_NO_DEVICE] no device"),
        ("nvbandwidth", 0, json.dumps(nvbandwidth())[:300], UNKNOWN),
        ("nvbandwidth", 134, json.dumps(nvbandwidth())[:300], "ended with status 134"),
        ("nvbandwidth", 127, NO_LIBRARY, f"ended with status 127: {NO_LIBRARY}"),
        ("nvbandwidth", 0, [], UNKNOWN),
        ("dcgmi", 226, NO_GPUS, "no GPUs found"),
        ("dcgmi", 205, dcgm4(("memory", ["Pass"], "")), "ended with status 205"),
        ("dcgmi", 0, {"entity_groups": []}, UNKNOWN),
        # A signal's status is no setting.
        ("dcgmi", 139, diagnosis([OFF]), "ended with status 139"),
        *(("dcgmi", 0, {"DCGM Diagnostic": {"test_categories": none}}, "ran no test") for none in NO_TESTS),
    ],
)  # fmt: skip
def test_a_tool_that_did_not_measure_says_why(name, status, told, said):
    text = told if isinstance(told, str) else json.dumps(told)
    with pytest.raises(tools.ToolError) as error:
        tools.read(name, status, text, 2)
    assert str(error.value).partition(": {")[0] == said


def test_a_node_without_programs_waits_as_long_as_the_others_need(tmp_path):
    asked, limits = [], []
    store = SimpleNamespace(
        set_timeout=lambda time: limits.append(time.total_seconds())
    )
    config, own = SimpleNamespace(timeout_seconds=600), {"size": 1, "rank": 0}
    own |= {"config": config, "node_ranks": [0], "store": store}
    peers = SimpleNamespace(**own, barrier=lambda: None)
    peers.max = lambda own: (asked.append(own), 3600.0)[1]
    tools.run(from_env(tools.ToolsConfig, {}), {}, peers, tmp_path, {})
    assert (asked, limits) == ([600], [3600, 600])


def program(folder: Path, name: str, *texts: str, more: str = "") -> Path:
    """A stand-in that prints its next output at each start, and then repeats the last."""
    path = folder / name
    for number, text in enumerate(texts):
        (folder / f"{name}.{number}").write_text(text)
    path.write_text(
        f"#!{sys.executable}\nimport os, pathlib, sys, time\nown = pathlib.Path({str(path)!r})\n"
        "turn = sum(1 for _ in own.parent.glob(own.name + '.turn*'))\n"
        "own.with_name(own.name + f'.turn{turn}').write_text(repr((sys.argv[1:], sorted(os.environ))))\n"
        f"print(own.with_name(own.name + f'.{{min(turn, {len(texts) - 1})}}').read_text(), flush=True)\n"
        f"{more}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_tool_that_does_not_end_is_killed_with_its_children(tmp_path):
    more = "child = os.fork() or os.execvp('sleep', ['sleep', '1000'])\n"
    more += "own.with_name('child').write_text(str(child))\ntime.sleep(1000)"
    path = program(tmp_path, "all_reduce_perf", nccl_tests(), more=more)
    output = tmp_path / "tools_a"
    told, rates = tools.test(path.name, [str(path)], 2, output, 2, os.environ)
    assert (told["faults"], rates) == ([("", "fail", "did not end in 2 s")], [])
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not running(child))  # which takes the kernel a moment
    assert "busbw" in (output / "all_reduce_perf_0.txt").read_text()


def test_a_program_that_cannot_start_is_a_fault(tmp_path):
    path = tmp_path / "nvbandwidth"
    path.write_text("no program")
    path.chmod(0o755)
    told, _ = tools.test(path.name, [str(path)], 2, tmp_path / "a", 2, os.environ)
    assert told["faults"] == [("", "fail", "did not start: Exec format error")]


NO_TOOLS = {"CERTIFY_TOOLS": "none"}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("bandwidthTest", "CERTIFY_TOOLS: bandwidthTest: expected `none` or some of dcgmi, nvbandwidth, all_reduce_perf, "),
        ("/none/nvbandwidth", "CERTIFY_TOOLS: /none/nvbandwidth is not installed: give its path, or remove it"),
    ],
)  # fmt: skip
def test_a_requested_tool_that_cannot_run_is_one_line(asked, said):
    with pytest.raises(ConfigError, match=said):
        from_env(tools.ToolsConfig, {"CERTIFY_TOOLS": asked}).programs(on_gpus=True)


def test_by_default_installed_tools_run_on_gpus_none_runs_none(tmp_path, monkeypatch):
    path = program(tmp_path, "all_reduce_perf", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    unset, none = (from_env(tools.ToolsConfig, one) for one in ({}, NO_TOOLS))
    assert unset.programs(on_gpus=True) == {"all_reduce_perf": str(path)}
    assert unset.programs(on_gpus=False) == none.programs(on_gpus=True) == {}
    over_all = {"CERTIFY_TOOLS": str(program(tmp_path, "all_reduce_perf_mpi", ""))}
    with pytest.raises(ConfigError, match="needs CERTIFY_MPI"):
        from_env(tools.ToolsConfig, over_all).programs(on_gpus=True)


MPI = {"CERTIFY_MPI": "srun --mpi=pmix -n 16"}
SIZE_OPTIONS = ["-b", "1K", "-e", "1G", "-f", "2"]
OF_NODE = ["/a", *SIZE_OPTIONS, "-g", "8"]
OVER_ALL = ["srun", "--mpi=pmix", "-n", "16"]


@pytest.mark.parametrize(
    ("env", "programs", "gpus", "commands"),
    [
        # Over all nodes one process for each GPU, of the program built for it if there is one.
        (MPI, {"all_reduce_perf": "/a"}, 8,
         {"all_reduce_perf": OF_NODE, "all_reduce_perf_mpi": [*OVER_ALL, "/a", *SIZE_OPTIONS, "-g", "1"]}),
        (MPI, {"all_reduce_perf": "/a", "all_reduce_perf_mpi": "/b"}, 8,
         {"all_reduce_perf": OF_NODE, "all_reduce_perf_mpi": [*OVER_ALL, "/b", *SIZE_OPTIONS, "-g", "1"]}),
        ({}, {"all_reduce_perf": "/a"}, 8, {"all_reduce_perf": OF_NODE}),
        ({}, {"all_reduce_perf": "/a"}, 1, {}),
        ({}, {"dcgmi": "/d"}, 8, {"dcgmi": ["/d", "diag", "-j", "-r", "3"]}),
    ],
)  # fmt: skip
def test_programs_are_started_by_these_commands(env, programs, gpus, commands):
    found = from_env(tools.ToolsConfig, env)
    assert dict(found.commands(programs, gpus, 3)) == commands


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


def test_certify_runs_tools_and_judges_results(repository, tmp_path, quick_python):
    gave = [nccl_tests(peak=peak) for peak in (400.0, 401.0, 399.0)]
    diagnosed = dcgm4(("memory", ["Pass"] * 2, ""), ("pcie", ["Skip"] * 2, ""))
    paths = [
        program(tmp_path, "all_reduce_perf", *gave),
        program(tmp_path, "nvbandwidth", json.dumps(nvbandwidth())),
        program(tmp_path, "dcgmi", json.dumps(diagnosed)),
    ]
    settings = {"CERTIFY_TOOLS": " ".join(map(str, paths)), "PYTHON": str(quick_python)}
    settings |= {"EXPECTED_FIGURES": "all_reduce_perf=398,sendrecv_perf=9"}
    settings |= {"PMI_RANK": "0", "SLURM_PROCID": "0"}
    done = run(repository, tmp_path, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    arguments, environment = eval((tmp_path / "all_reduce_perf.turn2").read_text())
    assert arguments == [*SIZE_OPTIONS, "-g", "2"]
    assert not {"PMI_RANK", "SLURM_PROCID"} & {*environment}
    figure = r"nccl-tests +398.4 GB/s +at least 378.1 \(398 expected\)"
    assert re.search(f"all-reduce of each node, {figure}", done.stdout)
    assert "sendrecv_perf=9 (expected, not measured)" in done.stdout
    found = certify(tmp_path / "results/test")
    said = found.tested
    tested, left = ({*said[key].split("; ")} for key in ("tested", "not tested"))
    versions = {"nccl-tests 2.19.6 with NCCL 2.31.3", "nvbandwidth v0.8", "dcgmi 4.2.3"}
    assert versions <= {*said["versions"].split(", ")}
    assert {"all-reduce of each node, nccl-tests", "dcgmi diag"} <= tested
    assert {"pcie (skipped by dcgmi)", "all-to-all of each node, nccl-tests"} <= left
    assert "nvbandwidth (measured, nothing to judge it by)" in left
    copies = [55.9, 55.9, 370]
    rates = [f"{name}={rate}" for name, rate in zip(COPIES, copies, strict=True)]
    expected = " ".join(["", "all_reduce_perf=398.4", *rates])
    assert expectations(found.records).endswith(expected)


def of_2021(text: str, redop: bool = True, error: str = "0e+00") -> str:
    """The same table as an nccl-tests of 2021 prints it: no version and root, errors for counts."""
    text = re.sub(r"# nccl-tests version.*\n", "", text).replace("#wrong", " error")
    text = text.replace("   root ", "   " if redop else "")
    lines = text.replace("sum      -1", "sum").splitlines()
    for number, row in enumerate(lines):
        words = row.split()
        if words and words[0].isdigit():
            words[7], words[-1] = error, error
            lines[number] = "  ".join(words if redop else [*words[:3], *words[4:]])
    return "\n".join(lines)


@pytest.mark.parametrize("redop", [True, False])
def test_the_format_of_2021_is_read(redop):
    text = of_2021(nccl_tests(), redop)
    found = read(text)
    rates = read(nccl_tests()).rates
    assert (found.rates, found.faults, found.skipped) == (rates, [], [])
    row = text.splitlines()[-6]
    with pytest.raises(tools.ToolError, match="truncated"):
        read(text.replace(row, row[:30]))


def test_sums_that_were_not_checked_are_not_tested():
    found = read(of_2021(nccl_tests(), error="N/A"))
    assert (found.faults, found.skipped) == ([], ["sums of all_reduce_perf"])
