"""The training run: initialise, start the clock, step and evaluate until the target or the end."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bert import checkpoint
from bert.config import Config
from bert.data.batch import Batch, make_batch
from bert.data.format import DataError
from bert.data.sampler import Sampler
from bert.data.synthetic import synthetic_records
from bert.data.training import TrainingData, open_source, row_sequences
from bert.dist import World
from bert.env import ConfigError
from bert.evaluate import Evaluator
from bert.kernels import select
from bert.mlperf import MlperfLog
from bert.model.bert import BertForPreTraining
from bert.model.init import initialize
from bert.optim.lamb import Lamb
from bert.precision import LossScaler, cast_with_masters
from bert.schedule import learning_rate
from bert.step import Step


class TrainingError(RuntimeError):
    """The run itself went wrong, such as a loss that is not a number."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What takes steps: the model, its optimizer and the loss scale."""

    model: BertForPreTraining
    optimizer: Lamb
    scaler: LossScaler
    step: Step


def train(config: Config, world: World, log: MlperfLog) -> bool:
    """Runs to the end; True when the target accuracy was reached. Every rank calls it with the same settings."""
    seed = world.broadcast_int(config.seed if config.seed is not None else int.from_bytes(os.urandom(4), "little"))
    log.submission()
    log.hyperparameters(config.hyperparameters(seed))
    trainer = build(config, world, seed)
    log.weights(name for name, _ in trainer.model.named_parameters())
    start_step, start_samples = resume(config, trainer, seed)
    if config.warm_up if config.warm_up is not None else world.device.type == "cuda":
        warm_up(config, trainer, world)
    world.barrier()
    log.run_start()  # the data set is first touched after this

    source = open_source(config.data, trainer.model.config.vocab_size)
    sampler = Sampler(source.row_counts(), config.data.rows_per_step, seed, world.rank, world.size)
    data = TrainingData(source, sampler, config.data, trainer.model.config.vocab_size, start_step + 1, pinned(world))
    progress = Progress(config, world, log, start_step, start_samples)
    evaluation = Evaluation(config, world, log, trainer.model, source.vocab_md5)
    reached = config.evaluate.initial and start_step == 0 and evaluation.run(0, progress)

    try:
        step = start_step
        while step < config.max_steps and not reached:
            step += 1
            batches = [batch.to(world.device) for batch in data.next_step()]
            torch.manual_seed(step_seed(seed, step, world.rank))  # dropout depends on the step, not on what ran before
            result = trainer.step(batches, learning_rate(step, config.schedule))
            progress.add(result.mlm_loss, result.nsp_loss, batches if result.updated else [])
            if step % config.log_every_steps == 0 or step == config.max_steps:
                progress.report(step)
            if step in config.evaluation_steps:
                reached = evaluation.run(step, progress)
            if config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0:
                save(config, trainer, world, seed, step, progress.samples())
    finally:
        data.close()
    log.run_stop(progress.samples(), config.evaluate.num_examples, reached)
    return reached


def build(config: Config, world: World, seed: int) -> Trainer:
    """The model with its first weights, and what trains it. Raises ConfigError for weights that do not fit."""
    model = BertForPreTraining(config.model, select(config.kernels, world.device))
    if config.checkpoint.init_checkpoint is not None:
        checkpoint.load_weights(model, config.checkpoint.init_checkpoint)
    else:
        initialize(model, seed)
    model.to(world.device)
    dtype = config.precision.dtype(world.device)
    masters = cast_with_masters(model, dtype)
    optimizer = Lamb(model.named_parameters(), config.optim.lamb, masters)
    scaler = LossScaler(config.precision, dtype)
    return Trainer(
        model=model, optimizer=optimizer, scaler=scaler, step=Step(model, optimizer, config.optim, scaler, world)
    )


def pinned(world: World) -> Any:
    """What to do with a batch on the data thread: pin its memory where a GPU will copy it."""
    return Batch.pin_memory if world.device.type == "cuda" else lambda batch: batch


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of the dropout of one step on one rank: independent streams, and nothing to save in a checkpoint."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def warm_up(config: Config, trainer: Trainer, world: World) -> None:
    """Takes one step on made-up data, so that kernels, allocator and communicators are ready, and undoes it.

    Weights, moments, step count and loss scale are afterwards bit for bit what they were; steps seed their own RNG.
    """
    before = snapshot({"optimizer": trainer.optimizer.state_dict(), "scaler": trainer.scaler.state_dict()})
    size = config.data.batch_size
    records = synthetic_records(size, config.data.max_seq_length, config.model.vocab_size, config.data.packed, seed=0)
    rows = np.arange(min(size, records.num_rows))
    batch = make_batch(records, row_sequences(records, rows), config.data.max_seq_length).to(world.device)
    trainer.step([batch] * config.data.gradient_steps, 0.0)
    trainer.optimizer.zero_grad()
    trainer.optimizer.load_state_dict(before["optimizer"])
    trainer.scaler.load_state_dict(before["scaler"])


def snapshot(state: Any) -> Any:
    """A copy of nested dicts of tensors that later updates do not touch."""
    if isinstance(state, dict):
        return {key: snapshot(value) for key, value in state.items()}
    return state.detach().clone() if isinstance(state, Tensor) else state


def resume(config: Config, trainer: Trainer, seed: int) -> tuple[int, int]:
    """Restores the newest checkpoint where there is one: (steps, samples) done. Raises ConfigError where it differs."""
    state = checkpoint.newest(config.checkpoint)
    if state is None:
        return 0, 0
    for name, value in run_identity(config, seed).items():
        if state["run"].get(name) != value:
            raise ConfigError(
                f"RESUME=1: the checkpoint in {config.checkpoint.directory} is of a run with {name} "
                f"{state['run'].get(name)}, this one has {value}: use the same settings, or another CHECKPOINT_DIR"
            )
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scaler.load_state_dict(state["scaler"])
    return int(state["step"]), int(state["samples"])


def run_identity(config: Config, seed: int) -> dict[str, Any]:
    """What must not change between a run and its resumption, by the name of the variable."""
    return {
        "SEED": seed,
        "WORLD_SIZE": config.dist.world_size,
        "BATCHSIZE": config.data.batch_size,
        "GRADIENT_STEPS": config.data.gradient_steps,
        "PACKED": config.data.packed,
        "MAX_STEPS": config.schedule.max_steps,
        "BERT_CONFIG": repr(config.model),
    }


def save(config: Config, trainer: Trainer, world: World, seed: int, step: int, samples: int) -> None:
    """Writes a checkpoint from rank 0; the others wait, so that none runs ahead of an unsaved state."""
    optimizer_state = trainer.optimizer.state_dict()
    if world.is_main:
        state = {
            "model": optimizer_state["masters"],
            "optimizer": optimizer_state,
            "scaler": trainer.scaler.state_dict(),
            "step": step,
            "samples": samples,
            "run": run_identity(config, seed),
        }
        checkpoint.save(config.checkpoint, step, state)
    world.barrier()


class Progress:
    """Counts samples and losses and prints them at a low rate, so that the device is rarely waited for."""

    def __init__(self, config: Config, world: World, log: MlperfLog, step: int, samples: int) -> None:
        self.config, self.world, self.log = config, world, log
        self.first_step, self.resumed_samples = step, samples
        self.local_samples = 0
        self.started = self.span_started = time.monotonic()
        self.evaluation_seconds = self.span_evaluation_seconds = 0.0
        self.span_samples, self.span_steps = samples, 0
        self.losses = torch.zeros(2, device=world.device)

    def add(self, mlm_loss: Tensor, nsp_loss: Tensor, batches: list[Batch]) -> None:
        """Adds a step; an overflowed one (no batches) trained on nothing."""
        self.losses += torch.stack([mlm_loss, nsp_loss])
        self.span_steps += 1
        self.local_samples += sum(batch.num_sequences for batch in batches)

    def samples(self) -> int:
        """Sequences trained on by all ranks. A collective."""
        local = torch.tensor(self.local_samples, dtype=torch.int64, device=self.world.device)
        return self.resumed_samples + int(self.world.sum(local).item())

    def report(self, step: int) -> dict[str, float]:
        """Prints the line of the steps since the last one; returns its figures. A collective."""
        losses = self.world.sum(self.losses / (max(self.span_steps, 1) * self.world.size)).tolist()
        samples, now = self.samples(), time.monotonic()
        seconds = now - self.span_started - self.span_evaluation_seconds
        rate = (samples - self.span_samples) / max(seconds, 1e-9)
        per_step = (now - self.started - self.evaluation_seconds) / max(step - self.first_step, 1)
        lr = learning_rate(step, self.config.schedule)
        if self.world.is_main:
            remaining = per_step * (self.config.max_steps - step)
            print(
                f"step {step:>6}/{self.config.max_steps}  loss {sum(losses):.4f} (mlm {losses[0]:.4f}, "
                f"nsp {losses[1]:.4f})  lr {lr:.3e}  {rate:,.1f} sequences/s  ETA {clock(remaining)}",
                file=sys.stderr,
                flush=True,
            )
        if not math.isfinite(sum(losses)):
            raise TrainingError(f"the loss is {sum(losses)} at step {step}: lower LR, or look at the data")
        self.span_started, self.span_samples, self.span_steps = now, samples, 0
        self.span_evaluation_seconds = 0.0
        self.losses.zero_()
        return {"throughput": rate, "loss": sum(losses), "mlm_loss": losses[0], "nsp_loss": losses[1], "lr": lr}


class Evaluation:
    """Evaluates, logs, and says whether the target is reached. The data set is opened at the first one."""

    def __init__(self, config: Config, world: World, log: MlperfLog, model: BertForPreTraining, vocab_md5: str) -> None:
        self.config, self.world, self.log, self.model, self.vocab_md5 = config, world, log, model, vocab_md5
        self.evaluator: Evaluator | None = None

    def run(self, step: int, progress: Progress) -> bool:
        """One evaluation after ``step``. A collective."""
        if progress.span_steps:
            self.log.stats(progress.samples(), progress.report(step))
        samples, begin = progress.samples(), time.monotonic()
        self.log.eval_start(samples)
        if self.evaluator is None:
            model = self.model.config
            self.evaluator = Evaluator(
                self.config.evaluate, self.config.data.max_seq_length, model.vocab_size, self.vocab_md5, self.world
            )
        result = self.evaluator(self.model)
        self.log.eval_stop(samples, result.accuracy)
        seconds = time.monotonic() - begin
        progress.evaluation_seconds += seconds
        progress.span_evaluation_seconds += seconds
        reached = result.accuracy >= self.config.evaluate.target
        if self.world.is_main:
            outcome = "reached" if reached else f"{self.config.evaluate.target:.4f}"
            print(
                f"evaluation at step {step}, {samples:,} samples: accuracy {result.accuracy:.5f} (target {outcome}), "
                f"loss {result.mlm_loss:.4f}, {seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        return reached


def clock(seconds: float) -> str:
    """3725 -> 1:02:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


USER_ERRORS = (ConfigError, DataError)
