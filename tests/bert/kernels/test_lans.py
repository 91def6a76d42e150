"""Flat-buffer LANS: the Triton passes over one shard or several against the rule that works by tensor, in fp64."""

from __future__ import annotations

import pytest
import torch

from bert import optim
from bert.kernels.operations import lamb
from bert.optim import rules
from bert.optim.flat import FlatLans, Layout, ListRule, Shard
from bert.optim.rules import Update

SIZES = {
    "a.weight": 97,
    "a.bias": 7,
    "b.weight": lamb.CHUNK + 131,
    "LayerNorm.weight": 64,
    "zero.weight": 5,
}
CONFIG = rules.LansConfig(beta1=0.6, beta2=0.85, weight_decay=0.1)
RATES = (0.02, 0.01, 0.015)
SCALE = 0.5  # of the gradients: clipping and unscaling


def drawn(seed):
    """A tensor for each name."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


def shards(num_ranks, device, masters_dtype=torch.float32, gradient_dtype=torch.bfloat16):
    """All ranks' shards of the first weights, one of them without a norm."""
    layout = Layout(list(SIZES.values()), num_ranks, 1 << 20)
    values = drawn(0) | {"zero.weight": torch.zeros(5)}
    made = []
    for rank in range(num_ranks):
        masters = torch.zeros(layout.shard_total, dtype=masters_dtype, device=device)
        gradient, weights = (torch.zeros_like(masters, dtype=gradient_dtype) for _ in range(2))
        made.append(
            Shard(
                names=list(SIZES),
                segments=layout.segments(rank),
                masters=masters,
                gradient=gradient,
                weights=weights,
            )
        )
        fill(made[-1], masters, values)
    return made


def fill(shard, flat, values):
    """Puts the shard's part of whole tensors into one of its buffers."""
    for segment, view in zip(shard.segments, shard.views(flat), strict=True):
        view.copy_(
            values[shard.names[segment.parameter]][segment.start : segment.start + segment.size]
        )


def step(rules, number, keep=None):
    """One step of all ranks, as Sharded takes it; a.bias has no gradient in the second one."""
    values = {name: value.bfloat16() for name, value in drawn(number + 1).items()}
    if number == 1:
        values["a.bias"].zero_()
    for rule in rules:
        fill(rule.shard, rule.shard.gradient, values)
        if keep is not None and not keep:
            rule.shard.gradient.fill_(float("inf"))
    squares = sum(rule.measure() for rule in rules)
    lr, scale = RATES[number % len(RATES)], torch.tensor(SCALE, device=squares.device)
    sums = []
    for rule in rules:  # what every rank brings to the sum, then the step again with the sum of all
        shard = rule.shard
        state = shard.masters, shard.weights, *shard.states.values(), rule.num_steps
        before = [tensor.clone() for tensor in state]
        rule.step(Update(lr, scale, keep, squares, lambda mine: sums.append(mine.clone()) or mine))
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)
    for rule in rules:
        rule.step(Update(lr, scale, keep, squares, lambda _: sum(sums)))


def whole(rules, buffer):
    """Tensors by name, put together of all ranks' parts."""
    found = {
        name: torch.full((size,), float("nan"), dtype=torch.float64) for name, size in SIZES.items()
    }
    for rule in rules:
        for segment, view in zip(
            rule.shard.segments, rule.shard.views(buffer(rule.shard)), strict=True
        ):
            found[rule.shard.names[segment.parameter]][
                segment.start : segment.start + segment.size
            ] = view.cpu()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_steps_of_any_number_of_shards_equal_the_rule_in_fp64(device, num_ranks):
    ours = [FlatLans(shard, CONFIG) for shard in shards(num_ranks, device)]
    [alone] = shards(1, torch.device("cpu"), torch.float64, torch.float64)
    oracle = [ListRule(alone, lambda shards: rules.LansRule(shards, CONFIG))]
    for number in range(len(RATES)):
        step(ours, number)
        step(oracle, number)
    for name in ("first_moments", "second_moments"):
        for key, tensor in whole(oracle, lambda shard, name=name: shard.states[name]).items():
            found = whole(ours, lambda shard, name=name: shard.states[name])[key]
            torch.testing.assert_close(found, tensor, rtol=2e-5, atol=1e-9, msg=f"{name} {key}")
    for key, tensor in whole(oracle, lambda shard: shard.masters).items():
        found = whole(ours, lambda shard: shard.masters)[key]
        torch.testing.assert_close(found, tensor, rtol=2e-5, atol=1e-6, msg=key)
        low = whole(ours, lambda shard: shard.weights)[
            key
        ]  # the interpreter cuts bits off where a GPU rounds
        torch.testing.assert_close(low, tensor, rtol=2**-7, atol=1e-6, msg=key)


def test_what_lies_between_the_tensors_stays_zero(device):
    rules = [FlatLans(shard, CONFIG) for shard in shards(2, device)]
    step(rules, 0)
    for rule in rules:
        between = torch.ones(rule.shard.masters.numel(), dtype=torch.bool)
        for segment in rule.shard.segments:
            between[segment.begin : segment.begin + segment.size] = False
        assert between.any()
        for flat in (rule.shard.masters, rule.shard.weights, *rule.shard.states.values()):
            assert not flat.cpu()[between].any()


def test_a_step_not_kept_changes_nothing(device):
    [rule] = [FlatLans(shard, CONFIG) for shard in shards(1, device)]
    step([rule], 0)
    shard = rule.shard
    before = [
        flat.clone()
        for flat in (shard.masters, shard.weights, *shard.states.values(), rule.num_steps)
    ]
    step([rule], 1, torch.tensor(False, device=device))
    after = (shard.masters, shard.weights, *shard.states.values(), rule.num_steps)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_same_input_gives_the_same_bits(device):
    found = []
    for _ in range(2):
        rules = [FlatLans(shard, CONFIG) for shard in shards(1, device)]
        step(rules, 0)
        found.append(rules[0].shard.masters)
    assert torch.equal(*found)


@pytest.mark.parametrize("rule", ["lamb", "lans", "adamw"])
def test_kernels_are_taken_where_there_are_some_and_are_wanted(device, rule):
    config = optim.Config(optimizer=rule)
    [plain] = shards(1, device)
    assert isinstance(config.flat_rule(plain, fused=False), ListRule)
    [shard] = shards(1, device)
    assert isinstance(config.flat_rule(shard, fused=True), ListRule) == (rule == "adamw")
