"""Writing checkpoints: what is in them, and when they are whole."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert.checkpoint import sharded
from bert.checkpoint.save import Writer
from bert.core.claim import check_held
from bert.core.dist import World
from bert.data.sampler import RowSource
from bert.deepspeed import checkpoints
from bert.deepspeed.step import DeepSpeedStep
from bert.pretraining.config import PretrainingConfig
from bert.pretraining.identity import computed, data_digest, run_identity
from bert.training.step import Step, check_finite
from bert.training.stop import TrainingError

Trainer = Step | DeepSpeedStep  # a training step and its state, whatever the engine


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
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """data: what is trained on; shard_order: see Sampler; first_weights: checksum of those of
        step 0; saved: what the run continues from.
        """
        before = saved or {}
        self.best: float = before.get("best", -1.0)  # highest accuracy
        self.left_out: list[int] = list(before.get("left_out", []))  # batches
        self.config, self.trained, self.world = config, trained, world
        self.folder = config.checkpoint.directory or Path()
        self.writer = Writer(config.checkpoint)
        # Of this process, and it is not known yet whether it was written; None: before it.
        self.is_first: bool | None = None
        best = dataclasses.replace(
            config.checkpoint, directory=self.folder / "best", keep=1
        )
        self.best_writer = Writer(best)
        self.facts = {  # equal in all checkpoints of the run
            "row_counts": data.row_counts().tolist(), "vocab_md5": data.vocab_md5,
            "data_digest": data_digest(data.identity()), "computed": computed(config), "dealt": shard_order,
            "bert_config": dataclasses.asdict(config.model), "run": run_identity(config, seed),
            "first_weights": first_weights, **config.run.owner,
        }  # fmt: skip
        if world.is_main and (folder := config.checkpoint.directory) is not None:
            # The claim on the folder is held: nobody else can be writing these.
            sharded.remove_unfinished(folder)
            folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            # Other ranks may never write their parts: rank 0's thread must not wait for them.
            self.writer.abandoned.set()
            self.best_writer.abandoned.set()
        self.writer.wait()
        self.best_writer.wait()

    def save_best(self, step: int, batches: int, samples: int, accuracy: float) -> None:
        """``save`` of the state with the highest accuracy so far, apart from the others."""
        self.best = accuracy
        self.save(step, batches, samples, {}, writer=self.best_writer)

    def save(
        self,
        step: int,
        batches: int,
        samples: int,
        span: Mapping[str, Any],
        ended: bool = False,
        writer: Writer | None = None,
    ) -> None:
        """Starts writing a checkpoint. span: see Progress.span; ``ended``: the run is over. A
        collective.

        Raises TrainingError for a state that is not finite.
        """
        writer = writer or self.writer
        if writer is self.writer and self.is_first is None:
            self.is_first = True
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
            "span": dict(span),
            "best": self.best,
            "left_out": self.left_out,
            **self.facts,
        }
        # 7 bytes: broadcast_int takes 63 bits.
        token = world.broadcast_int(int.from_bytes(os.urandom(7), "little"))
        if self.config.zero.own_checkpoints and isinstance(self.trained, DeepSpeedStep):
            assert writer.config.directory is not None
            facts |= self.trained.shard_state()[1]
            given = writer.config.directory, step, token, facts, writer.config.keep
            why = checkpoints.save(self.trained, *given)
            writer.note(step, OSError(why) if why else None, says=world.is_main)
        elif config.shards:
            shard, index = self.trained.shard_state()
            part = sharded.Part(
                rank=world.rank,
                num_ranks=world.size,
                token=token,
                abandoned=writer.abandoned,
            )
            writer.start(step, {"shard": shard, "index": index | facts}, part)
        else:
            state = self.trained.state_dict()
            if world.is_main:
                writer.start(
                    step, state | facts | {"model": state["optimizer"]["masters"]}
                )

    def check_first(self) -> None:
        """Raises TrainingError, on every rank, if the first checkpoint was not written and none is
        there: all that is trained would be lost. A collective until that is known.
        """
        if not self.is_first:
            return
        # Rank 0's, as its thread ends last.
        writing, why = self.world.objects((self.writer.is_writing, self._why()))[0]
        self.is_first = writing
        if why and not writing:
            raise TrainingError(
                f"{self.folder} has no checkpoint, and the first cannot be written ({why}): "
                "make room, or give another CHECKPOINT_DIR"
            )

    def _why(self) -> str:
        """Why there is no checkpoint after a failed write; empty if there is one."""
        error = self.writer.error
        if error is None or sharded.complete(self.folder):
            return ""
        return str(error) or repr(error)

    def finish(self) -> str:
        """Waits for the last checkpoint; returns why it was not written, on every rank; empty if
        it was. A collective.
        """
        self.writer.wait()
        error = self.writer.error
        # An error without words has a name.
        return self.world.first_text("" if error is None else str(error) or repr(error))
