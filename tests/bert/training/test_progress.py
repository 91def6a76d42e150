"""The figures of a run: means, speeds and the time left, which know nothing of evaluations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bert.core.dist import Config as DistConfig
from bert.core.dist import World
from bert.model.bert import Losses
from bert.training import progress
from bert.training.progress import Progress
from bert.training.step import StepResult
from bert.training.stop import LAST_STEP, Ending, TrainingError


class _Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


class _Seen:
    def __init__(self):
        self.told = []

    def write(self, kind, values):
        self.told.append((kind, dict(values)))


@pytest.fixture
def clock(monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "PROCESS_STARTED", 900.0)
    return clock


def _progress(seen, **settings):
    settings = {"last": 100, "rate": lambda step: step / 1000, "epochs": lambda batches, samples: samples / 64,
                "skips_overflows": False} | settings  # fmt: skip
    return Progress(World(DistConfig(device="cpu")), observers=[seen], **settings)


def _result(mlm=1.0, nsp=0.5, norm=2.0, finite=True):
    mlm, nsp, norm, finite = (torch.tensor(value) for value in (mlm, nsp, norm, finite))
    return StepResult(Losses(mlm, nsp), norm, finite)


BATCHES = [SimpleNamespace(num_sequences=3), SimpleNamespace(num_sequences=5)]


def test_speed_and_time_left_leave_evaluation_out(clock, capfd):
    seen = _Seen()
    run = _progress(seen, done=10, samples=80)
    for step in range(11, 21):
        run.add(_result(), BATCHES)
        clock.now += 2.0
        if step == 15:
            with run.paused():
                clock.now += 1000.0
    run.report(20, 20)
    said = capfd.readouterr().err
    assert "4.0 sequences/s" in said
    assert "ETA 2:40" in said, "80 steps of 2 s"
    (_, values), *_ = seen.told
    assert (values["sequences_per_second"], values["ms_per_step"]) == (pytest.approx(4.0), pytest.approx(2000.0))
    run.add(_result(), BATCHES)
    clock.now += 4.0
    run.report(21, 21)
    assert seen.told[-1][1]["ms_per_step"] == pytest.approx(4000.0), "the span's own"
    assert "ETA 2:52" in capfd.readouterr().err, "79 steps of 24/11 s"


def test_a_report_has_the_means_since_the_last_one(clock):
    seen = _Seen()
    run = _progress(seen)
    for mlm, norm in ((1.0, 2.0), (3.0, 4.0)):
        run.add(_result(mlm, 0.5, norm), BATCHES)
        clock.now += 1.0
    run.report(2, 2)
    run.add(_result(7.0, 0.25, 1.0), BATCHES)
    clock.now += 1.0
    run.report(3, 3)
    (_, first), (_, second) = seen.told
    assert first == {
        "step": 2, "epoch": 0.25, "samples": 16, "loss": 2.5, "mlm_loss": 2.0, "nsp_loss": 0.5, "lr": 0.002,
        "grad_norm": 3.0, "ms_per_step": 1000.0, "sequences_per_second": 8.0, "per_gpu": 8.0,
    }  # fmt: skip
    assert (second["mlm_loss"], second["nsp_loss"], second["grad_norm"], second["samples"]) == (7.0, 0.25, 1.0, 24)


def test_an_overflow_counts_for_neither_the_gradient_norm_nor_the_samples(clock):
    seen = _Seen()
    run = _progress(seen, skips_overflows=True)
    run.add(_result(norm=2.0), BATCHES)
    run.add(_result(norm=float("inf"), finite=False), BATCHES)
    run.add(_result(norm=float("nan"), finite=False), BATCHES)
    clock.now += 1.0
    run.report(1, 3)
    assert (seen.told[0][1]["grad_norm"], seen.told[0][1]["samples"]) == (pytest.approx(2.0), 8)


@pytest.mark.parametrize("bad", [{"mlm": float("nan")}, {"finite": False}], ids=["loss", "gradient"])
def test_a_broken_span_is_printed_and_raised_but_not_reported(bad, clock, capfd):
    seen = _Seen()
    run = _progress(seen)
    run.add(_result(**bad), BATCHES)
    with pytest.raises(TrainingError, match="step 1: lower LR"):
        run.report(1, 1)
    assert "step      1/100" in capfd.readouterr().err
    assert not seen.told


def test_the_summary_counts_this_process_alone_and_means_over_the_last_hundred_steps(clock):
    seen = _Seen()
    run = _progress(seen, last=300, done=50, samples=1000)
    for step in range(51, 251):
        run.add(_result(mlm=float(step), nsp=0.0), BATCHES)
        clock.now += 0.5
        if step % 40 == 10:
            run.report(step, step)
    with run.paused():
        clock.now += 60.0
    run.summary(Ending(LAST_STEP, 250, 250, 2600))
    kind, values = seen.told[-1]
    assert kind == "summary"
    assert (values["end"], values["step"], values["samples"]) == (LAST_STEP, 250, 1000 + 1600)
    assert (values["raw_train_time"], values["evaluation_time"]) == (pytest.approx(160.0), pytest.approx(60.0))
    assert values["training_sequences_per_second"] == pytest.approx(10.0)
    assert values["e2e_train_time"] == pytest.approx(260.0), "and the 100 s before"
    assert values["final_loss"] == pytest.approx(sum(range(211, 251)) / 40)
    assert values["mean_loss_steps"] == 120, "whole reports, at least 100 steps"
    assert values["mean_loss"] == pytest.approx(sum(range(131, 251)) / 120)
