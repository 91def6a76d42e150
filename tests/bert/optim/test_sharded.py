"""The sharded optimizer: equal to the replicated one on any number of ranks, exact norms, portable
state.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bert.core.dist import DistConfig, World
from bert.kernels.precision import LossScaler, Precision
from bert.optim.clipping import Clipping, Gradients
from bert.optim.flat import FlatLamb, ListRule
from bert.optim.layout import ALIGNMENT, Layout
from bert.optim.rules import LambConfig, LambRule
from bert.optim.sharded import FlatOptimizer

from ..kernels import plain_lamb
from ..ranks import run_ranks
from .whole import Whole

# Uneven: tensors that span shards, and shards without a tensor.
SIZES = [(5, 67), (300,), (1,), (129, 3), (7, 11)]
BUCKET_BYTES = 2400  # several buckets


class Chain(nn.Module):
    """Parameters of uneven sizes, each used once, in stages; the loss weighs them by the data."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        names = ["first", "LayerNorm", "bias", "dense", "last"]
        self.stages = nn.ModuleDict({name: nn.Module() for name in names})
        for name, shape in zip(names, SIZES, strict=True):
            values = torch.randn(shape, dtype=torch.float64, generator=generator)
            self.stages[name].weight = nn.Parameter(values.to(dtype))
            self.stages[name].forward = self._forward(self.stages[name])

    @staticmethod
    def _forward(stage):
        def forward(x, data):
            weight = stage.weight.reshape(-1)
            return x + (weight * data[: weight.numel()].to(weight.dtype)).sum().square()

        return forward

    def forward(self, data):
        x = torch.zeros((), dtype=torch.float64)
        for stage in self.stages.values():
            x = stage(x, data)
        return x


def _data(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(512, dtype=torch.float64, generator=generator) / 30


def _lrs(num_steps):
    return [0.02 / (step + 1) for step in range(num_steps)]


def replicated(model: Chain) -> Whole:
    """The same rule on whole parameters."""
    config = LambConfig(weight_decay=0.1)
    return Whole(model.named_parameters(), lambda shards: LambRule(shards, config))


def single_process(
    num_ranks: int, clip: str, num_steps: int, accumulate: int = 1
) -> Whole:
    """The expected result: one process with the gradients of all ranks."""
    model = Chain()
    lamb = replicated(model)
    _train_alone(model, lamb, num_ranks, clip, range(num_steps), accumulate)
    return lamb


def _train_alone(
    model: Chain, lamb: Whole, num_ranks: int, clip: str, steps: range, accumulate: int
) -> None:
    clipping = Clipping()
    for step in steps:
        totals = [torch.zeros_like(p) for p in model.parameters()]
        for rank, micro in itertools.product(range(num_ranks), range(accumulate)):
            loss = model(_data(step * accumulate + micro, rank))
            own = torch.autograd.grad(loss, model.parameters())
            norm = torch.stack([g.norm() for g in own]).norm()
            factor = clipping.coefficient(norm) if clip == "before" else 1.0
            for total, gradient in zip(totals, own, strict=True):
                total += gradient * factor / (num_ranks * accumulate)
        for parameter, total in zip(model.parameters(), totals, strict=True):
            parameter.grad = total
        norm = torch.stack([g.norm() for g in totals]).norm()
        factor = clipping.coefficient(norm) if clip == "after" else 1.0
        lamb.step(_lrs(steps.stop)[step], factor)


def train(world, model, optimizer, clip, steps, accumulate=1) -> None:
    """Steps as Step.run takes them."""
    gradients = Gradients(model, optimizer, Clipping(when=clip), world, False)
    scale = torch.ones((), dtype=torch.float64)
    lrs = _lrs(steps.stop)
    for step in steps:
        for micro in range(accumulate):
            data = _data(step * accumulate + micro, world.rank)
            place = micro == 0, micro == accumulate - 1
            with gradients.micro_batch(*place, scale / accumulate):
                (gradients.forward(data) / accumulate).backward()
        _, factor = gradients.finish(scale)
        optimizer.step(torch.tensor(lrs[step], dtype=torch.float64), factor)
    optimizer.gather()


def sharded(world, model, clip, accumulate=1, fused_layout=False, group=None):
    """The optimizer over the model's stages."""
    config = LambConfig(weight_decay=0.1)

    def make_rule(shard):
        if fused_layout:
            return FlatLamb(shard, config, plain_lamb)
        return ListRule(shard, lambda shards: LambRule(shards, config))

    return FlatOptimizer(
        model.named_parameters(), make_rule, world, stages=list(model.stages.values()), clip_each=clip == "before",
        accumulate=accumulate > 1, bucket_bytes=BUCKET_BYTES, group_size=group,
    )  # fmt: skip


def _equal(model, state, reference, tolerance=1e-12):
    for name, parameter in model.named_parameters():
        expected = dict(zip(reference.names, reference.parameters, strict=True))[name]
        close = {"atol": tolerance, "rtol": tolerance, "msg": name}
        torch.testing.assert_close(parameter, expected, **close)
    if state is not None:
        for key in ("masters", "first_moments", "second_moments"):
            for name, tensor in reference.state_dict()[key].items():
                close = {"atol": tolerance, "rtol": tolerance, "msg": name}
                torch.testing.assert_close(state[key][name], tensor.double(), **close)


def _check_rank(world, clip, accumulate, group):
    model = Chain()
    optimizer = sharded(world, model, clip, accumulate, group=group)
    is_cut = any(len(bucket.slices) > 1 for bucket in optimizer.layout.buckets)
    assert is_cut == (optimizer.mesh.size < 4)
    train(world, model, optimizer, clip, range(2), accumulate)
    state = [optimizer.state_dict()]  # collected after two steps, resumed below
    distributed.broadcast_object_list(state, 0)
    train(world, model, optimizer, clip, range(2, 4), accumulate)
    reference = single_process(world.size, clip, 4, accumulate)
    final = optimizer.state_dict()
    _equal(model, final if world.is_main else None, reference)
    again = Chain()
    resumed = sharded(world, again, clip, accumulate, group=group)
    resumed.load_state_dict(state[0])
    train(world, again, resumed, clip, range(2, 4), accumulate)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    if world.is_main:  # the same state with one rank, and replicated
        alone = _continued_alone(state[0], world.size, clip, accumulate)
        _equal(alone, None, reference)


def _check_ranks(world, groups):
    cases = itertools.product(groups, ("after", "before"), (1, 2))
    for group, clip, accumulate in cases:
        _check_rank(world, clip, accumulate, group)


def _continued_alone(state, size, clip, accumulate):
    """Two more steps by a replicated optimizer from a sharded one's state."""
    model = Chain()
    lamb = replicated(model)
    lamb.load_state_dict(state)
    _train_alone(model, lamb, size, clip, range(2, 4), accumulate)
    return model


@pytest.mark.parametrize(
    ("size", "groups"),
    [
        (2, (2, 1)),
        (4, (2,)),
        pytest.param(4, (4, 1), marks=pytest.mark.slow),
        pytest.param(8, (4, 2), marks=pytest.mark.slow),
    ],
)
def test_ranks_together_equal_one_process_in_groups_or_not_and_their_state_resumes_anywhere(
    size, groups
):
    run_ranks(_check_ranks, size, arguments=(groups,))


@pytest.mark.parametrize("fused_layout", [False, True], ids=["pieces", "two-pass"])
def test_one_rank_equals_the_replicated_optimizer(fused_layout):
    world, model = World(DistConfig(device="cpu")), Chain()
    optimizer = sharded(world, model, "after", fused_layout=fused_layout)
    train(world, model, optimizer, "after", range(4))
    # The two passes keep their scalars in fp32.
    alone, tolerance = single_process(1, "after", 4), 1e-6 if fused_layout else 1e-12
    _equal(model, optimizer.state_dict(), alone, tolerance)


def test_a_step_not_kept_changes_nothing_and_counts_nothing():
    world = World(DistConfig(device="cpu"))
    for fused_layout in (False, True):
        model = Chain()
        optimizer = sharded(world, model, "after", fused_layout=fused_layout)
        train(world, model, optimizer, "after", range(2))
        before = [tensor.clone() for tensor in optimizer.state_tensors()]
        optimizer.buckets.shard.fill_(float("inf"))
        optimizer.step(0.1, 1.0, apply_update=torch.tensor(False))
        for old, new in zip(before, optimizer.state_tensors(), strict=True):
            assert torch.equal(old, new)


def test_weights_in_low_precision_follow_fp32_masters_that_were_there_before_the_cast():
    world, model = World(DistConfig(device="cpu")), Chain(torch.bfloat16)
    exact = {name: torch.rand(p.shape) for name, p in model.named_parameters()}
    rule = lambda shard: ListRule(shard, lambda p: LambRule(p, LambConfig()))  # noqa: E731
    optimizer = FlatOptimizer(model.named_parameters(), rule, world, masters=exact)
    state = optimizer.state_dict()["masters"]
    for name, parameter in model.named_parameters():
        assert torch.equal(state[name], exact[name])
        assert torch.equal(parameter, exact[name].bfloat16())


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
    scaler = LossScaler(
        Precision(dtype=torch.float16, init_loss_scale=8.0, growth_interval=2)
    )
    scales = []
    for finite in (True, False, True, True, False, False, False, False, False):
        scaler.update(torch.tensor(finite))
        scales.append(float(scaler.scale))
    assert scales == [8, 4, 4, 8, 4, 2, 1, 1, 1]  # never below 1
    assert scaler.state_dict()["num_skipped_steps"] == 6
