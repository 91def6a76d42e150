"""Resuming: what a run continues from, whether that fits, and the warm start."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from bert.checkpoint import save, sharded, weights
from bert.checkpoint.save import CheckpointConfig, read_checkpoint
from bert.core import rundir
from bert.core.dist import World
from bert.data.sampler import RowSource
from bert.pretraining.config import PretrainingConfig
from bert.pretraining.identity import (
    check_identity,
    data_digest,
    has_begun,
    pick_seed,
)
from bert.pretraining.saver import Trainer
from bert.training.step import Step, is_finite
from common.env import ConfigError
from common.files import damage
from common.lists import first_few
from common.process import say


def newest(config: PretrainingConfig, world: World) -> dict[str, Any] | None:
    """What the run continues from: the newest checkpoint in its folder; None: it starts anew.

    Without RESUME=1 only a restart of the very same run finds one there. Raises ConfigError, on
    every rank, for a damaged checkpoint, and for one of another run without RESUME=1. A collective.
    """
    problem, saved = "", None
    if (last := config.checkpoint.newest) is not None:
        # Rank 0 says whose it is: another node may not share RUN_DIR.
        if world.is_main and not may_follow(config, last):
            problem = str(save.foreign(last, not config.mlperf.is_closed))
        elif not starts_over(config):
            try:
                saved = save.load(last, world.rank, world.size)
            except ConfigError as error:
                problem = str(error)
    # Folders may differ: a rank that stopped alone would leave the rest in a collective.
    if problem := world.first_text(problem):
        raise ConfigError(problem)
    return saved


def may_follow(config: PretrainingConfig, path: Path) -> bool:
    """Whether a run may go on after a checkpoint, or write over it: it was told to, or it is the
    very run that was interrupted there, and the launcher restarts it.
    """
    if config.checkpoint.resume:
        return True
    run = config.run
    try:
        saved = save.facts_of(path)
        if not run.owns(saved):
            return False
        check_identity(config, pick_seed(config.seed, saved), saved)
        # One that lost its result ends in the same way again.
        return not (saved["ended"] and run.has_left(f"result_{run.trial}.txt"))
    except Exception:  # damaged, of an earlier version, or of other settings
        return False


def starts_over(config: PretrainingConfig) -> bool:
    """Whether a restart begins at step 0 again: the closed division times a run from its start."""
    return config.mlperf.is_closed and not config.checkpoint.resume


def has_whole_clock(config: PretrainingConfig, saved: dict[str, Any] | None) -> bool:
    """Whether the time of this trial begins now: at step 0, with no time before that counts."""
    return saved is None and (starts_over(config) or not has_begun(config))


class Done(NamedTuple):
    """What was done before this process. ended: the run, which then lost its result; span: see
    Progress.span.
    """

    steps: int = 0
    batches: int = 0
    samples: int = 0
    ended: bool = False
    span: Mapping[str, Any] = MappingProxyType({})


def restore(
    config: PretrainingConfig,
    step: Trainer,
    seed: int,
    saved: dict[str, Any] | None,
    first_weights: int = 0,
) -> Done:
    """Restores a checkpoint, if any. Raises ConfigError if it is of another run.

    first_weights: checksum of the weights that this run would start from.
    """
    if saved is None:
        return Done()
    changed = check_identity(config, seed, saved)
    check_first_weights(config, saved, first_weights)
    if changed and config.dist.rank == 0:
        say(f"bert: RESUME=1 with {changed}")
    step.load_state_dict(saved)
    # Earlier versions noted no span.
    known = {name: saved[name] for name in Done._fields if name in saved}
    return Done(steps=saved["step"], **known)


def describe(config: PretrainingConfig, saved: dict[str, Any] | None) -> str:
    """Where a run begins that has a folder of checkpoints, and why; empty if that is plain."""
    folder, last = config.checkpoint.directory, config.max_steps
    if folder is None:
        return ""
    if saved is None:
        if config.checkpoint.resume:
            return f"RESUME=1: no checkpoint in CHECKPOINT_DIR={folder}: from the start, {last} steps"
        if starts_over(config) and sharded.complete(folder):
            return (
                f"a closed run is timed from its start: it replaces what {folder} holds"
            )
        return ""
    left = f"{max(0, last - saved['step'])} of {last} steps are left"
    if saved["ended"] and saved["step"] < last:
        left = "the run had ended there"
    return f"continues CHECKPOINT_DIR={folder} from step {saved['step']}: {left}"


def check_first_weights(
    config: PretrainingConfig, saved: Mapping[str, Any], first_weights: int
) -> None:
    """Raises ConfigError if INIT_CHECKPOINT are other weights than the saved run began with."""
    path, folder = config.checkpoint.init_checkpoint, config.checkpoint.directory
    noted = {**(save.noted_before(folder) if folder else {}), **saved}
    # Settings leave paths out, as they may move: the checksum tells that the weights are the same.
    if path is not None and noted.get("first_weights", first_weights) != first_weights:
        where = f"the checkpoint in CHECKPOINT_DIR={folder}"
        raise ConfigError(
            f"{where} is of a run from other weights than INIT_CHECKPOINT={path}: "
            "give those it started from, or another CHECKPOINT_DIR"
        )


def shard_order(
    config: PretrainingConfig, saved: dict[str, Any] | None
) -> tuple[int, int]:
    """(ranks, rows of each in a step) that determine which rows a rank gets: those of the original
    run.
    """
    if saved is None:
        return config.dist.world_size, config.data.rows_per_step
    # A run that has moved to other ranks keeps the order it began with.
    dealt: tuple[int, int] = saved["dealt"]
    return dealt


def check_data(
    config: CheckpointConfig, saved: dict[str, Any] | None, data: RowSource
) -> None:
    """Raises ConfigError if the rows, or their vocabulary, are not those the weights were trained
    on.
    """
    weights.check_vocabulary(config.init_checkpoint, data.vocab_md5)
    if saved is None:
        return
    row_counts, before = data.row_counts().tolist(), saved["row_counts"]
    if before != row_counts or saved["data_digest"] != data_digest(data.identity()):
        mine = f"{sum(row_counts):,} in {len(row_counts)}{' with other contents' if before == row_counts else ''}"
        differs = f"{sum(before):,} rows in {len(before)} files, this one has {mine}"
        raise ConfigError(
            f"RESUME=1: the checkpoint in {config.directory} is of a run on other training data, {differs}: "
            "use the same data, or another CHECKPOINT_DIR"
        )


def check_restored(trained: Trainer, world: World, path: Path | None) -> None:
    """Raises ConfigError, on every rank, if the weights or moments read are not finite. A
    collective.
    """
    if isinstance(trained, Step):
        trained.optimizer.gather()
    if not is_finite(trained.state_tensors(), world):
        raise ConfigError(
            f"{path} holds weights or moments that are NaN or infinite: "
            "start from others, or remove the newest checkpoint to resume from the one before"
        )


def check_ranks(
    config: PretrainingConfig, world: World, saved: dict[str, Any] | None
) -> None:
    """Raises ConfigError if a rank has other settings, code or checkpoint than most. A
    collective.
    """
    facts = rundir.shared_facts(config) | {"BERT_CONFIG": config.model}
    if saved is not None:  # a sharded one has a token
        facts["the newest checkpoint"] = saved.get("token") or weights.checksum_of(
            saved["model"]
        )
    facts["CHECKPOINT_DIR"] = "unset" if config.checkpoint.directory is None else "set"
    if config.zero.is_deepspeed:
        facts["DEEPSPEED_CONFIG"] = config.zero.json()
    world.agree(facts, "give all ranks the same settings, code and CHECKPOINT_DIR")


def check_weights(config: CheckpointConfig, world: World, checksum: int) -> None:
    """Raises ConfigError if a rank starts from other weights than most. checksum: of this rank's. A
    collective.
    """
    world.agree(
        {"weights": f"{checksum:08x}"},
        f"is INIT_CHECKPOINT={config.init_checkpoint} the same on every node?",
    )


def warm_start(
    path: Path, optimizer: str, shapes: Mapping[str, torch.Size]
) -> dict[str, Any]:
    """Optimizer state for a warm start: the moments of the previous phase of pretraining, steps
    counted from 0.

    path: a step_*.pt of this trainer; optimizer: this run's; shapes: of the model's parameters, by
    name. Raises ConfigError for another file, or another optimizer, vocabulary or shape.
    """
    try:
        saved = read_checkpoint(path, mmap=True)
    except Exception as error:  # a damaged file, or not PyTorch's
        raise ConfigError(
            f"INIT_OPTIMIZER=1: {path} is not a readable checkpoint ({damage(error)})"
        ) from None
    state = saved.get("optimizer") if isinstance(saved, Mapping) else None
    if not isinstance(state, Mapping) or "masters" not in state:
        raise ConfigError(
            f"INIT_OPTIMIZER=1: {path} holds no optimizer state: "
            "expected a step_*.pt of this trainer, or set INIT_OPTIMIZER=0"
        )
    trained_with = saved.get("run", {}).get("OPTIMIZER")
    if trained_with != optimizer:
        raise ConfigError(
            f"INIT_OPTIMIZER=1: {path} is of OPTIMIZER={trained_with}, this run has {optimizer}: "
            "use the same, or INIT_OPTIMIZER=0"
        )
    if "others" in state:
        raise ConfigError(
            f"INIT_OPTIMIZER=1: OPTIMIZER={optimizer} keeps states of its own, which would not begin anew: "
            "set INIT_OPTIMIZER=0"
        )
    for part, tensors in state.items():
        if isinstance(tensors, Mapping) and (wrong := weights.misfits(shapes, tensors)):
            raise ConfigError(
                f"INIT_OPTIMIZER=1: {part} of {path} do not fit BERT_CONFIG: {first_few(wrong)}"
            )
    # Bias correction begins anew, as the schedule does.
    return {**state, "num_steps": 0}
