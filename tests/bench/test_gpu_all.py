"""bench/gpu_all.py: a failing item loses no other item's figures, and its reason is reported."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ..waiting import running, wait_until

HANGS = 4  # seconds that an item which hangs may take
# What can go wrong with an item: its script, what its ending says, how many results it leaves.
FAULTS = {
    "hangs": (
        "import time; print('{\"figure\": 1}'); time.sleep(900)",
        {"status": 124, "reason": "exceeded its limit (stages.log has the stacks)", "results": 1},
    ),
    "dies": (
        "import os, signal; print('{\"figure\": 2}', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
        {"status": -11, "results": 1},
    ),
    "half a line": (
        'import sys; print(\'{"figure": 3}\'); sys.stdout.write(\'{"figure": 4, "ot\')',
        {"status": 0, "reason": "its last line is truncated", "results": 1},
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
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)'])\n"
        'print(\'{"figure": 5, "left": %d}\' % left.pid)\n',
        {"status": 0, "reason": "", "results": 1},
    ),
    "leaves a process in a session of its own that holds its pipes": (
        "import subprocess, sys\n"
        "script = 'import time; time.sleep(900); print(1)'\n"
        "held = subprocess.Popen([sys.executable, '-c', script], start_new_session=True)\n"
        'print(\'{"figure": 7, "held": %d}\' % held.pid)\n',
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


@pytest.fixture
def patient(bench, monkeypatch):
    """patient(so_far): a hanging item reaches its limit as soon as so_far() is true, not before it could start."""

    def until(so_far):
        class Process(subprocess.Popen):
            def wait(self, timeout=None):
                if timeout is None or timeout > HANGS:
                    return super().wait(timeout)
                wait_until(lambda: so_far() or self.poll() is not None)
                assert self.poll() is None, "it does not hang"
                raise subprocess.TimeoutExpired(self.args, timeout)

        monkeypatch.setattr(bench("gpu_all").subprocess, "Popen", Process)

    return until


def test_a_failing_item_loses_no_other_items_figures(bench, patient, tmp_path):
    gpu_all = bench("gpu_all")
    patient(
        lambda: (
            "Timeout" in (tmp_path / "stages.log").read_text()
            and (tmp_path / "results.jsonl").read_text()
        )
    )
    items = []
    for number, (name, (script, _)) in enumerate(FAULTS.items()):
        path = tmp_path / f"script_{number}.py"
        path.write_text(script)
        items.append(
            gpu_all.Item(name=name, command=(str(path),), seconds=HANGS if name == "hangs" else 200)
        )
    failed = gpu_all.run_all(items, time.monotonic() + 300, False, gpu_all.Recorder(tmp_path))
    lines = _lines(tmp_path)
    endings = {line["stage"]: line for line in lines if line.get("ended")}
    assert list(endings) == list(FAULTS)
    assert [line["figure"] for line in lines if "figure" in line] == [1, 2, 3, 5, 7, 6]
    for name, (_, expected) in FAULTS.items():
        end = expected.pop("reason_ends", None)
        assert endings[name].items() >= expected.items(), name
        assert end is None or endings[name]["reason"].endswith(end)
    assert failed == 4
    texts = dict(
        part.split("\n", 1) for part in (tmp_path / "stages.log").read_text().split("=== ")[1:]
    )
    assert "Timeout" in texts["hangs"], "where it stood"
    assert "Fatal Python error: Segmentation fault" in texts["dies"]
    assert "capture failed" in texts["hides its cause"]
    assert "the cause" in texts["hides its cause"]
    assert texts["good"] == '{"figure": 6}\n'
    os.kill(next(line["held"] for line in lines if "held" in line), signal.SIGKILL)
    left = next(line["left"] for line in lines if "left" in line)
    wait_until(lambda: not running(left))  # what an item left is ended with it


def test_results_are_in_the_file_while_the_item_still_runs(bench, tmp_path):
    gpu_all = bench("gpu_all")
    gpu_all.Recorder(tmp_path).result("one", {"figure": 1})
    assert _lines(tmp_path) == [{"stage": "one", "figure": 1}]


def test_an_item_without_its_packages_or_time_is_skipped_with_a_reason(bench, tmp_path):
    gpu_all = bench("gpu_all")
    recorder = gpu_all.Recorder(tmp_path)
    item = gpu_all.Item(
        name="tests", command=("-m", "pytest"), seconds=90, needs=("no_such_package",)
    )
    assert gpu_all.run_all([item], time.monotonic() + 300, False, recorder) == 0
    assert recorder.results[-1]["reason"] == "skipped: no_such_package not installed"
    assert gpu_all.run_all([item], time.monotonic() + 5, False, recorder) == 1
    assert recorder.results[-1]["reason"] == "no time left"


def test_the_most_valuable_items_come_first_and_fit_into_a_call(bench):
    gpu_all = bench("gpu_all")
    wanted = [
        "machine",
        "self_check",
        "steps_48",
        "profile",
        "steps_96",
        "peers",
        "attention",
        "gemm",
    ]
    most = [item for item in gpu_all.ITEMS if not item.unless][: len(wanted)]
    assert [item.name for item in most] == wanted
    assert sum(item.seconds for item in most) <= 520, "what is most wanted never runs out of time"
    deadline = gpu_all.command_of(gpu_all.ITEMS[2], 70, tiny=False)
    assert deadline[deadline.index("--deadline") + 1] == "45"


def test_output_goes_where_the_machine_wants_it(bench, tmp_path, monkeypatch):
    gpu_all = bench("gpu_all")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(gpu_all, "ITEMS", [])
    monkeypatch.setattr(gpu_all.sys, "argv", ["gpu_all.py"])
    assert gpu_all.main() == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["results.jsonl", "stages.log"]


def test_variants_are_measured_in_pairs_and_large_ones_alone(bench):
    train_step = bench("train_step")
    variant = train_step.Variant
    few = train_step.together([variant(name=str(n), rows=24) for n in range(5)])
    assert [len(variants) for variants in few] == [2, 2, 1]
    assert [
        len(v) for v in train_step.together([variant(name=str(n), rows=96) for n in range(2)])
    ] == [1, 1]


def _fake(bench, monkeypatch, tmp_path, **scripts):
    """Runs gpu_all with these scripts as items; returns the folder of its output."""
    gpu_all = bench("gpu_all")
    items = []
    for name, script in scripts.items():
        path = tmp_path / f"{name}.py"
        path.write_text(script)
        unless = "steps_48" if name == "steps_48_plain" else ""
        items.append(
            gpu_all.Item(
                name=name,
                command=(str(path),),
                seconds=HANGS if "sleep" in script else 200,
                unless=unless,
            )
        )
    monkeypatch.setattr(gpu_all, "ITEMS", items)
    monkeypatch.setattr(gpu_all.sys, "argv", ["gpu_all.py", "--output", str(tmp_path / "out")])
    return gpu_all, tmp_path / "out"


def _lines(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("only", [(), ("--only", "steps_48")])
def test_without_a_gpu_it_ends_at_once_in_one_line_with_the_reason(
    only, bench, monkeypatch, tmp_path, capfd
):
    machine = {"no_gpu": "the driver on your system is too old", "driver": "NVIDIA H100, 470.1"}
    gpu_all, out = _fake(
        bench, monkeypatch, tmp_path, machine=f"print('{json.dumps(machine)}')", steps_48="1 / 0"
    )
    gpu_all.sys.argv += only
    assert gpu_all.main() == 2
    said = capfd.readouterr()
    assert said.err.splitlines() == [
        "machine ...",
        "gpu_all: no GPU: the driver on your system is too old; nvidia-smi sees NVIDIA H100, 470.1: "
        "nothing was measured; --tiny tries out the command",
    ]
    assert {line["stage"] for line in _lines(out)} == {"machine"}


STEP = {"variant": "ours", "rows": 48, "milliseconds": 97.1, "sequences_per_second": 988.0, "model_tflops": 500.0,
        "tokens_per_second": 249000,
        "share_of_ceiling": 0.6, "peak_gib": 30.0}  # fmt: skip


def test_step_times_are_printed_as_they_arrive_and_no_item_replaces_them(
    bench, patient, monkeypatch, tmp_path, capfd
):
    line = json.dumps({"groups": {"rows 48": [STEP]}})
    steps = f"import time; print('{line}'); time.sleep(900)"
    gpu_all, out = _fake(bench, monkeypatch, tmp_path, steps_48=steps, steps_48_plain="1 / 0")
    patient((out / "results.jsonl").read_text)
    assert gpu_all.main() == 1
    assert "  rows 48: ours, 48 rows: 97.10 ms 988\n" in capfd.readouterr().err
    assert {line["stage"] for line in _lines(out)} == {"steps_48"}


def test_plainer_steps_run_if_no_step_was_timed(bench, monkeypatch, tmp_path):
    line = json.dumps(
        {"groups": {"rows 48": [{"variant": "ours", "rows": 48, "problem": "no C compiler"}]}}
    )
    plain = json.dumps({"groups": {"rows 48 plain": [STEP]}})
    gpu_all, out = _fake(
        bench,
        monkeypatch,
        tmp_path,
        steps_48=f"print('{line}')",
        steps_48_plain=f"print('{plain}')",
    )
    assert gpu_all.main() == 1, "a fault in a step is a failed item"
    assert [line["stage"] for line in _lines(out)] == ["steps_48"] * 2 + ["steps_48_plain"] * 2
    ending = next(line for line in _lines(out) if line.get("ended"))
    assert (ending["status"], ending["reason"]) == (1, "ours, 48 rows: no C compiler")


@pytest.mark.parametrize("figure", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_a_fault_and_unmeasured(
    figure, bench, monkeypatch, tmp_path, capfd
):
    step = STEP | {"milliseconds": figure}
    line = json.dumps({"groups": {"rows 48": [step]}})
    gpu_all, _ = _fake(bench, monkeypatch, tmp_path, steps_48=f"print('{line}')")
    assert gpu_all.main() == 1
    assert f"unmeasured ({figure} ms)" in capfd.readouterr().out
    with pytest.raises(ValueError, match="no step of ours was fully timed"):
        gpu_all.best_settings([json.loads(line) | {"stage": "steps_48"}])


RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import gpu_all
scripts = sys.argv[2:]
gpu_all.ITEMS = [
    gpu_all.Item(name=name, command=(script,), seconds=200)
    for name, script in zip(("machine", "self_check", "steps_48", "profile", "steps_96"), scripts)
]
sys.argv = ["gpu_all.py", "--output", "out"]
sys.exit(gpu_all.main())
"""


@pytest.mark.parametrize("moment", range(5))
def test_sigterm_ends_the_item_that_runs_and_prints_what_there_is(moment, repository, tmp_path):
    line = json.dumps({"groups": {"rows 48": [STEP]}})
    scripts = [tmp_path / f"{number}.py" for number in range(5)]
    for number, script in enumerate(scripts):
        script.write_text(
            f"import os, time\nprint('{line}', flush=True)\n"
            + f"open('{tmp_path}/there', 'w').write(str(os.getpid())); time.sleep(900)\n"
            * (number == moment)
        )
    command = [sys.executable, "-c", RUN, str(repository / "bench"), *map(str, scripts)]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    there = tmp_path / "there"
    wait_until(lambda: there.exists() and there.read_text())
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not running(int(there.read_text())))
    names = ("machine", "self_check", "steps_48", "profile", "steps_96")
    shown = [line.split()[:2] for line in out.splitlines() if line.split()[0] in names]
    assert shown == [[name, "ok"] for name in names[:moment]] + [[names[moment], "FAILED"]]
    assert "ended by SIGTERM" in out
    assert ("97.10" in out) is (moment > 1), "no figure counts before self_check has ended well"


@pytest.mark.parametrize("home", [True, False])
def test_kernels_are_kept_between_the_items_also_without_a_home(home, bench, monkeypatch, tmp_path):
    script = "import os; print('{\"folder\": \"%s\"}' % os.environ.get('TRITON_CACHE_DIR'))"
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path) if home else "/proc/none")
    gpu_all, out = _fake(bench, monkeypatch, tmp_path, one=script, two=script)
    assert gpu_all.main() == 0
    one, two = (line["folder"] for line in _lines(out) if "folder" in line)
    assert one == two
    assert (one == "None") == home
    assert "TRITON_CACHE_DIR" not in os.environ


def test_the_first_variant_is_reported_before_the_second_is_built(bench, monkeypatch):
    train_step = bench("train_step")
    told = []

    def prepare(variant, *_):
        if variant.name == "hangs":
            raise KeyboardInterrupt  # as if it were ended here
        return lambda number: None

    monkeypatch.setattr(train_step, "prepare", prepare)
    config = train_step.BertConfig(**train_step.TINY)
    variants = [train_step.Variant(name=name, rows=2) for name in ("one", "two", "hangs")]
    with pytest.raises(KeyboardInterrupt):
        train_step.measure_together(
            variants, config, rounds=2, steps=1, ceiling=1.0, deadline=time.monotonic() + 60,
            report=lambda lines: told.append([(one["variant"], one["early"], "milliseconds" in one) for one in lines]),
        )  # fmt: skip
    assert told == [[("one", True, True)], [("one", True, True), ("two", True, True)]]


def test_a_variant_that_fails_in_its_turn_loses_no_other_figures(bench, monkeypatch):
    train_step = bench("train_step")

    counted = {}

    def prepare(variant, *_):
        calls = counted.setdefault(variant.name, [])

        def run(number):
            calls.append(number)
            if variant.name == "first" or (variant.name == "later" and len(calls) > 8):
                raise RuntimeError(f"{variant.name}: an illegal memory access was encountered")

        return run

    monkeypatch.setattr(train_step, "prepare", prepare)
    config, told = train_step.BertConfig(**train_step.TINY), []
    variants = [
        train_step.Variant(name=name, rows=2) for name in ("first", "good", "later", "best")
    ]
    lines = train_step.measure_together(
        variants, config, rounds=2, steps=1, ceiling=1.0, deadline=time.monotonic() + 60,
        report=lambda lines: told.append(len(lines)),
    )  # fmt: skip
    found = {one["variant"]: one.get("problem", one.get("milliseconds")) for one in lines}
    assert found["first"] == "RuntimeError: first: an illegal memory access was encountered"
    assert found["later"] == "RuntimeError: later: an illegal memory access was encountered"
    assert isinstance(found["good"], float)
    assert isinstance(found["best"], float)
    assert len(counted["best"]) == 4 + 2 * 4 + 2 * 4, (
        "first steps, two turns beside one that fails, and two without"
    )
    assert told == [1, 2, 3]
