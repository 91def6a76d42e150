"""Pretraining as MLPerf times it: initialise, start the clock, train to the target accuracy, stop
the clock.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bert.checkpoint import sharded
from bert.checkpoint.weights import Checksum
from bert.core.dist import World
from bert.data.dali import DaliLoader
from bert.data.loader import TrainingData
from bert.data.sampler import RowSource
from bert.data.shards import Shards
from bert.model.bert import BertForPreTraining
from bert.model.flops import model_flops
from bert.pretraining import closed_division, identity, inputs, resume
from bert.pretraining.build import build, pad_and_pin, prepare, resolve_kernels
from bert.pretraining.config import PretrainingConfig
from bert.pretraining.saver import Saver, Trainer
from bert.pretraining.trial import begin
from bert.training.evaluate import EvaluationConfig, Evaluator, Result
from bert.training.loop import StepCounter, StepSchedule, step_seed, train
from bert.training.metrics import MetricSink, Progress, metric_sinks
from bert.training.mlperf import MlperfLog
from bert.training.schedule import learning_rate
from bert.training.step import TrainingStep
from bert.training.stop import LAST_STEP, Ending, Stop, TrainingError
from common.env import ConfigError
from common.process import say


def pretrain(config: PretrainingConfig, world: World, log: MlperfLog) -> Ending:
    """Runs to the end and returns why it ended. A collective: every rank calls it with the same
    settings.

    Before the clock: settings, kernels, weights, warm-up. On it: data, training, evaluation. After
    it: the last checkpoint, the digests of the data, the summary.
    """
    saved = resume.newest(config, world)
    # As early as can be: ranks with different settings would soon take part in different
    # collectives, and hang.
    resume.check_ranks(config, world, saved)
    # Where it comes from the system each rank has drawn another: rank 0's counts.
    seed = world.broadcast_int(identity.pick_seed(config.seed, saved))
    # Off the clock, as it reads all of the weights.
    weights_facts = initial_weights_facts(config, world)
    log.submission(config.hyperparameters(seed))
    config = resolve_kernels(config, world)
    start = start_of(config, world, seed, saved)
    # An event for each tensor, before run_start, as published logs have them.
    log.weights(name for name, _ in start.model.named_parameters())
    take_step, evaluation_graph = prepare(config, start.model, start.trainer, world)
    config.observers.load()
    world.barrier()

    # Here the clock starts: all above is initialization, which MLPerf does not time.
    log.run_start()
    if not resume.has_whole_clock(config, saved):
        begins = {"continued_at_step": start.done.steps}
        log.note("clock_not_whole", begins, start.done.samples)
    world.barrier()  # no rank may read the data set before run_start is logged
    run_start = time.monotonic()
    source = inputs.checked_source(config, world, saved)
    starting_point = log_data(config, world, log, source, weights_facts)
    evaluator = inputs.evaluator_of(config, world, source, evaluation_graph)
    pads, order = pad_and_pin(config, world), resume.shard_order(config, saved)
    batches = inputs.training_data(config, source, seed, saved, pads)
    data = loader_of(config, world, batches)
    try:
        # All that can be refused has been: only now is anything written.
        begin(config, world, log, starting_point)
        sinks = sinks_of(config, world, log, start)
        trainer = start.trainer
        with Saver(
            config, trainer, world, seed, source, order, start.first_weights, saved
        ) as saver:
            run = Run(
                config=config,
                world=world,
                log=log,
                seed=seed,
                start=start,
                take_step=take_step,
                data=data,
                evaluation=Evaluation(evaluator, trainer, config.evaluate, log, sinks),
                progress=progress_of(config, world, start, source, sinks),
                saver=saver,
                starting_point=starting_point,
            )
            ending = run.to_run_stop()
            run.after_run_stop(ending, source, run_start)
    finally:
        data.close()
    return ending


# --- before the clock


def initial_weights_facts(config: PretrainingConfig, world: World) -> dict[str, Any]:
    """What rank 0 of a closed run notes of INIT_CHECKPOINT; else nothing."""
    path = config.checkpoint.init_checkpoint
    if not config.mlperf.is_closed or not world.is_main or path is None:
        return {}
    return closed_division.starting_weights(path)


@dataclass(frozen=True, kw_only=True)
class Start:
    """The model at the step where this process begins. first_weights: checksum of those of step
    0.
    """

    model: BertForPreTraining
    trainer: Trainer
    first_weights: int
    done: resume.Done


def start_of(
    config: PretrainingConfig, world: World, seed: int, saved: dict[str, Any] | None
) -> Start:
    """Model and step with the initial weights, moments of a warm start, or the saved state."""
    path, initial = config.checkpoint.init_checkpoint, Checksum()
    # The initial weights even if a checkpoint follows: their checksum is compared with the one that
    # it notes.
    model, trainer = build(config, world, seed, initial)
    if saved is None and config.checkpoint.init_optimizer and path is not None:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        trainer.optimizer.load_state_dict(
            resume.warm_start(path, config.optim.optimizer, shapes)
        )
    done = resume.restore(config, trainer, seed, saved, initial.value)
    if world.is_main and (begins := resume.describe(config, saved)):
        say(f"bert: {begins}")
    if saved is not None or path is not None:
        read_from = path if saved is None else config.checkpoint.directory
        try:
            resume.check_restored(trainer, world, read_from)
        except ConfigError:
            inputs.check_finite_weights(config, saved, model)  # names it, as --check
            raise  # moments, then
    if saved is not None:
        # In the step by now: they would take memory, or a removed checkpoint's room, to the end.
        del saved["model"], saved["optimizer"]
    return Start(model=model, trainer=trainer, first_weights=initial.value, done=done)


def sinks_of(
    config: PretrainingConfig, world: World, log: MlperfLog, start: Start
) -> list[MetricSink]:
    """Where metrics go: the MLPerf log, and on rank 0 the run's folder."""
    sinks: list[MetricSink] = [log.stats]
    if world.is_main:
        sinks += metric_sinks(config.observers, config.run, start.done.steps)
    return sinks


# --- on the clock


def log_data(
    config: PretrainingConfig,
    world: World,
    log: MlperfLog,
    source: RowSource,
    weights_facts: dict[str, Any],
) -> dict[str, Any]:
    """Logs what is trained on, and in the closed division where the run starts from, which it
    returns on rank 0.
    """
    facts = weights_facts
    if config.mlperf.is_closed and world.is_main and isinstance(source, Shards):
        facts = closed_division.starting_point(config, source, weights_facts)
    # Of one shard: the others were made with the same max_predictions_per_seq.
    last_shard = source[len(source.row_counts()) - 1]
    most_masked = int(np.diff(last_shard.masked_lm_offsets).max(initial=0))
    log.data(most_masked, facts and closed_division.unread(facts))
    return facts


def loader_of(
    config: PretrainingConfig, world: World, data: TrainingData
) -> TrainingData | DaliLoader:
    """What brings the batches to the device."""
    if config.data.loader == "dali":
        return DaliLoader(data, world.device, config.data.gradient_steps)
    return data


def progress_of(
    config: PretrainingConfig,
    world: World,
    start: Start,
    source: RowSource,
    sinks: Sequence[MetricSink],
) -> Progress:
    """What reports and sums up the run. Its time begins here."""
    rows_per_step = config.data.rows_per_step * world.size
    num_rows = int(source.row_counts().sum())
    return Progress(
        world,
        last=config.max_steps,
        rate=partial(learning_rate, config=config.schedule),
        epochs=lambda batches, samples: batches * rows_per_step / num_rows,
        skips_overflows=start.trainer.scaler.enabled,
        sinks=sinks,
        done=start.done.steps,
        samples=start.done.samples,
        operations=partial(model_flops, config.model, in_fp8=config.numerics.fp8),
        span=start.done.span,
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run that the training loop drives."""

    config: PretrainingConfig
    world: World
    log: MlperfLog
    seed: int
    start: Start
    take_step: TrainingStep
    data: TrainingData | DaliLoader
    evaluation: Evaluation
    progress: Progress
    saver: Saver
    starting_point: dict[str, Any]  # proved by after_run_stop

    def to_run_stop(self) -> Ending:
        """Trains to the end, stops the clock, and writes the last checkpoint. Signals stop the run,
        also while that is written.
        """
        config = self.config
        note = config.run.run_dir and config.run.file("step_{}.txt")
        # Signals are heard if the run can save what it has.
        listens = config.checkpoint.directory is not None
        with Stop(self.world, listen=listens, note=note) as stop:
            ending = self._train(stop)
            if not ending.stopped:
                # A run without a target is run for its length, and succeeds by reaching it.
                untargeted = not (config.evaluate.has_target or config.dist.emulate)
                self.log.run_stop(
                    ending.samples,
                    self.evaluation.num_sequences,
                    ending.reached or untargeted,
                )
            # Without a step there is nothing new to save.
            has_trained = ending.batches > self.start.done.batches
            if has_trained and listens:
                span = self.progress.span()
                save_last(self.saver, ending, config.evaluate.has_target, span)
        return ending

    def _train(self, stop: Stop) -> Ending:
        """Trains to the target, the last step of the run or of this process, or a signal."""
        config, start, done = self.config, self.start, self.start.done
        last = config.max_steps
        if config.steps_this_run:
            last = min(last, done.steps + config.steps_this_run)
        steps = StepCounter(
            self.progress.rate,
            config.max_steps,
            start.trainer.scaler,
            done.steps,
            done.batches,
        )

        def evaluate(step: int, samples: int) -> bool:
            result = self.evaluation.run(step, samples)
            if config.checkpoint.best and result.accuracy > self.saver.best:
                self.saver.save_best(step, steps.batches, samples, result.accuracy)
            return self.evaluation.reached(result)

        ending = train(
            next_step=self.data.next_step,
            take_step=self.take_step,
            steps=steps,
            schedule=StepSchedule(
                last=last,
                report_every=config.log_every_steps,
                checkpoint=config.checkpoint.is_due,
                evaluations=config.evaluation_steps,
            ),
            progress=self.progress,
            stop=stop,
            seed=lambda batch: step_seed(self.seed, batch, self.world.rank),
            evaluate=evaluate,
            save=self._save,
            look=self.saver.check_first,
            ended=done.ended,
            left_out=self._is_left_out,
        )
        # Not the last step of the run: by another reason it counts as stopped, and RESUME=1
        # continues.
        if ending.reason == LAST_STEP and last < config.max_steps:
            return replace(ending, reason="STEPS_THIS_RUN")
        return ending

    def _save(self, step: int, batches: int, samples: int) -> None:
        self.saver.writer.wait()
        self.saver.check_first()
        self.saver.save(step, batches, samples, self.progress.span())

    def _is_left_out(self, batch: int) -> bool:
        if batch not in self.config.left_out:
            return False
        self.saver.left_out.append(batch)
        self.log.note("batch_left_out", batch)
        if self.world.is_main:
            say(f"bert: batch {batch} is left out (SKIP_BATCHES)")
        return True

    def after_run_stop(
        self, ending: Ending, source: RowSource, run_start: float
    ) -> None:
        """What takes time that is not the run's: the digests of the data, the summary, the work for
        a power meter.
        """
        config, world = self.config, self.world
        if (
            config.mlperf.is_closed
            and not ending.stopped
            and isinstance(source, Shards)
        ):
            closed_division.prove(config, source, world)  # reads all of the data
            self.log.note("starting_point", self.starting_point)
        self.progress.summary(ending)
        if config.dist.emulate:
            report_emulation(world, ending.batches, time.monotonic() - run_start)
        if config.sustained_minutes and not ending.stopped:
            until = run_start + 60 * config.sustained_minutes
            sustain(self.take_step, self.data, world, until)
            self.log.note("sustained_training_stop")


@dataclass(frozen=True)
class Evaluation:
    """Evaluates, logs, and tells whether the target is reached. evaluator: None if nothing is to be
    evaluated.
    """

    evaluator: Evaluator | None
    trained: Trainer
    config: EvaluationConfig
    log: MlperfLog
    sinks: Sequence[MetricSink]

    @property
    def num_sequences(self) -> int:
        return (
            self.evaluator.num_sequences if self.evaluator else self.config.num_examples
        )

    def reached(self, result: Result) -> bool:
        # 0: there is no target.
        return 0 < self.config.target <= result.accuracy

    def run(self, step: int, samples: int) -> Result:
        """One evaluation after ``step``, of ``samples`` trained samples. A collective."""
        assert self.evaluator is not None
        # A sharded optimizer gathers the last step's weights here, else in the next forward pass.
        with self.trained.gathered() as model:
            begin = time.monotonic()
            self.log.eval_start(samples)
            result = self.evaluator(model)
            self.log.eval_stop(samples, result.accuracy)
            seconds = time.monotonic() - begin
        figures = {
            "step": step,
            "samples": samples,
            **result.figures(),
            "seconds": seconds,
        }
        for sink in self.sinks:
            sink("evaluation", figures)
        target = self.config.target
        if self.evaluator.world.is_main:
            outcome = (
                "reached"
                if self.reached(result)
                else f"{target:.4f}"
                if target
                else "none"
            )
            parts = [f"accuracy {result.accuracy:.5f} (target {outcome})"]
            parts.append(f"loss {result.mlm_loss:.4f}")
            if result.nsp_accuracy is not None:
                parts.append(f"next sentence {result.nsp_accuracy:.4f}")
            say(
                f"evaluation at step {step}, {samples:,} samples: {', '.join(parts)}, {seconds:.1f} s"
            )
        return result


# --- after it


def save_last(
    saver: Saver, ending: Ending, has_target: bool, span: Mapping[str, Any]
) -> None:
    """Saves the state at the end. Raises TrainingError if it cannot be written and somebody needs
    it:

    a run that was stopped, and one without a target, which is run for its weights.
    """
    facts = ending.step, ending.batches, ending.samples
    saver.save(*facts, span, ended=not ending.stopped)
    why = saver.finish()
    if not why or (has_target and not ending.stopped):
        return
    where = f"{'stopped at' if ending.stopped else 'the last is'} step {ending.step}"
    rest = "none was written: make room, and train again"
    if before := sharded.complete(saver.folder):
        rest = f"RESUME=1 continues from {before[-1].name}"
    raise TrainingError(
        f"{where}, and its checkpoint cannot be written ({why}): {rest}"
    )


def sustain(
    take_step: TrainingStep, data: TrainingData | DaliLoader, world: World, until: float
) -> None:
    """The same work for a power meter, with a learning rate of 0, to a moment of
    time.monotonic().
    """
    while world.any(time.monotonic() < until):
        for _ in range(10):  # world.any waits for the device
            take_step(data.next_step(), 0.0)


def report_emulation(world: World, batches: int, seconds: float) -> None:
    """Prints what one rank of many takes, as such."""
    if world.device.type == "cuda":
        memory = f"{torch.cuda.max_memory_allocated() / 1e9:.2f} GB of the GPU"
    else:
        memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB of the host"
    took = f"{1000 * seconds / max(batches, 1):.1f} ms a step without the network, at most {memory}"
    say(
        f"bert: rank 0 of {world.size} emulated, alone: {took}; losses, weights and log are no result"
    )
