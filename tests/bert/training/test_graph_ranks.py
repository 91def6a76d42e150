"""Steps on several ranks: a replay launches what was captured, and the host decides nothing in it;
fp8 has one set of scales, so that rank 0's checkpoint resumes every rank exactly.
"""

import contextlib
import copy
import dataclasses
import io
import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as distributed

from bert.data.batch import PretrainingCapacity, make_batch
from bert.data.synthetic import synthetic_records
from bert.kernels.fp8 import GRADIENT, INPUT, Scaling
from bert.kernels.precision import PrecisionConfig
from bert.kernels.support.graph_capture import CaptureError
from bert.model.config import BertConfig
from bert.model.init import initialize
from bert.model.recompute import Recomputation
from bert.optim.sharded import FlatOptimizer
from bert.training import evaluate
from bert.training.evaluate import EvaluationConfig, EvaluationGraph
from bert.training.graph import (
    GraphedStep,
    capture_or_warm_up,
    graph_capacity,
    static_batch,
)

from .. import no_gpu
from ..plain import NO_DROPOUT, model_of, step_of
from ..ranks import run_ranks
from ..states import same

MODEL = BertConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                   max_position_embeddings=16, initializer_range=0.2)  # fmt: skip


class Variant(NamedTuple):
    """resumed: the state is that after a step, with fp8 scales that are known."""

    precision: str
    settings: dict[str, Any]
    micro_batches: int = 1
    resumed: bool = False
    recomputes: bool = False


# By number of ranks.
VARIANTS = {
    2: [
        Variant("fp32", {}),
        Variant("bf16", {"sharded": False, "clip": "before"}, micro_batches=2),
        Variant("bf16", {"clip": "bucket"}, micro_batches=2),
        Variant("bf16", {"optimizer": "madgrad"}, recomputes=True),
        Variant("fp16", {"optimizer": "adamw", "clip": "before"}),
        Variant("fp16", {"optimizer": "lans"}, micro_batches=2),
        Variant("fp8", {}),
        Variant("fp8", {"clip": "before"}, micro_batches=2, resumed=True),
    ],
    4: [Variant("fp8", {"shard_group": "2", "allreduce_dtype": "weights"}, micro_batches=2)],
}  # fmt: skip


def _batches(world):
    """Of equal lengths, which the CPU's attention reads on the host."""
    records = synthetic_records(4, 16, 61, packed=False, seed=world.rank)
    plain = make_batch(records, np.arange(4), 16)
    room = PretrainingCapacity(tokens=64, sequences=8, masked=plain.num_masked + 5)
    first = static_batch(plain, graph_capacity(room, 4))
    return [
        dataclasses.replace(first, input_ids=(first.input_ids + number) % 61)
        for number in range(3)
    ]


def _step(world, variant, batches):
    config = MODEL
    if variant.recomputes:  # PyTorch's dropout cannot be repeated in a graph
        config = dataclasses.replace(MODEL, **NO_DROPOUT)
    model = model_of(config, seed=None)
    if variant.recomputes:
        model.recompute(Recomputation(1, random_state=False))
    initialize(model, 0)
    # Several buckets, in this process of a rank.
    FlatOptimizer.__init__.__kwdefaults__["bucket_bytes"] = 6000
    numerics = PrecisionConfig(precision=variant.precision, init_loss_scale=1024.0)
    settings = {"sharded": True} | variant.settings
    accumulate = variant.micro_batches > 1
    step = step_of(model, numerics.resolve(world.device), world, accumulate, **settings)
    if variant.resumed:
        torch.manual_seed(world.rank)
        step(batches[: variant.micro_batches], 0.01)
    return step


def _outcome(world, step, take, batches, micro_batches):
    """Results of three steps, with an evaluation among them, and the state after them."""
    results = []
    for number in range(3):
        torch.manual_seed(10 * number + world.rank)
        chosen = [batches[(number + i) % len(batches)] for i in range(micro_batches)]
        losses, norm, finite = take(chosen, 0.01 * (number + 1))
        results += [tensor.clone() for tensor in (*losses, norm, finite)]
        if number == 1:
            step.optimizer.gather()
    step.optimizer.gather()
    return [*results, *(tensor.clone() for tensor in step.state_tensors())]


def _check_replays(world):
    batches = _batches(world)
    for variant in VARIANTS[world.size]:
        step = _step(world, variant, batches)
        expected = _outcome(world, step, step, batches, variant.micro_batches)
        with pytest.MonkeyPatch.context() as patch:
            no_gpu.captures(patch)
            step = _step(world, variant, batches)
            # On a CPU the memory of the graph is that of its examples.
            take = GraphedStep(step, copy.deepcopy(batches[: variant.micro_batches]))
            # The first step in fp8 measures its scales: two graphs, of one memory.
            measures = {variant.precision == "fp8" and not variant.resumed, False}
            assert take.captured.keys() == measures, variant
            assert len({each.graph.pool() for each in take.captured.values()}) == 1
            found = _outcome(world, step, take, batches, variant.micro_batches)
        assert same(found, expected), variant


def test_replays_change_results_and_state_as_eager_steps_do_bit_for_bit():
    run_ranks(_check_replays, 2, 4)


def _check_failures(world):
    batches, variant = _batches(world), Variant("bf16", {}, resumed=True)
    step = _step(world, variant, batches)
    expected = _outcome(world, step, step, batches, 1)
    for place, ranks in itertools.product(("forward", "backward"), ([0, 1], [1])):
        with pytest.MonkeyPatch.context() as patch:
            no_gpu.captures(patch)
            step = _step(world, variant, batches)
            layer = step.model.bert.encoder.layer[0]
            if world.rank in ranks and place == "forward":
                layer.register_forward_hook(no_gpu.uncapturable)
            elif world.rank in ranks:
                next(layer.parameters()).register_hook(no_gpu.uncapturable)
            given = {"graph": True, "warm_up": False}
            with contextlib.redirect_stderr(io.StringIO()) as said:
                assert capture_or_warm_up(step, lambda: batches[:1], **given) is step
            elsewhere = world.rank not in ranks
            assert ("on another rank" in said.getvalue()) == elsewhere & world.is_main
            found = _outcome(world, step, step, batches, 1)
        assert same(found, expected), (place, ranks)


def test_after_a_capture_that_fails_eager_steps_wait_for_nothing_of_it():
    """In the forward pass, as weights are gathered, and in the backward pass, as gradients are
    reduced; on every rank or on one.
    """
    run_ranks(_check_failures, 2)


def _check_evaluation(world):
    batches, variant = _batches(world), Variant("bf16", {})
    step = _step(world, variant, batches)
    expected = _outcome(world, step, step, batches, 1)
    for fails in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            no_gpu.captures(patch)
            step = _step(world, variant, batches)
            take = GraphedStep(step, copy.deepcopy(batches[:1]))

            def count(model, batch, fails=fails):
                if fails:
                    no_gpu.uncapturable()
                return torch.zeros(evaluate.NUM_COUNTS)

            patch.setattr(evaluate, "_count", count)
            with pytest.raises(CaptureError) if fails else contextlib.nullcontext():
                EvaluationGraph(EvaluationConfig(), 16, step.model, world.device)
            found = _outcome(world, step, take, batches, 1)
        assert same(found, expected), fails


def test_the_seed_reaches_captured_steps_whether_or_not_the_evaluation_is_captured():
    """Its capture follows that of the steps, whose dropout shows the seed."""
    run_ranks(_check_evaluation, 2)


def _check_overflow(world):
    for sharded in (False, True):
        step = step_of(model_of(MODEL), "fp32", world, True, sharded=sharded, clip="before")  # fmt: skip
        step.gradients.find_overflow = True
        factors = iter([float("inf") if world.rank else 1.0])  # then 1
        weight = step.model.bert.pooler.dense.weight
        weight.register_hook(lambda g, factors=factors: g * next(factors, 1.0))
        assert not torch.isfinite(step(_batches(world)[:2], 0.02).norm)


def test_every_rank_sees_the_overflow_of_anothers_first_micro_batch():
    run_ranks(_check_overflow, 2)


def _fp8_step(world, sharded):
    return step_of(model_of(MODEL), "fp8", world, sharded=sharded)


def _train(step, world, numbers):
    for number in numbers:
        # Data of its own.
        seed = 10 * number + world.rank
        records = synthetic_records(4, 16, 61, packed=False, seed=seed)
        torch.manual_seed(seed)
        assert step([make_batch(records, np.arange(4), 16)], 0.01).finite


def _check_fp8(world):
    scaling = Scaling(1, torch.device("cpu"))
    scaling.largest[0, INPUT] = 2.0 + world.rank
    scaling.largest[0, GRADIENT] = float("nan") if world.rank == 0 else 5.0
    assert not scaling.update(world)  # on every rank, whichever saw it
    assert scaling.scales[0, INPUT] == 448 / (1.0 + world.size)
    assert scaling.scales[0, GRADIENT] == 1
    scaling.largest[0, GRADIENT] = 1.0 + world.rank
    assert scaling.update(world)
    assert scaling.scales[0, GRADIENT] == 57344 / world.size

    for sharded in (False, True):
        step = _fp8_step(world, sharded)
        _train(step, world, [1, 2])
        found = [torch.empty_like(step.fp8.scales) for _ in range(world.size)]
        distributed.all_gather(found, step.fp8.scales.contiguous())
        assert all(torch.equal(found[0], other) for other in found)
        states = [copy.deepcopy(step.state_dict())]
        distributed.broadcast_object_list(states, 0)  # what rank 0 would have written
        _train(step, world, [3])
        resumed = _fp8_step(world, sharded)
        resumed.load_state_dict(states[0])
        _train(resumed, world, [3])
        assert same(step.state_tensors(), resumed.state_tensors()), sharded


def test_ranks_share_their_fp8_scales_and_resume_from_rank_0():
    run_ranks(_check_fp8, 2)
