"""One rank of a fine-tuning run: ``--check``, or bert's training loop on a task's samples, predictions and metrics."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from bert.checkpoint.save import Interval, load_newest, save_checkpoint
from bert.checkpoint.weights import Loaded, checksum_of
from bert.core import rundir, variables
from bert.core.dist import World, pick_device
from bert.data.tokens import WordPiece
from bert.kernels import bind_kernels
from bert.training import schedule
from bert.training.graph import capture_or_warm_up
from bert.training.loop import LoopHooks, StepCounter, StepSchedule, step_seed, train
from bert.training.metrics import Progress, metric_sinks
from bert.training.schedule import learning_rate
from bert.training.step import Step, build_step, check_finite
from bert.training.stop import Ending, Stop
from common import env
from common.env import ConfigError, from_env
from common.files import write_text
from finetune import config as settings
from finetune import models, saved, tasks
from finetune.batches import Order, Room, Samples, Source
from finetune.config import Config, learning_rates
from finetune.models import FineTuned


def run(environ: Mapping[str, str], check_only: bool = False) -> int:
    """Fine-tunes, or with ``check_only`` prints what would run; returns the exit status."""
    run_config = rundir.Config()  # a check leaves nothing in the folder that it judges
    try:
        if not check_only:
            run_config = from_env(rundir.Config, environ)
        variables.check_names(environ)
        config = settings.read(environ)
        if check_only:
            print(report(config, environ))
            return 0
        if config.run.run_dir is None:
            raise ConfigError(
                "RUN_DIR is not set: give the folder for the model and the predictions"
            )
        if config.dist.rank == 0:
            rundir.write_description(
                config.run, config, {"model": config.model, "seed": config.trial_seed}
            )
        with World(config.dist) as world:
            finetune(config, environ, world)
        return 0
    except Exception as error:
        return rundir.failed(run_config, "finetune", error)


def report(config: Config, environ: Mapping[str, str]) -> str:
    """Settings and what follows from them. Raises ConfigError or DataError for anything that would stop the run."""
    device = pick_device(config.dist)
    task = tasks.build(config, WordPiece(config.vocabulary, config.lower_case))
    model = task.model(config.model, bind_kernels(config.kernels, device))
    loaded = load_weights(config, model)
    identity = identity_of(config, environ, task, model, loaded)
    # A finished trial in RUN_DIR must be the same.
    if config.run.run_dir is not None and (path := config.folder() / "figures.json").is_file():
        rundir.check_same(
            path, json.loads(path.read_text(encoding="utf-8")).get("settings"), identity
        )
    # --check is one process and must not wait for the other ranks.
    alone = World(dataclasses.replace(config.dist, world_size=1, rank=0, local_rank=0))
    num_parameters, form = sum(p.numel() for p in model.parameters()), config.model.gelu_form
    batch = f"{config.batch_size} x {config.gradient_steps} accumulated x {config.dist.world_size} ranks"
    rows = [
        ("task", f"{config.task}, {config.mode}, seed {config.trial_seed}"),
        (
            "model",
            f"{num_parameters:,} parameters, GELU in its {form} form, {config.bert_config_path}",
        ),
        ("kernels", config.kernels.describe(device)),
        (
            "attention",
            config.kernels.resolve_attention(
                config.model, config.numerics.dtype, config.uses_graph, alone
            )[1],
        ),
        (
            "global batch",
            f"{config.samples_per_step} sequences = {batch}, at most {config.length} tokens each",
        ),
        *(("data", note) for note in task.notes),
        ("weights", f"{config.checkpoint.init_checkpoint}{f'; {loaded}' if any(loaded) else ''}"),
    ]
    if task.train is not None:
        last, _, room = plan(config, task.train)
        rows.append(("steps", f"{last:,}, {config.epochs:g} epochs"))
        if room:
            rows.append(("CUDA graph", str(room)))
        rows.append(("learning rate", schedule.describe(learning_rates(environ, last))))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


class Run(NamedTuple):
    """A model with its task and training step."""

    config: Config
    environ: Mapping[str, str]
    world: World
    task: tasks.Squad | tasks.Glue
    model: FineTuned
    step: Step
    identity: dict[str, Any]  # what a resumed run must have in common with it


def finetune(config: Config, environ: Mapping[str, str], world: World) -> dict[str, Any]:
    """Trains, predicts and scores, depending on the mode; returns the run's figures. A collective."""
    # Before anything is drawn; each step seeds dropout anew in the loop.
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
            reason = f"stopped at step {ending.step} ({ending.reason}); RESUME=1 continues"
            if world.is_main:
                rundir.write_error(
                    config.run, reason
                )  # tells the launcher that the run is incomplete
            _say(world, reason)
            return figures
        figures |= trained
        # A model with nan predicts without a word, so it is not saved.
        check_finite(run.step.state_tensors(), world, ending.step)
        if not config.keep_best:
            save_model(run)
    if task.test is not None:
        # A sharded optimizer leaves the weights of other ranks' shards a step behind.
        run.step.optimizer.gather()
        # Scored as it will be used: the weights that were kept, not those of the last step.
        if config.keep_best:
            models.load(run.model, config.folder() / "model.safetensors")
        begin = time.monotonic()
        metrics = scored(run)
        seconds = time.monotonic() - begin
        speed = len(task.test.lengths) / seconds
        figures |= {
            "e2e_inference_time": seconds,
            "inference_sequences_per_second": speed,
            **metrics,
        }
    if world.is_main:
        config.folder().mkdir(parents=True, exist_ok=True)
        # Last: where this file is, the trial is done, and the launcher does not repeat it.
        write_text(
            config.folder() / "figures.json",
            json.dumps(figures | {"settings": run.identity}, indent=2) + "\n",
        )
        shown = {
            name: f"{value:.4f}" if isinstance(value, float) else value
            for name, value in figures.items()
        }
        _say(world, ", ".join(f"{name} {value}" for name, value in shown.items()))
    world.barrier()
    return figures


def save_model(run: Run) -> None:
    """Writes the current model's folder. A collective."""
    # In fp32: the weights of a model in bf16 have lost digits.
    masters = run.step.state_dict()["optimizer"].get("masters", {})
    if run.world.is_main:
        models.save(
            run.config.folder(), run.model, masters, run.config.vocabulary, run.task.description()
        )


def scored(run: Run) -> dict[str, float]:
    """Writes predictions of the test samples; returns metrics on rank 0. A collective, after optimizer.gather()."""
    assert run.task.test is not None
    scores = saved.predict(run.model, run.task.test, run.world, run.config.eval_batch_size)
    return run.task.finish(scores, run.config.folder()) if run.world.is_main else {}


class Best:
    """KEEP_BEST: scores the model on dev after each epoch, and saves it if it is the best so far."""

    def __init__(self, run: Run, resumed: bool) -> None:
        self.run, self.path, self.record = run, run.config.folder() / "best.json", {}
        if resumed and self.path.is_file():
            self.record = json.loads(self.path.read_text(encoding="utf-8"))

    def evaluate(self, steps: int, samples: int) -> bool:
        """Scores the model after ``steps``; never ends the training. A collective."""
        self.run.step.optimizer.gather()
        metrics = scored(self.run)
        # A task's main metric comes first.
        name = "f1" if self.run.config.task == "squad" else next(iter(metrics), "")
        better = self.run.world.is_main and metrics[name] > self.record.get(name, -math.inf)
        # Only rank 0 has metrics, but all ranks must enter save_model.
        if self.run.world.any(better):
            save_model(self.run)
            self.record = {"best_step": steps, name: metrics.get(name)}
        if self.run.world.is_main:
            _say(
                self.run.world,
                f"step {steps}: dev {name} {metrics[name]:.4f}{', the best so far' if better else ''}",
            )
            write_text(self.path, json.dumps(self.record) + "\n")
        self.run.world.barrier()
        return False


def build(
    config: Config, environ: Mapping[str, str], world: World, task: tasks.Squad | tasks.Glue
) -> Run:
    """The model with its initial weights, and its training step. Raises ConfigError for weights that do not fit."""
    choice, words = config.kernels.resolve_attention(
        config.model, config.numerics.dtype, config.uses_graph, world
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
        facts = rundir.shared_facts(config) | {
            "BERT_CONFIG": config.model,
            "rates": learning_rates(environ, 1),
        }
        for name, part in (("training data", task.train), ("test data", task.test)):
            facts[name] = "none" if part is None else part.digest()
        facts["weights"] = f"{checksum_of(dict(model.named_parameters())):08x}"
        world.agree(facts, "give all ranks the same settings, code, DATA and INIT_CHECKPOINT")
    if recomputation := config.recomputation(uses_graph=config.uses_graph):
        model.recompute(recomputation)
    model.to(world.device)
    # One of the fused kernels is the whole update.
    fused = "lamb" in choice.names(world.device)
    accumulate = config.gradient_steps > 1
    step = build_step(
        model, config.numerics, config.optim, world, accumulate=accumulate, fused_update=fused
    )
    return Run(config, environ, world, task, model, step, identity)


def load_weights(config: Config, model: FineTuned) -> Loaded:
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
    config: Config,
    environ: Mapping[str, str],
    task: tasks.Squad | tasks.Glue,
    model: FineTuned,
    loaded: Loaded,
) -> dict[str, Any]:
    """Settings, data and initial weights: what must not change when a trial is resumed or counted as done."""
    facts = env.settings(config)
    if task.train is not None:
        facts |= {"training sequences": len(task.train.lengths)}
        facts |= env.settings(learning_rates(environ, num_steps(config, len(task.train.lengths))))
    # A new head follows from the seed, which is compared already.
    read = {name: tensor for name, tensor in model.named_parameters() if name not in loaded.new}
    facts |= {
        "SEED": config.trial_seed,
        "MAX_SEQ_LENGTH": config.length,
        "DO_LOWER_CASE": config.lower_case,
    }
    facts |= {
        "BERT_CONFIG": config.model.identity,
        "INIT_CHECKPOINT": f"{checksum_of(read):08x}",
        **task.digests,
    }
    facts |= {"vocabulary": tasks.digest(config.vocabulary)}
    # What changes outputs or only the rounding may differ; SEEDS is compared as this trial's seed.
    free = {*rundir.OUTPUT, "SEEDS", *settings.ROUNDING}
    return {name: value for name, value in facts.items() if name not in free}


def num_steps(config: Config, num_samples: int) -> int:
    return max(1, math.ceil(num_samples * config.epochs / config.samples_per_step))


def plan(config: Config, samples: Samples) -> tuple[int, Order, Room | None]:
    """Number of steps, this rank's order of the samples, and the fixed micro-batch size of CUDA graphs if used."""
    count, ranks = len(samples.lengths), config.dist
    order = Order(
        count,
        config.batch_size,
        config.gradient_steps,
        config.trial_seed,
        ranks.rank,
        ranks.world_size,
    )
    last = num_steps(config, count)
    # A step of fp16 that overflows is retried on the next batch, so there may be more batches than steps.
    num_batches = 2 * last if config.numerics.scales_loss else last
    return last, order, Room.of(samples.lengths, order, num_batches) if config.uses_graph else None


def train_on(run: Run, samples: Samples) -> tuple[Ending, dict[str, Any]]:
    """Trains, resuming from the newest checkpoint if any; returns how training ended, and its figures. A collective."""
    config, world, step = run.config, run.world, run.step
    num_samples, seed = len(samples.lengths), config.trial_seed
    last, order, room = plan(config, samples)
    # How a model predicts does not matter to its training, so it may change before RESUME=1.
    identity = {
        name: value
        for name, value in run.identity.items()
        if name not in (*settings.PREDICTION, "test data")
    }
    rounding = {
        name: value for name, value in env.settings(config).items() if name in settings.ROUNDING
    }
    done = batches = trained = 0
    before = 0.0  # seconds of training before this process
    if (found := load_newest(config.checkpoint)) is not None:
        where = f"RESUME=1: the checkpoint in {config.checkpoint.directory}"
        if difference := rundir.difference(found["run"], identity):
            raise ConfigError(
                f"{where} is {difference}: use the same settings and data, or another CHECKPOINT_DIR"
            )
        if unknown := [name for name in identity if name not in found["run"]]:
            _say(world, f"{where} is of an earlier version: not compared: {', '.join(unknown)}")
        if difference := rundir.difference(found.get("rounding", {}), rounding):
            _say(world, f"{where} is {difference}: from here on sums are rounded differently")
        # Before the capture, which keeps weights and moments as they are.
        step.load_state_dict(found)
        done, batches, trained = (int(found[name]) for name in ("step", "batches", "samples"))
        before = float(found.get("seconds", 0.0))
    if room is not None:
        _say(world, f"CUDA graph: {room}")
    source = partial(Source, samples, order, room=room, pin=world.device.type == "cuda")
    take_step = capture_or_warm_up(
        step, lambda: source(1).next_step(), graph=room is not None, rehearse=False
    )
    rate = partial(learning_rate, config=learning_rates(run.environ, last))
    progress = Progress(
        world, last=last, rate=rate, epochs=lambda _, count: count / num_samples,
        skips_overflows=step.scaler.enabled, done=done, samples=trained,
        sinks=metric_sinks(config.observers, config.run, identity, done) if world.is_main else [],
    )  # fmt: skip

    def save(steps: int, batches: int, samples: int) -> None:
        check_finite(step.state_tensors(), world, steps)
        # A collective: each rank gives its shard.
        state = step.state_dict()
        if world.is_main:
            state |= {
                "step": steps,
                "batches": batches,
                "samples": samples,
                "run": identity,
                "rounding": rounding,
            }
            state |= {"seconds": before + time.monotonic() - begin}
            save_checkpoint(config.checkpoint, steps, state)
        world.barrier()

    interval = Interval(config.checkpoint, world, 1, done)
    best = Best(run, resumed=found is not None) if config.keep_best else None
    each = num_samples / config.samples_per_step  # steps per epoch
    # An epoch may end within a step: it counts from the step that completes it.
    ends = {min(last, math.ceil(epoch * each)) for epoch in range(1, math.ceil(config.epochs) + 1)}
    due = StepSchedule(
        last=last, report_every=config.log_every_steps, checkpoint=interval.is_due,
        evaluations=ends if best else (),
    )  # fmt: skip
    begin = time.monotonic()
    with Stop(world, listen=config.checkpoint.directory is not None) as stop:
        hooks = LoopHooks(
            next_step=source(batches + 1).next_step, take_step=take_step,
            steps=StepCounter(rate, last, step.scaler, done, batches),
            schedule=due,
            progress=progress, stop=stop, seed=lambda batch: step_seed(seed, batch, world.rank),
            evaluate=best.evaluate if best else lambda steps, samples: False, save=partial(interval.save, save),
        )  # fmt: skip
        ending = train(hooks)
    seconds = before + time.monotonic() - begin
    if ending.stopped:
        save(ending.step, ending.batches, ending.samples)
    progress.summary(ending)
    # seconds include earlier processes if their checkpoint had them: then so do the samples.
    speed = (ending.samples - (0 if before else trained)) / seconds if seconds else 0.0
    figures = {"steps": last, "e2e_train_time": seconds, "training_sequences_per_second": speed}
    return ending, figures | (
        {"best_step": best.record["best_step"]} if best and best.record else {}
    )


def _say(world: World, text: str) -> None:
    if world.is_main:
        print(f"finetune: {text}", file=sys.stderr, flush=True)
