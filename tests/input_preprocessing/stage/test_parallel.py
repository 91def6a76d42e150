"""Results are in the order of the tasks, errors reach the user, and the time left is estimated."""

import io
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from bert.data.records import DataError
from input_preprocessing.stage import parallel
from input_preprocessing.stage.parallel import Progress, run_tasks

from ...refused import refused
from ...waiting import running, state, wait_until
from .test_interrupt import numbers_in

REPOSITORY = Path(__file__).parents[3]
PYTHONPATH = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "implementations")))


KILLED = (
    "a worker was killed, perhaps out of memory; run again with fewer --jobs (now 2)"
)


def square(task: int) -> int:
    if task == 13:
        raise DataError("thirteen")
    if task == 98:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()
    if task == 97:
        raise KeyError(97)
    return task * task


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_the_tasks_and_errors_are_raised(jobs):
    tasks = [5, 1, 4, 2]
    found = run_tasks("x", square, tasks, jobs=jobs, weights=[1, 2, 3, 4])
    assert found == [25, 1, 16, 4]
    assert run_tasks("x", square, [], jobs=jobs) == []
    with refused("thirteen"):
        run_tasks("x", square, [1, 13, 2], jobs=jobs)


# A stage of two workers whose every message is more than a pipe holds, and who stand still at the
# moment named.
STANDING = """
import os, pathlib, sys, threading
from functools import partial
from input_preprocessing.stage.parallel import run_tasks
folder, moment = pathlib.Path(sys.argv[1]), sys.argv[2]
def stand(at):
    if at == moment and __name__ == "__mp_main__":
        (folder / str(os.getpid())).touch()
        threading.Event().wait()
class Big:
    def __init__(self, name, data=None):
        self.name, self.data = name, data or bytes(10_000_000)
        stand(f"receiving {name}")
    def __reduce__(self):
        stand(f"sending {self.name}")
        return Big, (self.name, self.data)
def work(shared, task):
    stand(f"within {task.name}")
    (folder / f"sending_{os.getpid()}").touch()
    return Big(f"the result of {task.name}")
if __name__ == "__mp_main__":
    stand("importing")
elif __name__ == "__main__":
    run_tasks("x", partial(work, Big("the function")), [Big("a"), Big("b"), Big("c"), Big("c")], jobs=2)
"""
MOMENTS = ["started", "receiving the function", "within c", "half of a result sent"]
MORE = ["importing", "receiving a", "receiving c", "within a", "sending the result of a", "sending the result of c"]  # fmt: skip
MOMENTS += [pytest.param(moment, marks=pytest.mark.slow) for moment in MORE]


def workers_of(pid: int) -> list[int]:
    with suppress(OSError):
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [
            int(child)
            for child in found
            if b"multiprocessing-fork" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
    return []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_killed_from_outside_ends_the_stage_with_a_line(tmp_path, moment):
    script = tmp_path / "main.py"
    script.write_text(STANDING)
    line = [sys.executable, script, tmp_path, moment]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    parent = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environ)
    try:
        if moment == "started":
            wait_until(lambda: workers_of(parent.pid))
            victim = workers_of(parent.pid)[0]
        elif moment == "half of a result sent":
            # The parent reads nothing: the worker waits within its message.
            wait_until(lambda: list(tmp_path.glob("sending_*")))
            parent.send_signal(signal.SIGSTOP)
            victim = int(next(tmp_path.glob("sending_*")).name.removeprefix("sending_"))
            wait_until(lambda: state(victim) == "S")
        else:
            victim = numbers_in(tmp_path, 1)[0]
        workers = workers_of(parent.pid)
        os.kill(victim, signal.SIGKILL)
        parent.send_signal(signal.SIGCONT)
        told = parent.communicate(timeout=120)[1]
    finally:
        parent.kill()
    assert told.splitlines()[-1].endswith(f"x: {KILLED}")
    assert parent.returncode == 1
    wait_until(lambda: not any(running(pid) for pid in workers))


def test_a_worker_that_fails_or_is_ended_is_reported(capfd):
    for task, message in (
        (98, "a worker was ended by SIGTERM; run again"),
        (97, "a worker failed with status 1, see above; run again"),
    ):
        with refused(f"x: {message}"):
            run_tasks("x", square, [1, task, 2], jobs=2)
    assert "KeyError: 97" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_workers_end_with_the_process_that_started_them(tmp_path):
    (tmp_path / "main.py").write_text(STANDING)
    line = [sys.executable, tmp_path / "main.py", tmp_path, "within a"]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    parent = subprocess.Popen(line, env=environ)
    wait_until(lambda: len(workers_of(parent.pid)) == 2)
    workers = workers_of(parent.pid)
    numbers_in(tmp_path, 1)
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(running(pid) for pid in workers))


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(parallel.time, "monotonic", lambda: now[0])
    return now


def test_progress_tells_the_share_done_and_the_time_left(clock):
    log = io.StringIO()
    progress = Progress("pack", 8.0, log)
    for seconds, done in ((1, 1), (30, 1), (60, 2), (61, 0), (240, 4)):
        clock[0] = 100.0 + seconds
        progress.advance(done)
    progress.close()
    assert log.getvalue().splitlines() == [
        f"{'pack':<24}  25%  0:30  1:30 left",
        f"{'pack':<24}  50%  1:00  1:00 left",
        f"{'pack':<24} 100%  4:00",
    ]


def test_a_quick_step_shows_no_progress(clock):
    log = io.StringIO()
    progress = Progress("pack", 2.0, log)
    clock[0] += 1.0
    progress.advance(2)
    progress.close()
    assert not log.getvalue()


def test_a_terminal_gets_one_line_that_moves(clock):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    progress = Progress("pack", 4.0, screen)
    for _ in range(4):
        clock[0] += 1.0
        progress.advance(1)
    progress.close()
    assert screen.getvalue().count("\n") == 1
    assert screen.getvalue().count("\r") >= 4
    assert " 100%" in screen.getvalue().rsplit("\r", 1)[1]
