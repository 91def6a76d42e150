"""Where figures go: metrics_N.jsonl, TensorBoard's event files, Weights & Biases; none of them can stop a run."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from bert.core import rundir
from bert.core.env import ConfigError
from bert.training import observers

TRAIN = {"step": 5, "samples": 40, "loss": 1.5, "lr": 0.01}
SUMMARY = {"end": "the last step was reached", "step": 9, "samples": 72, "final_loss": 1.25}


def _built(folder, metrics="", first_step=0):
    run = rundir.Config(run_dir=folder, trial=3)
    return observers.build(observers.Config(metrics=metrics), run, {"seed": 7}, first_step)


def _write(built):
    for observer in built:
        observer.write("train", TRAIN)
        observer.write("evaluation", {"step": 5, "samples": 40, "accuracy": 0.25})
        observer.write("summary", SUMMARY)


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_file_has_an_object_a_line_and_a_resumed_run_appends(tmp_path):
    _write(_built(tmp_path))
    whole = [{"kind": "train", **TRAIN}, {"kind": "evaluation", "step": 5, "samples": 40, "accuracy": 0.25},
             {"kind": "summary", **SUMMARY}]  # fmt: skip
    assert _lines(tmp_path / "metrics_3.jsonl") == whole
    _write(_built(tmp_path, first_step=9))
    assert _lines(tmp_path / "metrics_3.jsonl") == whole * 2
    _write(_built(tmp_path))
    assert _lines(tmp_path / "metrics_3.jsonl") == whole


def test_each_line_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    (observer,) = _built(tmp_path)
    observer.write("train", TRAIN)
    assert len(_lines(tmp_path / "metrics_3.jsonl")) == 1


def test_tensorboard_reads_back_what_was_written(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: requirements/metrics.txt")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _write(_built(tmp_path, "tensorboard"))
    events = EventAccumulator(str(tmp_path / "tensorboard_3"))
    events.Reload()
    read = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert read == {
        "train/samples": [(5, 40.0)], "train/loss": [(5, 1.5)], "train/lr": [(5, pytest.approx(0.01))],
        "evaluation/samples": [(5, 40.0)], "evaluation/accuracy": [(5, 0.25)],
    }  # fmt: skip
    assert events.Tags()["tensors"] == ["summary/text_summary"]


def _wandb_records(path):
    """The records of a .wandb file: LevelDB's log, blocks of 32 KiB with fragments, after a header of 7 bytes."""
    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        length, kind = struct.unpack_from("<HB", data, place + 4)  # after the checksum; 1 whole, 2 first, 4 last
        record = (b"" if kind in (1, 2) else record) + data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record


def test_weights_and_biases_writes_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: requirements/metrics.txt")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    _write(_built(tmp_path, "wandb"))
    wandb.teardown()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    history, settings, summary = {}, {}, {}
    for data in _wandb_records(path):
        record = wandb_internal_pb2.Record.FromString(data)
        for items, read in ((record.history.item, history), (record.run.config.update, settings),
                            (record.summary.update, summary)):  # fmt: skip
            read |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
    assert settings["seed"] == 7
    assert (history["train/loss"], history["train/lr"], history["evaluation/accuracy"]) == (1.5, 0.01, 0.25)
    assert (summary["final_loss"], summary["end"]) == (1.25, SUMMARY["end"])


def test_a_failing_observer_warns_once_and_is_left_out(tmp_path, monkeypatch, capfd):
    class Full:
        def write(self, kind, values):
            raise OSError(28, "No space left on device")

    guarded = observers.Guarded("metrics_3.jsonl", Full)
    for _ in range(3):
        guarded.write("train", TRAIN)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("bert: warning: metrics_3.jsonl gets no more figures: OSError: [Errno 28] No space left")


def test_an_observer_that_cannot_be_made_warns_once_too(tmp_path, capfd):
    (tmp_path / "metrics_3.jsonl").mkdir()
    _write(_built(tmp_path))
    assert capfd.readouterr().err.count("bert: warning: metrics_3.jsonl gets no more figures") == 1


@pytest.mark.parametrize(
    ("metrics", "run_dir", "message"),
    [
        ("tensorbord", Path("x"), "METRICS=tensorbord: expected tensorboard or wandb, or both between commas"),
        ("tensorboard,mlflow", Path("x"), "METRICS=tensorboard,mlflow: expected"),
        ("tensorboard", None, "METRICS=tensorboard writes to RUN_DIR, which is not set"),
    ],
)
def test_what_cannot_be_is_one_line(metrics, run_dir, message, monkeypatch):
    monkeypatch.setattr(observers.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError) as caught:
        observers.Config(metrics=metrics).check(rundir.Config(run_dir=run_dir))
    assert str(caught.value).startswith(message)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(observers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"METRICS=wandb: it is not installed: pip install"):
        observers.Config(metrics=" wandb").check(rundir.Config(run_dir=Path("x")))


def test_a_run_leaves_its_figures_whatever_becomes_of_an_observer(prepared, run_bert, tmp_path):
    finished = run_bert(prepared | {"TRIAL": "3"}, ranks=2)
    assert finished.returncode == 3, finished.stderr
    *lines, summary = _lines(Path(prepared["RUN_DIR"]) / "metrics_3.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "train"] == [2, 4, 6, 8]
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [2, 4, 6, 8]
    first = lines[0]
    assert first["loss"] == pytest.approx(first["mlm_loss"] + first["nsp_loss"])
    assert first["grad_norm"] > 0
    assert first["per_gpu"] == pytest.approx(first["sequences_per_second"] / 2)
    assert first["epoch"] == pytest.approx(2 * 2 * 3 / 120)
    assert summary["kind"] == "summary"
    assert summary["end"] == "the last step was reached"
    assert summary["final_loss"] == pytest.approx([line for line in lines if line["kind"] == "train"][-1]["loss"])
    assert summary["e2e_train_time"] > summary["raw_train_time"] > 0
    blocked = tmp_path / "blocked"
    (blocked / "metrics_0.jsonl").mkdir(parents=True)
    again = run_bert(prepared | {"RUN_DIR": str(blocked)})
    assert again.returncode == 3
    assert again.stderr.count("gets no more figures") == 1
