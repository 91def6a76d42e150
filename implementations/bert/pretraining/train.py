"""Pretraining as MLPerf times it: initialise, start the clock, train to the target accuracy, stop
the clock.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bert.checkpoint.weights import Checksum, Loaded, checksum_of, chunks_of
from bert.core import rundir
from bert.core.dist import World
from bert.data import integrity
from bert.data.batch import PretrainingBatch, make_batch
from bert.data.dali import DaliLoader
from bert.data.loader import TrainingData, open_masks, open_source
from bert.data.sampler import RowSource, Sampler, row_sequences
from bert.data.shards import Shards
from bert.data.synthetic import synthetic_records
from bert.deepspeed.step import DeepSpeedStep
from bert.kernels import bind_kernels
from bert.kernels.support.graph_capture import CaptureError
from bert.model.bert import BertForPreTraining
from bert.model.init import Chunk, fill, uninitialized, use_placeholders
from bert.model.init import first_weights as drawn_weights
from bert.pretraining import closed_division, resume
from bert.pretraining.config import PretrainingConfig
from bert.pretraining.memory import meta_model
from bert.training.debug import ProfiledStep, RecordedStep
from bert.training.evaluate import EvaluationConfig, EvaluationGraph, Evaluator, warm_up
from bert.training.graph import capture_or_warm_up, graph_capacity, static_batch
from bert.training.loop import LoopHooks, StepCounter, StepSchedule, step_seed, train
from bert.training.metrics import MetricSink, Progress, metric_sinks
from bert.training.mlperf import MlperfLog
from bert.training.schedule import learning_rate
from bert.training.step import Step, TrainingStep, build_step
from bert.training.stop import LAST_STEP, Ending, Stop, TrainingError


@dataclass(frozen=True, kw_only=True)
class Start:
    """The model at the step where this process begins.

    first_weights: checksum of those of step 0; done, batches, samples: before this process.
    """

    model: BertForPreTraining
    step: resume.Trainer
    first_weights: int
    done: int
    batches: int
    samples: int


def pretrain(config: PretrainingConfig, world: World, log: MlperfLog) -> Ending:
    """Runs to the end and returns why it ended. A collective: every rank calls it with the same
    settings.

    Before the clock: settings, kernels, weights, warm-up. On it: data, training, evaluation. After
    it: the last checkpoint, the proof of the data, the summary.
    """
    saved = resume.newest(config, world)
    # As early as can be: ranks with different settings would soon take part in different
    # collectives, and hang.
    resume.check_ranks(config, world, saved)
    # Where it comes from the system each rank has drawn another: rank 0's counts.
    seed = world.broadcast_int(resume.pick_seed(config.seed, saved))
    hyperparameters, closed = (
        config.hyperparameters(seed),
        config.mlperf.division == "closed",
    )
    known: dict[str, Any] = {}
    if closed and world.is_main and config.checkpoint.init_checkpoint is not None:
        # Off the clock: it reads all of the weights.
        known = closed_division.starting_weights(config.checkpoint.init_checkpoint)
    log.submission(hyperparameters)
    config = resolve_kernels(config, world)
    start = start_of(config, world, seed, saved)
    log.weights(name for name, _ in start.model.named_parameters())
    # On synthetic data: MLPerf's rules allow no look at the data set before run_start.
    take_step, evaluation_graph = prepare(config, start.model, start.step, world)
    sinks: list[MetricSink] = [log.stats]
    if world.is_main:
        sinks += metric_sinks(config.observers, config.run, start.done)
    world.barrier()

    log.run_start()
    if saved is not None:
        log.clock_not_whole(start.done, start.samples)
    world.barrier()  # no rank may read the data set before run_start is logged
    run_start = time.monotonic()
    source = checked_source(config, world, saved)
    if closed and world.is_main:
        known = closed_division.starting_point(config, source, known)
    row_counts = source.row_counts()
    log.data(
        int(np.diff(source[len(row_counts) - 1].masked_lm_offsets).max(initial=0)),
        known,
    )
    evaluator = None
    if config.evaluates:
        sizes = config.data.max_seq_length, config.model.vocab_size
        evaluator = Evaluator(
            config.evaluate, *sizes, source.vocab_md5, world, evaluation_graph
        )
    evaluation = Evaluation(evaluator, start.step, config.evaluate, log, sinks)
    shard_order = resume.shard_order(config, saved)
    data = training_data(config, world, source, seed, shard_order, start.batches + 1)
    progress = progress_of(config, world, start, int(row_counts.sum()), sinks)
    saver = resume.Saver(
        config, start.step, world, seed, source, shard_order, start.first_weights
    )
    try:
        # Signals stop the run, also while its last checkpoint is written.
        with stop_of(config, world) as stop:
            ending = to_the_end(
                config,
                world,
                seed,
                start,
                data,
                take_step,
                progress,
                evaluation,
                saver,
                stop,
            )
            if not ending.stopped:
                # A run without a target is run for its length, and succeeds by reaching it.
                untargeted = not (config.evaluate.has_target or config.dist.emulate)
                log.run_stop(
                    ending.samples,
                    evaluation.num_sequences,
                    ending.reached or untargeted,
                )
            # Without a step there is nothing new to save.
            if (
                ending.batches > start.batches
                and config.checkpoint.directory is not None
            ):
                save_last(saver, ending, config.evaluate.has_target)
        if closed and not ending.stopped:
            # After run_stop: it reads all of the data.
            closed_division.prove(config, source, world)
        progress.summary(ending)
        if config.dist.emulate:
            report_emulation(world, ending.batches, time.monotonic() - run_start)
        if config.sustained_minutes and not ending.stopped:
            until = run_start + 60 * config.sustained_minutes
            sustain(take_step, data, world, until)
            log.sustained_stop()
    except BaseException:
        # Other ranks may never write their parts: rank 0's thread must not wait for them.
        saver.writer.abandoned.set()
        raise
    finally:
        data.close()
        saver.writer.wait()
    return ending


def start_of(
    config: PretrainingConfig, world: World, seed: int, saved: dict[str, Any] | None
) -> Start:
    """Model and step with the initial weights, moments of a warm start, or the saved state."""
    path, initial = config.checkpoint.init_checkpoint, Checksum()
    # The initial weights even if a checkpoint follows: their checksum is compared with the one that
    # it notes.
    model, step = build(config, world, seed, initial)
    if saved is None and config.checkpoint.init_optimizer and path is not None:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        step.optimizer.load_state_dict(
            resume.warm_start(path, config.optim.optimizer, shapes)
        )
    done, batches, samples = resume.restore(config, step, seed, saved, initial.value)
    if saved is not None or path is not None:
        resume.check_restored(
            step, world, path if saved is None else config.checkpoint.directory
        )
    return Start(
        model=model, step=step, first_weights=initial.value, done=done, batches=batches,
        samples=samples,
    )  # fmt: skip


def checked_source(
    config: PretrainingConfig, world: World, saved: dict[str, Any] | None
) -> RowSource:
    """The rows to train on, the same on every rank and, of a run that continues, as they were."""
    source = open_source(config.data, config.model.vocab_size, pairs=config.nsp)
    world.agree(source.identity(), "are the training data the same on every node?")
    resume.check_data(config.checkpoint, saved, source)
    if saved is not None and isinstance(source, Shards):
        # Not what they say of themselves.
        integrity.check(dict.fromkeys(source.paths, ""), world, config.run.digests)
    return source


def training_data(
    config: PretrainingConfig,
    world: World,
    source: RowSource,
    seed: int,
    shard_order: tuple[int, int],
    first_step: int,
) -> TrainingData | DaliLoader:
    """This rank's micro-batches, from a step on."""
    settings, vocab_size = config.data, config.model.vocab_size
    sampler = Sampler(
        source.row_counts(),
        settings.rows_per_step,
        seed,
        world.rank,
        world.size,
        shard_order,
    )
    masks = open_masks(settings, source, config.phase1, vocab_size, seed)
    pads = pad_and_pin(config, world)
    data = TrainingData(source, sampler, settings, vocab_size, first_step, pads, masks)
    if settings.loader == "dali":
        return DaliLoader(data, world.device, settings.gradient_steps)
    return data


def progress_of(
    config: PretrainingConfig,
    world: World,
    start: Start,
    num_rows: int,
    sinks: Sequence[MetricSink],
) -> Progress:
    """What reports and sums up the run. Its time begins here."""
    rows_per_step = config.data.rows_per_step * world.size
    return Progress(
        world,
        last=config.max_steps,
        rate=partial(learning_rate, config=config.schedule),
        epochs=lambda batches, samples: batches * rows_per_step / num_rows,
        skips_overflows=start.step.scaler.enabled,
        sinks=sinks,
        done=start.done,
        samples=start.samples,
    )


def stop_of(config: PretrainingConfig, world: World) -> Stop:
    """Listens to signals if the run can save what it has."""
    folder = config.run.run_dir
    note = folder / f"step_{config.run.trial}.txt" if folder else None
    return Stop(world, listen=config.checkpoint.directory is not None, note=note)


def to_the_end(
    config: PretrainingConfig,
    world: World,
    seed: int,
    start: Start,
    data: TrainingData | DaliLoader,
    take_step: TrainingStep,
    progress: Progress,
    evaluation: Evaluation,
    saver: resume.Saver,
    stop: Stop,
) -> Ending:
    """Trains to the target, the last step of the run or of this process, or a signal."""
    last = min(
        config.max_steps, start.done + (config.steps_this_run or config.max_steps)
    )
    schedule = StepSchedule(
        last=last, report_every=config.log_every_steps, checkpoint=config.checkpoint.is_due,
        evaluations=config.evaluation_steps,
    )  # fmt: skip
    steps = StepCounter(
        progress.rate, config.max_steps, start.step.scaler, start.done, start.batches
    )
    hooks = LoopHooks(
        next_step=data.next_step, take_step=take_step, steps=steps, schedule=schedule, progress=progress,
        stop=stop, seed=lambda batch: step_seed(seed, batch, world.rank), evaluate=evaluation.run,
        save=saver.save,
    )  # fmt: skip
    ending = train(hooks)
    # Not the last step of the run: by another reason it counts as stopped, and RESUME=1 continues.
    if ending.reason == LAST_STEP and last < config.max_steps:
        return replace(ending, reason="STEPS_THIS_RUN")
    return ending


def save_last(saver: resume.Saver, ending: Ending, has_target: bool) -> None:
    """Saves the state at the end. Raises TrainingError if it cannot be written and somebody needs
    it:

    a run that was stopped, and one without a target, which is run for its weights.
    """
    saver.save(ending.step, ending.batches, ending.samples, ended=not ending.stopped)
    if saver.finish() or not (ending.stopped or not has_target):
        return
    where = f"{'stopped at' if ending.stopped else 'the last is'} step {ending.step}"
    why = saver.writer.error or "another rank says why"
    raise TrainingError(
        f"{where}, and its checkpoint cannot be written ({why}): RESUME=1 continues from the one before"
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
    what = f"rank 0 of {world.size} emulated, alone: {took}; losses, weights and log are no result"
    print(f"bert: {what}", file=sys.stderr, flush=True)


def resolve_kernels(config: PretrainingConfig, world: World) -> PretrainingConfig:
    """The config with ATTENTION=auto resolved, which is printed and noted in the run's folder. A
    collective.
    """
    kernels, words = config.kernels.resolve_attention(
        config.model, config.numerics.dtype, config.uses_graph, world
    )
    if world.is_main:
        if world.device.type == "cuda":
            print(f"attention: {words}", file=sys.stderr, flush=True)
        fused = sorted(kernels.names(world.device))
        rundir.add_to_environment(
            config.run, {"attention": kernels.attention, "fused": fused}
        )
    return replace(config, kernels=kernels)


def build(
    config: PretrainingConfig,
    world: World,
    seed: int,
    first_weights: Checksum | None = None,
) -> tuple[BertForPreTraining, resume.Trainer]:
    """The model with its initial weights, and its training step. Raises ConfigError for weights
    that do not fit.

    first_weights: becomes the checksum of the initial weights as they are read, the same for every
    engine.

    ``config``: with the attention backend resolved. With a sharded optimizer no rank has all
    weights in fp32: they come chunk by chunk, and each rank keeps those of its shard.
    """
    kernels, device = bind_kernels(config.kernels, world.device), world.device
    path = config.checkpoint.init_checkpoint
    by_chunks = config.optim.is_sharded(device)  # always with DeepSpeed

    def chunks(
        shapes: BertForPreTraining, so_far: Checksum
    ) -> tuple[Iterator[Chunk], Loaded]:
        """Initial weights of a model of shapes; the checksum is computed as they are read."""
        if path is None:
            return so_far.of(drawn_weights(shapes, seed)), Loaded([], [])
        return chunks_of(shapes, path, seed, config.may_have_new_heads, so_far)

    def masters() -> Iterator[Chunk]:
        """The same weights again, for fp32 masters."""
        return chunks(meta_model(config.model), Checksum())[0]

    with uninitialized(torch.device("meta") if by_chunks else world.device):
        model = BertForPreTraining(config.model, kernels)
    so_far, checksum = first_weights or Checksum(), None
    first, loaded = chunks(model, so_far)
    if by_chunks:
        use_placeholders(model, config.numerics.dtype, world.device)
    else:
        fill(model, first)
        # Of all weights as loaded, which each rank holds anyway.
        checksum = checksum_of(dict(model.named_parameters()))
    if world.is_main and any(loaded):
        print(f"weights of {path}: {loaded}", file=sys.stderr, flush=True)
    if recomputation := config.recomputation(uses_graph=config.uses_graph):
        model.recompute(recomputation)
    data = config.data
    step: resume.Trainer
    if config.zero.is_deepspeed:
        given = config.zero.complete(
            config.optim, config.numerics, data.batch_size, data.gradient_steps
        )
        step = DeepSpeedStep(
            model, config.numerics, config.optim, world, given, first, masters
        )
    else:
        step = build_step(
            model, config.numerics, config.optim, world, accumulate=data.gradient_steps > 1,
            fused_update="lamb" in config.kernels.names(device), first_weights=first if by_chunks else None,
        )  # fmt: skip
    resume.check_weights(
        config.checkpoint, world, so_far.value if checksum is None else checksum
    )
    return model, step


def prepare(
    config: PretrainingConfig,
    model: BertForPreTraining,
    step: resume.Trainer,
    world: World,
) -> tuple[TrainingStep, EvaluationGraph | None]:
    """Before the clock: compiles and records what the first step and evaluation would otherwise
    wait for.
    """
    take_step: TrainingStep = step
    graph, length = None, config.data.max_seq_length
    if isinstance(step, Step):
        untimed = warms_up(world.device)
        take_step = capture_or_warm_up(
            step,
            lambda: dummy_batches(config, world),
            graph=config.uses_graph,
            warm_up=untimed,
        )
        if config.evaluates and take_step is not step:
            # Evaluation works without a graph, too.
            with contextlib.suppress(CaptureError):
                graph = EvaluationGraph(config.evaluate, length, model, world.device)
        if config.evaluates and graph is None and (untimed or config.uses_graph):
            # Each shard of the weights may lie with another rank.
            with step.gathered():
                warm_up(config.evaluate, length, model, world.device)
    folder, trial = config.run.run_dir, config.run.trial
    if config.capture.capture:
        assert folder is not None
        take_step = RecordedStep(
            folder / f"capture_{trial}", world.rank, model, take_step
        )
    if config.profile.span is not None and world.is_main:
        assert folder is not None
        take_step = ProfiledStep(
            config.profile.span, folder / f"trace_{trial}.json", take_step
        )
    return take_step, graph


def warms_up(device: torch.device) -> bool:
    """Whether an untimed step, rolled back, precedes the clock: GPUs load and choose kernels in
    it.
    """
    return device.type == "cuda"


def pad_and_pin(
    config: PretrainingConfig, world: World
) -> Callable[[PretrainingBatch], PretrainingBatch]:
    """The data thread's last stage: pads a batch for a graph, and pins its memory for a GPU."""
    capacity = graph_capacity(config.data.capacity, config.data.batch_size)

    def finish(batch: PretrainingBatch) -> PretrainingBatch:
        if config.uses_graph:
            # A graph has one size for all batches; without one, padding would only be work.
            batch = static_batch(batch, capacity)
        return batch.pin_memory() if world.device.type == "cuda" else batch

    return finish


def dummy_batches(config: PretrainingConfig, world: World) -> list[PretrainingBatch]:
    """Micro-batches of one step on synthetic data, as the data thread provides them."""
    size, length = config.data.batch_size, config.data.max_seq_length
    records = synthetic_records(
        size, length, config.model.vocab_size, config.data.packed, seed=0
    )
    batch = make_batch(
        records,
        row_sequences(records, np.arange(min(size, records.num_rows)))[0],
        length,
    )
    # The same batch for each micro-batch: sizes matter here, and the step is undone.
    return [pad_and_pin(config, world)(batch)] * config.data.gradient_steps


@dataclass(frozen=True)
class Evaluation:
    """Evaluates, logs, and tells whether the target is reached. evaluator: None if nothing is to be
    evaluated.
    """

    evaluator: Evaluator | None
    trained: resume.Trainer
    config: EvaluationConfig
    log: MlperfLog
    sinks: Sequence[MetricSink]

    @property
    def num_sequences(self) -> int:
        return (
            self.evaluator.num_sequences if self.evaluator else self.config.num_examples
        )

    def run(self, step: int, samples: int) -> bool:
        """One evaluation after ``step``, of ``samples`` trained samples. A collective."""
        assert self.evaluator is not None
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
        # 0: there is no target.
        reached = 0 < target <= result.accuracy
        if self.evaluator.world.is_main:
            outcome = "reached" if reached else f"{target:.4f}" if target else "none"
            parts = [f"accuracy {result.accuracy:.5f} (target {outcome})"]
            parts.append(f"loss {result.mlm_loss:.4f}")
            if result.nsp_accuracy is not None:
                parts.append(f"next sentence {result.nsp_accuracy:.4f}")
            when = f"evaluation at step {step}, {samples:,} samples"
            print(
                f"{when}: {', '.join(parts)}, {seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        return reached
