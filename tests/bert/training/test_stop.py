"""What is due after a step, when a run evaluates, and how runs end: with a checkpoint, also on a signal,
from which the next run continues bit for bit.
"""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bert.core.dist import DistConfig, World
from bert.data.batch import PretrainingCapacity, make_batch
from bert.training import stop
from bert.training.evaluate import (
    EvaluationConfig,
    _count,
    evaluation_steps,
)
from bert.training.graph import graph_capacity, static_batch
from bert.training.loop import StepCounter, StepSchedule, train
from bert.training.stop import Stop

from ...forked import Command
from ...waiting import free_ports, state, wait_until
from ..plain import model_of
from ..states import folders, newest, same

NO_EVALUATION = {"EVAL_ITER_START_SAMPLES": "99999999", "LOG_EVERY_STEPS": "1"}


def impatient() -> None:
    """A small model would finish before ranks ask each other, or a signal arrives: it pauses after a progress line."""
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
    """Starts the ranks, signals one of them when rank 0 has printed step ``at``; (exit statuses, stderr of rank 0)."""
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


SCHEDULE = StepSchedule(
    last=10, report_every=4, evaluations={3, 8}, checkpoint=lambda step: step % 5 == 0
)


def test_each_thing_is_due_at_its_steps_and_an_evaluation_and_the_end_are_preceded_by_a_report():
    due = {step: SCHEDULE.after(step) for step in range(1, 11)}
    assert [step for step in due if due[step].report] == [3, 4, 8, 10]
    assert [step for step in due if due[step].evaluate] == [3, 8]
    assert [step for step in due if due[step].checkpoint] == [5, 10]
    assert [step for step in due if due[step].end] == [10]
    assert [step for step in due if any(due[step])] == [3, 4, 5, 8, 10]


def test_without_an_interval_no_checkpoint_is_due_and_past_the_last_step_the_end_is():
    schedule = StepSchedule(last=4, report_every=100)
    assert not any(schedule.after(step).checkpoint for step in range(1, 9))
    assert [any(schedule.after(step)) for step in (3, 4, 5)] == [False, True, True]


@pytest.mark.parametrize("done", [0, 3])
def test_a_resumed_run_is_not_evaluated_before_its_first_step_and_goes_on_with_the_seeds_of_its_batches(
    done,
):
    seen, seeds = [], []
    progress = SimpleNamespace(
        samples=lambda: 0,
        paused=contextlib.nullcontext,
        add=lambda *_: None,
        report=lambda *_: None,
    )
    ending = train(
        next_step=list, take_step=lambda batches, rate: None, progress=progress,
        steps=StepCounter(lambda step: 0.1, 4, SimpleNamespace(enabled=False), done, done),
        schedule=StepSchedule(last=4, report_every=9, evaluations={0, 4}), stop=SimpleNamespace(agreed=lambda *_: None),
        seed=lambda batch: seeds.append(batch) or batch,
        evaluate=lambda steps, samples: bool(seen.append(steps)), save=lambda *_: None,
    )  # fmt: skip
    assert ending.step == 4
    assert seen == ([0, 4] if done == 0 else [4])
    assert seeds == list(range(done + 1, 5))


@pytest.mark.parametrize(
    ("start", "every", "steps"),
    [(0, 300, {3, 6, 9}), (500, 300, {5, 8}), (100, 300, {1, 4, 7, 10}), (901, 300, {10}), (0, 0, set())],
)  # fmt: skip
def test_evaluations_begin_at_their_start_and_keep_their_interval(start, every, steps):
    config = EvaluationConfig(start_samples=start, every_samples=every)
    assert evaluation_steps(config, 100, 1000) == steps


def test_padding_to_a_capacity_counts_as_no_words_or_sequences(tiny, make_records):
    torch.manual_seed(0)
    model = model_of(tiny, seed=None).eval()
    records = make_records(5, packed=False)
    batch = make_batch(records, np.arange(5), tiny.max_position_embeddings)
    room = PretrainingCapacity.of(3 * batch.num_tokens, 9)
    with torch.no_grad():
        exact = _count(model, batch)
        padded = _count(model, static_batch(batch, graph_capacity(room, 3)))
    assert exact[-1] == 5
    torch.testing.assert_close(padded, exact)
