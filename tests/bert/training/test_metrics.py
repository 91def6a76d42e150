"""The figures of a run: means, speeds and the time left; and their sinks, none of which can stop a run."""

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch

from bert.core import rundir
from bert.model.bert import Losses
from bert.model.config import BertConfig
from bert.model.flops import model_flops
from bert.training import metrics
from bert.training.metrics import Progress
from bert.training.step import StepResult
from bert.training.stop import LAST_STEP, Ending, TrainingError
from common.env import ConfigError

from ..plain import alone


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(metrics, "time", clock)
    monkeypatch.setattr(metrics, "PROCESS_STARTED", 900.0)
    return clock


@pytest.fixture
def seen():
    """(kind, figures) of what the runs of a test told."""
    return []


@pytest.fixture
def progress(seen):
    """progress(**settings): the figures of a run of 100 steps."""

    def begin(**settings):
        settings = {"last": 100, "rate": lambda step: step / 1000, "epochs": lambda batches, samples: samples / 64,
                    "skips_overflows": False} | settings  # fmt: skip
        sink = lambda kind, values: seen.append((kind, dict(values)))  # noqa: E731
        return Progress(alone(), sinks=[sink], **settings)

    return begin


def _result(mlm=1.0, nsp=0.5, norm=2.0, finite=True):
    mlm, nsp, norm, finite = (torch.tensor(value) for value in (mlm, nsp, norm, finite))
    return StepResult(Losses(mlm, nsp), norm, finite)


BATCHES = [SimpleNamespace(num_sequences=3), SimpleNamespace(num_sequences=5)]


def test_speed_and_time_left_leave_evaluation_out(clock, capfd, progress, seen):
    run = progress(done=10, samples=80)
    for step in range(11, 21):
        run.add(_result(), BATCHES)
        clock.now += 2.0
        if step == 15:
            with run.paused():
                clock.now += 1000.0
    run.report(20, 20)
    said = capfd.readouterr().err
    assert "4.0/s" in said
    assert "ETA 2:40" in said, "80 steps of 2 s"
    speeds = seen[-1][1]["sequences_per_second"], seen[-1][1]["ms_per_step"]
    assert speeds == pytest.approx((4.0, 2000.0))
    run.add(_result(), BATCHES)
    clock.now += 4.0
    run.report(21, 21)
    assert seen[-1][1]["ms_per_step"] == pytest.approx(4000.0), "the span's own"
    assert "ETA 2:52" in capfd.readouterr().err, "79 steps of 24/11 s"


def test_a_report_has_the_means_since_the_last_one(clock, progress, seen):
    run = progress()
    for mlm, norm in ((1.0, 2.0), (3.0, 4.0)):
        run.add(_result(mlm, 0.5, norm), BATCHES)
        clock.now += 1.0
    run.report(2, 2)
    run.add(_result(7.0, 0.25, 1.0), BATCHES)
    clock.now += 1.0
    run.report(3, 3)
    (_, first), (_, second) = seen
    assert first == {
        "step": 2, "epoch": 0.25, "samples": 16, "loss": 2.5, "mlm_loss": 2.0, "nsp_loss": 0.5, "lr": 0.002,
        "grad_norm": 3.0, "ms_per_step": 1000.0, "sequences_per_second": 8.0, "per_gpu": 8.0,
    }  # fmt: skip
    expected = {"mlm_loss": 7.0, "nsp_loss": 0.25, "grad_norm": 1.0, "samples": 24}
    assert second | expected == second


def test_an_overflow_counts_for_neither_norm_nor_samples(clock, progress, seen):
    run = progress(skips_overflows=True)
    for norm in (2.0, float("inf"), float("nan")):
        run.add(_result(norm=norm, finite=norm == 2.0), BATCHES)
    clock.now += 1.0
    run.report(1, 3)
    figures = seen[-1][1]
    assert (figures["grad_norm"], figures["samples"]) == pytest.approx((2.0, 8))


@pytest.mark.parametrize(
    "bad", [{"mlm": float("nan")}, {"finite": False}], ids=["loss", "gradient"]
)
def test_a_broken_span_is_printed_and_raised_alone(bad, clock, capfd, progress, seen):
    run = progress()
    run.add(_result(**bad), BATCHES)
    with pytest.raises(TrainingError, match=r"step 1(, batch 1)?: lower LR"):
        run.report(1, 1)
    assert "step      1/100" in capfd.readouterr().err
    assert not seen


def test_the_summary_counts_this_process_alone(clock, progress, seen):
    run = progress(last=300, done=50, samples=1000)
    for step in range(51, 251):
        run.add(_result(mlm=float(step), nsp=0.0), BATCHES)
        clock.now += 0.5
        if step % 40 == 10:
            run.report(step, step)
    with run.paused():
        clock.now += 60.0
    run.summary(Ending(LAST_STEP, 250, 250, 2600))
    kind, values = seen[-1]
    assert kind == "summary"
    ended = {"end": LAST_STEP, "step": 250, "samples": 1000 + 1600}
    assert values | ended == values
    expected = {
        "raw_train_time": 160.0,
        "evaluation_time": 60.0,
        "training_sequences_per_second": 10.0,
        "e2e_train_time": 260.0,
        "final_loss": sum(range(211, 251)) / 40,
    }  # fmt: skip (the end-to-end time has the 100 s before)
    assert {name: values[name] for name in expected} == pytest.approx(expected)


TRAIN = {"step": 5, "samples": 40, "loss": 1.5, "lr": 0.01}
SUMMARY = {"end": "the last step was reached", "step": 9, "samples": 72, "final_loss": 1.25}  # fmt: skip


def _built(folder, names="", first_step=0):
    run = rundir.RunConfig(run_dir=folder, trial=3)
    return metrics.metric_sinks(metrics.MetricsConfig(metrics=names), run, first_step)


def _write(built):
    for sink in built:
        sink("train", TRAIN)
        sink("evaluation", {"step": 5, "samples": 40, "accuracy": 0.25})
        sink("summary", SUMMARY)


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_file_has_an_object_per_line_and_each_step_once(tmp_path):
    (sink,) = _built(tmp_path)
    sink("train", TRAIN)
    assert len(_lines(tmp_path / "metrics_3.jsonl")) == 1, "at once"
    _write(_built(tmp_path))
    whole = [{"kind": "train", **TRAIN}, {"kind": "evaluation", "step": 5, "samples": 40, "accuracy": 0.25},
             {"kind": "summary", **SUMMARY}]  # fmt: skip
    assert _lines(tmp_path / "metrics_3.jsonl") == whole
    _write(_built(tmp_path, first_step=9))
    assert _lines(tmp_path / "metrics_3.jsonl") == whole * 2
    with open(tmp_path / "metrics_3.jsonl", "a") as file:
        # After its checkpoint, and killed.
        file.write('{"kind": "train", "step": 12}\n{"kind": "tra')
    _write(_built(tmp_path, first_step=9))
    assert _lines(tmp_path / "metrics_3.jsonl") == whole * 3
    _write(_built(tmp_path))
    assert _lines(tmp_path / "metrics_3.jsonl") == whole


def test_tensorboard_reads_back_what_was_written(tmp_path):
    pytest.importorskip("tensorboard", reason="requirements/metrics.txt")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _write(_built(tmp_path, "tensorboard"))
    events = EventAccumulator(str(tmp_path / "tensorboard_3"))
    events.Reload()
    tags = events.Tags()["scalars"]
    read = {tag: [event[1:] for event in events.Scalars(tag)] for tag in tags}
    assert read == {
        "train/samples": [(5, 40.0)], "train/loss": [(5, 1.5)], "train/lr": [(5, pytest.approx(0.01))],
        "evaluation/samples": [(5, 40.0)], "evaluation/accuracy": [(5, 0.25)],
    }  # fmt: skip
    assert events.Tags()["tensors"] == ["summary/text_summary"]


def test_weights_and_biases_has_all_figures_of_a_run_on_a_page(tmp_path, monkeypatch):
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "config.json").write_text('{"lr": 0.5}')
    for first_step in (0, 9, 0):  # fresh, resumed, repeated from the start
        _write(_built(tmp_path, "wandb", first_step))
    given = [page.kwargs for page in wandb.init.call_args_list]
    assert given[0] == given[1]
    assert given[0]["id"] != given[2]["id"]
    assert given[0] | {
        "dir": str(tmp_path / "wandb_3"), "config": {"lr": 0.5}, "name": f"{tmp_path.parent.name}/{tmp_path.name} 3",
    } == given[0]  # fmt: skip
    evaluation = {"evaluation/step": 5, "evaluation/samples": 40, "evaluation/accuracy": 0.25}  # fmt: skip
    train = {f"train/{name}": value for name, value in TRAIN.items()}
    page = wandb.init.return_value
    assert page.log.mock_calls == 3 * [call(train, step=5), call(evaluation, step=5)]
    assert page.summary.update.mock_calls == 3 * [call(SUMMARY)]
    assert page.finish.call_count == 3


def test_weights_and_biases_itself_writes_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="requirements/metrics.txt")
    for name, value in (("MODE", "offline"), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    _write(_built(tmp_path, "wandb"))
    number = (tmp_path / "wandb_3" / "run_id").read_text()
    (path,) = tmp_path.glob("wandb_3/wandb/offline-run-*/run-*.wandb")
    assert path.stem == f"run-{number}"
    for word in (b"train/loss", b"evaluation/accuracy", b"the last step was reached"):
        assert word in path.read_bytes()


def test_a_run_waits_for_no_server_and_all_figures_arrive_in_order():
    asked, told = threading.Event(), []

    def slow():
        asked.wait(60)
        return lambda kind, values: told.append((kind, values))

    sink = metrics.on_thread(slow)
    for step in range(3):
        sink("train", step)  # would hang
    assert told == []
    asked.set()
    sink("summary", 9)
    assert told == [("train", 0), ("train", 1), ("train", 2), ("summary", 9)]


def test_what_cannot_be_written_is_refused_in_one_line(monkeypatch):
    config = metrics.MetricsConfig(metrics="tensorboard")
    here = rundir.RunConfig(run_dir=Path("x"))
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: object())
    config.check(here)
    with pytest.raises(ConfigError, match="METRICS=tensorboard writes to RUN_DIR"):
        config.check(rundir.RunConfig())
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    said = "METRICS=tensorboard: it is not installed: pip install"
    with pytest.raises(ConfigError, match=said):
        config.check(here)


def test_a_run_leaves_its_figures_whatever_sinks_do(prepared, run_bert, tmp_path):
    run_bert(prepared, 2, status=3, TRIAL=3)
    *lines, summary = _lines(Path(prepared["RUN_DIR"]) / "metrics_3.jsonl")
    for kind in ("train", "evaluation"):
        found = [line["step"] for line in lines if line["kind"] == kind]
        assert found == [2, 4, 6, 8], kind
    first = lines[0]
    assert first["loss"] == pytest.approx(first["mlm_loss"] + first["nsp_loss"])
    assert first["grad_norm"] > 0
    assert first["per_gpu"] == pytest.approx(first["sequences_per_second"] / 2)
    assert first["epoch"] == pytest.approx(2 * 2 * 3 / 120)
    assert summary["kind"] == "summary"
    assert summary["end"] == "the last step was reached"
    final = [line["loss"] for line in lines if line["kind"] == "train"][-1]
    assert summary["final_loss"] == pytest.approx(final)
    assert summary["e2e_train_time"] > summary["raw_train_time"] > 0
    blocked = tmp_path / "blocked"
    (blocked / "metrics_0.jsonl").mkdir(parents=True)
    again = run_bert(prepared, status=3, RUN_DIR=blocked)
    said = "bert: warning: metrics_0.jsonl gets no more figures: IsADirectoryError: "
    assert again.stderr.count(said) == again.stderr.count("no more figures") == 1


@pytest.mark.parametrize("last", [8, 155_000])
def test_a_report_on_a_gpu_has_norm_mfu_and_memory_in_100_columns(
    last, clock, capfd, monkeypatch, progress
):
    run = progress(last=last, operations=lambda batch: 1e14, done=last - 2)
    run.peak = 1e15
    batches = [SimpleNamespace(num_sequences=8192)] * 2
    figures = {"memory_gb": 61.2, "reserved_gb": 68.4}
    of_device = lambda rate: figures | {"mfu": rate / run.peak}  # noqa: E731
    monkeypatch.setattr(run, "_device_figures", of_device)
    run.add(_result(norm=0.8312), batches)
    clock.now += 0.5
    run.report(last - 1, last - 1)
    line = capfd.readouterr().err.rstrip("\n")
    assert len(line) <= metrics.WIDTH
    assert "norm 0.831  32,768.0/s  MFU 40%  61/68 GB  ETA" in line
    assert line.startswith(f"step {last - 1:>6}/{last}  loss 1.5000")


def test_a_resumed_run_reports_the_means_of_an_undisturbed_one(clock, progress, seen):
    results = [_result(mlm=float(n), norm=2.0 * n, finite=n != 2) for n in range(1, 5)]

    def report(results, **begun):
        run = progress(skips_overflows=True, **begun)
        for result in results:
            run.add(result, BATCHES)
        span = json.loads(json.dumps(run.span()))
        run.report(4, 4)
        return span

    report(results)
    span = report(results[:3])
    report(results[3:], done=3, samples=16, span=span)
    (_, whole), _, (_, parts) = seen
    for name in ("loss", "mlm_loss", "grad_norm"):
        assert parts[name] == whole[name]


def test_operations_are_counted_without_the_device_and_in_fp8(make_records, batch_of):
    config = BertConfig(hidden_size=96, num_attention_heads=4, intermediate_size=384)
    batch = batch_of(make_records(5, packed=False), np.arange(5))
    lengths = batch.cu_seqlens.diff().tolist()
    assert batch.num_pairs == sum(length**2 for length in lengths)
    plain = model_flops(config, batch)
    assert model_flops(config, batch.to(torch.device("meta"))) == plain
    halved = 24 * (3 * 96**2 + 2 * 96 * 384) * sum(lengths)  # of 2 a multiply-add
    assert model_flops(config, batch, in_fp8=True) == plain - 3 * halved
