"""EMULATE_RANKS: one rank of many, alone, which is never taken for a result."""

import json
from pathlib import Path

import pytest
import torch

from bert.core import dist
from bert.pretraining.build import build
from bert.pretraining.config import PretrainingConfig
from common.env import ConfigError, from_env

SETTINGS = {"SHARD_OPTIMIZER": "1", "EMULATE_RANKS": "16", "LOCAL_WORLD_SIZE": "8"}


def test_one_rank_of_sixteen_trains_its_shard_and_is_no_result(prepared, run_bert):
    # A process of its own.
    finished = run_bert(prepared | SETTINGS, status=0, LR=0.001)
    last = finished.stderr.splitlines()[-1]
    assert last.startswith("bert: rank 0 of 16 emulated, alone: ")
    assert "ms a step without the network, at most" in last
    assert last.endswith("losses, weights and log are no result")
    log = Path(prepared["RUN_DIR"], "result_0.txt").read_text()
    assert '"status": "success"' not in log
    assert "eval_accuracy" not in log
    described = json.loads(Path(prepared["RUN_DIR"], "config.json").read_text())
    assert (described["dist"]["world_size"], described["dist"]["emulate"]) == (16, 16)


@pytest.fixture
def alone():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_its_shard_is_that_of_one_of_sixteen(prepared, alone):
    """In two groups of eight an eighth of all parameters, padded to whole lines."""
    config = from_env(PretrainingConfig, prepared | SETTINGS | {"SHARD_GROUP": "node"})
    with dist.World(config.dist) as world:
        assert world.size == 16
        _, step = build(config, world, 7)
        whole = sum(p.numel() for p in step.model.parameters())
        mine = step.optimizer.shard.masters.numel()
    assert whole > 6 * mine


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"CHECKPOINT_DIR": "c"}, "one rank's part, which is no model: unset CHECKPOINT_DIR"),
     ({"WORLD_SIZE": "2"}, "EMULATE_RANKS=16 with WORLD_SIZE=2: start one process")],
)  # fmt: skip
def test_what_one_rank_of_many_cannot_do_is_refused(prepared, changed, said):
    with pytest.raises(ConfigError, match=said):
        from_env(PretrainingConfig, prepared | SETTINGS | changed).check()
