"""DeepSpeed's checkpoints: read exactly by any engine, stage and number of ranks; written whole or not at all."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch

from bert.deepspeed import checkpoints
from common.env import ConfigError

from ..ranks import run_ranks
from ..states import same
from .engines import FP32, STAGES, curve, deepspeed_step, own_step

deepspeed = pytest.mark.deepspeed


def _save(world, config, folder, zero):
    step = deepspeed_step(world, config, "lamb", FP32, 1, folder, **zero)
    curve(world, step, 0, 2, 1)
    checkpoints.save(step, folder, 2, 2, {"step": 2})
    state = step.state_dict()
    if world.is_main:
        torch.save(state, folder / "expected.pt")


def _load_and_save(world, config, folder, zero):
    (last,) = checkpoints.folders(folder)
    saved, expected = checkpoints.read(last), torch.load(folder / "expected.pt", weights_only=True)
    step = deepspeed_step(world, config, "lamb", FP32, 1, folder, **zero)
    for trained in (step, own_step(world, config, "lamb", FP32, 1)):
        trained.load_state_dict(saved)
        state = trained.state_dict()
        if world.is_main:
            assert same(state, expected)
        with trained.gathered() as model:
            for name, weight in model.named_parameters():
                assert torch.equal(weight, expected["optimizer"]["masters"][name]), name
    world.barrier()
    checkpoints.save(step, folder, 1, 3, {"step": 3})


@deepspeed
def test_two_ranks_write_what_one_reads_and_one_what_two_read_in_other_stages_bit_for_bit(
    tiny, tmp_path
):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    run_ranks(_save, 2, arguments=(tiny, tmp_path, STAGES[2]))
    masters = torch.load(tmp_path / "expected.pt", weights_only=True)["optimizer"]["masters"]
    assert same(dict(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))), masters), (
        "as DeepSpeed's own tool reads"
    )
    run_ranks(_load_and_save, 1, arguments=(tiny, tmp_path, STAGES[1]))
    assert [path.name for path in checkpoints.folders(tmp_path)] == ["deepspeed_0000000003"], (
        "the newest one is kept"
    )
    run_ranks(_load_and_save, 2, arguments=(tiny, tmp_path, STAGES[0]))
    (last,) = checkpoints.folders(tmp_path)
    shard = next(last.glob("*zero_pp_rank_1*"))
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(
        ConfigError, match=r"deepspeed_0000000003: damaged checkpoint .*: give another"
    ):
        checkpoints.read(last)


def _fail_at_the_second(world, config, folder, dies):
    step = deepspeed_step(world, config, "lamb", FP32, 1, folder, stage=2)
    checkpoints.save(step, folder, 2, 1, {"step": 1})
    plain = torch.save

    def save(state, path, *rest, **options):
        if not dies:
            raise OSError(28, "No space left on device")
        plain(state, path, *rest, **options)
        os.truncate(path, 1000)
        os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == 1:
        torch.save = save
    checkpoints.save(step, folder, 2, 2, {"step": 2})


@deepspeed
def test_a_rank_that_is_killed_or_fails_while_it_writes_leaves_the_checkpoint_before(
    tiny, tmp_path
):
    line = "TrainingError: the checkpoint of step 2 cannot be written to .*No space left.*RESUME=1 continues from the one"
    # Of the killed one nothing is heard but its status, or first what the other one finds: its connection broken.
    for dies, reason in ((False, line), (True, "-9|Connection (reset|closed) by peer")):
        with pytest.raises(AssertionError, match=reason):
            run_ranks(_fail_at_the_second, 2, arguments=(tiny, tmp_path, dies))
        assert [path.name for path in tmp_path.glob("deepspeed_*")] == ["deepspeed_0000000001"]
        assert (tmp_path / "latest").read_text() == "deepspeed_0000000001"
        assert checkpoints.read(tmp_path / "deepspeed_0000000001")["step"] == 1
    assert list(tmp_path.glob(".deepspeed_0000000002.partial/*zero_pp_rank_1*")), (
        "it died in the middle"
    )
    run_ranks(_save, 2, arguments=(tiny, tmp_path, STAGES[1]))
    assert [path.name for path in checkpoints.folders(tmp_path)] == [
        "deepspeed_0000000001",
        "deepspeed_0000000002",
    ]
    assert not list(tmp_path.glob(".*")), "what the killed one left is gone"


def test_such_a_checkpoint_without_deepspeed_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(
        ConfigError,
        match=r"is a checkpoint of DeepSpeed's: .*: pip install -r requirements/deepspeed",
    ):
        checkpoints.read(tmp_path)
