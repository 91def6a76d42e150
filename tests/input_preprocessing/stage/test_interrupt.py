"""A signal at any moment ends a stage and its workers with one line, and the next run continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ...waiting import running, wait_until

COMPILED_LOOP = """
import numpy as np
from bert.data.compiled import compiled
@compiled
def endless(x):
    while x[0] == 0:
        x[1] += 1
    return x[1]
def work():
    print("ready", flush=True)
    endless(np.zeros(2, np.int64))
"""
WORKERS = """
import os, pathlib, time
from common.files import whole_file
from input_preprocessing.stage.parallel import run_tasks
def wait(folder):
    with whole_file(pathlib.Path(folder, f"out_{os.getpid()}")) as partial:
        partial.touch()
        pathlib.Path(folder, str(os.getpid())).touch()
        while not pathlib.Path(folder, "go").exists():
            time.sleep(0.02)
def work():
    print("ready", flush=True)
    run_tasks("wait", wait, [FOLDER] * 3, jobs=JOBS)
"""
# Interrupted when a worker's process is there and has been told nothing yet.
HALF_STARTED = """
import os, signal, time
from multiprocessing import util
def half_started(path, words, *rest):
    number = spawn(path, words, *rest)
    if b"--multiprocessing-fork" in b" ".join(os.fsencode(word) for word in words):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    return number
if __name__ == "__main__":
    spawn, util.spawnv_passfds = util.spawnv_passfds, half_started
"""
STARTING = """
import os
if __name__ == "__mp_main__":
    open(f"{FOLDER}/status_{os.getpid()}", "w").write(open("/proc/self/status").read())
"""
IMPORT = """
def work():
    print("ready", flush=True)
    import slow
"""
LINE = "stage: interrupted; to continue, run the same command again\n"
# Swallows the interruption, as some libraries do: ended from outside all the same.
DEAF = """
def work():
    import time
    print("ready", flush=True)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
"""


def start(
    folder: Path, body: str, jobs: int = 2, shell: str = ""
) -> subprocess.Popen[str]:
    """A process that runs `work` as a command runs a stage; ready to be interrupted when this
    returns.
    """
    (folder / "slow.py").write_text(
        "import time\ntry:\n    time.sleep(60)\nexcept BaseException:\n    raise ImportError\n"
    )
    (folder / "command.py").write_text(
        "from input_preprocessing.stage import interrupt\n"
        "if __name__ == '__main__':\n    interrupt.install('stage')\n"
        + body.replace("{FOLDER}", str(folder))
        .replace("FOLDER", repr(str(folder)))
        .replace("JOBS", str(jobs))
        + "if __name__ == '__main__':\n    work()\n"
    )
    line = ["bash", "-c", f"{shell} exec {sys.executable} {folder / 'command.py'}"]
    process = subprocess.Popen(line, stdout=-1, stderr=-1, text=True, start_new_session=True)  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def numbers_in(folder: Path, count: int = 0) -> list[int]:
    """Of the workers that have told so by a file, when there are ``count``."""
    names = lambda: [path.name for path in folder.iterdir() if path.name.isdigit()]  # noqa: E731
    wait_until(lambda: len(names()) >= count)
    return [int(name) for name in names()]


def without_progress(told: str) -> str:
    """Output of a stage without its progress line, which appears after two seconds."""
    return "".join(
        line for line in told.splitlines(keepends=True) if not line.startswith("wait  ")
    )


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def blocked(status: Path) -> set[int]:
    """Signals that a process blocks, from /proc/PID/status."""
    line = next(
        line for line in status.read_text().splitlines() if line.startswith("SigBlk:")
    )
    mask = int(line.split()[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


@pytest.mark.parametrize(
    "body", [COMPILED_LOOP, IMPORT, DEAF], ids=["compiled loop", "import", "deaf"]
)
def test_a_signal_ends_what_does_not_listen_with_one_line(tmp_path, body):
    process = start(tmp_path, body)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=240)
    assert told == LINE
    assert process.returncode == 130


@pytest.mark.parametrize(
    "whom", ["the parent alone", "all, as Ctrl-C", "a stage of one process"]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_end_with_it_and_leave_nothing_unfinished(tmp_path, number, whom):
    jobs = 1 if whom == "a stage of one process" else 2
    process = start(tmp_path, WORKERS, jobs)
    workers = numbers_in(tmp_path, jobs)
    assert len(list(tmp_path.glob(".out_*.partial"))) == jobs
    (os.killpg if whom == "all, as Ctrl-C" else os.kill)(process.pid, number)
    _, told = process.communicate(timeout=240)
    ended = "interrupted" if number == signal.SIGINT else "terminated"
    line = LINE.replace("interrupted", ended)
    assert without_progress(told) == line
    assert told.endswith(line), "and nothing after it"
    assert process.returncode == 128 + number
    wait_until(lambda: not any(running(pid) for pid in workers))
    assert not list(tmp_path.glob(".out_*")) + list(tmp_path.glob("out_*"))


def test_ctrl_c_for_another_command_of_a_background_jobs_group_ends_no_worker(tmp_path):
    """The shell has a job in the background ignore it; its workers do too."""
    process = start(tmp_path, WORKERS, shell="trap '' INT;")
    numbers_in(tmp_path, 2)
    os.killpg(process.pid, signal.SIGINT)
    (tmp_path / "go").touch()
    assert without_progress(process.communicate(timeout=240)[1]) == ""
    assert process.returncode == 0


def test_a_worker_that_is_half_started_leaves_no_traceback(tmp_path):
    process = start(tmp_path, HALF_STARTED + WORKERS)
    assert without_progress(process.communicate(timeout=240)[1]) == LINE
    assert process.returncode == 130


def test_signals_wait_while_a_worker_starts_and_no_longer(tmp_path):
    """Before a worker can end without a traceback it imports the main module: there its signals are
    blocked.
    """
    process = start(tmp_path, STARTING + WORKERS)
    workers = numbers_in(tmp_path, 2)
    masks = [blocked(Path(f"/proc/{number}/status")) for number in workers]
    starting = [blocked(path) for path in tmp_path.glob("status_*")]
    process.terminate()
    process.communicate(timeout=240)
    both = {signal.SIGINT, signal.SIGTERM}
    assert len(starting) == 2
    assert all(both <= mask for mask in starting), starting
    assert not any(both & mask for mask in masks), masks


def test_a_command_in_the_background_ignores_ctrl_c_as_the_shell_asked(tmp_path):
    (tmp_path / "command.py").write_text(
        "import os, signal\nfrom input_preprocessing.stage import interrupt\ninterrupt.install('stage')\n"
        "os.kill(os.getpid(), signal.SIGINT)\nprint('alive')\n"
    )
    line = f"trap '' INT; exec {sys.executable} {tmp_path / 'command.py'}"
    assert subprocess.check_output(["bash", "-c", line], text=True) == "alive\n"


def test_every_command_is_started_so(tmp_path):
    """SIGINT while a stage waits for its input: the line names the stage, and nothing is
    written.
    """
    os.mkfifo(tmp_path / "pipe")
    options = ["--input", tmp_path / "pipe", "--outputdir", tmp_path / "out"]
    command = [sys.executable, "-m", "input_preprocessing", "corpus", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: threads(process.pid) > 1)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=240)[1]
    assert told == f"python -m input_preprocessing corpus: {LINE.partition(': ')[2]}"
    assert not (tmp_path / "out").exists()
