"""The training run: initialise, start the clock, step and evaluate until the target or the end."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bert import checkpoint, kernel_choice, resume, rundir
from bert.config import Config
from bert.data.batch import Batch, make_batch
from bert.data.records import DataError
from bert.data.sampler import Sampler
from bert.data.synthetic import synthetic_records
from bert.data.training import TrainingData, open_source, row_sequences
from bert.dist import World
from bert.env import ConfigError
from bert.evaluate import EvaluationGraph, Evaluator
from bert.graph import GraphedStep, graph_capacity, preserved, static_batch
from bert.kernels import select
from bert.mlperf import MlperfLog
from bert.model.bert import BertForPreTraining
from bert.model.init import initialize
from bert.precision import LossScaler
from bert.schedule import learning_rate
from bert.step import Step, StepResult, TrainingStep, build_step

MOST_OVERFLOWS = 50  # in a row: as many halvings bring every sensible loss scale to 1


class TrainingError(RuntimeError):
    """The run itself went wrong, such as a loss that is not a number."""


def train(config: Config, world: World, log: MlperfLog) -> bool:
    """Runs to the end; True when the target accuracy was reached. Every rank calls it with the same settings."""
    saved = checkpoint.newest(config.checkpoint)
    seed = world.broadcast_int(resume.pick_seed(config, saved))
    log.submission()
    log.hyperparameters(config.hyperparameters(seed))
    config = settle_kernels(config, world)
    model, eager = build(config, world, seed)
    log.weights(name for name, _ in model.named_parameters())
    start_step, start_batch, start_samples = resume.restore(config, eager, seed, saved)
    take_step, evaluation_graph = prepare(config, model, eager, world)
    world.barrier()
    log.run_start()  # the data set is first touched after this
    started = time.monotonic()

    source = open_source(config.data, model.config.vocab_size)
    resume.check_data(config, saved, source.row_counts())
    sampler = Sampler(source.row_counts(), config.data.rows_per_step, seed, world.rank, world.size)
    data = TrainingData(source, sampler, config.data, model.config.vocab_size, start_batch + 1, finisher(config, world))
    steps = Steps(config, eager.scaler, start_step, start_batch, world.device)
    progress = Progress(config, world, log, start_step, start_samples)
    evaluation = Evaluation(config, world, log, model, source.vocab_md5, evaluation_graph)
    reached = config.evaluate.initial and start_step == 0 and evaluation.run(0, progress)

    try:
        while steps.done < config.max_steps and not reached:
            batches, rate = data.next_step(), steps.begin()
            # Dropout depends on the batch, not on what ran before.
            torch.manual_seed(step_seed(seed, steps.batches, world.rank))
            progress.add(take_step(batches, rate), batches)
            if not steps.due() or not steps.settle():
                continue
            step = steps.done
            if step % config.log_every_steps == 0 or step == config.max_steps:
                progress.report(step)
            if step in steps.evaluations:
                eager.optimizer.gather()
                reached = evaluation.run(step, progress)
            if config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0 and not reached:
                place = {"step": step, "batches": steps.batches, "samples": progress.samples()}
                resume.save(config, eager, world, seed, place | {"row_counts": source.row_counts().tolist()})
        log.run_stop(progress.samples(), config.evaluate.num_examples, reached)
        if config.sustained_minutes:
            sustain(take_step, data, world, log, until=started + 60 * config.sustained_minutes)
    finally:
        data.close()
    return reached


def sustain(take_step: TrainingStep, data: TrainingData, world: World, log: MlperfLog, until: float) -> None:
    """Steps on with a learning rate of 0, the same work for a power meter, until the clock of every rank is past."""
    while world.any(time.monotonic() < until):
        for _ in range(10):  # the question of the time is a collective that waits for the device
            take_step(data.next_step(), 0.0)
    log.sustained_stop()


def settle_kernels(config: Config, world: World) -> Config:
    """With the attention backend named; says which, and leaves it in the run's folder. A collective."""
    choice, words = kernel_choice.choose(config, world)
    if world.is_main:
        if world.device.type == "cuda":
            print(f"attention: {words}", file=sys.stderr, flush=True)
        fused = sorted(choice.names(world.device))
        rundir.add_to_environment(config.run, {"attention": choice.attention, "fused": fused})
    return dataclasses.replace(config, kernels=choice)


def build(config: Config, world: World, seed: int) -> tuple[BertForPreTraining, Step]:
    """The model with its first weights, and what trains it. Raises ConfigError for weights that do not fit.

    ``config``: with the attention backend named.
    """
    model = BertForPreTraining(config.model, select(config.kernels, world.device))
    if config.checkpoint.init_checkpoint is not None:
        checkpoint.load_weights(model, config.checkpoint.init_checkpoint)
    else:
        initialize(model, seed)
    model.to(world.device)
    step = build_step(
        model,
        config.precision,
        config.optim,
        world,
        accumulate=config.data.gradient_steps > 1,
        fused_update="lamb" in config.kernels.names(world.device),
    )
    return model, step


def finisher(config: Config, world: World) -> Callable[[Batch], Batch]:
    """What the data thread does with a batch: fills it up for a graph, pins its memory where a GPU will copy it."""
    capacity = graph_capacity(config.data.capacity, config.data.batch_size)

    def finish(batch: Batch) -> Batch:
        if config.uses_graph:
            batch = static_batch(batch, capacity)
        return batch.pin_memory() if world.device.type == "cuda" else batch

    return finish


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of the dropout of one step on one rank: independent streams, and nothing to save in a checkpoint."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def prepare(
    config: Config, model: BertForPreTraining, step: Step, world: World
) -> tuple[TrainingStep, EvaluationGraph | None]:
    """Before the clock: takes steps on made-up data and undoes them, so that kernels, allocator and communicators are
    ready, and records the graphs.

    Weights, moments, step count, scales and random states are afterwards bit for bit what they were.
    """
    if not config.uses_graph:
        if config.warm_up if config.warm_up is not None else world.device.type == "cuda":
            calibrated = step.calibrated
            with preserved(step.state_tensors(), world.device):
                for _ in range(1 if calibrated else 2):  # the first fp8 step measures; others run other kernels
                    step(made_up_step(config, world), 0.0)
                step.optimizer.gather()
            step.optimizer.zero_grad()
            step.calibrated = calibrated
        return step, None
    graphed = GraphedStep(step, made_up_step(config, world))
    return graphed, EvaluationGraph(config.evaluate, config.data.max_seq_length, model, world.device)


def made_up_step(config: Config, world: World) -> list[Batch]:
    """Micro-batches of one step, as the data thread gives them."""
    size = config.data.batch_size
    records = synthetic_records(size, config.data.max_seq_length, config.model.vocab_size, config.data.packed, seed=0)
    rows = np.arange(min(size, records.num_rows))
    batch = make_batch(records, row_sequences(records, rows), config.data.max_seq_length)
    return [finisher(config, world)(batch)] * config.data.gradient_steps


class Steps:
    """Counts optimizer steps, and gives each its learning rate.

    With loss scaling, a batch whose gradient overflows makes no step. Only the device knows, so the rate is computed
    there, and ``done`` runs ahead of the truth until something is due, where the host waits for the device anyway.
    """

    def __init__(self, config: Config, scaler: LossScaler, done: int, batches: int, device: torch.device) -> None:
        self.config, self.scaler, self.done, self.batches = config, scaler, done, batches
        self.evaluations = config.evaluation_steps
        self.settled, self.settled_batches = done, batches
        self.rates: Tensor | None = None
        if scaler.enabled:
            rates = [learning_rate(step, config.schedule) for step in range(1, config.max_steps + 1)]
            self.rates = torch.tensor(rates, dtype=torch.float32, device=device)

    def begin(self) -> float | Tensor:
        """Begins a step; returns its learning rate."""
        self.done += 1
        self.batches += 1
        if self.rates is None:
            return learning_rate(self.done, self.config.schedule)
        return torch.take(self.rates, self.batches - 1 - self.scaler.num_skipped_steps)

    def due(self) -> bool:
        """Whether something comes after this step: a report, an evaluation, a checkpoint, the end."""
        step, every = self.done, self.config.checkpoint.every_steps
        reported = step % self.config.log_every_steps == 0 or step >= self.config.max_steps
        return reported or step in self.evaluations or (every > 0 and step % every == 0)

    def settle(self) -> bool:
        """Brings ``done`` to the truth; False where overflows have put off what is due. Waits for the device.

        Raises TrainingError where no gradient is finite any more.
        """
        if not self.scaler.enabled:
            return True
        expected, self.done = self.done, self.batches - int(self.scaler.num_skipped_steps)
        if self.done > self.settled:
            self.settled, self.settled_batches = self.done, self.batches
        elif self.batches - self.settled_batches > MOST_OVERFLOWS:
            raise TrainingError(
                f"gradients were not finite in {self.batches - self.settled_batches} steps in a row after step "
                f"{self.done}: lower LR or INIT_LOSS_SCALE, or look at the data"
            )
        return self.done == expected


class Progress:
    """Counts samples and losses and prints them at a low rate, so that the device is rarely waited for."""

    def __init__(self, config: Config, world: World, log: MlperfLog, step: int, samples: int) -> None:
        self.config, self.world, self.log = config, world, log
        self.first_step, self.resumed_samples = step, samples
        self.local_samples = torch.zeros((), dtype=torch.int64, device=world.device)
        self.started = self.span_started = time.monotonic()
        self.evaluation_seconds = self.span_evaluation_seconds = 0.0
        self.span_samples, self.span_steps = samples, 0
        self.losses = torch.zeros(2, device=world.device)
        self.overflows = torch.zeros((), dtype=torch.int64, device=world.device)

    def add(self, result: StepResult, batches: list[Batch]) -> None:
        """Adds a step; one whose gradient overflowed trained on nothing. Does not wait for the device."""
        self.losses += torch.stack([result.mlm_loss, result.nsp_loss])
        self.span_steps += 1
        self.local_samples += result.finite * sum(batch.num_sequences for batch in batches)
        self.overflows += ~result.finite

    def samples(self) -> int:
        """Sequences trained on by all ranks. A collective."""
        return self.resumed_samples + int(self.world.sum(self.local_samples.clone()).item())

    def report(self, step: int) -> None:
        """Prints and logs the figures of the steps since the last report. A collective."""
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
        self._check_finite(step, sum(losses))
        self.span_started, self.span_samples, self.span_steps = now, samples, 0
        self.span_evaluation_seconds = 0.0
        self.losses.zero_()
        figures = {"throughput": rate, "loss": sum(losses), "mlm_loss": losses[0], "nsp_loss": losses[1], "lr": lr}
        self.log.stats(samples, figures)

    def _check_finite(self, step: int, loss: float) -> None:
        """Raises TrainingError where training has broken down. A collective."""
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss} at step {step}: lower LR, or look at the data")
        overflows = int(self.world.sum(self.overflows.clone()).item())
        self.overflows.zero_()
        if not overflows:
            return
        # Loss scaling skips steps (Steps.settle ends a run that takes none any more); nothing else may.
        if self.config.precision.dtype(self.world.device) != torch.float16:
            raise TrainingError(
                f"gradients were not finite in {overflows // self.world.size or 1} of the {self.span_steps} steps up "
                f"to step {step}: lower LR, or look at the data"
            )


class Evaluation:
    """Evaluates, logs, and says whether the target is reached. The data set is opened at the first one."""

    def __init__(
        self,
        config: Config,
        world: World,
        log: MlperfLog,
        model: BertForPreTraining,
        vocab_md5: str,
        graph: EvaluationGraph | None,
    ) -> None:
        self.config, self.world, self.log, self.model, self.vocab_md5 = config, world, log, model, vocab_md5
        self.graph = graph
        self.evaluator: Evaluator | None = None

    def run(self, step: int, progress: Progress) -> bool:
        """One evaluation after ``step``. A collective."""
        if progress.span_steps:
            progress.report(step)
        samples, begin = progress.samples(), time.monotonic()
        self.log.eval_start(samples)
        if self.evaluator is None:
            length, vocab_size = self.config.data.max_seq_length, self.model.config.vocab_size
            self.evaluator = Evaluator(self.config.evaluate, length, vocab_size, self.vocab_md5, self.world, self.graph)
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
