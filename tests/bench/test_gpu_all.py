"""The one command on a GPU cannot be wasted: an item that goes wrong loses no other's figures, and says why."""

from __future__ import annotations

import importlib
import io
import json
import os
import time
from pathlib import Path

import pytest

# What can go wrong with an item: its script, what its ending says, how many results it leaves.
FAULTS = {
    "hangs": (
        "import time; print('{\"figure\": 1}'); time.sleep(60)",
        {"status": 124, "reason": "ran past its limit (stages.log says where it stood)", "results": 1},
    ),
    "dies": (
        "import os, signal; print('{\"figure\": 2}', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
        {"status": -11, "results": 1},
    ),
    "half a line": (
        'import sys; print(\'{"figure": 3}\'); sys.stdout.write(\'{"figure": 4, "ot\')',
        {"status": 0, "reason": "its last line is cut short", "results": 1},
    ),
    "cannot import": (
        "import no_such_package",
        {
            "status": 1,
            "reason_ends": "ModuleNotFoundError: No module named 'no_such_package'",
            "results": 0,
        },
    ),
    "leaves a process": (
        "import subprocess, sys\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        'print(\'{"figure": 5, "left": %d}\' % left.pid)\n',
        {"status": 0, "reason": "", "results": 1},
    ),
    "hides its cause": (
        "import contextlib\n"
        "@contextlib.contextmanager\n"
        "def recording():\n"
        "    try:\n"
        "        yield\n"
        "    finally:\n"
        "        raise RuntimeError('capture failed')\n"
        "with recording():\n"
        "    raise MemoryError('the cause')\n",
        {"status": 1, "reason_ends": "MemoryError: the cause", "results": 0},
    ),
    "good": ("print('{\"figure\": 6}')", {"status": 0, "reason": "", "results": 1}),
}


@pytest.fixture
def bench(repository, monkeypatch):
    """import_(name): a module of bench/."""
    monkeypatch.syspath_prepend(str(repository / "bench"))
    return importlib.import_module


def test_no_fault_of_an_item_loses_anothers_figures(bench, tmp_path):
    gpu_all = bench("gpu_all")
    items = []
    for number, (name, (script, _)) in enumerate(FAULTS.items()):
        path = tmp_path / f"script_{number}.py"
        path.write_text(script)
        items.append(gpu_all.Item(name=name, command=(str(path),), seconds=4 if name == "hangs" else 30))
    with open(tmp_path / "log", "w") as log, open(tmp_path / "results", "w") as file:
        recorder = gpu_all.Recorder(log, file)
        failed = gpu_all.run_all(items, time.monotonic() + 300, False, recorder)
    lines = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    endings = {line["stage"]: line for line in lines if line.get("ended")}
    assert list(endings) == list(FAULTS)
    assert [line["figure"] for line in lines if "figure" in line] == [1, 2, 3, 5, 6]
    for name, (_, expected) in FAULTS.items():
        end = expected.pop("reason_ends", None)
        assert endings[name].items() >= expected.items(), name
        assert end is None or endings[name]["reason"].endswith(end)
    assert failed == 4
    text = (tmp_path / "log").read_text()
    assert "[hangs] Timeout" in text, "where it stood"
    assert "[dies] Fatal Python error: Segmentation fault" in text
    assert "capture failed" in text
    assert "the cause" in text
    left = next(line["left"] for line in lines if "left" in line)
    status = Path(f"/proc/{left}/status")
    assert not status.exists() or "State:\tZ" in status.read_text(), "what an item left is ended with it"


def test_results_are_in_the_file_while_the_item_still_runs(bench, tmp_path):
    gpu_all = bench("gpu_all")
    with open(tmp_path / "log", "w") as log, open(tmp_path / "results", "w") as file:
        recorder = gpu_all.Recorder(log, file)
        recorder.result("one", {"figure": 1})
        recorder.line("one", "half done")
        assert json.loads((tmp_path / "results").read_text()) == {"stage": "one", "figure": 1}
        assert (tmp_path / "log").read_text() == "[one] half done\n"


def test_an_item_without_its_packages_or_time_is_left_out_with_a_reason(bench):
    gpu_all = bench("gpu_all")
    recorder = gpu_all.Recorder(io.StringIO(), io.StringIO())
    item = gpu_all.Item(name="tests", command=("-m", "pytest"), seconds=90, needs=("no_such_package",))
    assert gpu_all.run_all([item], time.monotonic() + 300, False, recorder) == 0
    assert recorder.results[-1]["reason"] == "left out: no no_such_package here"
    assert gpu_all.run_all([item], time.monotonic() + 5, False, recorder) == 1
    assert recorder.results[-1]["reason"] == "no time left"


def test_the_most_valuable_items_come_first_and_fit_into_a_call(bench):
    gpu_all = bench("gpu_all")
    names = [item.name for item in gpu_all.ITEMS]
    assert names[:4] == ["machine", "self_check", "steps_48", "steps_24"]
    assert names[-1] == "compiled_peers"
    before = [item.seconds for item in gpu_all.ITEMS[: names.index("kernel_tests")]]
    assert sum(before) < 520, "what is most wanted never runs out of time"
    deadline = gpu_all.command_of(gpu_all.ITEMS[2], 70, tiny=False)
    assert deadline[deadline.index("--deadline") + 1] == "45"


def test_output_goes_where_the_machine_wants_it(bench, tmp_path, monkeypatch):
    gpu_all = bench("gpu_all")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(gpu_all, "ITEMS", [])
    monkeypatch.setattr(gpu_all.sys, "argv", ["gpu_all.py"])
    assert gpu_all.main() == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["results.jsonl", "stages.log"]


def test_variants_are_measured_by_twos_and_large_ones_alone(bench):
    train_step = bench("train_step")
    variant = train_step.Variant
    few = train_step.together([variant(name=str(n), rows=24) for n in range(5)])
    assert [len(variants) for variants in few] == [2, 2, 1]
    assert [len(v) for v in train_step.together([variant(name=str(n), rows=96) for n in range(2)])] == [1, 1]
