"""A backend that crashes, hangs or breaks its process is excluded, and never harms the run; results are cached."""

import os
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bert.kernels import attention
from bert.kernels.attention import benchmark
from bert.kernels.support import triton_support

from ...waiting import running, wait_until
from ..plain import CPU

HEADS = benchmark.Heads(dtype=torch.float32)
NOTES_ITS_NUMBER = "import os, time; open({!r}, 'w').write(str(os.getpid())); time.sleep(900)"  # fmt: skip
# The process of a trial, with backends that do what those of a GPU might.
FAULTY = """
import os, signal, sys, time
sys.path[:0] = sys.argv[2:]
from bert.kernels import attention
from bert.kernels.attention import benchmark
benchmark.LENGTHS, benchmark.TOLERANCE = (48, 33, 1, 56), 0.2
benchmark._time = lambda *arguments: 1.0

def crashes(*arguments):
    os.kill(os.getpid(), signal.SIGSEGV)

def poisons(*arguments):
    attention.BACKENDS["sdpa_loop"] = attention.Backend(crashes, None)
    raise RuntimeError("an illegal memory access was encountered")

for backend in (crashes, poisons):
    attention.BACKENDS[backend.__name__] = attention.Backend(backend, None)
benchmark.main(sys.argv[1])
"""
PROBLEMS = {
    "poisons": "an illegal memory access was encountered",
    "crashes": "its process died (SIGSEGV): ",
}


@pytest.fixture
def faulty(monkeypatch, quick_python, tmp_path):
    """Trials in processes of the script above, forked from one that has imported PyTorch."""
    script, program = tmp_path / "faulty.py", tmp_path / "python"
    script.write_text(FAULTY)
    words = shlex.join(map(str, (quick_python, script)))
    program.write_text(f'#!/bin/sh\nshift 2\nexec {words} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(benchmark.sys, "executable", str(program))


def test_each_fault_costs_its_backend_and_later_ones_are_timed(faulty):
    names = [*PROBLEMS, "sdpa_loop"]
    found = benchmark.attempts(names, CPU, HEADS)
    assert [trial.name for trial in found] == names
    for trial in found:
        assert trial.problem.startswith(PROBLEMS.get(trial.name, ""))
        failed = trial.name in PROBLEMS
        assert (trial.milliseconds is None) == failed == bool(trial.problem)


def test_a_gpu_that_opens_for_one_process_alone_is_tried_by_that_one(monkeypatch):
    """In the compute mode EXCLUSIVE_PROCESS, in which the trials' process cannot open the GPU."""
    busy = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    asked = []

    def refused(name, *_):
        asked.append(name)
        return benchmark.Trial(name=name, problem=busy)

    monkeypatch.setattr(benchmark, "_attempt_apart", refused)
    works = lambda name, *_: benchmark.Trial(name=name, milliseconds=1.0)  # noqa: E731
    monkeypatch.setattr(benchmark, "attempt", works)
    names = ["triton", "flash"]
    assert benchmark.attempts(names, CPU, HEADS) == list(map(works, names))
    assert asked == ["triton"], "it asks once"


def test_a_process_that_hangs_is_killed_with_what_it_started(monkeypatch, tmp_path):
    started = tmp_path / "started"
    compiler = NOTES_ITS_NUMBER.format(str(started))
    command = f"[sys.executable, '-c', {compiler!r}]"
    script = f"import subprocess, sys; subprocess.run({command})"
    monkeypatch.setattr(benchmark, "CHILD", script)
    monkeypatch.setattr(benchmark, "LIMIT", 3)
    (found,) = benchmark.attempts(["triton"], CPU, HEADS)
    assert found == benchmark.Trial(name="triton", problem="ran past 3 s")
    wait_until(lambda: not Path("/proc", started.read_text()).exists())


def test_a_trial_ends_with_the_process_that_asked_for_it(quick_python, tmp_path):
    """Killed outright: the trial would go on using the GPU."""
    started = tmp_path / "started"
    hangs = NOTES_ITS_NUMBER.format(str(started))
    (tmp_path / "parent.py").write_text(
        "import torch\nfrom bert.kernels.attention import benchmark\n"
        f"child = benchmark.CHILD.replace('from bert.kernels', {hangs!r} + ' #')\n"
        "benchmark.CHILD = child\n"
        "benchmark.attempts(['triton'], torch.device('cpu'), benchmark.BERT_LARGE)\n"
    )
    parent = subprocess.Popen([quick_python, tmp_path / "parent.py"])
    wait_until(lambda: started.exists() and started.read_text())
    parent.kill()
    parent.wait()
    wait_until(lambda: not running(int(started.read_text())))


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """What benchmark_backends() asks for, and what it is answered; flash crashes."""
    asked, answers = [], {"triton": benchmark.Trial(name="triton", milliseconds=2.0)}

    def attempts(names, device, heads):
        asked.append(names)
        crashed = lambda name: benchmark.Trial(name=name, problem="crashed")  # noqa: E731
        return [answers.get(name) or crashed(name) for name in names]

    monkeypatch.setattr(triton_support, "triton", None)
    monkeypatch.setattr(benchmark, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(benchmark, "attempts", attempts)
    monkeypatch.setattr(attention, "candidates", lambda device: ["flash", "triton"])
    yield asked, answers
    benchmark.benchmark_backends.cache_clear()


def _again(*arguments):
    """Forgets what this process has cached in memory."""
    benchmark.benchmark_backends.cache_clear()
    return benchmark.benchmark_backends(CPU, *arguments)


def test_results_are_kept_until_what_they_depend_on_changes(
    kept, monkeypatch, tmp_path
):
    """Also what a backend loads without being named after it, such as flash-attn's compiler."""
    asked, _ = kept
    folder, installed = tmp_path / "kernels", []
    (folder / "support").mkdir(parents=True)
    monkeypatch.setattr(benchmark, "KERNELS", folder)
    metadata = benchmark.importlib.metadata
    monkeypatch.setattr(metadata, "distributions", lambda: installed)
    both = ["flash", "triton"]
    first = _again()
    assert _again() == first
    assert [trial.problem for trial in first] == ["crashed", ""]
    assert asked == [both]
    _again(HEADS)
    _again(benchmark.BERT_LARGE, "triton")
    assert asked == [both, both, ["triton"]]

    def package(version):
        installed[:] = [SimpleNamespace(name="nvidia-cutlass-dsl", version=version)]

    def cut_short():
        for path in tmp_path.glob("trials-*.json"):
            path.write_text(path.read_text()[:20])

    for change in (
        lambda: monkeypatch.setattr(torch, "__version__", "2.99"),
        lambda: package("4.0"),
        lambda: package("4.1"),
        lambda: monkeypatch.setenv("CUDNN_LOGLEVEL_DBG", "3"),
        (folder / "softmax.py").touch,
        lambda: (folder / "softmax.py").write_text("pass\n"),
        lambda: (folder / "support" / "launches.yaml").write_text("rows: 64\n"),
        cut_short,
    ):
        asked.clear()
        change()
        assert _again() == _again() == first
        assert asked == [both]


def test_results_are_kept_beside_the_kernels_also_by_a_triton_without_knobs(
    monkeypatch, tmp_path
):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    without = SimpleNamespace(__version__="3.2.0")
    monkeypatch.setattr(triton_support, "triton", without)
    assert tmp_path in benchmark.cache_folder().parents
    monkeypatch.setattr(triton_support, "triton", None)
    assert str(benchmark.cache_folder()) == os.devnull


def test_if_nothing_works_nothing_is_cached(kept, tmp_path):
    asked, answers = kept
    answers.clear()
    assert not any(trial.milliseconds for trial in _again())
    _again()
    assert len(asked) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_an_illegal_access_on_a_gpu_costs_its_backend_alone(gpu, monkeypatch):
    poison = (
        "def poisons(qkv, *rest):\n"
        "    qkv[torch.full((4,), 10**6, device=qkv.device)].sum().item()  # a device-side assert\n"
        "attention.BACKENDS['poisons'] = attention.Backend(poisons, None)\n"
    )
    before = f"attention = benchmark.attention; import torch\n{poison}benchmark.main"
    script = benchmark.CHILD.replace("benchmark.main", before)
    monkeypatch.setattr(benchmark, "CHILD", script)
    found = benchmark.attempts(["poisons", "triton"], gpu, benchmark.BERT_LARGE)
    assert found[0].problem
    assert found[1].milliseconds, found[1].problem
    assert torch.ones(2, device=gpu).sum() == 2
