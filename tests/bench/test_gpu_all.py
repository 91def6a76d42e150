"""bench/gpu_all.py, from start to end: order, limits, faults, signals and the table.

Items are short scripts that stand in for a GPU's; one run is the real one, at a tiny size.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ..forked import interpreter_with
from ..waiting import running, wait_until

STEP = {
    "benchmark": "train_step", "group": "rows 48", "variant": "ours", "rows": 48, "milliseconds": 97.1,
    "sequences_per_second": 988.0, "tokens_per_second": 249000, "model_tflops": 500.0, "share_of_ceiling": 0.6,
    "peak_gib": 30.0, "settings": {"PRECISION": "bf16", "BATCHSIZE": "48"},
}  # fmt: skip
CHECKED = {"stage": "self_check", "ended": True, "status": 0, "seconds": 60, "reason": ""}  # fmt: skip
LEFT = """import subprocess, sys
left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)'])
print('{"figure": 5, "left": %d}' % left.pid)"""
NAN = json.dumps(STEP | {"milliseconds": math.nan})
# What can go wrong with an item: its script, its exit status, words of its reason, its results.
FAULTS = {
    "hangs": ("import time; print('{\"figure\": 1}', flush=True); time.sleep(900)", 124, "exceeded its limit (stages.log has the stacks)", [1]),
    "dies": ("import os, signal; print('{\"figure\": 2}', flush=True); os.kill(os.getpid(), signal.SIGSEGV)", -11, "killed by SIGSEGV", [2]),
    "half a line": ("import sys; print('{\"figure\": 3}'); sys.stdout.write('{\"figure\": 4, \"ot')", 0, "", [3]),
    "cannot import": ("import no_such_package", 1, "No module named 'no_such_package'", []),
    "leaves a process": (LEFT, 0, "", [5]),
    "has a problem": ("print('{\"problem\": \"no C compiler\"}')", 1, "no C compiler", []),
    "is not a number": (f"print('{NAN}')", 1, "nan ms", []),
    "good": ("print('{\"figure\": 6}')", 0, "", [6]),
}  # fmt: skip


@pytest.fixture
def gpu_all(bench):
    return bench("gpu_all")


def _lines(folder):
    return [*map(json.loads, (folder / "results.jsonl").read_text().splitlines())]


def test_a_failing_item_loses_no_other_items_figures(gpu_all, tmp_path):
    items = []
    for number, (name, (script, *_)) in enumerate(FAULTS.items()):
        path = tmp_path / f"script_{number}.py"
        path.write_text(script)
        seconds = 4 if name == "hangs" else 200
        items.append(gpu_all.Item(name=name, command=(str(path),), seconds=seconds))
    recorder = gpu_all.Recorder(tmp_path)
    assert gpu_all.run_all(items, time.monotonic() + 300, False, recorder) == 5
    lines = _lines(tmp_path)
    endings = {line["stage"]: line for line in lines if line.get("ended")}
    assert list(endings) == list(FAULTS)
    for name, (_, status, reason, figures) in FAULTS.items():
        assert endings[name]["status"] == status, name
        assert reason in endings[name]["reason"]
        of_item = [line for line in lines if line["stage"] == name]
        assert [one["figure"] for one in of_item if "figure" in one] == figures
    log = (tmp_path / "stages.log").read_text()
    texts = dict(part.split("\n", 1) for part in log.split("=== ")[1:])
    assert "Fatal Python error: Aborted" in texts["hangs"]
    assert "line 1 in <module>" in texts["hangs"], "where it stood"
    assert "Fatal Python error: Segmentation fault" in texts["dies"]
    left = next(line["left"] for line in lines if "left" in line)
    wait_until(lambda: not running(left))  # what an item left is ended with it


@pytest.fixture
def modelled(gpu_all, monkeypatch, tmp_path):
    """modelled(spans, end) -> endings by item, and the time at the end. spans: seconds that an item
    would take. Time passes in items alone; one that is killed is stuck in the driver.
    """

    def run_all(spans, end):
        clock = [0.0]

        def run(item, limit, *_):
            late = spans[item.name] > limit
            stuck = gpu_all.STACKS + gpu_all.STUCK
            clock[0] += limit + stuck if late else spans[item.name]
            return {"status": gpu_all.KILLED * late, "reason": ""}

        now = SimpleNamespace(monotonic=lambda: clock[0])
        monkeypatch.setattr(gpu_all, "time", now)
        monkeypatch.setattr(gpu_all, "run", run)
        recorder = gpu_all.Recorder(tmp_path)
        items = [item for item in gpu_all.ITEMS if item.name in spans]
        gpu_all.run_all(items, end, False, recorder)
        return {each["stage"]: each for each in recorder.results}, clock[0]

    return run_all


def test_whichever_items_hang_all_end_within_ten_minutes_and_others_are_measured(
    gpu_all, modelled
):
    whole = {item.name: item.seconds for item in gpu_all.ITEMS}
    # The most valuable first.
    wanted = "machine attention self_check steps_48 profile steps_96 trials peers gemm steps_24"
    assert [*whole] == [*wanted.split(), "convergence"]
    lost = gpu_all.STACKS + gpu_all.STUCK
    for stuck in [*([name] for name in whole), [*whole], [*whole][::2]]:
        spans = {name: (span - lost) * 0.9 for name, span in whole.items()}
        spans |= dict.fromkeys(stuck, 900)
        endings, end = modelled(spans, gpu_all.SECONDS)
        assert end <= 600, stuck
        failed = [name for name, ending in endings.items() if ending["status"]]
        assert failed == stuck


@pytest.mark.parametrize(
    ("spans", "end", "failed"),
    [
        ({"machine": 1, "attention": 80}, 570, []),  # takes what the first one left
        ({"machine": 40, "attention": 50}, 570, [("attention", "")]),
        ({"machine": 5, "attention": 1}, 12, [("attention", "no time left")]),
    ],
)
def test_an_item_has_its_time_and_what_earlier_ones_left(spans, end, failed, modelled):
    endings, _ = modelled(spans, end)
    found = [(name, one["reason"]) for name, one in endings.items() if one["status"]]
    assert found == failed


@pytest.mark.parametrize("results", ["whole", "on a full disk"])
def test_a_failure_of_gpu_all_itself_costs_one_item_at_most(
    results, gpu_all, monkeypatch, tmp_path, capsys
):
    (tmp_path / "script.py").write_text("print('{\"figure\": 1}')")
    run = gpu_all.run

    def failing(item, *rest):
        if item.name == "b":  # no process can be started
            raise OSError(28, "No space left on device")
        return run(item, *rest)

    monkeypatch.setattr(gpu_all, "run", failing)
    recorder = gpu_all.Recorder(tmp_path)
    if results != "whole":
        recorder.file = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    items = [gpu_all.Item(name, (str(tmp_path / "script.py"),), 200) for name in "abc"]
    assert gpu_all.run_all(items, time.monotonic() + 300, False, recorder) == 1
    endings = [one for one in recorder.results if one.get("ended")]
    assert [one["status"] for one in endings] == [0, 1, 0]
    assert endings[1]["reason"] == "gpu_all: [Errno 28] No space left on device"
    figures = [one["stage"] for one in recorder.results if "figure" in one]
    assert figures == ["a", "c"]
    assert ("results.jsonl: " in capsys.readouterr().err) == (results != "whole")


NAMES = ("machine", "self_check", "steps_48", "profile", "steps_96")
RUN = f"""
import sys
sys.path.insert(0, sys.argv[1])
import gpu_all
items = zip({NAMES}, sys.argv[2:])
gpu_all.ITEMS = [gpu_all.Item(name=name, command=(script,), seconds=200) for name, script in items]
sys.argv = ["gpu_all.py"]
sys.exit(gpu_all.main())
"""


def _whole_run(repository, folder, scripts):
    """gpu_all started with these scripts as items; it writes into <folder>/out, as OUT says."""
    paths = []
    for number, script in enumerate(scripts):
        paths.append(folder / f"{number}.py")
        paths[-1].write_text(script)
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(repository / "bench"), *map(str, paths)], cwd=folder, text=True,
        env=os.environ | {"OUT": str(folder / "out")}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("moment", "signum"), [(1, signal.SIGTERM), (2, signal.SIGHUP), (4, signal.SIGTERM)]
)
def test_a_signal_ends_the_item_that_runs_and_prints_what_there_is(
    moment, signum, repository, tmp_path
):
    line, there = json.dumps(STEP), tmp_path / "there"
    scripts = [f"print('{line}', flush=True)\n"] * 5
    scripts[moment] += f"""import os, time
open('{there}', 'w').write(str(os.getpid()))
time.sleep(900)
"""
    process = _whole_run(repository, tmp_path, scripts)
    wait_until(lambda: there.exists() and there.read_text())
    process.send_signal(signum)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signum
    wait_until(lambda: not running(int(there.read_text())))
    shown = [line.split()[:2] for line in out.splitlines() if line.startswith(NAMES)]
    ended = [[name, "ok"] for name in NAMES[:moment]]
    assert shown == [*ended, [NAMES[moment], "FAILED"]]
    assert f"ended by {signum.name}" in out
    # No figure counts before self_check has ended well.
    assert ("97.10" in out) is (moment > 1)
    assert sorted(os.listdir(tmp_path / "out")) == ["results.jsonl", "stages.log"]


def test_without_a_gpu_it_ends_at_once_and_says_why(repository, tmp_path):
    machine = json.dumps({"no_gpu": "the driver is too old"})
    process = _whole_run(repository, tmp_path, [f"print('{machine}')", "1 / 0"])
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    expected = "gpu_all: no GPU: the driver is too old: nothing was measured; --tiny tries out the command"
    assert err.splitlines() == ["machine ...", expected]
    assert {line["stage"] for line in _lines(tmp_path / "out")} == {"machine"}


def test_the_table_says_what_is_unmeasured_and_why_and_the_fastest_settings_come_last(
    gpu_all, capsys
):
    changes = (
        {},
        fast := {"variant": "ours, fp8", "sequences_per_second": 1200.0, "settings": {"PRECISION": "fp8"}},
        {"variant": "ours, eager", "problem": "OutOfMemoryError: no room"},
        {"variant": "ours, fp8", "left_out": "no fp8"},
        {"variant": "Hugging Face, compiled", "sequences_per_second": 9000.0, "settings": None},
        fast | {"group": "trials", "sequences_per_second": 5000.0},
    )  # fmt: skip
    steps = [{"stage": "steps_48"} | STEP | change for change in changes]
    del steps[4]["settings"]
    gpu_all.show([CHECKED, *steps])
    said = capsys.readouterr().out
    for row in (
        "| rows 48 | ours | 48 | 97.10 | 988 | 249,000 | 500 | 60% | 30.0 |",
        "| rows 48 | ours, eager | 48 | unmeasured (OutOfMemoryError: no room) |",
        "| rows 48 | ours, fp8 | 48 | unmeasured (no fp8) |",
        "| trials | ours, fp8 | 48 | 97.10 | 5,000 |",
    ):
        assert row in said
    # Of no trial: it is fast before it is known to be accurate.
    best = "\n# best settings of this GPU: 1,200 sequences/s\nexport PRECISION=fp8\n"
    assert said.endswith(best)
    for checks in ([CHECKED | {"status": 1}], []):
        text = gpu_all.table([*checks, *steps])
        assert "| ours | 48 | unmeasured (unverified: self_check did not succ" in text
        assert "| Hugging Face, compiled | 48 | 97.10 |" in text, "no kernel of ours"
        assert gpu_all.best_settings([*checks, *steps]) == ""


# What the one command must do without: found by no import, as if it were not installed. Its items
# are forked from a process that has imported what they use of the rest.
WITHOUT = """
import os, sys
sys.executable = os.environ.get("PYTHON_OF_ITEMS", sys.executable)
from importlib.machinery import PathFinder
absent = {"numba", "llvmlite", "scipy", "mlperf_logging", "rich", "resvg_py", "jinja2", "pytest", "hypothesis"}
find = PathFinder.find_spec.__func__
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name in absent else find(cls, name, *rest))
"""
USED = ["torch", "transformers.models.bert.modeling_bert", "bert.training.graph"]


def test_one_command_checks_and_measures_everything_tiny(repository, tmp_path):
    """With only torch, triton, h5py, transformers and their dependencies."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment = hidden | {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    paths = [str(tmp_path), str(repository / "implementations"), str(repository)]
    theirs = environment | {"PYTHONPATH": os.pathsep.join(paths)}
    script = str(repository / "bench" / "gpu_all.py")
    with tempfile.TemporaryDirectory() as folder, interpreter_with(Path(folder), theirs, USED) as python:  # fmt: skip
        finished = subprocess.run(
            [sys.executable, script, "--tiny", "--output", str(tmp_path)], cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(tmp_path), "PYTHON_OF_ITEMS": str(python)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = _lines(tmp_path)
    results = {line["stage"]: line for line in lines if not line.get("ended")}
    ending = {line["stage"]: line["status"] for line in lines if line.get("ended")}
    expected = "machine self_check profile peers gemm steps_24 convergence"
    assert ending == dict.fromkeys(expected.split(), 0)
    checks = results["self_check"]
    assert checks["weight_gradients"] == checks["graphs"] == checks["finite_steps"] == "ok"  # fmt: skip
    assert checks["way_down"] == []
    assert results["gemm"]["tflops"]["64"]["bf16"]["layer"] > 0
    assert all(pair["overlay"] for pair in results["convergence"]["pairs"].values())
    steps = {line["variant"]: line for line in lines if "variant" in line}
    assert [*steps] == ["Hugging Face, eager", "ours", "ours, fp8"]
    for one in steps.values():
        mean_length = one["tokens_per_second"] / one["sequences_per_second"]
        assert mean_length == pytest.approx(32, rel=0.3)
    assert results["profile"]["top_kernels"]
