"""``python -m bert deepspeed-config``: the JSON as exports that mean the same, and the launcher's file."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from bert.__main__ import main
from bert.pretraining.config import Config
from common.env import from_env

FOUND = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {"enabled": True, "initial_scale_power": 12},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 1, "overlap_comm": True},
    "optimizer": {
        "type": "Lamb",
        "params": {"lr": 0.002, "betas": [0.8, 0.9], "weight_decay": 0.1},
    },
    "wall_clock_breakdown": True,
}


@pytest.fixture
def saved(tmp_path):
    """saved(JSON) -> its path."""

    def save(found):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(found))
        return str(path)

    return save


def test_a_shell_that_evaluates_the_exports_has_the_settings_of_the_json(saved, capsys, prepared):
    assert main(["deepspeed-config", saved(FOUND), "--ranks", "8"], {}) == 0
    printed = capsys.readouterr().out
    shown = subprocess.run(
        ["bash", "-c", f"{printed}\nenv -0"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    exported = dict(entry.partition("=")[::2] for entry in shown.split("\0") if "=" in entry)
    config = from_env(Config, prepared | exported)
    assert (config.data.batch_size, config.data.gradient_steps, config.schedule.lr) == (4, 2, 0.002)
    assert (config.optim.optimizer, config.optim.max_grad_norm, config.optim.sharded) == (
        "lamb",
        0.5,
        True,
    )
    assert (config.optim.lamb.beta1, config.optim.lamb.beta2, config.optim.lamb.weight_decay) == (
        0.8,
        0.9,
        0.1,
    )
    assert (config.precision.precision, config.precision.init_loss_scale) == ("fp16", 4096.0)
    for alone in ("wall_clock_breakdown", "zero_optimization.overlap_comm"):
        assert f"# {alone}: used by DeepSpeed alone" in printed


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_shards_here_too(saved, capsys, stage):
    assert main(["deepspeed-config", saved({"zero_optimization": {"stage": stage}})], {}) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "SHARD" in line]
    assert [line.split(" #")[0] for line in lines] == ["export SHARD_OPTIMIZER=1"]


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 3},
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        {"stage": 2, "cpu_offload": True},
    ],
)
def test_what_our_own_engine_does_not_do_is_an_error(saved, capsys, zero):
    assert main(["deepspeed-config", saved({"zero_optimization": zero})], {}) == 2
    assert "our own engine has no stage 3 and no offload" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["0", "-1"])
def test_fewer_ranks_than_one_are_an_error(saved, capsys, ranks):
    assert main(["deepspeed-config", saved({"train_batch_size": 12}), "--ranks", ranks], {}) == 2
    assert f"--ranks is {ranks}: expected at least 1" in capsys.readouterr().err


def test_the_defaults_of_a_scheduler_are_exported_and_marked_as_such(saved, capsys):
    decay = {"type": "WarmupDecayLR", "params": {"warmup_type": "linear", "total_num_steps": 1e5}}
    assert main(["deepspeed-config", saved({"scheduler": decay})], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "export LR=0.001 # scheduler.params.warmup_max_lr, the default" in lines
    assert "export WARMUP_STEPS=1000 # scheduler.params.warmup_num_steps, the default" in lines
    assert "export LR_DECAY_STEPS=100000 # scheduler.params.total_num_steps" in lines


def test_the_environment_is_what_is_set_but_for_the_place_of_a_rank(capsys):
    environ = {
        "BATCHSIZE": "4",
        "LR": " 1e-3",
        "DATADIR": "/a b",
        "RUN_DIR": "/results/run",
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "elsewhere",
        "PATH": "/bin",
        "SEED": "",
    }
    assert main(["deepspeed-config", "--environment"], environ) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == ["BATCHSIZE=4", "DATADIR=/a b", "LR=1e-3", "RUN_DIR=/results/run"]
    assert main(["deepspeed-config", "--environment"], {}) == 0
    assert capsys.readouterr().out == "", "not an empty line, on which the launcher would fail"


@pytest.mark.parametrize(
    ("value", "what"), [("a\nb", "a line break"), ("$HOME/data", "$"), ("a%nb", "%"), ('a"b', '"')]
)
def test_a_value_that_would_not_arrive_unchanged_is_an_error(capsys, value, what):
    assert main(["deepspeed-config", "--environment"], {"DATADIR": value}) == 2
    assert f"DATADIR has {what} in it" in capsys.readouterr().err
