"""Steps of our own engine and of DeepSpeed's on a tiny model, and the figures of their training."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import torch

from bert import kernels, optim
from bert.data.batch import make_batch
from bert.data.synthetic import synthetic_records
from bert.deepspeed import settings
from bert.deepspeed.step import DeepSpeedStep
from bert.kernels.precision import Precision
from bert.model.bert import BertForPreTraining
from bert.model.init import first_weights, initialize, use_placeholders
from bert.model.recompute import Recomputation
from bert.training.step import build_step

LENGTH, ROWS, VOCABULARY = 48, 4, 211
FP32 = Precision(dtype=torch.float32)


def tiny_model(config):
    """The model with its first weights."""
    model = BertForPreTraining(
        config,
        kernels.bind_kernels(kernels.KernelsConfig(fused="none"), torch.device("cpu")),
    )
    initialize(model, 0)
    return model


def own_step(world, config, rule, precision, accumulate):
    """Our own engine, sharded; accumulate: micro-batches in a step."""
    sharded = optim.OptimizerConfig(optimizer=rule, sharded=True)
    return build_step(
        tiny_model(config),
        precision,
        sharded,
        world,
        accumulate=accumulate > 1,
        fused_update=False,
    )


def deepspeed_step(
    world, config, rule, precision, accumulate, folder, *, recompute=0, **zero
):
    """DeepSpeed's, with the ``zero_optimization`` that is given; folder: for its JSON; recompute:
    RECOMPUTE_LAYERS.
    """
    rules = optim.OptimizerConfig(optimizer=rule)
    path = folder / f"ds_{world.rank}.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    given = settings.EngineConfig(engine="deepspeed", path=path).complete(
        rules, precision, ROWS, accumulate
    )
    model, weights = tiny_model(config), partial(first_weights, tiny_model(config), 0)
    use_placeholders(model, precision.dtype, world.device)
    if recompute:
        model.recompute(Recomputation(recompute, random_state=True))
    return DeepSpeedStep(model, precision, rules, world, given, weights(), weights)


def curve(world, step, first, last, accumulate):
    """Losses and norms of steps first + 1 to last; the data depend on the step alone."""
    records = synthetic_records(40, LENGTH, VOCABULARY, False, seed=world.rank)
    data = [
        make_batch(records, np.arange(begin, begin + ROWS), LENGTH)
        for begin in range(0, 40, ROWS)
    ]
    figures = []
    for number in range(first, last):
        torch.manual_seed(100 * number + world.rank)
        batches = [
            data[(accumulate * number + i) % len(data)] for i in range(accumulate)
        ]
        result = step(batches, 0.003 * 0.98**number)
        figures.append([*map(float, result.losses), float(result.norm)])
    return torch.tensor(figures)


STAGES = [{"stage": 1}, {"stage": 2}]
