"""Buckets of gradients: clipped separately (CLIP=bucket), sent in the weights' precision."""

from __future__ import annotations

import math

import pytest
import torch

from bert import optim
from bert.core.dist import DistConfig, World
from bert.optim.clipping import Clipping, Gradients
from bert.optim.flat import ListRule
from bert.optim.rules import LambConfig, LambRule
from bert.optim.sharded import FlatOptimizer
from common.env import ConfigError

from ..ranks import run_ranks
from ..states import same
from .test_sharded import BUCKET_BYTES, Chain, _data

MAX_NORM = 0.3


def _sharded(world, dtype, **settings):
    model = Chain(dtype)
    rule = LambConfig()
    optimizer = FlatOptimizer(
        model.named_parameters(), lambda shard: ListRule(shard, lambda shards: LambRule(shards, rule)), world,
        stages=list(model.stages.values()), accumulate=True, bucket_bytes=BUCKET_BYTES, **settings,
    )  # fmt: skip
    return model, optimizer


def _own(model, micro, rank):
    loss = model(_data(micro, rank))
    return [g.double() for g in torch.autograd.grad(loss, list(model.parameters()))]


def _averaged(world, model, optimizer, clipping, scale):
    """(whole averaged gradients on rank 0, the update's grad_scale)."""
    gradients = Gradients(model, optimizer, clipping, world, False)
    for micro in range(2):
        with gradients.micro_batch(micro == 0, micro == 1, scale / 2):
            (gradients.forward(_data(micro, world.rank)) * (scale / 2)).backward()
    _, factor = gradients.finish(scale)
    return list(optimizer.gathered(optimizer.buckets.shard).values()), factor


def _check_bucket_clipping(world):
    model, optimizer = _sharded(world, torch.float64)
    buckets, clipped = optimizer.layout.buckets, 0
    assert len(buckets) > 2
    scale = torch.tensor(8.0, dtype=torch.float64)
    clipping = Clipping(when="bucket", max_norm=MAX_NORM)
    found, factor = _averaged(world, model, optimizer, clipping, scale)
    bound, plain = MAX_NORM / math.sqrt(len(buckets)), Chain()
    expected = [torch.zeros_like(p) for p in plain.parameters()]
    for rank in range(world.size):
        for micro in range(2):
            own = _own(plain, micro, rank)
            for bucket in buckets:
                parts = [own[i] for i in bucket.parameters]
                norm = math.sqrt(sum(float(g.square().sum()) for g in parts))
                clipped += norm > bound
                for i in bucket.parameters:
                    expected[i] += own[i] * min(1.0, bound / norm) / (2 * world.size)
    assert 0 < clipped < 2 * world.size * len(buckets), "some, not all"
    if world.is_main:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a * float(factor), b, atol=1e-6, rtol=1e-5)
        assert math.sqrt(sum(float(b.square().sum()) for b in expected)) <= MAX_NORM


def _check_wire(world):
    one = torch.ones(())
    results = {}
    for low in (False, True):
        dtype = torch.bfloat16
        sent = {"communication_dtype": dtype if low else None}
        model, optimizer = _sharded(world, dtype, **sent)
        loose = Clipping(max_norm=1e9)
        results[low], _ = _averaged(world, model, optimizer, loose, one)
        assert optimizer.buckets.shard.dtype == torch.float32
        assert optimizer.buckets.reducer.dtype == (dtype if low else torch.float32)
    if world.is_main:
        for exact, sent in zip(results[False], results[True], strict=True):
            assert torch.equal(sent, sent.bfloat16().float())
            torch.testing.assert_close(sent, exact, rtol=2**-6, atol=1e-3)
        assert not same(results[False], results[True])


def _check_rank(world):
    _check_bucket_clipping(world)
    _check_wire(world)


def test_two_ranks_clip_every_bucket_of_a_micro_batch_and_may_send_sums_in_the_weights_precision():
    run_ranks(_check_rank, 2)


def test_one_rank_clips_every_bucket():
    _check_bucket_clipping(World(DistConfig(device="cpu")))


@pytest.mark.parametrize(
    "setting", [{"clip": "bucket"}, {"allreduce_dtype": "weights"}]
)
def test_what_only_a_sharded_optimizer_does_is_refused_elsewhere(setting):
    with pytest.raises(ConfigError, match="set SHARD_OPTIMIZER=1"):
        optim.OptimizerConfig(sharded=False, **setting).check(torch.device("cpu"))
    optim.OptimizerConfig(sharded=True, **setting).check(torch.device("cpu"))
