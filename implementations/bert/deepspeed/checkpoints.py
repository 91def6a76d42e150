"""DEEPSPEED_CHECKPOINTS=1: CHECKPOINT_DIR/global_step<step>, as DeepSpeed's engine writes it.

``latest`` and ``zero_to_fp32.py`` beside it are DeepSpeed's, too. index.pt in the folder is ours:
the rest of the run's state, checksums, and where the parameters lie in the ranks' parts, by which
any number of ranks and either engine read it (checkpoint/sharded.py).
"""

import shutil
from pathlib import Path
from typing import Any

from bert.checkpoint import deepspeed_files, sharded, sums
from bert.deepspeed.step import DeepSpeedStep
from common.files import name_folder, sync, whole_file
from common.process import one_line


def save(
    trained: DeepSpeedStep,
    directory: Path,
    step: int,
    token: int,
    facts: dict[str, Any],
    keep: int,
) -> str:
    """Writes the folder whole or not at all, then removes all but the newest ``keep``; returns, on
    every rank, why it cannot. A collective.
    """
    world, engine = trained.world, trained.engine
    name = f"global_step{step}"
    hidden = directory / f".{name}.{token:016x}"

    def agreed(act: Any) -> str:
        reason = ""
        try:
            act()
        except Exception as error:  # torch.save reports a full disk as a RuntimeError
            reason = one_line(f"rank {world.rank}: {error}")
        return world.first_text(reason)

    def write() -> None:
        # A resumed engine counts from 0.
        engine.global_steps = step
        try:
            # DeepSpeed's ``latest`` is written below, when the folder is whole.
            engine.save_checkpoint(str(directory), tag=hidden.name, save_latest=False)
        except Exception:
            world.barrier()  # the one at its end, where the other ranks wait
            raise

    reason = agreed(lambda: hidden.mkdir(parents=True, exist_ok=True)) or agreed(write)
    shards = world.objects(trained.optimizer.shard_state()["segments"])

    def complete() -> None:
        if not world.is_main:
            return
        files = deepspeed_files.rank_files(hidden, world.size)
        known = {path.name: sums.sum_of(path) for path in files}
        known[deepspeed_files.MODEL] = sums.sum_of(hidden / deepspeed_files.MODEL)
        places = {"sums": known, "token": token, "num_ranks": world.size}
        sharded.save(hidden / sharded.INDEX, {**facts, **places, "segments": shards})
        for path in [*hidden.iterdir(), hidden]:
            sync(path)
        name_folder(hidden, directory / name)
        with whole_file(directory / "latest") as latest:
            latest.write_text(name, encoding="utf-8")
        sharded.prune(directory, keep, step)

    reason = reason or agreed(complete)
    if reason and world.is_main:
        shutil.rmtree(hidden, ignore_errors=True)
    return reason
