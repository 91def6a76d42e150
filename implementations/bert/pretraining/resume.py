"""Going on from a checkpoint: what is saved, and what must be the same in the run that resumes."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from typing import Any

import numpy as np
import torch

from bert.checkpoint.save import Config as CheckpointConfig
from bert.checkpoint.save import Writer, load_newest, saved_checkpoints, step_path
from bert.checkpoint.sharded import Part
from bert.checkpoint.weights import check_vocabulary, checksum_of
from bert.core.dist import World
from bert.core.env import ConfigError
from bert.data.sampler import RowSource
from bert.deepspeed import checkpoints as zero_checkpoints
from bert.deepspeed.step import DeepSpeedStep
from bert.kernels.precision import resolved
from bert.pretraining.config import Config
from bert.training.step import Step, Trainer


def newest(config: CheckpointConfig) -> dict[str, Any] | None:
    """The state in the newest checkpoint, ours or DeepSpeed's, or None. Raises ConfigError for one that is damaged."""
    if config.directory is not None and config.resume:
        ours = saved_checkpoints(config.directory)
        theirs = zero_checkpoints.folders(config.directory)
        last = step_path(ours[-1]).stem.rpartition("_")[2] if ours else ""
        if theirs and theirs[-1].name.rpartition("_")[2] > last:
            return zero_checkpoints.read(theirs[-1], "remove it to resume from the one before")
    return load_newest(config)


def pick_seed(config: Config, saved: dict[str, Any] | None) -> int:
    """SEED; unset: that of the run which is resumed, or one from the system."""
    if config.seed is not None:
        return config.seed
    return int(saved["run"]["SEED"]) if saved else int.from_bytes(os.urandom(4), "little")


def restore(config: Config, step: Trainer, seed: int, saved: dict[str, Any] | None) -> tuple[int, int, int]:
    """Restores a checkpoint where there is one: (steps, batches, samples) done. Raises ConfigError where it differs."""
    if saved is None:
        return 0, 0, 0
    _check_run(config, run_identity(config, seed), saved["run"])
    step.load_state_dict(saved)
    return int(saved["step"]), int(saved["batches"]), int(saved["samples"])


_ROWS = ("WORLD_SIZE", "BATCHSIZE", "GRADIENT_STEPS")  # may change where their product, a step's rows, does not


def _check_run(config: Config, mine: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises ConfigError where the run that was saved is not this one."""
    can_move = config.data.batching == "rows" and config.data.exchange_group == 1  # by step and rank alone
    rows, rows_before = (math.prod(identity.get(name, 0) for name in _ROWS) for identity in (mine, saved))
    # Earlier versions saved the word auto itself.
    saved = saved | {"PRECISION": resolved(saved["PRECISION"], config.device)}
    for name, value in mine.items():
        if saved.get(name) == value or (name in _ROWS and can_move and rows == rows_before):
            continue
        cure = "use the same settings"
        if name in _ROWS and can_move:
            cure = f"{' x '.join(_ROWS)} must stay {rows_before}, and is {rows}: change another of them"
        raise ConfigError(
            f"RESUME=1: the checkpoint in {config.checkpoint.directory} is of a run with {name} "
            f"{saved.get(name)}, this one has {value}: {cure}, or use another CHECKPOINT_DIR"
        )


def shard_order(config: Config, saved: dict[str, Any] | None) -> tuple[int, int]:
    """(ranks, rows of each in a step) by which rows go to ranks: those of the run that was the first of this one."""
    if saved is None:
        return config.dist.world_size, config.data.rows_per_step
    ranks, rows, steps = (saved["run"][name] for name in _ROWS)
    return saved.get("dealt", (ranks, rows * steps))


def run_identity(config: Config, seed: int) -> dict[str, Any]:
    """What must not change between a run and its resumption, by the name of the variable."""
    data = config.data
    return {
        "SEED": seed,
        "WORLD_SIZE": config.dist.world_size,
        "BATCHSIZE": data.batch_size,
        "GRADIENT_STEPS": data.gradient_steps,
        "PACKED": data.packed,
        "MAX_SEQ_LENGTH": data.max_seq_length,
        "BATCHING": data.batching,
        "MAX_SEQUENCES_PER_ROW": data.max_sequences_per_row,
        "ONLINE_BUFFER": data.online_buffer,
        "BIN_COUNTS": data.bin_counts,
        "EXCHANGE_GROUP": data.exchange_group,
        "MASKING": None if data.masking == "static" else data.masking,
        "OPTIMIZER": config.optim.optimizer,
        "CLIP": config.optim.clip,
        "PRECISION": resolved(config.precision.precision, config.device),
        "FP8_RECIPE": config.precision.fp8_recipe if config.precision.precision == "fp8" else None,
        # None where earlier versions, which had no such setting, did the same.
        "FP8_FAST_SUMS": config.precision.fp8_fast_sums if config.precision.fp8_fast_sums != "forward" else None,
        "FP8_OUTPUT_PROJECTION": int(config.numerics.fp8 is not None and config.numerics.fp8.output_projection) or None,
        # The run may become longer where the schedule's length is given apart.
        "LR_DECAY_STEPS" if config.schedule.decay_steps else "MAX_STEPS": config.schedule.length,
        "BERT_CONFIG": config.model.identity,
    }


def check_data(config: Config, saved: dict[str, Any] | None, row_counts: np.ndarray, vocab_md5: str) -> None:
    """Raises ConfigError where the rows, or their vocabulary, are not those that the weights were trained on."""
    check_vocabulary(config.checkpoint.init_checkpoint, vocab_md5)
    if saved is not None and saved["row_counts"] != row_counts.tolist():
        raise ConfigError(
            f"RESUME=1: the checkpoint in {config.checkpoint.directory} is of a run on other training data, "
            f"{sum(saved['row_counts']):,} rows in {len(saved['row_counts'])} files, this one has "
            f"{int(row_counts.sum()):,} in {len(row_counts)}: use the same data, or another CHECKPOINT_DIR"
        )


def check_weights(config: Config, world: World, checksum: int) -> None:
    """Raises ConfigError, on every rank, where a rank begins with other weights than most. A collective.

    checksum: of this rank's weights.
    """
    mine = torch.tensor([checksum], dtype=torch.int64, device=world.device)
    everyones = mine.repeat(world.size)
    if work := world.all_gather(everyones, mine):
        work.wait()
    checksums = everyones.tolist()
    (most, _), *others = Counter(checksums).most_common()
    if others:
        odd = [f"rank {rank} ({value:08x})" for rank, value in enumerate(checksums) if value != most]
        path = config.checkpoint.directory if config.checkpoint.resume else config.checkpoint.init_checkpoint
        raise ConfigError(
            f"weights differ between ranks: {', '.join(odd)} against {most:08x} of the others: is {path} the same "
            "on every node?"
        )


def saved_checksum(saved: dict[str, Any] | None) -> int:
    """Of the weights in a checkpoint; of one in shards, which nobody reads whole, its token."""
    if saved is None:
        return 0
    return int(saved["token"]) if "token" in saved else checksum_of(saved["model"])


class Saver:
    """Saves the state of a run on a thread, from rank 0, or each rank its part; the steps wait for a copy only."""

    def __init__(
        self, config: Config, trained: Trainer, world: World, seed: int, data: RowSource, shard_order: tuple[int, int]
    ) -> None:
        """data: what is trained on; shard_order: see Sampler."""
        self.config, self.trained, self.world, self.seed = config, trained, world, seed
        self.data, self.shard_order = data, shard_order
        self.writer = Writer(config.checkpoint)

    def save(self, step: int, batches: int, samples: int, ended: bool = False) -> None:
        """Begins to write a checkpoint of what was done so far. ``ended``: the run is over. A collective."""
        facts: dict[str, Any] = {"step": step, "batches": batches, "samples": samples, "ended": ended}
        facts["dealt"] = self.shard_order
        facts |= {"row_counts": self.data.row_counts().tolist(), "vocab_md5": self.data.vocab_md5}
        facts |= {"bert_config": dataclasses.asdict(self.config.model), "run": run_identity(self.config, self.seed)}
        if self.config.checkpoint.shards:
            token = self.world.broadcast_int(int.from_bytes(os.urandom(7), "little"))
            assert isinstance(self.trained, Step)
            shard, index = self.trained.shard_state()
            part = Part(rank=self.world.rank, num_ranks=self.world.size, token=token, abandoned=self.writer.abandoned)
            self.writer.start(step, {"shard": shard, "index": index | facts}, part)
            return
        if self.config.zero.checkpoints and isinstance(self.trained, DeepSpeedStep):
            settings = self.config.checkpoint
            assert settings.directory is not None
            zero_checkpoints.save(self.trained, settings.directory, settings.keep, step, facts)
            return
        state = self.trained.state_dict()
        if self.world.is_main:
            self.writer.start(step, state | facts | {"model": state["optimizer"]["masters"]})

    def finish(self) -> bool:
        """Waits for the last checkpoint; whether it was written, on every rank. A collective."""
        self.writer.wait()
        return not self.world.any(self.writer.error is not None)
