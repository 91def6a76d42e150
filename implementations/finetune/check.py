"""``python -m finetune --check``: is everything there, does it fit, and what would run? Before any GPU is taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from bert.core.dist import World, pick_device
from bert.data.tokens import WordPiece
from bert.kernels import select
from bert.training import schedule
from finetune import tasks, train
from finetune.batches import Order
from finetune.config import Config, learning_rates


def report(config: Config, environ: Mapping[str, str]) -> str:
    """The settings and what follows from them. Raises ConfigError or DataError for what would stop the run."""
    device = pick_device(config.dist)
    task = tasks.build(config, WordPiece(config.vocabulary, config.lower_case))
    model = task.model(config.model, select(config.kernels, device))
    loaded = train.load_weights(config, model)
    alone = World(dataclasses.replace(config.dist, world_size=1, rank=0, local_rank=0))
    num_parameters, form = sum(p.numel() for p in model.parameters()), config.model.gelu_form
    batch = f"{config.batch_size} x {config.gradient_steps} accumulated x {config.dist.world_size} ranks"
    rows = [
        ("task", f"{config.task}, {config.mode}, seed {config.trial_seed}"),
        ("model", f"{num_parameters:,} parameters, GELU in its {form} form, {config.bert_config_path}"),
        ("kernels", config.kernels.describe(device)),
        ("attention", config.kernels.choose(config.numerics.dtype, config.uses_graph, alone)[1]),
        ("global batch", f"{config.samples_per_step} sequences = {batch}, at most {config.length} tokens each"),
        *(("data", note) for note in task.notes),
        ("weights", f"{config.checkpoint.init_checkpoint}{f'; {loaded}' if any(loaded) else ''}"),
    ]
    if task.train is not None:
        last = train.num_steps(config, len(task.train.lengths))
        rows.append(("steps", f"{last:,}, {config.epochs:g} epochs"))
        count, ranks = len(task.train.lengths), config.dist.world_size
        order = Order(count, config.batch_size, config.gradient_steps, config.trial_seed, world_size=ranks)
        if room := train.room_of(config, task.train, order, last):
            rows.append(("CUDA graph", str(room)))
        rows.append(("learning rate", schedule.describe(learning_rates(environ, last))))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
