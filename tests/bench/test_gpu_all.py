"""bench/gpu_all.py, from start to end: order, limits, faults, signals and the table.

Items are short scripts that stand in for a GPU's; one run is the real one, at a tiny size.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ..forked import interpreter_with
from ..waiting import running, wait_until

STEP = {
    "benchmark": "train_step", "group": "rows 48", "variant": "ours", "rows": 48, "milliseconds": 97.1,
    "sequences_per_second": 988.0, "tokens_per_second": 249000, "model_tflops": 500.0, "share_of_ceiling": 0.6,
    "peak_gib": 30.0, "settings": {"PRECISION": "bf16", "BATCHSIZE": "48"},
}  # fmt: skip
CHECKED = {
    "stage": "self_check",
    "ended": True,
    "status": 0,
    "seconds": 60,
    "reason": "",
}
# What can go wrong with an item: its script, its exit status, words of its reason, its results.
FAULTS = {
    "hangs": (
        "import time; print('{\"figure\": 1}', flush=True); time.sleep(900)",
        (124, "exceeded its limit (stages.log has the stacks)", [1]),
    ),
    "dies": (
        "import os, signal; print('{\"figure\": 2}', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
        (-11, "killed by SIGSEGV", [2]),
    ),
    "half a line": (
        'import sys; print(\'{"figure": 3}\'); sys.stdout.write(\'{"figure": 4, "ot\')',
        (0, "", [3]),
    ),
    "cannot import": (
        "import no_such_package",
        (1, "No module named 'no_such_package'", []),
    ),
    "leaves a process": (
        "import subprocess, sys\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)'])\n"
        'print(\'{"figure": 5, "left": %d}\' % left.pid)\n',
        (0, "", [5]),
    ),
    "has a problem": (
        'print(\'{"problem": "no C compiler"}\')',
        (1, "no C compiler", []),
    ),
    "is not a number": (
        f"print('{json.dumps(STEP | {'milliseconds': float('nan')})}')",
        (1, "nan ms", []),
    ),
    "good": ("print('{\"figure\": 6}')", (0, "", [6])),
}


@pytest.fixture
def gpu_all(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "bench"))
    return importlib.import_module("gpu_all")


def _lines(folder):
    return [
        json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()
    ]


def test_a_failing_item_loses_no_other_items_figures(gpu_all, tmp_path):
    items = []
    for number, (name, (script, _)) in enumerate(FAULTS.items()):
        path = tmp_path / f"script_{number}.py"
        path.write_text(script)
        seconds = 4 if name == "hangs" else 200
        items.append(gpu_all.Item(name=name, command=(str(path),), seconds=seconds))
    failed = gpu_all.run_all(
        items, time.monotonic() + 300, False, gpu_all.Recorder(tmp_path)
    )
    lines = _lines(tmp_path)
    endings = {line["stage"]: line for line in lines if line.get("ended")}
    assert list(endings) == list(FAULTS)
    for name, (_, (status, reason, figures)) in FAULTS.items():
        assert (endings[name]["status"], reason in endings[name]["reason"]) == (
            status,
            True,
        ), name
        assert [
            each["figure"]
            for each in lines
            if each["stage"] == name and "figure" in each
        ] == figures
    assert failed == 5
    log = (tmp_path / "stages.log").read_text()
    texts = dict(part.split("\n", 1) for part in log.split("=== ")[1:])
    assert "Fatal Python error: Aborted" in texts["hangs"]
    assert "line 1 in <module>" in texts["hangs"], "where it stood"
    assert "Fatal Python error: Segmentation fault" in texts["dies"]
    left = next(line["left"] for line in lines if "left" in line)
    wait_until(lambda: not running(left))  # what an item left is ended with it


def test_an_item_without_time_is_left_out_with_a_reason(gpu_all, tmp_path):
    recorder = gpu_all.Recorder(tmp_path)
    item = gpu_all.Item(name="steps_48", command=("none.py",), seconds=90)
    assert gpu_all.run_all([item], time.monotonic() + 5, False, recorder) == 1
    assert recorder.results[-1]["reason"] == "no time left"


def test_the_most_valuable_items_come_first_and_no_item_takes_anothers_time(gpu_all):
    wanted = "machine attention self_check steps_48 profile steps_96 trials peers gemm steps_24"
    assert [item.name for item in gpu_all.ITEMS] == [*wanted.split(), "convergence"]
    assert sum(item.seconds for item in gpu_all.ITEMS) == gpu_all.SECONDS
    # The last item may have to be killed.
    assert gpu_all.SECONDS + gpu_all.STACKS + gpu_all.STUCK <= 600, (
        "a call takes ten minutes"
    )


def test_an_item_may_take_what_earlier_ones_left(gpu_all, tmp_path):
    quick, slow = tmp_path / "quick.py", tmp_path / "slow.py"
    quick.write_text("")
    slow.write_text("import time; time.sleep(4)")
    for names, failed in ((["quick", "slow"], 0), (["slow"], 1)):
        items = [
            gpu_all.Item(
                name=name,
                command=(str(tmp_path / f"{name}.py"),),
                seconds={"quick": 60, "slow": 2}[name],
            )
            for name in names
        ]
        recorder = gpu_all.Recorder(tmp_path)
        end = time.monotonic() + 300
        assert gpu_all.run_all(items, end, False, recorder) == failed


RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import gpu_all
names = ("machine", "self_check", "steps_48", "profile", "steps_96")
gpu_all.ITEMS = [gpu_all.Item(name=name, command=(script,), seconds=200) for name, script in zip(names, sys.argv[2:])]
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
    ("moment", "signum"),
    [*((moment, signal.SIGTERM) for moment in range(5)), (2, signal.SIGHUP)],
)
def test_a_signal_ends_the_item_that_runs_and_prints_what_there_is(
    moment, signum, repository, tmp_path
):
    line, there = json.dumps(STEP), tmp_path / "there"
    scripts = [f"print('{line}', flush=True)\n"] * 5
    scripts[moment] += (
        f"import os, time\nopen('{there}', 'w').write(str(os.getpid())); time.sleep(900)\n"
    )
    process = _whole_run(repository, tmp_path, scripts)
    wait_until(lambda: there.exists() and there.read_text())
    process.send_signal(signum)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signum
    wait_until(lambda: not running(int(there.read_text())))
    names = ("machine", "self_check", "steps_48", "profile", "steps_96")
    shown = [line.split()[:2] for line in out.splitlines() if line.startswith(names)]
    assert shown == [[name, "ok"] for name in names[:moment]] + [
        [names[moment], "FAILED"]
    ]
    assert f"ended by {signum.name}" in out
    assert ("97.10" in out) is (moment > 1), (
        "no figure counts before self_check has ended well"
    )
    assert sorted(os.listdir(tmp_path / "out")) == ["results.jsonl", "stages.log"]


def test_without_a_gpu_it_ends_at_once_in_one_line_with_the_reason(
    repository, tmp_path
):
    machine = {
        "no_gpu": "the driver on your system is too old",
        "driver": "NVIDIA H100, 470.1",
    }
    process = _whole_run(
        repository, tmp_path, [f"print('{json.dumps(machine)}')", "1 / 0"]
    )
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err.splitlines() == [
        "machine ...",
        "gpu_all: no GPU: the driver on your system is too old; nvidia-smi sees NVIDIA H100, 470.1: "
        "nothing was measured; --tiny tries out the command",
    ]
    assert {line["stage"] for line in _lines(tmp_path / "out")} == {"machine"}


def test_the_table_says_what_is_unmeasured_and_why_and_the_fastest_settings_come_last(
    gpu_all, capsys
):
    fast = STEP | {
        "variant": "ours, fp8",
        "sequences_per_second": 1200.0,
        "settings": {"PRECISION": "fp8"},
    }
    broken = STEP | {"variant": "ours, eager", "problem": "OutOfMemoryError: no room"}
    absent = {
        "group": "rows 48",
        "variant": "ours, fp8",
        "rows": 48,
        "left_out": "no fp8",
    }
    theirs = STEP | {
        "variant": "Hugging Face, compiled",
        "sequences_per_second": 9000.0,
    }
    del theirs["settings"]
    steps = [
        {"stage": "steps_48"} | step for step in (STEP, fast, broken, theirs, absent)
    ]
    gpu_all.show([CHECKED, *steps])
    said = capsys.readouterr().out
    assert "| rows 48 | ours | 48 | 97.10 | 988 | 249,000 | 500 | 60% | 30.0 |" in said
    assert (
        "| rows 48 | ours, eager | 48 | unmeasured (OutOfMemoryError: no room) |"
        in said
    )
    assert "| rows 48 | ours, fp8 | 48 | unmeasured (no fp8) |" in said
    assert said.endswith(
        "\n# best settings of this GPU: 1,200 sequences/s\nexport PRECISION=fp8\n"
    )
    for checks in ([CHECKED | {"status": 1}], [CHECKED | {"status": 124}], []):
        text = gpu_all.table([*checks, *steps])
        assert (
            "| ours | 48 | unmeasured (unverified: self_check did not succeed) |"
            in text
        )
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
USED = [
    "torch",
    "transformers.models.bert.modeling_bert",
    "bert.kernels",
    "bert.model.bert",
    "bert.training.graph",
]


def test_one_command_checks_and_measures_everything_at_a_tiny_size(
    repository, tmp_path
):
    """With only torch, triton, h5py, transformers and their dependencies."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "OMP_NUM_THREADS": "1",
    }
    environment["PYTHONPATH"] = str(tmp_path)
    environment["CUDA_VISIBLE_DEVICES"] = ""  # whatever GPUs this machine has
    script = str(repository / "bench" / "gpu_all.py")
    command = [sys.executable, script, "--tiny", "--output", str(tmp_path)]
    theirs = environment | {
        "PYTHONPATH": os.pathsep.join(
            [str(tmp_path), str(repository / "implementations")]
        )
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        interpreter_with(Path(folder), theirs, USED) as python,
    ):
        environment["PYTHON_OF_ITEMS"] = str(python)
        finished = subprocess.run(
            command,
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = _lines(tmp_path)
    results = {line["stage"]: line for line in lines if not line.get("ended")}
    ending = {line["stage"]: line for line in lines if line.get("ended")}
    expected = [
        "machine",
        "self_check",
        "profile",
        "peers",
        "gemm",
        "steps_24",
        "convergence",
    ]
    assert list(ending) == expected
    assert all(ending[name]["status"] == 0 for name in results), ending
    assert results["self_check"]["weight_gradients"] == "ok"
    assert results["self_check"]["way_down"] == []
    assert (
        results["self_check"]["graphs"] == results["self_check"]["finite_steps"] == "ok"
    )
    assert results["gemm"]["tflops"]["64"]["bf16"]["layer"] > 0
    assert all(pair["overlay"] for pair in results["convergence"]["pairs"].values())
    steps = [line for line in lines if "variant" in line]
    assert [one["variant"] for one in steps] == [
        "Hugging Face, eager",
        "ours",
        "ours, fp8",
    ]
    for one in steps:
        assert one["sequences_per_second"] > 0
        mean_length = one["tokens_per_second"] / one["sequences_per_second"]
        assert mean_length == pytest.approx(32, rel=0.3)
    assert results["profile"]["top_kernels"]
