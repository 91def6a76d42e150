"""One live writer of a folder: a second one is refused by name, a dead one does not block."""

import json
import os
import threading
import time
from contextlib import suppress

import pytest

from bert.core import claim
from bert.core.claim import Claim, OccupiedError, TakenOverError, check_held


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    # A thread of a busy machine pauses longer than one beat.
    monkeypatch.setattr(claim, "BEAT_SECONDS", 0.2)


@pytest.fixture
def elsewhere(tmp_path):
    """A claim made on another machine, which is dead."""
    path = tmp_path / ".writer_0"
    maker = {"host": "node7", "job": "42", "pid": 31}
    maker |= {"start": "1", "pids": "x", "token": "t"}
    path.write_bytes(b"0" * 20 + json.dumps(maker).encode())
    return path


@pytest.fixture
def beating(elsewhere):
    """One that beats until the test ends."""
    ended = threading.Event()

    def beat():
        for number in range(1, 10_000):
            if ended.wait(0.02):
                return
            with suppress(FileNotFoundError), open(elsewhere, "r+b") as file:
                file.write(f"{number:020}".encode())

    thread = threading.Thread(target=beat)
    thread.start()
    yield elsewhere
    ended.set()
    thread.join()


def test_a_second_writer_is_refused_with_host_and_process(tmp_path):
    path = tmp_path / "c" / ".writer_0"
    with Claim(path, "CHECKPOINT_DIR=c"), pytest.raises(OccupiedError) as caught:
        Claim(path, "CHECKPOINT_DIR=c").__enter__()
    who = f"process {os.getpid()} on {os.uname().nodename}"
    assert str(caught.value).startswith(f"CHECKPOINT_DIR=c: {who} writes to it")
    assert not path.exists(), "at its end it is free"
    with Claim(path, "CHECKPOINT_DIR=c"):
        pass


def test_a_writer_on_another_machine_lives_by_its_beats(beating):
    with pytest.raises(OccupiedError, match="process 31 on node7, job 42"):
        Claim(beating, "RUN_DIR=r").__enter__()
    assert json.loads(beating.read_bytes()[20:])["host"] == "node7"


def test_a_restart_waits_for_an_earlier_attempt_of_its_job(beating, monkeypatch):
    monkeypatch.setattr(claim, "PATIENCE_SECONDS", 1.0)
    begun = time.monotonic()
    with pytest.raises(OccupiedError, match="on node7, job 42 writes to it"):
        Claim(beating, "CHECKPOINT_DIR=c", "42").__enter__()
    assert time.monotonic() - begun >= 1
    monkeypatch.setattr(claim, "PATIENCE_SECONDS", 60.0)
    leaves = threading.Timer(1, beating.unlink)
    leaves.start()
    with Claim(beating, "CHECKPOINT_DIR=c", "42") as held:
        assert held.is_held()
    leaves.join()


def test_a_dead_writer_does_not_block_here_or_elsewhere(elsewhere):
    with Claim(elsewhere, "RUN_DIR=r") as held:
        assert held.is_held()
    path = held.path.with_name("other")
    pid = os.fork()
    if pid == 0:
        Claim(path, "RUN_DIR=r").__enter__()
        os._exit(0)
    os.waitpid(pid, 0)
    assert path.exists()
    with Claim(path, "RUN_DIR=r") as held:
        assert held.is_held()
        assert {file.name for file in path.parent.iterdir()} == {"other"}


def test_a_writer_that_was_taken_for_dead_writes_no_more(tmp_path):
    path = tmp_path / ".writer_0"
    first = Claim(path, "CHECKPOINT_DIR=c").__enter__()
    path.unlink()
    with Claim(path, "CHECKPOINT_DIR=c") as second:
        with pytest.raises(TakenOverError, match=r"taken over by process \d+ on"):
            check_held()
        second.check()
        first.__exit__()
        assert second.is_held(), "the first one leaves the second one's claim alone"
