"""One rank of a fine-tuning run: ``--check``, or bert's training loop on a task's samples,
predictions and metrics.
"""

import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from bert.checkpoint.save import facts_of, load_newest, save_checkpoint
from bert.checkpoint.weights import Loaded, checksum_of
from bert.core import extension, rundir, variables
from bert.core.claim import check_held
from bert.core.dist import World
from bert.data.batch import Batch
from bert.data.tokens import WordPiece
from bert.kernels import bind_kernels
from bert.training import schedule
from bert.training.loop import StepCounter, StepSchedule, step_seed, train
from bert.training.metrics import Progress, metric_sinks
from bert.training.schedule import learning_rate
from bert.training.step import Step, build_step, check_finite
from bert.training.stop import PATIENCE, Ending, Stop
from common import env
from common.env import ConfigError, from_env
from common.files import object_of, write_json
from finetune import config as settings
from finetune import models, saved, tasks
from finetune.batches import Order, Samples, micro_batches
from finetune.best import Best, evaluation_steps
from finetune.config import FinetuneConfig, learning_rates
from finetune.models import FineTuned


def run(environ: Mapping[str, str], check_only: bool = False) -> int:
    """Fine-tunes, or with ``check_only`` prints what would run; returns the exit status."""
    # A check leaves nothing in the folder that it judges.
    run_config = rundir.RunConfig()
    try:
        if not check_only:
            run_config = from_env(rundir.RunConfig, environ)
        variables.check_names(environ)
        extension.load(environ)
        config = settings.read(environ)
        if check_only:
            print(report(config, environ))
            return 0
        if config.run.run_dir is None:
            raise ConfigError(
                "RUN_DIR is not set: give the folder for the model and the predictions"
            )
        rank, directory = config.dist.rank, config.checkpoint.directory
        with config.run.claims(environ, rank, directory):
            if rank == 0:
                derived = {"model": config.model, "seed": config.trial_seed}
                rundir.write_description(config.run, config, derived)
            with World(config.dist) as world:
                finetune(config, environ, world)
        return 0
    except Exception as error:
        return rundir.failed(run_config, "finetune", error)


def report(config: FinetuneConfig, environ: Mapping[str, str]) -> str:
    """Settings and what follows from them. Raises ConfigError or DataError for anything that would
    stop the run.
    """
    # The check does what the run does first: it reads the data and the weights.
    task = tasks.build(config, WordPiece(config.vocabulary, config.lower_case))
    model = task.model(config.model, bind_kernels(config.kernels, config.device))
    loaded = load_weights(config, model)
    identity = identity_of(config, environ, task, model, loaded)
    # A finished trial in RUN_DIR must be the same.
    if config.run.run_dir is not None:
        path = config.folder() / "figures.json"
        if figures := object_of(path):
            rundir.check_same(path, figures.get("settings"), identity)
    num_parameters = sum(p.numel() for p in model.parameters())
    form = config.model.gelu_form
    batch = f"{config.batch_size} x {config.gradient_steps} accumulated x {config.dist.world_size} ranks"
    rows = [
        ("task", f"{config.task}, {config.mode}, seed {config.trial_seed}"),
        (
            "model",
            f"{num_parameters:,} parameters, GELU in its {form} form, {config.bert_config_path}",
        ),
        ("kernels", config.kernels.describe(config.device)),
        (
            "global batch",
            f"{config.samples_per_step} sequences = {batch}, at most {config.length} tokens each",
        ),
        *(("data", note) for note in task.notes),
        ("weights", f"{config.checkpoint.init_checkpoint}; {loaded}"),
    ]
    if task.train is not None:
        last = num_steps(config, len(task.train.lengths))
        rows.append(("steps", f"{last:,}, {config.epochs:g} epochs"))
        rows.append(("learning rate", schedule.describe(learning_rates(environ, last))))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


class Run(NamedTuple):
    """A model with its task and training step."""

    config: FinetuneConfig
    environ: Mapping[str, str]
    world: World
    task: tasks.Squad | tasks.Glue
    model: FineTuned
    step: Step
    identity: dict[str, Any]  # what a resumed run must have in common with it
    best: Best


def finetune(config: FinetuneConfig, environ: Mapping[str, str], world: World) -> None:
    """Trains, predicts and scores, depending on the mode. A collective."""
    # Before anything is drawn; each step seeds dropout anew in the loop.
    torch.manual_seed(config.trial_seed)
    task = tasks.build(config, WordPiece(config.vocabulary, config.lower_case))
    for note in task.notes:
        _say(world, note)
    run = build(config, environ, world, task)
    best = run.best
    figures: dict[str, Any] = {"task": config.task, "seed": config.trial_seed}
    if config.trains:
        assert task.train is not None
        ending, trained = train_on(run, task.train)
        if ending.stopped:
            reason = (
                f"stopped at step {ending.step} ({ending.reason}); RESUME=1 continues"
            )
            if world.is_main:
                # The launcher sees an incomplete run.
                rundir.write_error(config.run, reason)
            _say(world, reason)
            return
        figures |= trained
        # A model with nan predicts without a word, so it is not saved.
        check_finite(run.step.state_tensors(), world, ending.step)
        masters = best.weights if best.step else weights_of(run)
        if world.is_main:
            models.save(
                config.folder(),
                run.model,
                masters,
                config.vocabulary,
                task.description(),
            )
    if task.test is not None:
        begin = time.monotonic()
        known = [row.numpy() for row in best.scores]
        scores = known if best.step else predict(run)
        metrics = task.finish(scores, config.folder()) if world.is_main else {}
        seconds = time.monotonic() - begin
        if best.step:
            seconds = best.seconds / best.evaluations
            figures |= {"best_step": best.step}
        figures |= {
            "e2e_inference_time": seconds,
            "inference_sequences_per_second": len(task.test.lengths) / seconds,
            **metrics,
        }
    if world.is_main:
        config.folder().mkdir(parents=True, exist_ok=True)
        # Last: where this file is, the trial is done, and the launcher does not repeat it.
        facts = figures | {"settings": run.identity}
        write_json(config.folder() / "figures.json", facts)
        shown = {
            name: f"{value:.4f}" if isinstance(value, float) else value
            for name, value in figures.items()
        }
        _say(world, ", ".join(f"{name} {value}" for name, value in shown.items()))
    world.barrier()


def build(
    config: FinetuneConfig,
    environ: Mapping[str, str],
    world: World,
    task: tasks.Squad | tasks.Glue,
) -> Run:
    """The model with its initial weights, and its training step. Raises ConfigError for weights
    that do not fit.
    """
    choice, words = config.kernels.resolve_attention(
        config.model, config.numerics.dtype, False, world
    )
    if world.device.type == "cuda":
        _say(world, f"attention: {words}")
    model = task.model(config.model, bind_kernels(choice, world.device))
    loaded = load_weights(config, model)
    if any(loaded):
        _say(world, f"weights: {loaded}")
    identity = identity_of(config, environ, task, model, loaded)
    # Before the first step: ranks with different data would train a mixture without a word.
    if world.joined:
        facts = rundir.shared_facts(config) | identity
        world.agree(
            facts, "give all ranks the same settings, code, DATA and INIT_CHECKPOINT"
        )
    if recomputation := config.recomputation(uses_graph=False):
        model.recompute(recomputation)
    model.to(world.device)
    # One of the fused kernels is the whole update.
    fused = "lamb" in choice.names(world.device)
    accumulate = config.gradient_steps > 1
    # The trainer's own step: fine-tuning differs in the model and the batches alone.
    step = build_step(
        model,
        config.numerics,
        config.optim,
        world,
        accumulate=accumulate,
        fused_update=fused,
    )
    return Run(config, environ, world, task, model, step, identity, Best())


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    """In fp32, on rank 0: the weights of a model in bf16 have lost digits. A collective."""
    masters: dict[str, torch.Tensor] = run.step.state_dict()["optimizer"].get(
        "masters", {}
    )
    return masters


def predict(run: Run) -> list[np.ndarray]:
    """Scores of every test sample, in order, on rank 0. A collective."""
    assert run.task.test is not None
    # A sharded optimizer leaves the weights of other ranks' shards a step behind.
    run.step.optimizer.gather()
    size = run.config.eval_batch_size
    return saved.predict(run.model, run.task.test, run.world, size)


def load_weights(config: FinetuneConfig, model: FineTuned) -> Loaded:
    """Sets the initial weights. Raises ConfigError for weights that do not fit."""
    path = config.checkpoint.init_checkpoint
    assert path is not None
    # First all, then those that the checkpoint has: what
    # remains is new, and depends on the seed alone.
    models.initialize(model, config.trial_seed)
    loaded = models.load(model, path)
    if loaded.new and not config.trains:
        lacking = f"INIT_CHECKPOINT={path} lacks {', '.join(loaded.new)}"
        raise ConfigError(
            f"{lacking}: it was not fine-tuned for this task; MODE=train-eval does that"
        )
    return loaded


def identity_of(
    config: FinetuneConfig,
    environ: Mapping[str, str],
    task: tasks.Squad | tasks.Glue,
    model: FineTuned,
    loaded: Loaded,
) -> dict[str, Any]:
    """Settings, data and initial weights: what must not change when a trial is resumed or counted
    as done.
    """
    facts = env.settings(config)
    if task.train is not None:
        last = num_steps(config, len(task.train.lengths))
        facts |= env.settings(learning_rates(environ, last))
    # A new head follows from the seed, which is compared already.
    read = {
        name: tensor
        for name, tensor in model.named_parameters()
        if name not in loaded.new
    }
    facts |= {
        "SEED": config.trial_seed,
        "MAX_SEQ_LENGTH": config.length,
        "lower case": config.lower_case,
        "BERT_CONFIG": config.model.identity,
        "EXTENSION": config.extension.identity,
        "INIT_CHECKPOINT": f"{checksum_of(read):08x}",
        "vocabulary": tasks.digest(config.vocabulary),
        **task.digests,
    }
    # What changes outputs or only the rounding may differ; SEEDS is compared as this trial's seed.
    free = {*rundir.OUTPUT, "SEEDS", *settings.ROUNDING}
    return {name: value for name, value in facts.items() if name not in free}


def num_steps(config: FinetuneConfig, num_samples: int) -> int:
    return max(1, math.ceil(num_samples * config.epochs / config.samples_per_step))


class Start(NamedTuple):
    """Where training begins: after the steps, batches, samples and seconds of earlier processes."""

    step: int = 0
    batches: int = 0
    samples: int = 0
    seconds: float = 0.0


def resume(run: Run) -> Start:
    """Loads the newest checkpoint, if there is one. Raises ConfigError for one of another run. A
    collective.
    """
    config, mine = run.config.checkpoint, run.config.run
    last = config.newest
    is_own = last is not None and mine.owns(facts_of(last))
    is_own &= not mine.has_left(f"{run.config.folder().name}/figures.json")
    # Another node may not share RUN_DIR.
    state = load_newest(config, run.world.broadcast_int(is_own) == 1)
    if state and (difference := rundir.difference(state["run"], run.identity)):
        where = f"the checkpoint in {config.directory} is {difference}"
        raise ConfigError(
            f"{where}: use the same settings and data, or another CHECKPOINT_DIR"
        )
    if state is None:
        return Start()
    run.step.load_state_dict(state)
    # Those of before version 0.2 had no evaluations in training.
    vars(run.best).update(state.get("best", {}))
    return Start(*(state[name] for name in Start._fields))


def train_on(run: Run, samples: Samples) -> tuple[Ending, dict[str, Any]]:
    """Trains, resuming from the newest checkpoint if any; returns how training ended, and its
    figures. A collective.
    """
    config, world, step = run.config, run.world, run.step
    num_samples = len(samples.lengths)
    last = num_steps(config, num_samples)
    start = resume(run)
    rate = partial(learning_rate, config=learning_rates(run.environ, last))
    evaluations = evaluation_steps(config.eval_every_epochs, config.epochs, last)
    progress = Progress(
        world,
        last=last,
        rate=rate,
        epochs=lambda _, count: count / num_samples,
        skips_overflows=step.scaler.enabled,
        done=start.step,
        samples=start.samples,
        sinks=(
            metric_sinks(config.observers, config.run, start.step)
            if world.is_main
            else []
        ),
    )
    begin = time.monotonic()

    def save(steps: int, batches: int, samples: int) -> None:
        seconds = start.seconds + time.monotonic() - begin
        save_state(run, Start(steps, batches, samples, seconds))

    with Stop(world, listen=config.checkpoint.directory is not None) as stop:
        ending = train(
            next_step=partial(next, batches_of(run, samples, start.batches + 1)),
            take_step=step,
            steps=StepCounter(rate, last, step.scaler, start.step, start.batches),
            schedule=StepSchedule(
                last=last,
                report_every=config.log_every_steps,
                checkpoint=config.checkpoint.is_due,
                evaluations=evaluations,
            ),
            progress=progress,
            stop=stop,
            seed=lambda batch: step_seed(config.trial_seed, batch, world.rank),
            evaluate=lambda steps, samples: evaluate(run, progress, steps),
            save=save,
        )
    seconds = start.seconds + time.monotonic() - begin
    if ending.reached:
        ending = replace(ending, reason=PATIENCE)
    if ending.stopped:
        save(ending.step, ending.batches, ending.samples)
    progress.summary(ending)
    return ending, {
        "steps": ending.step,
        "e2e_train_time": seconds,
        "training_sequences_per_second": ending.samples / (seconds - run.best.seconds),
    }


def evaluate(run: Run, progress: Progress, step: int) -> bool:
    """Keeps the model if it is the best so far; returns whether training ends for want of better
    ones. A collective.
    """
    best, world = run.best, run.world
    begin = time.monotonic()
    # The scores of nan are numbers, and could be the best.
    check_finite(run.step.state_tensors(), world, step)
    scores = predict(run)
    run.model.train()
    metrics = run.task.finish(scores) if world.is_main else {}
    # The main metric comes first.
    figure = next(iter(metrics.values()), 0.0)
    is_best = world.broadcast_int(figure > best.figure) == 1
    if is_best:
        best.step, best.figure, best.weights = step, figure, weights_of(run)
        best.scores = [torch.from_numpy(row) for row in scores]
    best.worse = 0 if is_best else best.worse + 1
    best.evaluations += 1
    best.seconds += time.monotonic() - begin
    if world.is_main:
        for sink in progress.sinks:
            sink("evaluation", {"step": step, **metrics})
        found = [f"{name} {value:.4f}" for name, value in metrics.items()]
        note = " (best)" if is_best else ""
        _say(world, f"evaluation at step {step:,}: {', '.join(found)}{note}")
    return 0 < run.config.patience <= best.worse


def batches_of(run: Run, samples: Samples, first_step: int) -> Iterator[list[Batch]]:
    """This rank's micro-batches of each step, from one on."""
    config, world = run.config, run.world
    order = Order(
        len(samples.lengths),
        config.batch_size,
        config.gradient_steps,
        config.trial_seed,
        world.rank,
        world.size,
    )
    on_gpu = world.device.type == "cuda"
    return micro_batches(samples, order, first_step, pin=on_gpu)


def save_state(run: Run, now: Start) -> None:
    """Writes a checkpoint, from rank 0. A collective."""
    check_finite(run.step.state_tensors(), run.world, now.step)
    # A collective: each rank gives its shard.
    state = run.step.state_dict()
    if run.world.is_main:
        check_held()
        facts = now._asdict() | {"run": run.identity, "best": vars(run.best)}
        facts |= run.config.run.owner
        save_checkpoint(run.config.checkpoint, now.step, state | facts)
    run.world.barrier()


def _say(world: World, text: str) -> None:
    if world.is_main:
        print(f"finetune: {text}", file=sys.stderr)
