"""DeepSpeed's own checkpoints: DEEPSPEED_CHECKPOINTS=1 writes what its tools read, and resumes; one
of another program starts a run.
"""

import shutil

import pytest
import torch

from bert.checkpoint import deepspeed_files, sharded, weights
from bert.checkpoint.deepspeed_files import MODEL
from bert.checkpoint.save import CheckpointConfig
from bert.deepspeed import checkpoints
from common.env import ConfigError

from ..ranks import run_ranks
from ..states import folders, zero_json
from .engines import FP32, deepspeed_step, model_of, same_optimizer

NAMES = ["global_step4", "global_step8"]


@pytest.fixture
def environ(prepared, tmp_path):
    """environ(folder, own engine?, **variables) of a run of 8 steps, on two ranks."""

    def make(folder, ours=False, **variables):
        engine = zero_json(tmp_path) | {"DEEPSPEED_CHECKPOINTS": "1"}
        common = {"OPTIMIZER": "lans", "PRECISION": "fp32", "SHARD_OPTIMIZER": "1"}
        untimed = {"EVAL_ITER_SAMPLES": "0", "TARGET_MLM_ACCURACY": "0"}
        saved = folders(tmp_path, folder) | {"CHECKPOINT_EVERY_STEPS": "4"}
        own = {} if ours else engine
        return prepared | common | untimed | saved | own | variables

    return make


def _run(run_bert, environment, status=0):
    return run_bert(environment, 2, status=status).stderr


@pytest.mark.deepspeed
def test_a_run_writes_what_deepspeed_reads_and_either_engine_resumes_it(
    environ, run_bert, tmp_path
):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    whole = tmp_path / "whole"
    _run(run_bert, environ("whole"))
    assert sorted(path.name for path in whole.glob("*step*")) == NAMES
    assert (whole / "latest").read_text() == NAMES[1]
    assert (whole / "zero_to_fp32.py").is_file()
    expected = sharded.read(whole / NAMES[1])
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(whole))
    assert theirs.keys() >= expected["model"].keys()
    for name, tensor in expected["model"].items():
        assert torch.equal(theirs[name], tensor), name
    assert {"masters", "first_moments", "second_moments"} < expected["optimizer"].keys()

    for ours in (False, True):
        folder = tmp_path / f"resumed_{ours}"
        shutil.copytree(whole / NAMES[0], folder / NAMES[0])
        resumed = environ(folder.name, ours, RESUME="1")
        said = _run(run_bert, resumed)
        assert "step      8/8" in said
        (last,) = sharded.complete(folder)[-1:]
        assert last.name == ("step_0000000008.pt" if ours else NAMES[1])
        state = torch.load(last, weights_only=True) if ours else sharded.read(last)
        found = state["optimizer"]
        assert found["num_steps"] == 8
        if not ours:  # what DeepSpeed's own programs count from
            stated = torch.load(next(last.glob("mp_rank_00_*")), weights_only=False)
            assert stated["global_steps"] == 8
        same_optimizer(found, expected["optimizer"], exact=not ours)

    # Whose it is, and whether it is whole, is asked as of ours.
    said = _run(run_bert, environ("whole", RUN_DIR=str(tmp_path / "other")), 2)
    assert "set RESUME=1" in said
    part = next((whole / NAMES[1]).glob("*rank_1*optim_states.pt"))
    other = next((whole / NAMES[0]).glob("*rank_1*optim_states.pt"))
    shutil.copy(other, part)  # sound, of another step
    said = _run(run_bert, environ("whole", RESUME="1"), 2)
    assert "is of another checkpoint" in said
    assert "resume from global_step4" in said


def _failing_writes(world, config, folder):
    trained = deepspeed_step(world, config, "lans", FP32, 1, folder, stage=2)
    saved, engine = folder / "saved", trained.engine.checkpoint_engine

    def full(*_, **__):
        raise RuntimeError("no space left")

    def save(step):
        return checkpoints.save(trained, saved, step, step, {"step": step}, keep=1)

    def kept():
        world.barrier()
        newest = sharded.complete(saved)[-1].name
        assert [path.name for path in saved.glob("*step*")] == [newest]
        assert [*saved.glob(".*")] == []
        assert (saved / "latest").read_text() == newest
        world.barrier()
        return newest

    assert save(4) == ""
    assert kept() == NAMES[0]
    writes = engine.save
    for odd in range(2):
        engine.save = full if world.rank == odd else writes
        assert save(8) == f"rank {odd}: no space left"
        assert kept() == NAMES[0]
    engine.save = writes
    assert save(8) == ""
    assert kept() == NAMES[1]


@pytest.mark.deepspeed
def test_a_write_that_fails_on_one_rank_leaves_the_checkpoint_before(tiny, tmp_path):
    run_ranks(_failing_writes, 2, arguments=(tiny, tmp_path))


def _their_program(world, config, folder):
    """Another DeepSpeed program: its own optimizer and names, in bf16."""
    from bert.deepspeed.step import _choose_device, load

    deepspeed = load()
    _choose_device(deepspeed, world)
    for stage in (0, 1, 2, 3):
        model = torch.nn.Module()
        model.module = model_of(config)
        model.forward = lambda batch: None
        settings = {
            "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }  # fmt: skip
        rule = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"model": model, "optimizer": rule, "config": settings}
        engine, *_ = deepspeed.initialize(**given, dist_init_required=False)
        engine.save_checkpoint(str(folder / str(stage)), client_state={"mine": 1})


@pytest.mark.deepspeed
def test_a_checkpoint_of_another_deepspeed_program_starts_a_run(tiny, tmp_path):
    run_ranks(_their_program, 2, arguments=(tiny, tmp_path))
    first = model_of(tiny)
    expected = {name: p.detach() for name, p in first.named_parameters()}
    for stage in (0, 1, 2):
        for named in (tmp_path / str(stage), tmp_path / str(stage) / "global_step0"):
            path = CheckpointConfig(init_checkpoint=named).init_checkpoint
            assert path is not None
            assert path.name == MODEL
            model = model_of(tiny)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.5)
            assert not any(weights.load_weights(model, path))
            for name, parameter in model.named_parameters():
                # Without ZeRO there are no masters but in bf16.
                assert torch.equal(parameter, expected[name].bfloat16().float()), name
    path = CheckpointConfig(init_checkpoint=tmp_path / "3").init_checkpoint
    with pytest.raises(ConfigError, match=r"ZeRO stage 3: .*zero_to_fp32\.py"):
        weights.read_state_dict(path)
    (tmp_path / "2" / "global_step0" / _rank_file(1)).unlink()
    path = CheckpointConfig(init_checkpoint=tmp_path / "2").init_checkpoint
    with pytest.raises(ConfigError, match="0 files of rank 1 of 2"):
        weights.read_state_dict(path)


def _rank_file(rank):
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@pytest.fixture
def foreign(tmp_path):
    """foreign(sizes of the parts, gaps): a checkpoint of 2 parameters, 7 and 5 numbers."""

    def make(sizes, gaps=None):
        shapes = {"a": torch.Size([7]), "b": torch.Size([5])}
        torch.save({"param_shapes": [shapes], "module": {}}, tmp_path / MODEL)
        flat = torch.arange(float(sum(sizes)))
        for rank, part in enumerate(flat.split(sizes)):
            state = {"partition_count": [len(sizes)]}
            state["single_partition_of_fp32_groups"] = [part.clone()]
            if gaps:
                state["param_alignment_paddings"] = [gaps]
            torch.save({"optimizer_state_dict": state}, tmp_path / _rank_file(rank))
        return weights.read_state_dict(tmp_path / MODEL)

    return make


@pytest.mark.parametrize(
    ("sizes", "gaps"),
    [([12], None), ([6, 6], None), ([7, 5], None), ([3] * 4, None), ([8, 4], None), ([8, 6], None), ([8, 8], [1, 3])],
)  # fmt: skip
def test_parameters_cut_anywhere_are_whole_again(foreign, sizes, gaps):
    found, begin = foreign(sizes, gaps), 8 if gaps else 7
    assert found["a"].tolist() == [*range(7)]
    assert found["b"].tolist() == [*range(begin, begin + 5)]


@pytest.mark.parametrize("sizes", [[11], [6, 4], [12, 12]])
def test_numbers_that_are_too_few_or_too_many_are_refused(foreign, sizes):
    with pytest.raises(ConfigError, match="numbers for parameters of 12"):
        foreign(sizes)


class Command:
    """What a pickle from elsewhere may hold."""

    def __reduce__(self):
        return exec, ("raise SystemExit('it ran')",)


def test_nothing_in_a_file_from_elsewhere_is_called(tmp_path):
    path = tmp_path / MODEL
    torch.save({"module": {"a": torch.ones(2)}, "mine": Command()}, path)
    found = deepspeed_files.read(path)
    assert found["module"]["a"].tolist() == [1, 1]
    assert isinstance(found["mine"], deepspeed_files._Inert)
    with pytest.raises(SystemExit, match="it ran"):
        torch.load(path, weights_only=False)
    for name in ("os system", "builtins eval", "torch load", "torch.utils f"):
        assert not deepspeed_files._PLAIN.fullmatch(name), name
