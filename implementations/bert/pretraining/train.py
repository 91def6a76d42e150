"""Pretraining as MLPerf times it: initialise, start the clock, train to the target accuracy, stop the clock."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from bert.checkpoint.weights import Checksum, Loaded, checksum_of, chunks_of, load_weights
from bert.core import rundir
from bert.core.dist import World
from bert.core.start import StartClock
from bert.data.batch import PretrainingBatch, make_batch
from bert.data.dali import DaliLoader
from bert.data.loader import TrainingData, open_masks, open_source
from bert.data.sampler import RowSource, Sampler, row_sequences
from bert.data.synthetic import synthetic_records
from bert.deepspeed.partitions import shape_of
from bert.deepspeed.step import DeepSpeedStep
from bert.kernels import compile_once, select
from bert.model.bert import BertForPreTraining
from bert.model.init import Chunk, first_weights, initialize, uninitialized, use_placeholders
from bert.pretraining import hand_over, resume
from bert.pretraining.config import Config
from bert.training.debug import CapturedStep, ProfiledStep, unprofiled
from bert.training.evaluate import EvaluationGraph, Evaluator, rehearse
from bert.training.graph import graph_capacity, ready, static_batch
from bert.training.loop import DataSource, Parts, StepCounter, StepSchedule, step_seed, train
from bert.training.metrics import MetricSink, Progress, metric_sinks
from bert.training.mlperf import MlperfLog
from bert.training.schedule import learning_rate
from bert.training.step import Step, Trainer, TrainingStep, build_step
from bert.training.stop import LAST_STEP, Ending, Stop, TrainingError


def pretrain(config: Config, world: World, log: MlperfLog, clock: StartClock) -> Ending:
    """Runs to the end and says why it ended. Every rank calls it with the same settings."""
    saved = resume.newest(config.checkpoint)
    resume.check_weights(config, world, resume.saved_checksum(saved))
    seed = world.broadcast_int(resume.pick_seed(config, saved))
    log.submission()
    log.hyperparameters(config.hyperparameters(seed))
    clock.lap("checkpoint")
    config = settle_kernels(config, world)
    clock.lap("choice of kernels")
    model, step = build(config, world, seed, clock)
    log.weights(name for name, _ in model.named_parameters())
    if saved is None and config.checkpoint.init_optimizer:
        hand_over.restore(config, step, {name: shape_of(parameter) for name, parameter in model.named_parameters()})
    done, done_batches, done_samples = resume.restore(config, step, seed, saved)
    clock.lap("checkpoint")
    take_step, evaluation_graph = prepare(config, model, step, world, clock)
    watchers = watch(config, world, log, seed, done)
    end_start(config, world, clock)
    log.run_start()
    world.barrier()  # no rank touches the data set before the line is written
    started = time.monotonic()

    source = open_source(config.data, model.config.vocab_size)
    row_counts = source.row_counts()
    resume.check_data(config, saved, row_counts, source.vocab_md5)
    shard_order = resume.shard_order(config, saved)
    sampler = Sampler(row_counts, config.data.rows_per_step, seed, world.rank, world.size, shard_order)
    data = open_data(config, world, source, sampler, done_batches + 1, seed)
    rate = partial(learning_rate, config=config.schedule)
    steps = StepCounter(rate, config.max_steps, step.scaler, done, done_batches)
    progress = Progress(
        world, last=config.max_steps, rate=rate, epochs=epochs(config, int(row_counts.sum())),
        skips_overflows=step.scaler.enabled, sinks=watchers, done=done, samples=done_samples,
    )  # fmt: skip
    evaluation = Evaluation(config, world, log, step, source.vocab_md5, evaluation_graph, watchers)

    saver = resume.Saver(config, step, world, seed, source, shard_order)
    last = min(config.max_steps, done + (config.steps_this_run or config.max_steps))
    try:
        with Stop(world, listen=config.checkpoint.directory is not None) as stop:
            parts = Parts(
                data=data, take_step=take_step, steps=steps, schedule=step_schedule(config, last), progress=progress,
                stop=stop, seed=lambda batch: step_seed(seed, batch, world.rank), evaluate=evaluation.run,
                save=saver.save,
            )  # fmt: skip
            ending = train(parts)
            if ending.reason == LAST_STEP and last < config.max_steps:
                ending = dataclasses.replace(ending, reason="STEPS_THIS_RUN")
            finish(config, log, ending, saver if ending.batches > done_batches else None)
        progress.summary(ending)
        take_step = unprofiled(take_step)
        if config.sustained_minutes and not ending.stopped:
            sustain(take_step, data, world, log, until=started + 60 * config.sustained_minutes)
    except BaseException:
        saver.writer.abandoned.set()
        raise
    finally:
        data.close()
        saver.writer.wait()
    return ending


def open_data(
    config: Config, world: World, source: RowSource, sampler: Sampler, first_step: int, seed: int
) -> TrainingData | DaliLoader:
    """The loader that DATA_LOADER names. Raises what open_masks and TrainingData raise."""
    vocab_size = config.model.vocab_size
    masks = open_masks(config.data, source, config.phase1, vocab_size, seed)
    data = TrainingData(source, sampler, config.data, vocab_size, first_step, finisher(config, world), masks)
    if config.data.loader == "dali":
        return DaliLoader(data, world.device, config.data.gradient_steps)
    return data


def finish(config: Config, log: MlperfLog, ending: Ending, saver: resume.Saver | None) -> None:
    """Stops the clock of a run that is over, then saves (None: nothing is new). A collective.

    Raises TrainingError where the last checkpoint cannot be written and is needed: of a run that was asked to stop, and
    of one without a target, which is there for its weights.
    """
    if not ending.stopped:
        success = ending.reached or not config.evaluate.has_target
        log.run_stop(ending.samples, config.evaluate.num_examples, success)
    if saver is None or config.checkpoint.directory is None:
        return
    saver.save(ending.step, ending.batches, ending.samples, ended=not ending.stopped)
    needed = ending.stopped or not config.evaluate.has_target
    if not saver.finish() and needed:
        raise TrainingError(
            f"{'stopped at' if ending.stopped else 'the last is'} step {ending.step}, and its checkpoint cannot be "
            "written, see above: RESUME=1 continues from the one before"
        )


def step_schedule(config: Config, last: int) -> StepSchedule:
    """When reports, evaluations and checkpoints are due, up to the ``last`` step of this process."""
    first = {0} if config.evaluate.initial else set()
    return StepSchedule(
        last=last,
        report_every=config.log_every_steps,
        evaluations=config.evaluation_steps | first,
        checkpoint_every=config.checkpoint.every_steps,
    )


def epochs(config: Config, num_rows: int) -> Callable[[int, int], float]:
    """(batches, samples) trained on -> passes over the data. Rows packed while training are not rows of the files."""
    if config.data.batching == "online":
        return lambda batches, samples: samples / num_rows
    rows_per_step = config.data.rows_per_step * config.dist.world_size
    return lambda batches, samples: batches * rows_per_step / num_rows


class LogStats:
    """Writes each report to the MLPerf log."""

    def __init__(self, log: MlperfLog) -> None:
        self.log = log

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """See MetricSink."""
        if kind == "train":
            losses = {name: value for name, value in values.items() if name.endswith("loss")}
            self.log.stats(
                values["samples"], {"throughput": values["sequences_per_second"], **losses, "lr": values["lr"]}
            )


def watch(config: Config, world: World, log: MlperfLog, seed: int, first_step: int) -> list[MetricSink]:
    """Who is given the figures of this rank."""
    watchers: list[MetricSink] = [LogStats(log)]
    if world.is_main:
        settings = config.hyperparameters(seed)
        watchers += metric_sinks(config.observers, config.run, settings, first_step)
    return watchers


def sustain(take_step: TrainingStep, data: DataSource, world: World, log: MlperfLog, until: float) -> None:
    """Steps on with a learning rate of 0, the same work for a power meter, until the clock of every rank is past."""
    while world.any(time.monotonic() < until):
        for _ in range(10):  # the question of the time is a collective that waits for the device
            take_step(data.next_step(), 0.0)
    log.sustained_stop()


def settle_kernels(config: Config, world: World) -> Config:
    """With the attention backend named; says which, and leaves it in the run's folder. A collective."""
    choice, words = config.kernels.choose(config.numerics.dtype, config.uses_graph, world)
    if world.is_main:
        if world.device.type == "cuda":
            print(f"attention: {words}", file=sys.stderr, flush=True)
        fused = sorted(choice.names(world.device))
        rundir.add_to_environment(config.run, {"attention": choice.attention, "fused": fused})
    return dataclasses.replace(config, kernels=choice)


def end_start(config: Config, world: World, clock: StartClock) -> None:
    """Waits for all ranks, and says by part how long the start took on rank 0, also in the run's folder."""
    world.barrier()
    clock.lap("other ranks")
    if world.is_main:
        kernels = f"; {compile_once.compilations()}" if world.device.type == "cuda" else ""
        print(f"{clock.line()}{kernels}", file=sys.stderr, flush=True)
        parts = {part: round(seconds, 3) for part, seconds in clock.parts.items()}
        rundir.add_to_environment(config.run, {"start_seconds": parts})


def build(
    config: Config, world: World, seed: int, clock: StartClock | None = None
) -> tuple[BertForPreTraining, Trainer]:
    """The model with its first weights, and what trains it. Raises ConfigError for weights that do not fit.

    ``config``: with the attention backend named. Where the optimizer is sharded, weights are never whole: each rank
    keeps the fp32 numbers of its shard.
    """
    kernels, device, clock = select(config.kernels, world.device), world.device, clock or StartClock()
    by_pieces = config.optim.is_sharded(device)  # as with DeepSpeed always
    with uninitialized(torch.device("meta") if by_pieces else world.gathered_device):
        model = BertForPreTraining(config.model, kernels)
    clock.lap("model")
    checksum, pieces = Checksum(), None
    if by_pieces:
        pieces, loaded = _pieces(config, model, seed, checksum)
        _say_loaded(config, loaded, world)
        use_placeholders(model, config.numerics.dtype, world.gathered_device)
    else:
        _whole_weights(config, world, model, seed)
        clock.lap("weights")
        resume.check_weights(config, world, checksum_of(dict(model.named_parameters())))
        clock.lap("comparison of weights")
    if recomputation := config.recomputation(uses_graph=config.uses_graph):
        model.recompute(recomputation)
    step: Trainer
    if config.zero.is_deepspeed:
        assert pieces is not None
        given = config.zero.complete(config.optim, config.numerics, config.data.batch_size, config.data.gradient_steps)
        masters = partial(_pieces_again, config, seed)
        step = DeepSpeedStep(model, config.numerics, config.optim, world, given, pieces, masters)
    else:
        step = build_step(
            model,
            config.numerics,
            config.optim,
            world,
            accumulate=config.data.gradient_steps > 1,
            fused_update="lamb" in config.kernels.names(device),
            first_weights=pieces,
        )
    clock.lap("weights")
    if by_pieces:
        resume.check_weights(config, world, checksum.value)
        clock.lap("comparison of weights")
    return model, step


def _whole_weights(config: Config, world: World, model: BertForPreTraining, seed: int) -> None:
    path = config.checkpoint.init_checkpoint
    if path is None:
        initialize(model, seed)
        return
    loaded = load_weights(model, path, config.may_have_new_heads)
    if loaded.new:
        initialize(model, seed, only=loaded.new)
    _say_loaded(config, loaded, world)


def _pieces(config: Config, model: BertForPreTraining, seed: int, checksum: Checksum) -> tuple[Iterator[Chunk], Loaded]:
    """The first weights of a model that is all shapes, chunk by chunk, which the checksum takes in as they come."""
    path = config.checkpoint.init_checkpoint
    if path is None:
        return checksum.of(first_weights(model, seed)), Loaded([], [])
    return chunks_of(model, path, seed, config.may_have_new_heads, checksum)


def _pieces_again(config: Config, seed: int) -> Iterator[Chunk]:
    """The same once more, of a model that has its weights, of which stage 3 leaves no shapes."""
    with uninitialized():
        model = BertForPreTraining(config.model, select(config.kernels, torch.device("cpu")))
    return _pieces(config, model, seed, Checksum())[0]


def _say_loaded(config: Config, loaded: Loaded, world: World) -> None:
    if world.is_main and any(loaded):
        print(f"weights of {config.checkpoint.init_checkpoint}: {loaded}", file=sys.stderr, flush=True)


def finisher(config: Config, world: World) -> Callable[[PretrainingBatch], PretrainingBatch]:
    """What the data thread does with a batch: fills it up for a graph, pins its memory where a GPU will copy it."""
    capacity = graph_capacity(config.data.capacity, config.data.batch_size)

    def finish(batch: PretrainingBatch) -> PretrainingBatch:
        if config.uses_graph:
            batch = static_batch(batch, capacity)
        return batch.pin_memory() if world.device.type == "cuda" else batch

    return finish


def prepare(
    config: Config, model: BertForPreTraining, step: Trainer, world: World, clock: StartClock | None = None
) -> tuple[TrainingStep, EvaluationGraph | None]:
    """Before the clock: all that the first step and the first evaluation would otherwise wait for."""
    if not isinstance(step, Step):
        return _observed(config, model, step, world), None
    clock = clock or StartClock()
    warms_up = config.warm_up if config.warm_up is not None else world.device.type == "cuda"
    take_step = ready(step, lambda: made_up_step(config, world), graph=config.uses_graph, rehearse=warms_up)
    clock.lap("warm-up")
    take_step = _observed(config, model, take_step, world)
    graph = None
    if config.evaluates and config.uses_graph:
        graph = EvaluationGraph(config.evaluate, config.data.max_seq_length, model, world.device)
    elif config.evaluates and warms_up:
        with step.gathered():
            rehearse(config.evaluate, config.data.max_seq_length, model, world.device)
    clock.lap("evaluation's warm-up")
    return take_step, graph


def _observed(config: Config, model: BertForPreTraining, take_step: TrainingStep, world: World) -> TrainingStep:
    """With CAPTURE and PROFILE_STEPS, where they are set."""
    if config.capture.kinds:
        assert config.run.run_dir is not None
        folder = config.run.run_dir / f"capture_{config.run.trial}"
        take_step = CapturedStep(config.capture, folder, world.rank, model, take_step)
    if config.profile.span is not None and world.is_main:
        assert config.run.run_dir is not None
        trace = config.run.run_dir / f"trace_{config.run.trial}.json"
        take_step = ProfiledStep(config.profile.span, trace, take_step)
    return take_step


def made_up_step(config: Config, world: World) -> list[PretrainingBatch]:
    """Micro-batches of one step, as the data thread gives them."""
    size = config.data.batch_size
    records = synthetic_records(size, config.data.max_seq_length, config.model.vocab_size, config.data.packed, seed=0)
    rows = np.arange(min(size, records.num_rows))
    batch = make_batch(records, row_sequences(records, rows)[0], config.data.max_seq_length)
    return [finisher(config, world)(batch)] * config.data.gradient_steps


class Evaluation:
    """Evaluates, logs, and says whether the target is reached. The data set is opened at the first one."""

    def __init__(
        self,
        config: Config,
        world: World,
        log: MlperfLog,
        step: Trainer,
        vocab_md5: str,
        graph: EvaluationGraph | None,
        watchers: Sequence[MetricSink],
    ) -> None:
        self.config, self.world, self.log, self.step = config, world, log, step
        self.vocab_md5, self.graph, self.watchers = vocab_md5, graph, watchers
        self.evaluator: Evaluator | None = None

    def run(self, step: int, samples: int) -> bool:
        """One evaluation after ``step``, of ``samples`` trained samples. A collective."""
        with self.step.gathered() as model:
            return self._run(model, step, samples)

    def _run(self, model: BertForPreTraining, step: int, samples: int) -> bool:
        begin = time.monotonic()
        self.log.eval_start(samples)
        if self.evaluator is None:
            length, vocab_size = self.config.data.max_seq_length, model.config.vocab_size
            self.evaluator = Evaluator(self.config.evaluate, length, vocab_size, self.vocab_md5, self.world, self.graph)
        result = self.evaluator(model)
        self.log.eval_stop(samples, result.accuracy)
        seconds = time.monotonic() - begin
        target = self.config.evaluate.target
        reached = 0 < target <= result.accuracy
        if self.world.is_main:
            outcome = "reached" if reached else f"{target:.4f}" if target else "none"
            print(
                f"evaluation at step {step}, {samples:,} samples: accuracy {result.accuracy:.5f} (target {outcome}), "
                f"loss {result.mlm_loss:.4f}, next sentence {result.nsp_accuracy:.4f}, {seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        names = ("accuracy", "mlm_loss", "nsp_loss", "nsp_accuracy")
        figures = {name: getattr(result, name) for name in names} | {"seconds": seconds}
        for watcher in self.watchers:
            watcher.write("evaluation", {"step": step, "samples": samples, **figures})
        return reached
