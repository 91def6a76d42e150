"""One fine-tuning run: bert's loop on a task's samples, then its predictions and metrics."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bert.checkpoint.save import load_newest, save_checkpoint
from bert.core import rundir
from bert.core.dist import World
from bert.core.env import ConfigError
from bert.core.files import write_text
from bert.data.tokens import WordPiece
from bert.kernels import select
from bert.training import observers
from bert.training.agenda import Agenda
from bert.training.loop import Parts, step_seed, train
from bert.training.progress import Progress
from bert.training.schedule import learning_rate
from bert.training.step import Step, build_step
from bert.training.steps import Steps
from bert.training.stop import Ending, Stop
from bert.training.warm_up import ready
from finetune import inference, tasks, weights
from finetune.batches import Order, Room, Samples, Source
from finetune.config import Config, learning_rates
from finetune.models import FineTuned


@dataclass(frozen=True)
class Run:
    """What is trained, on what."""

    config: Config
    environ: Mapping[str, str]
    world: World
    task: tasks.Task
    model: FineTuned
    step: Step


def finetune(config: Config, environ: Mapping[str, str], world: World) -> dict[str, Any]:
    """Trains, predicts and scores as the mode says; the figures of the run. Every rank calls it."""
    torch.manual_seed(config.trial_seed)
    task = tasks.build(config, WordPiece(config.vocabulary, config.lower_case))
    for note in task.notes:
        _say(world, note)
    run = build(config, environ, world, task)
    figures: dict[str, Any] = {"task": config.task, "seed": config.trial_seed}
    if config.trains:
        assert task.train is not None
        ending, trained = train_on(run, task.train)
        if ending.stopped:
            said = f"stopped at step {ending.step} ({ending.reason}); RESUME=1 continues"
            if world.is_main:
                rundir.write_error(config.run, said)  # the launcher's word that the run is not complete
            _say(world, said)
            return figures
        figures |= trained
        masters = run.step.state_dict()["optimizer"].get("masters", {})
        if world.is_main:
            weights.save(config.folder(), run.model, masters, config.vocabulary, task.description())
    if task.test is not None:
        figures |= _test(run, task.test)
    if world.is_main:
        config.folder().mkdir(parents=True, exist_ok=True)
        write_text(config.folder() / "figures.json", json.dumps(figures, indent=2) + "\n")
        _say(world, ", ".join(f"{name} {_shown(value)}" for name, value in figures.items()))
    world.barrier()
    return figures


def build(config: Config, environ: Mapping[str, str], world: World, task: tasks.Task) -> Run:
    """The model with its first weights, and what trains it. Raises ConfigError for weights that do not fit."""
    choice, words = config.kernels.choose(config.numerics.dtype, config.uses_graph, world)
    if world.device.type == "cuda":
        _say(world, f"attention: {words}")
    model = task.model(config.model, select(choice, world.device))
    loaded = load_weights(config, model)
    if any(loaded):
        _say(world, f"weights: {loaded}")
    if recomputation := config.recomputation(uses_graph=config.uses_graph):
        model.recompute(recomputation)
    model.to(world.device)
    fused = "lamb" in choice.names(world.device)
    accumulate = config.gradient_steps > 1
    step = build_step(model, config.numerics, config.optim, world, accumulate=accumulate, fused_update=fused)
    return Run(config, environ, world, task, model, step)


def load_weights(config: Config, model: FineTuned) -> weights.Loaded:
    """Gives the model its first weights. Raises ConfigError for those that do not fit."""
    path = config.checkpoint.init_checkpoint
    assert path is not None
    weights.initialise(model, config.trial_seed)
    loaded = weights.load(model, path)
    if loaded.new and not config.trains:
        raise ConfigError(
            f"INIT_CHECKPOINT={path} lacks {', '.join(loaded.new)}: it was not fine-tuned for this task; "
            "MODE=train-eval trains it"
        )
    return loaded


def num_steps(config: Config, num_samples: int) -> int:
    """Optimizer steps of a run."""
    return max(1, math.ceil(num_samples * config.epochs / config.samples_per_step))


def room_of(config: Config, samples: Samples, order: Order, num_steps: int) -> Room | None:
    """What a CUDA graph's micro-batches are filled up to; None without one."""
    if not config.uses_graph:
        return None
    # A step of fp16 that overflows is put off to the next batch, so that there may be more batches than steps.
    return Room.of(samples.lengths, order, 2 * num_steps if config.numerics.scales_loss else num_steps)


def train_on(run: Run, samples: Samples) -> tuple[Ending, dict[str, Any]]:
    """Trains, from the newest checkpoint on where there is one; why it ended, and its figures. A collective."""
    config, world, step = run.config, run.world, run.step
    num_samples, seed = len(samples.lengths), config.trial_seed
    last = num_steps(config, num_samples)
    rates = learning_rates(run.environ, last)
    saved = load_newest(config.checkpoint)
    identity = _identity(config, num_samples)
    done = batches = trained = 0
    if saved is not None:
        _check_same(config, saved["run"], identity)
        step.load_state_dict(saved)
        done, batches, trained = (int(saved[name]) for name in ("step", "batches", "samples"))
    order = Order(num_samples, config.batch_size, config.gradient_steps, seed, world.rank, world.size)
    room = room_of(config, samples, order, last)
    if room is not None:
        _say(world, f"CUDA graph: {room}")
    source = partial(Source, samples, order, room=room, pin=world.device.type == "cuda")
    take_step = ready(step, lambda: source(1).next_step(), graph=room is not None, rehearse=False)
    rate = partial(learning_rate, config=rates)
    watchers = observers.build(config.observers, config.run, identity, done) if world.is_main else []
    progress = Progress(
        world, last=last, rate=rate, epochs=lambda _, count: count / num_samples,
        skips_overflows=step.scaler.enabled, observers=watchers, done=done, samples=trained,
    )  # fmt: skip

    def save(steps: int, batches: int, samples: int) -> None:
        state = step.state_dict()
        if world.is_main:
            state |= {"step": steps, "batches": batches, "samples": samples, "run": identity}
            save_checkpoint(config.checkpoint, steps, state)
        world.barrier()

    begin = time.monotonic()
    with Stop(world, listen=config.checkpoint.directory is not None) as stop:
        parts = Parts(
            data=source(batches + 1), take_step=take_step,
            steps=Steps(rate, last, step.scaler, done, batches),
            agenda=Agenda(
                last=last, report_every=config.log_every_steps, checkpoint_every=config.checkpoint.every_steps
            ),
            progress=progress, stop=stop, seed=lambda batch: step_seed(seed, batch, world.rank),
            evaluate=lambda steps, samples: False, save=save,
        )  # fmt: skip
        ending = train(parts)
    seconds = time.monotonic() - begin
    if ending.stopped:
        save(ending.step, ending.batches, ending.samples)
    progress.summary(ending)
    speed = (ending.samples - trained) / seconds if seconds else 0.0
    figures = {"steps": last, "e2e_train_time": seconds, "training_sequences_per_second": speed}
    return ending, figures


def _test(run: Run, samples: Samples) -> dict[str, Any]:
    run.step.optimizer.gather()
    begin = time.monotonic()
    scores = inference.predict(run.model, samples, run.world, run.config.eval_batch_size)
    metrics = run.task.finish(scores, run.config.folder()) if run.world.is_main else {}
    seconds = time.monotonic() - begin
    speed = len(samples.lengths) / seconds
    return {"e2e_inference_time": seconds, "inference_sequences_per_second": speed, **metrics}


def _identity(config: Config, num_samples: int) -> dict[str, Any]:
    """What must not change between a run and its resumption, by the name of the variable."""
    return {
        "TASK": config.task,
        "SEED": config.trial_seed,
        "EPOCHS": config.epochs,
        "WORLD_SIZE": config.dist.world_size,
        "BATCHSIZE": config.batch_size,
        "GRADIENT_STEPS": config.gradient_steps,
        "MAX_SEQ_LENGTH": config.length,
        "OPTIMIZER": config.optim.optimizer,
        "PRECISION": config.precision.precision,
        "training sequences": num_samples,
    }


def _check_same(config: Config, saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    for name, value in identity.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"RESUME=1: the checkpoint in {config.checkpoint.directory} is of a run with {name} {saved.get(name)}, "
                f"this one has {value}: use the same settings, or another CHECKPOINT_DIR"
            )


def _shown(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _say(world: World, text: str) -> None:
    if world.is_main:
        print(f"finetune: {text}", file=sys.stderr, flush=True)
