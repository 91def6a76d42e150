"""fp8 on several ranks: one set of scales, so that rank 0's checkpoint resumes every rank
exactly.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.distributed as distributed

from bert.data.batch import make_batch
from bert.data.synthetic import synthetic_records
from bert.kernels.fp8 import GRADIENT, INPUT, Scaling
from bert.model.config import BertConfig

from ..plain import model_of, step_of
from ..ranks import run_ranks

MODEL = BertConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                   max_position_embeddings=16, initializer_range=0.2)  # fmt: skip


def _step(world, sharded):
    return step_of(model_of(MODEL), "fp8", world, sharded=sharded)


def _train(step, world, numbers):
    for number in numbers:
        # Data of its own.
        records = synthetic_records(
            4, 16, 61, packed=False, seed=10 * number + world.rank
        )
        torch.manual_seed(10 * number + world.rank)
        assert step([make_batch(records, np.arange(4), 16)], 0.01).finite


def _on_all_ranks(world, tensor):
    found = [torch.empty_like(tensor) for _ in range(world.size)]
    distributed.all_gather(found, tensor.contiguous())
    return found


def _check_scales_and_resumption(world, sharded):
    step = _step(world, sharded)
    _train(step, world, [1, 2])
    first, *others = _on_all_ranks(world, step.fp8.scales)
    assert all(torch.equal(first, other) for other in others)
    states = [copy.deepcopy(step.state_dict())]
    distributed.broadcast_object_list(states, 0)  # what rank 0 would have written
    _train(step, world, [3])
    resumed = _step(world, sharded)
    resumed.load_state_dict(states[0])
    _train(resumed, world, [3])
    for ours, theirs in zip(step.state_tensors(), resumed.state_tensors(), strict=True):
        assert torch.equal(ours, theirs)


def _check_the_largest_of_all_ranks_counts(world):
    scaling = Scaling(1, torch.device("cpu"))
    scaling.largest[0, INPUT] = 2.0 + world.rank
    scaling.largest[0, GRADIENT] = float("nan") if world.rank == 0 else 5.0
    assert not scaling.update(world)  # on every rank, whichever saw it
    assert scaling.scales[0, INPUT] == 448 / (1.0 + world.size)
    assert scaling.scales[0, GRADIENT] == 1
    scaling.largest[0, GRADIENT] = 1.0 + world.rank
    assert scaling.update(world)
    assert scaling.scales[0, GRADIENT] == 57344 / world.size


def _check(world):
    _check_the_largest_of_all_ranks_counts(world)
    for sharded in (False, True):
        _check_scales_and_resumption(world, sharded)


def test_ranks_share_their_scales_and_resume_from_rank_0():
    run_ranks(_check, 2)
