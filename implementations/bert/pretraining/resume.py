"""Resuming: what is saved, what must stay the same, and the warm start."""

import dataclasses
import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bert.checkpoint import save, sharded, weights
from bert.checkpoint.save import CheckpointConfig, Writer, read_checkpoint
from bert.core import rundir
from bert.core.claim import check_held
from bert.core.dist import World
from bert.data.sampler import RowSource
from bert.deepspeed import checkpoints
from bert.deepspeed.step import DeepSpeedStep
from bert.kernels.precision import resolved
from bert.pretraining.config import PretrainingConfig
from bert.training.step import Step, check_finite, is_finite
from common.env import ConfigError, settings
from common.files import damage, object_of

Trainer = Step | DeepSpeedStep  # a training step and its state, whatever the engine

# May change where their product, a step's rows, does not.
_ROWS = "WORLD_SIZE", "BATCHSIZE", "GRADIENT_STEPS"
# What a resumed run may change; all other variables must stay (``run_identity``). How work is
# divided and computed: losses then differ by rounding and by dropout's random numbers.
ROUNDING = {
    "DEVICE",
    "FUSED",
    "ATTENTION",
    "CUDA_GRAPH",
    "RECOMPUTE_LAYERS",
    "SHARD_OPTIMIZER",
    "SHARD_GROUP",
    "ENGINE",
    *_ROWS,
}
# Output, length and evaluation of a run, machine and log, which do not affect its weights.
FREE = rundir.OUTPUT | {
    "DATA_LOADER",
    "NUM_EVAL_EXAMPLES",
    "EVAL_BATCHSIZE",
    "INIT_OPTIMIZER",
    "EVAL_ITER_START_SAMPLES",
    "EVAL_ITER_SAMPLES",
    "TARGET_MLM_ACCURACY",
    "MAX_STEPS",
    "MAX_SAMPLES_TERMINATION",
    "REHEARSAL",
    "SUSTAINED_TRAINING_TIME",
    "SUBMISSION_DIVISION",
    "SUBMISSION_ORG",
    "SUBMISSION_PLATFORM",
    "SUBMISSION_STATUS",
    "DGXSYSTEM",
    "DGXNNODES",
}


def newest(config: PretrainingConfig, world: World) -> dict[str, Any] | None:
    """What the run continues from: the newest checkpoint in its folder; None: it starts anew.

    Without RESUME=1 only a restart of the very same run finds one there. Raises ConfigError, on
    every rank, for a damaged checkpoint, and for one of another run without RESUME=1. A collective.
    """
    directory, problem, saved = config.checkpoint.directory, "", None
    checkpoints = sharded.complete(directory) if directory is not None else []
    if (
        checkpoints
        and world.is_main  # another node may not share RUN_DIR
        and not config.checkpoint.resume
        and not is_own(config, checkpoints[-1])
    ):
        problem = str(save.foreign(checkpoints[-1], not config.mlperf.is_closed))
    elif is_repeated(config):
        checkpoints = []  # what the attempt before saved is written over
    if checkpoints and not problem:
        try:
            saved = _read(checkpoints[-1], world)
        except Exception as error:
            damaged = save.damaged(checkpoints[-1], error)
            problem = str(error if isinstance(error, ConfigError) else damaged)
    # Folders may differ: a rank that stopped alone would leave the rest in a collective.
    if problem := world.first_text(problem):
        raise ConfigError(problem)
    return saved


def _read(path: Path, world: World) -> dict[str, Any]:
    """A checkpoint that is as it was written; of a sharded one each rank compares its share."""
    file = path / sharded.INDEX if path.is_dir() else path
    save.check_checkpoint(file, world.rank, world.size)
    saved: dict[str, Any] = read_checkpoint(file)
    return saved


def is_own(config: PretrainingConfig, path: Path) -> bool:
    """Whether a checkpoint is of this very run, which was interrupted: as after a restart by the
    launcher.
    """
    index = path / sharded.INDEX if path.is_dir() else path
    try:
        # Mapped, as only the small entries are looked at.
        saved = torch.load(index, map_location="cpu", weights_only=True, mmap=True)
        result = f"result_{config.run.trial}.txt"
        if not config.run.has_begun(path.parent) or (
            saved["ended"] and config.run.has_left(result)
        ):
            return False
        check_identity(config, pick_seed(config.seed, saved), saved)
    except Exception:  # damaged, of an earlier version, or of another run
        return False
    return True


def is_repeated(config: PretrainingConfig) -> bool:
    """Whether a restart is a new run: the closed division's is timed from its start."""
    return config.mlperf.is_closed and not config.checkpoint.resume


def has_whole_clock(config: PretrainingConfig, saved: dict[str, Any] | None) -> bool:
    """Whether the time of this trial begins now: this is its first start, or a new run."""
    return saved is None and (
        is_repeated(config) or not config.run.has_begun(config.checkpoint.directory)
    )


def pick_seed(seed: int | None, saved: dict[str, Any] | None) -> int:
    """SEED; unset: the resumed run's, or one from the system."""
    if seed is not None:
        return seed
    # 32 bits from the system: the rules want seeds from the clock or the system.
    return (
        int(saved["run"]["SEED"]) if saved else int.from_bytes(os.urandom(4), "little")
    )


def restore(
    config: PretrainingConfig,
    step: Trainer,
    seed: int,
    saved: dict[str, Any] | None,
    first_weights: int = 0,
) -> tuple[int, int, int]:
    """Restores a checkpoint, if any: (steps, batches, samples) done. Raises ConfigError if it is of
    another run.

    first_weights: checksum of the weights that this run would start from.
    """
    if saved is None:
        return 0, 0, 0
    changed = check_identity(config, seed, saved)
    check_first_weights(config, first_weights)
    if changed and config.dist.rank == 0:
        print(f"bert: RESUME=1 with {changed}", file=sys.stderr, flush=True)
    step.load_state_dict(saved)
    return int(saved["step"]), int(saved["batches"]), int(saved["samples"])


def check_first_weights(config: PretrainingConfig, first_weights: int) -> None:
    """Raises ConfigError if INIT_CHECKPOINT are other weights than the run in CHECKPOINT_DIR began
    with.
    """
    path, folder = config.checkpoint.init_checkpoint, config.checkpoint.directory
    noted = object_of(folder / rundir.OWNER) if folder else {}
    # Settings leave paths out, as they may move: the checksum tells that the weights are the same.
    if path is not None and noted.get("first_weights", first_weights) != first_weights:
        where = f"the checkpoint in CHECKPOINT_DIR={folder}"
        cure = "give those it started from, or another CHECKPOINT_DIR"
        raise ConfigError(
            f"{where} is of a run from other weights than INIT_CHECKPOINT={path}: {cure}"
        )


def check_identity(
    config: PretrainingConfig, seed: int, saved: Mapping[str, Any]
) -> str:
    """Raises ConfigError if the saved run is another one; describes changes of ROUNDING."""
    mine = run_identity(config, seed)
    before = saved["run"]
    # Rows depend on step and rank alone, and no micro-batch of a rank is clipped by itself.
    can_move = not config.data.for_unpacked and config.optim.clip == "after"
    rows, rows_before = (
        math.prod(identity[name] for name in _ROWS) for identity in (mine, before)
    )
    for name, value in mine.items():
        if before.get(name) == value or (
            name in _ROWS and can_move and rows == rows_before
        ):
            continue
        cure = "use the same settings"
        if name in _ROWS and can_move:
            cure = f"{' x '.join(_ROWS)} must stay {rows_before}, and is {rows}: change another of them"
        differs = f"is of a run with {name} {before.get(name)}, this one has {value}"
        cure += ", or use another CHECKPOINT_DIR"
        raise ConfigError(
            f"RESUME=1: the checkpoint in {config.checkpoint.directory} {differs}: {cure}"
        )
    if gone := sorted(before.keys() - mine.keys()):
        differs = f"is of an earlier version, with the setting {gone[0]}, which is gone"
        cure = "use it as INIT_CHECKPOINT, or continue with the version that wrote it"
        raise ConfigError(
            f"RESUME=1: the checkpoint in {config.checkpoint.directory} {differs}: {cure}"
        )
    now = _computed(config)
    earlier = saved["computed"] | {name: before[name] for name in _ROWS}
    changed = [
        f"{name} {earlier.get(name)} -> {value}"
        for name, value in now.items()
        if earlier.get(name) != value
    ]
    if not changed:
        return ""
    cause = "rounding, and by what dropout draws"
    if earlier["BATCHSIZE"] != now["BATCHSIZE"]:
        # A micro-batch's loss is the mean over its own masked tokens, whose number differs.
        cause = f"the weight of each token in its micro-batch, more than by {cause}"
    return f"{', '.join(changed)}: losses differ by {cause}"


def _computed(config: PretrainingConfig) -> dict[str, Any]:
    return {name: value for name, value in settings(config).items() if name in ROUNDING}


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


def run_identity(config: PretrainingConfig, seed: int) -> dict[str, Any]:
    """What must not change between a run and its resumption, by variable."""
    others = ROUNDING.difference(_ROWS) | FREE | {"LR_DECAY_STEPS"}
    kept = {
        name: value for name, value in settings(config).items() if name not in others
    }
    return {
        **kept,
        "SEED": seed,
        "MASKING": None if config.data.masking == "static" else config.data.masking,
        "PRECISION": resolved(config.precision.precision, config.device),
        # The run may become longer if the schedule's length is set separately.
        "LR_DECAY_STEPS"
        if config.schedule.decay_steps
        else "MAX_STEPS": config.schedule.length,
        "BERT_CONFIG": config.model.identity,
    }


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
        problem = f"the checkpoint in {config.directory} is of a run on other training data, {differs}"
        raise ConfigError(
            f"RESUME=1: {problem}: use the same data, or another CHECKPOINT_DIR"
        )


def data_digest(identity: Mapping[str, Any]) -> str:
    """Digest of all files, by ``RowSource.identity``."""
    return hashlib.md5(json.dumps(identity).encode()).hexdigest()


def check_restored(trained: Trainer, world: World, path: Path | None) -> None:
    """Raises ConfigError, on every rank, if the weights or moments read are not finite. A
    collective.
    """
    if isinstance(trained, Step):
        trained.optimizer.gather()
    if not is_finite(trained.state_tensors(), world):
        cure = "start from others, or remove the newest checkpoint to resume from the one before"
        raise ConfigError(
            f"{path} holds weights or moments that are NaN or infinite: {cure}"
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


class Saver:
    """Saves the state of a run on a thread, from rank 0 or in shards; training only waits for a
    copy.
    """

    def __init__(
        self,
        config: PretrainingConfig,
        trained: Trainer,
        world: World,
        seed: int,
        data: RowSource,
        shard_order: tuple[int, int],
        first_weights: int = 0,
    ) -> None:
        """data: what is trained on; shard_order: see Sampler; first_weights: checksum of those of
        step 0.
        """
        self.config, self.trained, self.world = config, trained, world
        self.writer = Writer(config.checkpoint)
        self.facts = {  # equal in all checkpoints of the run
            "row_counts": data.row_counts().tolist(), "vocab_md5": data.vocab_md5,
            "data_digest": data_digest(data.identity()), "computed": _computed(config), "dealt": shard_order,
            "bert_config": dataclasses.asdict(config.model), "run": run_identity(config, seed),
        }  # fmt: skip
        if world.is_main and (folder := config.checkpoint.directory) is not None:
            # The claim on the folder is held: nobody else can be writing these.
            sharded.remove_unfinished(folder)
            folder.mkdir(parents=True, exist_ok=True)
            known = {name: self.facts[name] for name in ("run", "data_digest")}
            config.run.own(folder, **known, first_weights=first_weights)

    def save(self, step: int, batches: int, samples: int, ended: bool = False) -> None:
        """Starts writing a checkpoint. ``ended``: the run is over. A collective.

        Raises TrainingError for a state that is not finite.
        """
        config, world = self.config.checkpoint, self.world
        if world.is_main:
            # A process that was taken for dead must not write over its successor's checkpoints.
            check_held()
        # A broken state must not push out the last sound one, of which only a few are kept.
        check_finite(self.trained.state_tensors(), world, step)
        facts = {
            "step": step,
            "batches": batches,
            "samples": samples,
            "ended": ended,
            **self.facts,
        }
        # 7 bytes: broadcast_int takes 63 bits.
        token = world.broadcast_int(int.from_bytes(os.urandom(7), "little"))
        if self.config.zero.own_checkpoints and isinstance(self.trained, DeepSpeedStep):
            assert config.directory is not None
            facts |= self.trained.shard_state()[1]
            saved = step, token, facts, config.keep
            why = checkpoints.save(self.trained, config.directory, *saved)
            self.writer.note(step, OSError(why) if why else None, says=world.is_main)
        elif config.shards:
            shard, index = self.trained.shard_state()
            part = sharded.Part(
                rank=world.rank,
                num_ranks=world.size,
                token=token,
                abandoned=self.writer.abandoned,
            )
            self.writer.start(step, {"shard": shard, "index": index | facts}, part)
        else:
            state = self.trained.state_dict()
            if world.is_main:
                self.writer.start(
                    step, state | facts | {"model": state["optimizer"]["masters"]}
                )

    def finish(self) -> str:
        """Waits for the last checkpoint; returns why it was not written, on every rank; empty if
        it was. A collective.
        """
        self.writer.wait()
        error = self.writer.error
        # An error without words has a name.
        return self.world.first_text("" if error is None else str(error) or repr(error))


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
        expected = "expected a step_*.pt of this trainer, or set INIT_OPTIMIZER=0"
        raise ConfigError(
            f"INIT_OPTIMIZER=1: {path} holds no optimizer state: {expected}"
        )
    trained_with = saved.get("run", {}).get("OPTIMIZER")
    if trained_with != optimizer:
        differs = f"is of OPTIMIZER={trained_with}, this run has {optimizer}"
        raise ConfigError(
            f"INIT_OPTIMIZER=1: {path} {differs}: use the same, or INIT_OPTIMIZER=0"
        )
    if "others" in state:
        counts = (
            f"OPTIMIZER={optimizer} counts its own steps, which would not begin anew"
        )
        raise ConfigError(f"INIT_OPTIMIZER=1: {counts}: set INIT_OPTIMIZER=0")
    for part, tensors in state.items():
        if isinstance(tensors, Mapping) and (wrong := weights.misfits(shapes, tensors)):
            some = "; ".join(wrong[:3]) + (
                f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            )
            raise ConfigError(
                f"INIT_OPTIMIZER=1: {part} of {path} do not fit BERT_CONFIG: {some}"
            )
    # Bias correction begins anew, as the schedule does.
    return {**state, "num_steps": 0}
