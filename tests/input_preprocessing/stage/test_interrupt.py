"""A signal at any moment ends a stage and its workers with one line, and the next run continues."""

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
SLOW = """
import time
try:
    time.sleep(60)
except BaseException:
    raise ImportError
"""
COMMAND = """
from input_preprocessing.stage import interrupt
if __name__ == '__main__':
    interrupt.install('stage')
BODY
if __name__ == '__main__':
    work()
"""
SIGNALS = {signal.SIGINT, signal.SIGTERM}
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
    """A process that runs `work` as a command runs a stage; ready to be interrupted when this returns."""
    (folder / "slow.py").write_text(SLOW)
    for name, value in (
        ("{FOLDER}", folder),
        ("FOLDER", repr(str(folder))),
        ("JOBS", jobs),
    ):
        body = body.replace(name, str(value))
    (folder / "command.py").write_text(COMMAND.replace("BODY", body))
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


def end_of(process: subprocess.Popen[str]) -> tuple[str, int]:
    """What it said, but for its progress line, which appears after two seconds; and its status."""
    told = process.communicate(timeout=240)[1].splitlines(keepends=True)
    lines = (line for line in told if not line.startswith("wait  "))
    return "".join(lines), process.returncode


def blocked(status: Path) -> set[int]:
    """Which of the two signals a process blocks, from /proc/PID/status."""
    (line,) = (x for x in status.read_text().splitlines() if x.startswith("SigBlk:"))
    mask = int(line.split()[1], 16)
    return {number for number in SIGNALS if mask >> (number - 1) & 1}


@pytest.mark.parametrize(
    "body", [COMPILED_LOOP, IMPORT, DEAF], ids=["compiled loop", "import", "deaf"]
)
def test_a_signal_ends_what_does_not_listen_with_one_line(tmp_path, body):
    process = start(tmp_path, body)
    process.send_signal(signal.SIGINT)
    assert end_of(process) == (LINE, 130)


@pytest.mark.parametrize("whom", ["the parent alone", "all, as Ctrl-C", "a stage of one process"])  # fmt: skip
@pytest.mark.parametrize("number", sorted(SIGNALS))
def test_workers_end_with_it_and_leave_nothing_unfinished(tmp_path, number, whom):
    jobs = 1 if whom == "a stage of one process" else 2
    process = start(tmp_path, WORKERS, jobs)
    workers = numbers_in(tmp_path, jobs)
    assert len(list(tmp_path.glob(".out_*.partial"))) == jobs
    (os.killpg if whom == "all, as Ctrl-C" else os.kill)(process.pid, number)
    ended = "interrupted" if number == signal.SIGINT else "terminated"
    assert end_of(process) == (LINE.replace("interrupted", ended), 128 + number)
    wait_until(lambda: not any(running(pid) for pid in workers))
    assert not [*tmp_path.glob(".out_*"), *tmp_path.glob("out_*")]


def test_ctrl_c_for_another_command_of_a_background_jobs_group_ends_no_worker(tmp_path):
    """The shell has a job in the background ignore it; its workers do too."""
    process = start(tmp_path, WORKERS, shell="trap '' INT;")
    numbers_in(tmp_path, 2)
    os.killpg(process.pid, signal.SIGINT)
    (tmp_path / "go").touch()
    assert end_of(process) == ("", 0)


def test_a_worker_that_is_half_started_leaves_no_traceback(tmp_path):
    assert end_of(start(tmp_path, HALF_STARTED + WORKERS)) == (LINE, 130)


def test_signals_wait_while_a_worker_starts_and_no_longer(tmp_path):
    """Before a worker can end without a traceback it imports the main module: there its signals are blocked."""
    process = start(tmp_path, STARTING + WORKERS)
    workers = numbers_in(tmp_path, 2)
    masks = [blocked(Path(f"/proc/{number}/status")) for number in workers]
    starting = [blocked(path) for path in tmp_path.glob("status_*")]
    process.terminate()
    process.communicate(timeout=240)
    assert starting == [SIGNALS] * 2
    assert masks == [set()] * 2


def test_every_command_is_started_so(tmp_path):
    """SIGINT while a stage waits for its input: the line names the stage, and nothing is written."""
    os.mkfifo(tmp_path / "pipe")
    options = ["--input", tmp_path / "pipe", "--outputdir", tmp_path / "out"]
    command = [sys.executable, "-m", "input_preprocessing", "corpus", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    tasks = Path(f"/proc/{process.pid}/task")
    wait_until(lambda: len(list(tasks.iterdir())) > 1)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=240)[1]
    assert told == f"python -m input_preprocessing corpus: {LINE.partition(': ')[2]}"
    assert not (tmp_path / "out").exists()
