"""How runs end: with a checkpoint, also on a signal, from which the next run continues bit for
bit.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from bert.core.dist import DistConfig, World
from bert.training import stop
from bert.training.stop import Stop

from ...forked import Command
from ...waiting import free_ports, state, wait_until
from ..states import folders, newest, same

NO_EVALUATION = {"EVAL_ITER_START_SAMPLES": "99999999", "LOG_EVERY_STEPS": "1"}


def impatient() -> None:
    """A small model would finish before ranks ask each other, or a signal arrives: it pauses after
    a progress line.
    """
    stop.AGREEMENT_SECONDS = 0.0
    write, said = sys.stderr.write, []

    def write_and_stand_still(text: str) -> None:
        write(text)
        said.append(text)
        if text.endswith("\n"):
            line = "".join(said)
            said.clear()
            if os.environ["STANDS_AFTER"] in line:
                sys.stderr.flush()
                os.kill(os.getpid(), signal.SIGSTOP)

    sys.stderr.write = write_and_stand_still


def _stopped(environment, ranks, receiver, number, at):
    """Starts the ranks, signals one of them when rank 0 has printed step ``at``; (exit statuses,
    stderr of rank 0).
    """
    environment = environment | {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()),
        "GLOO_SOCKET_IFNAME": "lo", "PATH": os.environ["PATH"], "STANDS_AFTER": f"step {at:>6}/",
    }  # fmt: skip
    processes = [
        Command("bert", environment | {"RANK": str(rank)}, before=impatient)
        for rank in range(ranks)
    ]
    try:
        wait_until(lambda: state(processes[0].pid) == "T" or not processes[0].running())
        os.kill(processes[receiver].pid, number)
        os.kill(processes[0].pid, signal.SIGCONT)
        done = [process.finish(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    said = done[0].stderr.splitlines(keepends=True)
    return [process.returncode for process in done], said


@pytest.mark.parametrize(
    ("ranks", "receiver", "number", "settings"),
    [
        (2, 1, signal.SIGUSR1, {"SHARD_OPTIMIZER": "1"}),
        (1, 0, signal.SIGTERM, {"PRECISION": "fp16", "INIT_LOSS_SCALE": str(2.0**30)}),
    ],
    ids=["the-other-of-two-ranks", "overflows"],
)
def test_a_signal_to_any_rank_saves_and_the_next_run_continues_bit_for_bit(
    ranks, receiver, number, settings, prepared, run_bert, tmp_path
):
    common = prepared | NO_EVALUATION | settings
    common |= {"MAX_STEPS": "16", "CHECKPOINT_KEEP": "9"}
    run_bert(common, ranks, status=3, CHECKPOINT_DIR=tmp_path / "whole")
    parts = common | folders(tmp_path, "parts")
    statuses, said = _stopped(parts, ranks, receiver, number, at=5)
    assert statuses == [0] * ranks, said
    saved = newest(tmp_path / "parts")
    assert 5 <= saved["step"] < 16
    stopped = f"stopped at step {saved['step']} ({number.name})"
    assert said[-1] == f"bert: {stopped}; RESUME=1 continues\n"
    folder = tmp_path / "run_parts"
    assert (folder / "error_0.txt").read_text().startswith(stopped)
    # The run is not over.
    assert "run_stop" not in (folder / "result_0.txt").read_text()
    run_bert(parts, ranks, status=3, RESUME=1)
    assert same(newest(tmp_path / "parts"), newest(tmp_path / "whole"))


def test_without_a_folder_for_checkpoints_a_signal_ends_the_run_as_usual(prepared):
    endless = prepared | NO_EVALUATION | {"MAX_STEPS": "100000"}
    statuses, _ = _stopped(endless, 1, 0, signal.SIGTERM, at=3)
    assert statuses == [-signal.SIGTERM]


@pytest.mark.parametrize(
    ("target", "status", "step"), [("0.9", 3, 8), ("0.0001", 0, 4)], ids=str
)
def test_a_run_saves_at_its_end_whatever_the_interval(
    target, status, step, prepared, run_bert, tmp_path
):
    folder = tmp_path / "c"
    given = {"CHECKPOINT_DIR": folder, "TARGET_MLM_ACCURACY": target}
    run_bert(prepared, status=status, **given)
    saved = [f"step_{step:010d}.pt"]
    assert [path.name for path in folder.glob("[!.]*")] == saved
    log = Path(prepared["RUN_DIR"], "result_0.txt").read_text()
    assert log.count('"run_stop"') == 1
    run_bert(prepared, status=status, RESUME=1, **given)
    # Nothing is left to do, and nothing is written.
    assert [path.name for path in folder.glob("[!.]*")] == saved


class _World:
    """Two ranks, of which the other has received ``other`` and takes ``seconds`` a batch."""

    size, device, other, seconds, asked = 2, torch.device("cpu"), 0, 0.001, 0

    def max(self, values):
        self.asked += 1
        theirs = torch.tensor([self.other, self.seconds], dtype=torch.float64)
        return torch.maximum(values, theirs)


@pytest.mark.parametrize("done", [0, 400_000], ids=["from-the-start", "continued"])
def test_ranks_are_asked_as_often_as_the_slowest_one_needs(monkeypatch, done):
    clock = iter([0.0] + [0.01 * n for n in range(1, 99)])
    monkeypatch.setattr(stop.time, "monotonic", lambda: next(clock))
    world = _World()
    listener = Stop(world, listen=True)
    # 10 ms a batch: the next question in 5 s.
    assert listener.agreed(done + 1, done + 1) is None
    assert listener.next_batch == done + 501
    world.other = signal.SIGUSR1
    assert {listener.agreed(done + batch, done + batch) for batch in (2, 500)} == {None}
    assert world.asked == 1, "no collective in between"
    world.seconds = 20.0
    assert listener.agreed(done + 501, done + 501) == "SIGUSR1"
    assert listener.next_batch == done + 502, "a step of 20 s: at the next one"


def test_alone_a_signal_is_seen_at_the_next_batch_without_a_collective(monkeypatch):
    world = World(DistConfig(device="cpu"))
    monkeypatch.setattr(world, "max", lambda values: pytest.fail("a collective"))
    before = signal.getsignal(signal.SIGTERM)
    with Stop(world, listen=True) as listener:
        assert listener.agreed(1, 1) is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert listener.agreed(2, 2) == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_thread_that_cannot_listen_does_not():
    seen = []
    world = World(DistConfig(device="cpu"))
    look = lambda: seen.append(Stop(world, listen=True).listen)  # noqa: E731
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [False]
