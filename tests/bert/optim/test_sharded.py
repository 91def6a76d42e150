"""The sharded optimizer: equal to the replicated one on any number of ranks, exact norms, buckets
clipped separately (CLIP=bucket) and sent in the weights' precision, portable state.
"""

import functools
import itertools
import math

import pytest
import torch
import torch.distributed as distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bert import optim
from bert.kernels.precision import LossScaler, Precision
from bert.optim.clipping import Clipping, Gradients
from bert.optim.flat import FlatLamb, ListRule
from bert.optim.layout import ALIGNMENT, Layout
from bert.optim.rules import LambConfig, LambRule
from bert.optim.sharded import FlatOptimizer
from common.env import ConfigError

from ..kernels import plain_lamb
from ..plain import alone, close
from ..ranks import run_ranks
from ..states import same
from .whole import Whole

# Uneven: tensors that span shards, and shards without a tensor.
SIZES = [(5, 67), (300,), (1,), (129, 3), (7, 11)]
BUCKET_BYTES = 2400  # several buckets
LAMB = LambConfig(weight_decay=0.1)
MAX_NORM = 0.3  # of a bucket, some are above
ONE = torch.ones((), dtype=torch.float64)


class Stage(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.weight = nn.Parameter(values)

    def forward(self, x, data):
        weight = self.weight.reshape(-1)
        return x + (weight * data[: weight.numel()].to(weight.dtype)).sum().square()


class Chain(nn.Module):
    """Parameters of uneven sizes, each used once, in stages; the loss weighs them by the data."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        drawn = {"dtype": torch.float64, "generator": torch.Generator().manual_seed(0)}
        names = ["first", "LayerNorm", "bias", "dense", "last"]
        values = [torch.randn(shape, **drawn).to(dtype) for shape in SIZES]
        self.stages = nn.ModuleDict(zip(names, map(Stage, values), strict=True))

    def forward(self, data):
        x = torch.zeros((), dtype=torch.float64)
        for stage in self.stages.values():
            x = stage(x, data)
        return x

    def gradients(self, step, rank):
        return torch.autograd.grad(self(_data(step, rank)), [*self.parameters()])


def _data(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(512, dtype=torch.float64, generator=generator) / 30


def _lrs(num_steps):
    return [0.02 / (step + 1) for step in range(num_steps)]


def _norm(gradients):
    return torch.stack([g.norm() for g in gradients]).norm()


def replicated(num_ranks, clip, steps, accumulate=1, state=None):
    """(model, optimizer) of one process with the gradients of all ranks and the same rule on whole
    parameters: the expected result; state: what it continues from.
    """
    model, clipping = Chain(), Clipping()
    lamb = Whole(model.named_parameters(), lambda shards: LambRule(shards, LAMB))
    if state:
        lamb.load_state_dict(state)
    for step in steps:
        totals = [torch.zeros_like(p) for p in model.parameters()]
        for rank, micro in itertools.product(range(num_ranks), range(accumulate)):
            own = model.gradients(step * accumulate + micro, rank)
            factor = clipping.coefficient(_norm(own)) if clip == "before" else 1.0
            for total, gradient in zip(totals, own, strict=True):
                total += gradient * factor / (num_ranks * accumulate)
        for parameter, total in zip(model.parameters(), totals, strict=True):
            parameter.grad = total
        factor = clipping.coefficient(_norm(totals)) if clip == "after" else 1.0
        lamb.step(_lrs(steps.stop)[step], factor)
    return model, lamb


def _backward(gradients, world, step, accumulate, scale=ONE):
    """The gradients of a step, as Step.run takes them. Returns the update's factor."""
    for micro in range(accumulate):
        data, part = _data(step * accumulate + micro, world.rank), scale / accumulate
        with gradients.micro_batch(micro == 0, micro == accumulate - 1, part):
            (gradients.forward(data) * part).backward()
    return gradients.finish(scale)[1]


def train(world, model, optimizer, clip, steps, accumulate=1):
    gradients = Gradients(model, optimizer, Clipping(when=clip), world, False)
    for step in steps:
        factor = _backward(gradients, world, step, accumulate)
        lr = torch.tensor(_lrs(steps.stop)[step], dtype=torch.float64)
        optimizer.step(lr, factor)
    optimizer.gather()


def sharded(world, model, clip, accumulate=1, fused_layout=False, **settings):
    """The optimizer over the model's stages."""

    def make_rule(shard):
        if fused_layout:
            return FlatLamb(shard, LAMB, plain_lamb)
        return ListRule(shard, lambda shards: LambRule(shards, LAMB))

    return FlatOptimizer(
        model.named_parameters(), make_rule, world, stages=list(model.stages.values()), clip_each=clip == "before",
        accumulate=accumulate > 1, bucket_bytes=BUCKET_BYTES, **settings,
    )  # fmt: skip


_expected = functools.cache(replicated)


def _check_rank(world, clip, accumulate, group):
    model = Chain()
    optimizer = sharded(world, model, clip, accumulate, group_size=group)
    is_cut = any(len(bucket.slices) > 1 for bucket in optimizer.layout.buckets)
    assert is_cut == (optimizer.mesh.size < 4)
    train(world, model, optimizer, clip, range(2), accumulate)
    state = [optimizer.state_dict()]  # collected after two steps, resumed below
    distributed.broadcast_object_list(state, 0)
    train(world, model, optimizer, clip, range(2, 4), accumulate)
    whole, lamb = _expected(world.size, clip, range(4), accumulate)
    final, expected = optimizer.state_dict(), dict(whole.named_parameters())
    close(dict(model.named_parameters()), expected, 1e-12, 1e-12)
    again = Chain()
    resumed = sharded(world, again, clip, accumulate, group_size=group)
    resumed.load_state_dict(state[0])
    train(world, again, resumed, clip, range(2, 4), accumulate)
    assert same([*model.parameters()], [*again.parameters()])
    if world.is_main:  # the same state with one rank, and replicated
        _assert_state(final, lamb.state_dict())
        continued = world.size, clip, range(2, 4), accumulate
        last, _ = replicated(*continued, state=state[0])
        close(dict(last.named_parameters()), expected, 1e-12, 1e-12)


def _assert_state(found, expected, tolerance=1e-12):
    for part in ("masters", "first_moments", "second_moments"):
        ours = {name: tensor.double() for name, tensor in found[part].items()}
        close(ours, expected[part], tolerance, tolerance)


def _check_ranks(world, groups, micro_batches):
    cases = itertools.product(groups, ("after", "before"), micro_batches)
    for group, clip, accumulate in cases:
        _check_rank(world, clip, accumulate, group)


SLOW = {"marks": pytest.mark.slow}
GROUPS = [(2, (2, 1), (1, 2)), (4, (2,), (2,))]
GROUPS += [
    pytest.param(4, (4, 2, 1), (1, 2), **SLOW),
    pytest.param(8, (4, 2), (1, 2), **SLOW),
]


@pytest.mark.parametrize(("size", "groups", "micro_batches"), GROUPS)
def test_ranks_together_equal_one_process_in_groups_or_not_and_their_state_resumes_anywhere(size, groups, micro_batches):  # fmt: skip
    run_ranks(_check_ranks, size, arguments=(groups, micro_batches))


@pytest.mark.parametrize("fused_layout", [False, True], ids=["pieces", "two-pass"])
def test_one_rank_equals_the_replicated_and_keeps_no_overflow(fused_layout):
    world, model = alone(), Chain()
    optimizer = sharded(world, model, "after", fused_layout=fused_layout)
    train(world, model, optimizer, "after", range(4))
    # The two passes keep their scalars in fp32.
    tolerance = 1e-6 if fused_layout else 1e-12
    whole, lamb = replicated(1, "after", range(4))
    expected = dict(whole.named_parameters())
    close(dict(model.named_parameters()), expected, tolerance, tolerance)
    _assert_state(optimizer.state_dict(), lamb.state_dict(), tolerance)
    before = [tensor.clone() for tensor in optimizer.state_tensors()]
    optimizer.buckets.shard.fill_(float("inf"))
    optimizer.step(0.1, 1.0, apply_update=torch.tensor(False))
    assert same(before, [*optimizer.state_tensors()]), "a step that is not kept"


def test_weights_in_low_precision_follow_fp32_masters_that_were_there_before_the_cast():
    model = Chain(torch.bfloat16)
    exact = {name: torch.rand(p.shape) for name, p in model.named_parameters()}
    optimizer = sharded(alone(), model, "after", masters=exact)
    assert same(optimizer.state_dict()["masters"], exact)
    for _ in range(20):
        optimizer.buckets.shard.fill_(1.0)
        optimizer.step(1e-4, 1.0)  # far below what bf16 alone could add up
    masters = optimizer.state_dict()["masters"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, masters[name].bfloat16())
    moved = torch.cat([(exact[name] - masters[name]).reshape(-1) for name in exact])
    assert moved.mean() > 5e-4


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    st.integers(1, 9),
    st.sampled_from([1, 1000, 10**6]),
)
@settings(max_examples=60, deadline=None)
def test_layout_gives_every_element_to_one_rank_once(sizes, num_ranks, bucket):
    layout = Layout(sizes, num_ranks, bucket)
    assert layout.shard_total * num_ranks == layout.total
    owned = [[] for _ in sizes]
    for rank in range(num_ranks):
        segments = layout.segments(rank)
        for segment in segments:
            assert segment.begin % ALIGNMENT == 0
            part = segment.start, segment.start + segment.size
            owned[segment.parameter].append(part)
        places = sorted((one.begin, one.begin + one.size) for one in segments)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
    for size, parts in zip(sizes, owned, strict=True):
        parts.sort()
        assert [begin for begin, _ in parts] == [0, *[end for _, end in parts[:-1]]]
        assert parts[-1][1] == size


def test_scale_of_the_loss_follows_overflows_on_the_device():
    settings = {"init_loss_scale": 8.0, "growth_interval": 2}
    scaler = LossScaler(Precision(dtype=torch.float16, **settings))
    scales = []
    for finite in (True, False, True, True, False, False, False, False, False):
        scaler.update(torch.tensor(finite))
        scales.append(float(scaler.scale))
    assert scales == [8, 4, 4, 8, 4, 2, 1, 1, 1]  # never below 1
    assert scaler.state_dict()["num_skipped_steps"] == 6


# --- buckets


def _averaged(world, model, optimizer, clipping, scale):
    """(whole averaged gradients on rank 0, the update's factor)."""
    gradients = Gradients(model, optimizer, clipping, world, False)
    factor = _backward(gradients, world, 0, 2, scale)
    return [*optimizer.gathered(optimizer.buckets.shard).values()], factor


def _check_bucket_clipping(world):
    model, plain = Chain(), Chain()
    optimizer = sharded(world, model, "after", 2)
    buckets, clipped = optimizer.layout.buckets, 0
    assert len(buckets) > 2
    clipping = Clipping(when="bucket", max_norm=MAX_NORM)
    found, factor = _averaged(world, model, optimizer, clipping, 8 * ONE)
    bound = MAX_NORM / math.sqrt(len(buckets))
    expected = [torch.zeros_like(p) for p in plain.parameters()]
    for rank, micro in itertools.product(range(world.size), range(2)):
        own = plain.gradients(micro, rank)
        for bucket in buckets:
            norm = float(_norm([own[i] for i in bucket.parameters]))
            clipped += norm > bound
            for i in bucket.parameters:
                expected[i] += own[i] * min(1.0, bound / norm) / (2 * world.size)
    assert 0 < clipped < 2 * world.size * len(buckets), "some, not all"
    if world.is_main:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a * float(factor), b, atol=1e-6, rtol=1e-5)
        assert _norm(expected) <= MAX_NORM


def _check_wire(world):
    results = []
    for low in (None, torch.bfloat16):
        model = Chain(torch.bfloat16)
        optimizer = sharded(world, model, "after", 2, communication_dtype=low)
        loose = Clipping(max_norm=1e9)
        results.append(_averaged(world, model, optimizer, loose, ONE.float())[0])
        assert optimizer.buckets.shard.dtype == torch.float32
        assert optimizer.buckets.reducer.dtype == (low or torch.float32)
    if world.is_main:
        exact, low = results
        for sent, summed in zip(low, exact, strict=True):
            assert torch.equal(sent, sent.bfloat16().float())
            torch.testing.assert_close(sent, summed, rtol=2**-6, atol=1e-3)
        assert not same(low, exact)


def _check_buckets(world):
    _check_bucket_clipping(world)
    _check_wire(world)


def test_two_ranks_clip_every_bucket_of_a_micro_batch_and_may_send_in_low_precision():
    run_ranks(_check_buckets, 2)


def test_one_rank_clips_every_bucket():
    _check_bucket_clipping(alone())


@pytest.mark.parametrize("setting", [{"clip": "bucket"}, {"allreduce_dtype": "weights"}])  # fmt: skip
def test_what_only_a_sharded_optimizer_does_is_refused_elsewhere(setting):
    with pytest.raises(ConfigError, match="set SHARD_OPTIMIZER=1"):
        optim.OptimizerConfig(sharded=False, **setting).check(torch.device("cpu"))
    optim.OptimizerConfig(sharded=True, **setting).check(torch.device("cpu"))
