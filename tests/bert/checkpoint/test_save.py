"""A checkpoint is written whole or not at all, the newest ones are kept, and those of earlier versions
resume and are written in the same way.
"""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from bert.checkpoint import sharded
from bert.checkpoint.save import CheckpointConfig as Config
from bert.checkpoint.save import load_newest, save_checkpoint, saved_checkpoints
from common.env import ConfigError

from ..plain import model_of, step_of
from ..states import same


def test_only_the_newest_checkpoints_are_kept_and_a_damaged_one_is_named(tmp_path):
    config = Config(directory=tmp_path, resume=True, keep=2)
    aside = tmp_path / "step_0000000005_keep.pt", tmp_path / "step_7.copy.pt"
    for path in aside:
        path.touch()
    for step in (5, 10, 200):
        save_checkpoint(config, step, {"step": step})
    assert all(path.exists() for path in aside), "set aside by a user"
    names = [path.name for path in saved_checkpoints(tmp_path)]
    assert names == ["step_0000000010.pt", "step_0000000200.pt"]
    assert load_newest(config) == {"step": 200}
    (tmp_path / "step_0000000200.pt").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"step_0000000200.pt: damaged"):
        load_newest(config)


def test_checkpoints_of_all_kinds_count_and_what_killed_runs_left_goes(tmp_path):
    whole = "step_0000000001", "step_0000000002"
    for name in (*whole, ".step_0000000003.77", ".step_0000000009.7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.pt").touch()
    (tmp_path / ".step_0000000005.pt.partial").touch()
    save_checkpoint(Config(directory=tmp_path, keep=2), 3, {"step": 3})
    # Another rank may be ahead.
    ahead = {".step_0000000009.7", ".step_0000000005.pt.partial"}
    assert ahead < {path.name for path in tmp_path.iterdir()}
    sharded.remove_unfinished(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step_0000000002", "step_0000000003.pt"}


@pytest.mark.parametrize("path", ["bert-base-uncased", "google/bert_uncased"])
def test_a_model_name_of_the_hub_gets_the_download_command(path):
    name = path.rpartition("/")[2]
    fetch = f"hf download {path} --local-dir {name}, then INIT_CHECKPOINT={name}"
    with pytest.raises(ConfigError, match=f"INIT_CHECKPOINT={path}: .* {fetch}"):
        Config(init_checkpoint=Path(path)).check()


@pytest.mark.parametrize("keep", [1, 2])
def test_a_failed_write_leaves_the_older_checkpoint(keep, tmp_path, monkeypatch):
    config = Config(directory=tmp_path, resume=True, keep=keep)
    save_checkpoint(config, 1, {"step": 1})
    monkeypatch.setattr(torch, "save", mock.Mock(side_effect=OSError(28, "No space")))
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(config, 2, {"step": 2})
    assert load_newest(config) == {"step": 1}


def test_a_checkpoint_reaches_the_disk_before_its_name_does(tmp_path, monkeypatch):
    order, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        order.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def named(source, target):
        order.append(("replace", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    save_checkpoint(Config(directory=tmp_path, resume=True), 7, {"step": 7})
    name = "step_0000000007.pt"
    written = ("fsync", f".{name}.partial"), ("replace", name)
    assert order == [*written, ("fsync", tmp_path.name)]


def _saved(model, precision):
    """The layout of the first version: nothing here comes from the code that writes it today."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    draw = lambda shape: torch.rand(shape, generator=generator)  # noqa: E731
    names = "masters", "first_moments", "second_moments"
    parts = {part: {name: draw(shapes[name]) for name in shapes} for part in names}
    state = {
        "optimizer": {"num_steps": 11, **parts},
        "scaler": {"scale": 512.0, "num_good_steps": 7, "num_skipped_steps": 2},
    }
    if precision == "fp8":
        scales = torch.rand(3 * model.config.num_hidden_layers, 3)
        state["fp8"] = {"scales": scales, "calibrated": True}
    return state


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [("lamb", "fp32"), ("lamb", "fp8"), ("lamb", "fp16"), ("adamw", "bf16")],
)
def test_a_first_checkpoint_is_written_as_it_was(optimizer, precision, sharded, tiny):
    model = model_of(tiny, seed=None)
    step = step_of(model, precision, optimizer=optimizer, sharded=sharded)
    saved = _saved(model, precision)
    step.load_state_dict(saved)
    assert not step.needs_calibration_step
    masters = saved["optimizer"]["masters"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, masters[name].to(parameter.dtype)), name
    assert same(step.state_dict(), saved)
