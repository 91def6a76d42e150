"""CLIP=before: every micro-batch is clipped by its own norm, so the update does not depend on who
computes it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bert.data.batch import make_batch
from bert.data.synthetic import synthetic_records
from bert.model.config import BertConfig

from ..plain import alone, model_of, step_of
from ..ranks import run_ranks

NUM_MICRO_BATCHES, NUM_ROWS, LENGTH, VOCABULARY, NUM_STEPS = 8, 2, 16, 61, 2
MODEL = BertConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                   intermediate_size=32, max_position_embeddings=LENGTH, initializer_range=0.2,
                   hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def _micro_batches(step, world):
    """This rank's share of the step's rows."""
    records = synthetic_records(
        NUM_MICRO_BATCHES * NUM_ROWS, LENGTH, VOCABULARY, packed=False, seed=step
    )
    count = NUM_MICRO_BATCHES // world.size
    numbers = range(world.rank * count, (world.rank + 1) * count)
    return [
        make_batch(records, np.arange(NUM_ROWS * n, NUM_ROWS * (n + 1)), LENGTH)
        for n in numbers
    ]


def _trained(world, dtype, sharded, clip="before"):
    settings = {"sharded": sharded, "clip": clip}
    accumulate = world.size < NUM_MICRO_BATCHES
    step = step_of(model_of(MODEL, dtype=dtype), "fp32", world, accumulate, **settings)
    batches = [_micro_batches(number, world) for number in range(NUM_STEPS)]
    norms = [float(step(mine, 0.02).norm) for mine in batches]
    assert min(norms) > 1.5, "nothing to clip"
    return step.state_dict()["optimizer"].get("masters")  # whole on rank 0


def _train_and_save(world, folder):
    for name, dtype in DTYPES.items():
        for sharded in (False, True):
            masters = _trained(world, dtype, sharded)
            if world.is_main:
                torch.save(masters, folder / f"{name}_{int(sharded)}_{world.size}.pt")


@pytest.mark.parametrize(
    "ranks", [(1, 4), pytest.param((1, 2, 8), marks=pytest.mark.slow)], ids=str
)
def test_any_number_of_ranks_makes_the_same_update_of_the_same_micro_batches(
    ranks, tmp_path
):
    run_ranks(_train_and_save, *ranks, arguments=(tmp_path,))
    for name in DTYPES:
        expected = torch.load(tmp_path / f"{name}_0_1.pt")
        tolerance = 1e-12 if name == "fp64" else 1e-5
        for path in sorted(tmp_path.glob(f"{name}_*.pt")):
            for key, tensor in torch.load(path).items():
                # Its true gradient is 0: rounding, normalised.
                if name == "fp64" or not key.endswith("key.bias"):
                    torch.testing.assert_close(
                        tensor, expected[key], atol=tolerance, rtol=tolerance, msg=f"{path.name} {key}"
                    )  # fmt: skip


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_on_one_rank_before_is_not_after(sharded):
    before, after = (
        _trained(alone(), torch.float64, sharded, clip) for clip in ("before", "after")
    )
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    assert (before[name] - after[name]).norm() > 1e-3 * after[name].norm()


def _overflow_on_another_rank(world, sharded):
    model = model_of(MODEL, dtype=torch.float32)
    step = step_of(model, "fp32", world, True, sharded=sharded, clip="before")
    step.gradients.find_overflow = True
    factors = iter([float("inf") if world.rank else 1.0])  # then 1
    model.bert.pooler.dense.weight.register_hook(lambda g: g * next(factors, 1.0))
    assert not torch.isfinite(step(_micro_batches(0, world), 0.02).norm)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_every_rank_sees_the_overflow_of_anothers_first_micro_batch(sharded):
    run_ranks(_overflow_on_another_rank, 2, arguments=(sharded,))
