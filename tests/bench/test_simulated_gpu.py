"""bench/gpu_all.py from start to end on a GPU in name (stand_in_gpu.py), with tiny models: what its
items do where there is a GPU, in their order, and what a signal leaves.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..waiting import processes_with, wait_until
from . import cuda_rules

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]
START = """
import ctypes, sys
ctypes.CDLL({library!r})
sys.path.append({folder!r})
import stand_in_gpu
stand_in_gpu.install()
"""


@pytest.fixture(scope="module")
def simulated(repository, tmp_path_factory):
    """The environment of processes that see the GPU."""
    folder, library = tmp_path_factory.mktemp("gpu"), Path(torch.__file__).parent
    headers = [library / "include", library / "include/torch/csrc/api/include"]
    subprocess.run(
        ["c++", "-shared", "-fPIC", "-std=c++20", *(f"-I{path}" for path in headers),
         str(Path(__file__).with_name("stand_in_gpu.cpp")), "-o", str(folder / "gpu.so"),
         f"-L{library / 'lib'}", f"-Wl,-rpath,{library / 'lib'}", "-lc10", "-ltorch_cpu"],
        check=True,
    )  # fmt: skip
    (folder / "sitecustomize.py").write_text(
        START.format(library=str(folder / "gpu.so"), folder=str(Path(__file__).parent))
    )
    paths = [str(folder), str(repository / "implementations"), str(repository)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("TRITON_INTERPRET", None)
    return environment | {"OMP_NUM_THREADS": "1"}


def _started(repository, environment, output, *arguments):
    script = str(repository / "bench" / "gpu_all.py")
    return subprocess.Popen(
        [sys.executable, script, "--tiny", "--output", str(output), *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _results(folder):
    """(figures, endings) by item."""
    lines = (folder / "results.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return tuple(
        {one["stage"]: one for one in found if one.get("ended", False) == ended}
        for ended in (False, True)
    )


@pytest.mark.timeout(1800)
def test_every_item_runs_in_order_and_every_step_has_a_row(
    repository, simulated, tmp_path
):
    """There is no Triton: steps that ask for a kernel are no figure, and say why."""
    process = _started(repository, simulated, tmp_path, "--seconds", "1700")
    out, err = process.communicate()
    found, endings = _results(tmp_path)
    order = "machine attention self_check steps_48 profile steps_96 trials peers gemm steps_24"
    assert list(endings) == [*order.split(), "convergence"], err
    failed = {name for name, ending in endings.items() if ending["status"]}
    log = (tmp_path / "stages.log").read_text()
    assert failed == {"steps_24", "trials"}, log[-20_000:]
    assert "No module named 'cudnn'" in endings["trials"]["reason"]
    assert "but Triton is not installed" in endings["steps_24"]["reason"]
    assert process.returncode == 1
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| rows")]
    for _, variant, _, figure, *_ in rows:
        assert ("unmeasured" in figure) == ("without fused" in variant), variant
    assert [variant for _, variant, *_ in rows][:4] == ["ours", "ours, fp8"] * 2
    assert "\nexport PRECISION=" in out
    assert found["self_check"]["chosen_attention"] == "flash"
    assert [trial["name"] for trial in found["attention"]["trials"]] == ["flash"]
    assert all(pair["overlay"] for pair in found["convergence"]["pairs"].values())


@pytest.mark.timeout(900)
def test_on_a_gpu_without_fp8_all_else_is_done_and_timed(
    repository, simulated, tmp_path
):
    items = ["self_check", "steps_48", "profile", "gemm", "convergence"]
    without = simulated | {"STAND_IN_CAPABILITY": "8.0"}
    asked = "--seconds", "800", "--only", *items
    process = _started(repository, without, tmp_path, *asked)
    out, _ = process.communicate()
    assert process.returncode == 0, (tmp_path / "stages.log").read_text()[-20_000:]
    reason = "PRECISION=fp8 needs compute capability 8.9 (Ada, Hopper) or later: use bf16"  # fmt: skip
    rows = {line.split(" | ")[1]: line for line in out.splitlines() if " | " in line}
    assert "unmeasured" not in rows["ours"]
    assert f"unmeasured ({reason})" in rows["ours, fp8"]
    found, _ = _results(tmp_path)
    for name in ("self_check", "gemm", "convergence"):
        assert found[name]["no_fp8"] == reason
    assert [*found["gemm"]["tflops"]["64"]] == ["bf16"]
    assert found["profile"]["profile"] == "bf16"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", cuda_rules.VERSIONS)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_whatever_call_fails_before_the_clock_the_run_goes_on_or_ends_with_one_line(
    precision, version, repository, simulated
):
    """Every call but kernels, and each 40th of these. Where it goes on losses and state are those of
    eager steps, and no memory is left behind.
    """
    environment = simulated | {"STAND_IN_TORCH": version}
    script = str(repository / "tests/bench/every_call.py")
    done = subprocess.run(
        [sys.executable, script, precision, "40"], env=environment, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["faults"] == []
    # Before the capture, in the steps' and in the evaluation's.
    for outcome in ("ended", "eager, evaluation True", "graph, evaluation False"):
        assert found["outcomes"][outcome] > 5, found
    assert found["outcomes"]["graph, evaluation True"] == 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("item", "moment"),
    [
        ("self_check", "=== self_check"),
        ("peers", '"Hugging Face, eager"'),
    ],
)
def test_a_signal_at_any_moment_leaves_no_process_on_the_gpu(
    item, moment, repository, simulated, tmp_path
):
    """Neither the item nor the trial of attention that it started."""
    process = _started(repository, simulated, tmp_path, "--only", item)
    log, folder = tmp_path / "stages.log", simulated["PYTHONPATH"].split(":")[0]
    trial = item == "self_check"
    # gpu_all, its item, and the trial.
    wait_until(lambda: log.exists() and moment in log.read_text(errors="replace"))
    wait_until(lambda: not trial or len(processes_with(folder)) == 3)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert f"{item:<14} FAILED (143)" in out
    assert "ended by SIGTERM" in out
    wait_until(lambda: not processes_with(folder))
