"""Steps of our own engine and of DeepSpeed's on a tiny model, and the figures of their training."""

import json
from functools import partial

import numpy as np
import torch

from bert import optim
from bert.data.batch import make_batch
from bert.data.synthetic import synthetic_records
from bert.deepspeed import settings
from bert.deepspeed.step import DeepSpeedStep
from bert.kernels.precision import Precision
from bert.model.init import first_weights, use_placeholders
from bert.model.recompute import Recomputation

from ..plain import model_of, step_of

LENGTH, ROWS, VOCABULARY = 48, 4, 211
FP32 = Precision(dtype=torch.float32)


def own_step(world, config, rule, precision, accumulate):
    """Our own engine, sharded; accumulate: micro-batches in a step."""
    settings = {"optimizer": rule, "sharded": True}
    return step_of(model_of(config), precision, world, accumulate > 1, **settings)


def deepspeed_step(
    world, config, rule, precision, accumulate, folder, *, recompute=0, **zero
):
    """DeepSpeed's, with the ``zero_optimization`` that is given; folder: for its JSON; recompute: RECOMPUTE_LAYERS."""
    rules = optim.OptimizerConfig(optimizer=rule)
    path = folder / f"ds_{world.rank}.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    given = settings.EngineConfig(engine="deepspeed", path=path).complete(
        rules, precision, ROWS, accumulate
    )
    model, weights = model_of(config), partial(first_weights, model_of(config), 0)
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


def same_optimizer(found, expected, atol=2e-5, exact=False):
    """Fails if masters or moments differ. The gradient of a key's bias is 0 except rounding, which Adam amplifies."""
    assert found.keys() == expected.keys()
    assert found["num_steps"] == expected["num_steps"]
    for part in found.keys() - {"num_steps"}:
        for name, tensor in found[part].items():
            known, what = expected[part][name], f"{part} {name}"
            if exact:
                assert torch.equal(tensor, known), what
            elif not name.endswith("key.bias"):
                torch.testing.assert_close(
                    tensor, known, atol=atol, rtol=1e-3, msg=what
                )
