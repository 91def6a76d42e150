"""A checkpoint is written whole or not at all, and the newest ones are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bert.checkpoint import save, sharded
from bert.checkpoint.save import Config, Interval, load_newest, save_checkpoint, saved_checkpoints
from bert.core.dist import Config as DistConfig
from bert.core.dist import World
from common.env import ConfigError, from_env


def test_only_the_newest_checkpoints_are_kept_and_a_damaged_one_is_named(tmp_path):
    config = Config(directory=tmp_path, resume=True, keep=2)
    for step in (5, 10, 200):
        save_checkpoint(config, step, {"step": step})
    assert [path.name for path in saved_checkpoints(tmp_path)] == [
        "step_0000000010.pt",
        "step_0000000200.pt",
    ]
    assert load_newest(config) == {"step": 200}
    (tmp_path / "step_0000000200.pt").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"step_0000000200.pt: damaged"):
        load_newest(config)


def test_checkpoints_of_all_kinds_count_together_and_what_killed_runs_left_over_goes(tmp_path):
    for name in ("step_0000000001", "step_0000000004", ".step_0000000003.77", ".step_0000000009.7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.pt").touch()
    (tmp_path / ".step_0000000005.pt.partial").touch()
    save_checkpoint(Config(directory=tmp_path, keep=2), 3, {"step": 3})
    ahead = {".step_0000000009.7", ".step_0000000005.pt.partial"}
    assert ahead < {path.name for path in tmp_path.iterdir()}, "another rank may be ahead"
    sharded.remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_0000000003.pt",
        "step_0000000004",
    ]


@pytest.mark.parametrize("path", ["bert-base-uncased", "google/bert_uncased"])
def test_a_model_name_of_the_hub_gets_the_download_command(path):
    name = path.rpartition("/")[2]
    fetch = f"not fetched: hf download {path} --local-dir {name}, then INIT_CHECKPOINT={name}"
    with pytest.raises(
        ConfigError, match=f"INIT_CHECKPOINT={path}: no such file or folder; .* {fetch}"
    ):
        Config(init_checkpoint=Path(path)).check()


@pytest.mark.parametrize("keep", [1, 2])
def test_a_failed_write_leaves_the_older_checkpoint(keep, tmp_path, monkeypatch):
    config = Config(directory=tmp_path, resume=True, keep=keep)
    save_checkpoint(config, 1, {"step": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(config, 2, {"step": 2})
    assert load_newest(config) == {"step": 1}


def test_a_checkpoint_reaches_the_disk_before_it_gets_its_name_and_the_name_after_that(
    tmp_path, monkeypatch
):
    order, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        order.append(("fsync", target.name))
        fsync(descriptor)

    def named(source, target):
        order.append(("replace", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    save_checkpoint(Config(directory=tmp_path, resume=True), 7, {"step": 7})
    name = "step_0000000007.pt"
    assert order == [("fsync", f".{name}.partial"), ("replace", name), ("fsync", tmp_path.name)]


def test_the_interval_between_checkpoints_loses_the_least_time_to_them_and_to_failures(
    monkeypatch, capfd
):
    clock = [0.0]
    monkeypatch.setattr(save.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(save, "HOURS_BETWEEN_FAILURES", 1000)
    environ = {"CHECKPOINT_DIR": "c", "CHECKPOINT_EVERY_STEPS": "auto"}
    interval = Interval(
        from_env(Config, environ), World(DistConfig(device="cpu")), num_nodes=10, done=40
    )
    due = []

    def write(*done):
        due.append(done)
        clock[0] += 2.0

    for step in range(41, 5000):
        clock[0] += 0.5
        if interval.is_due(step):
            interval.save(write, step, step + 1, 7)

    def lost(steps):  # share of the time: 2 s a checkpoint, and half an interval each 100 hours
        return 2.0 / (0.5 * steps) + 0.5 * steps / 2 / 360_000

    best = min(range(1, 9999), key=lost)
    assert due == [(step, step + 1, 7) for step in (140, 140 + best, 140 + 2 * best)]
    (said,) = capfd.readouterr().err.splitlines()
    assert said == (
        "bert: a checkpoint every 2,400 steps, 20.0 min: it takes 2.00 s of training, and one of 10 nodes fails every "
        "100 hours"
    )
    with pytest.raises(
        ConfigError,
        match="CHECKPOINT_EVERY_STEPS='often': expected an integer, at least 0, or auto",
    ):
        from_env(Config, environ | {"CHECKPOINT_EVERY_STEPS": "often"})
