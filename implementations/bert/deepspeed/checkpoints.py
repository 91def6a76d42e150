"""CHECKPOINT_SHARDS=1 of DeepSpeed: a folder deepspeed_<step> in CHECKPOINT_DIR, one shard per rank.

Its engine writes DeepSpeed's usual files (``latest``, ``zero_to_fp32.py``, ``*_optim_states.pt``). bert.pt beside them
has the rest of the run's state, and the places of the parameters' parts in the shards. With it they are read by name,
for any number of ranks, stage and engine; tensors are assembled on access.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from bert.checkpoint import sums
from bert.checkpoint.sharded import assembled, num_bytes, prune
from bert.deepspeed.partitions import MASTERS, STEPS
from bert.deepspeed.step import DeepSpeedStep, load
from bert.training.stop import TrainingError
from common.env import ConfigError
from common.files import damage, has_no_room, is_full, name_folder, no_space, sync, whole_file

INDEX = "bert.pt"


def folders(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path.parent for path in directory.glob(f"deepspeed_*/{INDEX}"))


def save(
    trained: DeepSpeedStep, directory: Path, keep: int, step: int, facts: dict[str, Any]
) -> None:
    """Writes the folder of ``step`` whole or not at all, then removes all but the newest ``keep``. A collective.

    facts: other state for resuming. Raises TrainingError if it cannot be written.
    """
    state, world, name = trained.optimizer, trained.world, f"deepspeed_{step:010d}"
    partial = f".{name}.partial"
    try:
        if world.is_main:
            for left_over in directory.glob(".deepspeed_*.partial"):  # of a killed run
                shutil.rmtree(left_over, ignore_errors=True)
        world.barrier()
        # ``latest`` is written below, when the folder is whole.
        trained.engine.save_checkpoint(str(directory), tag=partial, save_latest=False)
        places = [
            [(s.parameter, s.begin, s.size, s.start) for s in shard.segments]
            for shard in state.update.shards()
        ]
        segments: list[Any] = [None] * world.size
        distributed.all_gather_object(segments, places)
        if world.is_main:
            checksums = {path.name: sums.sum_of(path) for path in _shards(directory / partial)}
            index = {
                "sums": checksums, "segments": segments,
                "shapes": {name: tuple(shape) for name, shape in state.shapes.items()},
                "parts": state.update.parts(), "num_steps": state.num_steps(), "scaler": trained.scaler.state_dict(),
            }  # fmt: skip
            # Last: a folder without it is no checkpoint (see ``folders``).
            torch.save({**facts, **index}, directory / partial / INDEX)
            # All data is on the disk before the folder is renamed, and before DeepSpeed's ``latest`` names it.
            for path in [*(directory / partial).iterdir(), directory / partial]:
                sync(path)
            name_folder(directory / partial, directory / name)
            with whole_file(directory / "latest") as latest:
                latest.write_text(name, encoding="utf-8")
            prune(directory, keep, step)
        world.barrier()
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        if is_full(error) or has_no_room(
            directory / partial / INDEX
        ):  # PyTorch's message does not tell
            megabytes = num_bytes(dict(enumerate(trained.state_tensors()))) / 1e6
            error = no_space(directory, f"{name} needs {megabytes:,.1f} MB of each rank")
        reason = " ".join(str(error).split())[:500] + "; RESUME=1 continues from the one before"
        raise TrainingError(
            f"the checkpoint of step {step} cannot be written to {directory}: {reason}"
        ) from error


def check(folder: Path, rank: int, size: int) -> None:
    """Compares a rank's share of the files, every ``size``-th, with their checksums, before any is unpickled.

    Raises ChecksumError, or what zipfile and torch.load raise for a missing or damaged file.
    """
    sums.check(folder / INDEX)
    index = torch.load(folder / INDEX, map_location="cpu", weights_only=True)
    known = index.get("sums", {})
    for path in _shards(folder)[rank::size]:
        sums.check(path, known.get(path.name))


def read(folder: Path) -> dict[str, Any]:
    """The state as in our step_*.pt; its tensors are mappings that read on access.

    Raises ConfigError for a damaged one.
    """
    load(f"{folder} is a checkpoint of DeepSpeed's")
    try:
        index = torch.load(folder / INDEX, map_location="cpu", weights_only=True)
        shards = [_shard(folder, rank) for rank in range(len(index["segments"]))]
    except Exception as error:  # depends on the kind of damage
        raise unreadable(folder, error) from None
    names = list(index["shapes"])
    held = [
        (
            dict(zip(flats, parts, strict=True)),
            [(names[number], start, a, size) for number, a, size, start in segments],
        )
        for flats, partitions in zip(shards, index["segments"], strict=True)
        for parts, segments in zip(zip(*flats.values(), strict=True), partitions, strict=True)
    ]
    optimizer = assembled(index, held)
    ours = {"sums", "segments", "shapes", "parts", "num_steps"}
    facts = {key: index[key] for key in index.keys() - ours}
    return {**facts, "optimizer": optimizer, "model": optimizer[MASTERS]}


def unreadable(folder: Path, error: Exception) -> ConfigError:
    """The error for a damaged checkpoint that a command was given."""
    return ConfigError(f"{folder}: damaged checkpoint ({damage(error)}): give another")


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*_optim_states.pt"))


def _shard(folder: Path, rank: int) -> dict[str, list[Tensor]]:
    """Masters and states of a rank, one flat tensor per partition."""
    # The star, as with bf16 DeepSpeed begins the names with bf16_.
    (path,) = folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    # Not weights_only, since DeepSpeed pickles its own objects: such a file must be trusted like code.
    saved = torch.load(path, map_location="cpu", weights_only=False, mmap=True)[
        "optimizer_state_dict"
    ]
    # Stage 3 writes fp32_flat_groups, stages 1 and 2 other keys.
    masters = (
        saved["fp32_flat_groups"]
        if "fp32_flat_groups" in saved
        else saved["single_partition_of_fp32_groups"]
    )
    states = saved[
        "optimizer_state_dict" if "fp32_flat_groups" in saved else "base_optimizer_state"
    ]["state"]
    found = {MASTERS: [master.detach() for master in masters]}
    for number in sorted(states):
        for name, flat in states[number].items():
            # The step count is in the index already.
            if name != STEPS:
                found.setdefault(name, []).append(flat)
    return found
