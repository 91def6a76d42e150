"""Before the clock: the model with its initial weights, its training step, and what both would
otherwise compile, load or measure in the first timed step. All of it on synthetic data: MLPerf's
rules allow no look at the data set before run_start.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bert.checkpoint.weights import Checksum, Loaded, checksum_of, chunks_of
from bert.core.dist import World
from bert.data.batch import PretrainingBatch, make_batch
from bert.data.sampler import row_sequences
from bert.data.synthetic import synthetic_records
from bert.deepspeed.step import DeepSpeedStep
from bert.kernels import bind_kernels
from bert.kernels.support.graph_capture import CaptureError
from bert.model.bert import BertForPreTraining
from bert.model.init import Chunk, fill, uninitialized, use_placeholders
from bert.model.init import first_weights as drawn_weights
from bert.pretraining import resume
from bert.pretraining.config import PretrainingConfig
from bert.pretraining.memory import meta_model
from bert.pretraining.saver import Trainer
from bert.training.debug import ProfiledStep, RecordedStep
from bert.training.evaluate import EvaluationGraph, warm_up
from bert.training.graph import capture_or_warm_up, graph_capacity, static_batch
from bert.training.step import Step, TrainingStep, build_step
from common.process import say


def resolve_kernels(config: PretrainingConfig, world: World) -> PretrainingConfig:
    """The config with ATTENTION=auto resolved, which is printed. A collective."""
    kernels, words = config.kernels.resolve_attention(
        config.model, config.numerics.dtype, config.uses_graph, world
    )
    if world.is_main and world.device.type == "cuda":
        say(f"attention: {words}")
    return replace(config, kernels=kernels)


def chosen_kernels(config: PretrainingConfig) -> dict[str, Any]:
    """What a resolved config computes with, for the run's folder."""
    fused = sorted(config.kernels.names(config.device))
    return {"attention": config.kernels.attention, "fused": fused}


def build(
    config: PretrainingConfig,
    world: World,
    seed: int,
    first_weights: Checksum | None = None,
) -> tuple[BertForPreTraining, Trainer]:
    """The model with its initial weights, and its training step, in one of two ways.

    Where every rank has all weights in fp32 (SHARD_OPTIMIZER=0) the model is filled, and the step
    built on it. With a sharded optimizer, always so with DeepSpeed, no rank ever has: the model has
    placeholders without memory, the step reads the weights chunk by chunk, and keeps those of its
    shard.

    ``config``: with the attention backend resolved. first_weights: becomes the checksum of the
    initial weights, the same for every engine, as they are read. Raises ConfigError for weights
    that do not fit.
    """
    device = world.device
    by_chunks = config.optim.is_sharded(device)
    # Without PyTorch's own initialization, which would draw all weights to be overwritten.
    with uninitialized(torch.device("meta") if by_chunks else device):
        model = BertForPreTraining(config.model, bind_kernels(config.kernels, device))
    as_read = first_weights or Checksum()
    chunks, loaded = initial_weights(config, seed, model, as_read)
    if by_chunks:
        use_placeholders(model, config.numerics.dtype, device)
    else:
        fill(model, chunks)
        # Of all weights as loaded, before the step casts them.
        checksum = checksum_of(dict(model.named_parameters()))
    if world.is_main and any(loaded):
        path = config.checkpoint.init_checkpoint
        say(f"weights of {path}: {loaded}")
    if recomputation := config.recomputation(uses_graph=config.uses_graph):
        model.recompute(recomputation)
    step: Trainer
    if config.zero.is_deepspeed:
        step = _deepspeed_step(config, world, seed, model, chunks)
    else:
        step = build_step(
            model,
            config.numerics,
            config.optim,
            world,
            accumulate=config.data.gradient_steps > 1,
            fused_update="lamb" in config.kernels.names(device),
            first_weights=chunks if by_chunks else None,
        )
    # Chunks have been read only now.
    resume.check_weights(
        config.checkpoint, world, as_read.value if by_chunks else checksum
    )
    return model, step


def initial_weights(
    config: PretrainingConfig, seed: int, shapes: BertForPreTraining, so_far: Checksum
) -> tuple[Iterator[Chunk], Loaded]:
    """The weights that a model of ``shapes`` starts with, of INIT_CHECKPOINT or drawn; ``so_far``
    becomes their checksum as they are read.
    """
    path = config.checkpoint.init_checkpoint
    if path is None:
        return so_far.of(drawn_weights(shapes, seed)), Loaded([], [])
    share = config.dist.rank, config.dist.world_size
    return chunks_of(shapes, path, seed, config.may_have_new_heads, so_far, share)


def _deepspeed_step(
    config: PretrainingConfig,
    world: World,
    seed: int,
    model: BertForPreTraining,
    weights: Iterator[Chunk],
) -> DeepSpeedStep:
    """DeepSpeed's step; it reads the weights twice: as its model's, and as fp32 masters."""

    def masters() -> Iterator[Chunk]:
        return initial_weights(config, seed, meta_model(config.model), Checksum())[0]

    settings = config.zero.complete(
        config.optim,
        config.numerics,
        config.data.batch_size,
        config.data.gradient_steps,
    )
    return DeepSpeedStep(
        model, config.numerics, config.optim, world, settings, weights, masters
    )


def prepare(
    config: PretrainingConfig, model: BertForPreTraining, step: Trainer, world: World
) -> tuple[TrainingStep, EvaluationGraph | None]:
    """Before the clock: compiles and records what the first step and evaluation would otherwise
    wait for.
    """
    take_step: TrainingStep = step
    graph, length = None, config.data.max_seq_length
    if isinstance(step, Step):
        untimed = warms_up(world.device)
        # On dummy batches of the run's capacity; the steps taken are undone bit for bit.
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
    if config.capture.capture:
        take_step = RecordedStep(
            config.run.file("capture_{}"),
            world.rank,
            model,
            take_step,
            config.capture.steps,
        )
    # One rank's trace is enough, and its files are large.
    if config.profile.span is not None and world.is_main:
        trace = config.run.file("trace_{}.json")
        take_step = ProfiledStep(config.profile.span, trace, take_step)
    return take_step, graph


def warms_up(device: torch.device) -> bool:
    """Whether an untimed step, rolled back, precedes the clock: GPUs load and choose kernels in
    it.
    """
    return device.type == "cuda"


def pad_and_pin(
    config: PretrainingConfig, world: World
) -> Callable[[PretrainingBatch], PretrainingBatch]:
    """The data thread's last step: pads a batch for a graph, and pins its memory for a GPU."""
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
