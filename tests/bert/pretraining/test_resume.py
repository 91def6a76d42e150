"""RESUME=1 on another number of ranks: each step has the rows that it would have had, and gives the same weights."""

import math

import pytest
import torch

from bert.checkpoint import save
from bert.checkpoint.save import saved_checkpoints
from bert.core.dist import World
from bert.data.loader import open_source
from bert.deepspeed.settings import merged
from bert.pretraining import check, identity, resume
from bert.pretraining.build import build, resolve_kernels
from bert.pretraining.config import PretrainingConfig
from bert.pretraining.saver import Saver
from bert.pretraining.train import save_last, start_of
from bert.training.stop import LAST_STEP, Ending, TrainingError
from common import env
from common.env import ConfigError, from_env

from ..plain import close
from ..ranks import run_ranks
from ..states import folders, newest, without_dropout, zero_json

UNSAVED = {"EVAL_ITER_SAMPLES": "0", "TARGET_MLM_ACCURACY": "0"}
REPLICATED = {"SHARD_OPTIMIZER": "0"}
SHARDED = {"SHARD_OPTIMIZER": "1"}
IN_SHARDS = SHARDED | {"CHECKPOINT_SHARDS": "1"}
# By ranks: micro-batches of three rows.
ROWS = {1: {"GRADIENT_STEPS": "4"}, 2: {"GRADIENT_STEPS": "2"}}


@pytest.fixture
def train(prepared, run_bert, tmp_path):
    """train(name, ranks, **settings): a run of six steps without dropout that saves into the folder
    ``name``; it ends with 0 but where a status is given.
    """
    without_dropout(prepared)

    def run(name, ranks, status=0, **settings):
        given = folders(tmp_path, name) | {"MAX_STEPS": "6", "LR": "0.001"} | settings
        return run_bert(prepared | UNSAVED | ROWS[ranks], ranks, status=status, **given)

    return run


def test_a_run_continues_on_other_ranks_where_a_step_keeps_its_rows(train, tmp_path):
    train("whole", 1)
    train("moved", 1, STEPS_THIS_RUN=3, **REPLICATED)
    train("moved", 2, RESUME=1, **SHARDED)
    expected, found = (newest(tmp_path / name) for name in ("whole", "moved"))
    assert found["step"] == expected["step"] == 6
    assert found["model"].keys() == expected["model"].keys()
    close(found["model"], expected["model"], atol=2e-5)
    changed = {"GRADIENT_STEPS": "1", "RUN_DIR": tmp_path / "elsewhere"}
    refused = train("moved", 2, status=2, RESUME=1, **changed)
    (line,) = refused.stderr.strip().splitlines()
    assert "is of a run with GRADIENT_STEPS 2, this one has 1" in line
    assert "GRADIENT_STEPS must stay 12, and is 6: change another" in line


class Trained:
    """What a checkpoint is loaded into."""

    def load_state_dict(self, state):
        self.state = state


def test_seed_and_order_are_those_of_the_first_run(prepared):
    def settings(**changed):
        two = {"WORLD_SIZE": "2", "GRADIENT_STEPS": "2"}
        return from_env(PretrainingConfig, prepared | two | changed)

    def saved(config, **facts):
        before = identity.run_identity(config, 7)
        before |= {"WORLD_SIZE": 4, "GRADIENT_STEPS": 1}
        return _saved(config, before, dealt=(4, 3)) | facts

    config = settings()
    assert resume.shard_order(config, None) == (2, 6)
    assert resume.shard_order(config, saved(config, dealt=(1, 12))) == (1, 12)
    assert resume.restore(config, Trained(), 7, saved(config))[:3] == (4, 5, 6)
    assert [identity.pick_seed(seed, saved(config)) for seed in (None, 9)] == [7, 9]
    unpacked = {"PACKED": "0", "DATADIR_PHASE2": "/data"}
    for changed in ({"BATCHING": "bins", "BIN_COUNTS": "3"}, {"EXCHANGE_GROUP": "2"}):
        config = settings(**unpacked, **changed)
        said = "is of a run with WORLD_SIZE 4, this one has 2: use the same settings"
        with pytest.raises(ConfigError, match=said):
            resume.restore(config, Trained(), 7, saved(config))


def _saved(config, run, **facts):
    """What a checkpoint tells of a run."""
    known = {"run": run, "computed": identity.computed(config), "step": 4}
    return known | {"batches": 5, "samples": 6} | facts


def _restore(config, run, **facts):
    return resume.restore(config, Trained(), 7, _saved(config, run, **facts))


def test_a_checkpoint_with_other_settings_than_this_version_has_is_refused(prepared):
    config = from_env(PretrainingConfig, prepared)
    before = identity.run_identity(config, 7)
    said = "with the setting UNHEARD_OF, which is gone: use it as INIT"
    with pytest.raises(ConfigError, match=said):
        _restore(config, before | {"UNHEARD_OF": 1})
    # A setting that is newer than the checkpoint had its default.
    del before["NSP"]
    _restore(config, before)
    other = from_env(PretrainingConfig, prepared | {"NSP": "0"})
    said = "is of a run with NSP True, this one has False"
    with pytest.raises(ConfigError, match=said):
        _restore(other, before)


def test_a_run_is_lengthened_if_its_schedule_keeps_its_length(prepared):
    """Also one whose checkpoint is of the version that noted MAX_STEPS instead."""
    before = identity.run_identity(from_env(PretrainingConfig, prepared), 7)
    earlier = before | {"MAX_STEPS": before["LR_DECAY_STEPS"]}
    del earlier["LR_DECAY_STEPS"]
    longer = prepared | {"MAX_STEPS": "16"}
    for known in (before, earlier):
        with pytest.raises(ConfigError, match="set LR_DECAY_STEPS=8, whatever MAX_ST"):
            _restore(from_env(PretrainingConfig, longer), known)
        _restore(from_env(PretrainingConfig, longer | {"LR_DECAY_STEPS": "8"}), known)


def test_every_variable_must_stay_or_is_listed_among_those_that_may_change(prepared):
    config = from_env(PretrainingConfig, prepared)
    listed = [identity.ROUNDING, identity.FREE]
    kept = identity.run_identity(config, 7).keys() - {"BERT_CONFIG", *identity._ROWS}
    assert sum(map(len, [kept, *listed])) == len(kept.union(*listed)), "in one of them"
    assert kept.union(*listed) == env.settings(config).keys()
    arithmetic = (
        "LR LR_SCHEDULE WARMUP_STEPS OPT_LAMB_BETA_1 PACKING_FACTOR MAX_GRAD_NORM"
    )
    arithmetic += " WEIGHT_DECAY_RATE LAMB_RATIO OPTIMIZER SYNTH_DATA MASKING CLIP"
    assert kept.issuperset(arithmetic.split())


def test_changes_that_affect_rounding_are_reported(prepared, capfd):
    before = from_env(PretrainingConfig, prepared | {"GRADIENT_STEPS": "2"})
    run, computed = identity.run_identity(before, 7), identity.computed(before)
    assert _restore(before, run, computed=computed)[:3] == (4, 5, 6)
    assert capfd.readouterr().err == ""
    moved = {"WORLD_SIZE": "2", "FUSED": "none", "EVAL_BATCHSIZE": "3", "CHECKPOINT_KEEP": "9"}  # fmt: skip
    other = from_env(PretrainingConfig, prepared | moved)
    assert _restore(other, run, computed=computed)[:3] == (4, 5, 6)
    said = "WORLD_SIZE 1 -> 2, FUSED auto -> none, GRADIENT_STEPS 2 -> 1: losses differ by rounding, and by what dropout"
    assert f"bert: RESUME=1 with {said}" in capfd.readouterr().err
    split = from_env(PretrainingConfig, prepared | {"BATCHSIZE": "6"})
    assert _restore(split, run, computed=computed)[:3] == (4, 5, 6)
    said = "losses differ by the weight of each token in its micro-batch, more than by"
    assert said in capfd.readouterr().err
    clip = prepared | {"CLIP": "before"}
    clipped = from_env(PretrainingConfig, clip | {"GRADIENT_STEPS": "2"})
    said = "is of a run with WORLD_SIZE 1, this one has 2: use the same settings"
    with pytest.raises(ConfigError, match=said):
        _restore(
            from_env(PretrainingConfig, clip | moved), identity.run_identity(clipped, 7)
        )


def test_weights_that_are_not_finite_are_refused_at_the_start_and_in_the_check(
    prepared, train, tmp_path
):
    train("whole", 2, **SHARDED, STEPS_THIS_RUN=1)
    (path,) = saved_checkpoints(tmp_path / "whole")
    state = torch.load(path, weights_only=True)
    state["optimizer"]["masters"]["cls.predictions.bias"][3] = float("nan")
    torch.save(state | {"model": state["optimizer"]["masters"]}, path)
    said = "cls.predictions.bias holds NaN or infinity"
    assert said in train("whole", 2, status=2, **SHARDED, RESUME=1).stderr
    resumed = {"RESUME": "1", "CHECKPOINT_DIR": str(tmp_path / "whole")}
    resumed |= {"MAX_STEPS": "6", "LR": "0.001", "GRADIENT_STEPS": "4"}
    with pytest.raises(ConfigError, match=said):
        check.report(from_env(PretrainingConfig, prepared | resumed))


def test_what_was_restored_is_held_in_the_step_alone(prepared):
    """Not to the end of the run in the host's memory, or in files that were removed, too."""
    config = from_env(PretrainingConfig, prepared)
    with World(config.dist) as world:
        config = resolve_kernels(config, world)
        state = start_of(config, world, 7, None).trainer.state_dict()
        facts = {"run": identity.run_identity(config, 7), "step": 4, "ended": False}
        saved = state | facts | {"computed": identity.computed(config)}
        saved["model"] = state["optimizer"]["masters"]
        assert start_of(config, world, 7, saved).done.steps == 4
    assert not {"model", "optimizer"} & saved.keys()


def _saver(world, environment, directory):
    """Of a run that has taken no step, and the step."""
    ranks = {"WORLD_SIZE": str(world.size), "RANK": str(world.rank)}
    saves = {"CHECKPOINT_DIR": str(directory), "CHECKPOINT_KEEP": "1"}
    config = from_env(PretrainingConfig, merged(environment | ranks | saves))
    _, step = build(config, world, 7)
    return Saver(config, step, world, 7, open_source(config.data, 211), (1, 1)), step


def _save_on_a_full_disk(world, environment, folder):
    """Rank 0 alone writes."""

    def fail(*_: object) -> None:
        raise OSError("No space left")

    save.save_checkpoint = fail
    saving, _ = _saver(world, environment, folder)
    ending = Ending(reason=LAST_STEP, step=1, batches=1, samples=1)
    with pytest.raises(TrainingError, match=r"be written \(No space left\)"):
        save_last(saving, ending, has_target=False, span={})


def test_every_rank_says_why_the_last_checkpoint_is_not_written(prepared, tmp_path):
    """As the launcher shows the reason of whichever rank is first."""
    run_ranks(_save_on_a_full_disk, 2, arguments=(prepared, tmp_path))


def _save_what_is_not_finite(world, environment, folder, bad):
    """A good checkpoint; then the last rank alone has a number that is not finite."""
    if "ENGINE" in environment:
        own = folder / f"ds_{world.rank}"
        own.mkdir()
        environment = environment | zero_json(own)
    directory = folder / "c"
    saving, step = _saver(world, environment, directory)
    saving.save(1, 1, 1, {})
    assert not saving.finish()
    good = sorted(path.name for path in directory.iterdir())
    assert good
    if world.rank == world.size - 1:
        max(step.state_tensors(), key=torch.Tensor.numel).view(-1)[3] = bad
    with pytest.raises(TrainingError, match="not finite at step 2, and are not saved"):
        saving.save(2, 2, 2, {})
    assert sorted(path.name for path in directory.iterdir()) == good


DEEPSPEED = {"ENGINE": "deepspeed", "CHECKPOINT_SHARDS": "1"}


@pytest.mark.parametrize(
    ("engine", "bad"),
    [
        pytest.param(REPLICATED, math.nan, id="replicated"),
        pytest.param(SHARDED, math.inf, id="sharded"),
        pytest.param(IN_SHARDS, -math.inf, id="in shards"),
        pytest.param(DEEPSPEED, math.nan, id="DeepSpeed", marks=pytest.mark.deepspeed),
    ],
)
def test_no_engine_saves_what_is_not_finite_on_a_rank_and_all_ranks_say_so(
    prepared, tmp_path, engine, bad
):
    run_ranks(_save_what_is_not_finite, 2, arguments=(prepared | engine, tmp_path, bad))


# The gradients of step 8 are no numbers; nothing else is due there.
NAN_AT_8 = """
from bert.training.loop import StepCounter
begun = StepCounter.begin
StepCounter.begin = lambda steps: begun(steps) * (float("nan") if steps.batches == 8 else 1)
"""


def test_a_run_whose_weights_break_between_reports_ends_at_the_checkpoint_and_keeps_the_good_ones(
    prepared, run_bert, tmp_path
):
    (tmp_path / "first.py").write_text(NAN_AT_8)
    settings = {"CHECKPOINT_DIR": tmp_path / "c", "CHECKPOINT_EVERY_STEPS": "3"}
    settings |= {"LOG_EVERY_STEPS": "10", "MAX_STEPS": "30"} | UNSAVED
    first = {"FIRST": tmp_path / "first.py"}
    finished = run_bert(prepared, 2, status=1, **settings, **first)
    said = "bert: error: weights or moments are not finite at step 9"
    assert said in finished.stderr.splitlines()[-1]
    assert [path.stem[-1] for path in saved_checkpoints(tmp_path / "c")] == ["3", "6"]
