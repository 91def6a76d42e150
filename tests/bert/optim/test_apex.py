"""OPTIMIZER=apex_lamb is LAMB: on a stand-in for apex's kernels, which need a GPU, and on apex's own
class where its sources are at hand.
"""

from __future__ import annotations

import os
import sys
import types

import pytest
import torch
from torch import nn

from bert import optim
from bert.optim import apex
from bert.optim.flat import ListRule
from bert.optim.rules import LambConfig
from bert.optim.sharded import WholeOptimizer
from common.env import ConfigError

from ..plain import alone
from ..states import same
from . import apex_stand_in

SHAPES = {"a.weight": (7, 3), "a.bias": (5,), "LayerNorm.weight": (5,)}
SHAPES["zero.weight"] = (4,)
LOW = torch.bfloat16, torch.float16


@pytest.fixture(params=["stand-in", "apex's own class"])
def installed(request, monkeypatch):
    own_sources = request.param != "stand-in"
    if own_sources and "APEX_SOURCES" not in os.environ:
        pytest.skip("APEX_SOURCES names no checkout of NVIDIA's apex")
    apex_stand_in.install(monkeypatch, own_sources)


def _optimizer(name, dtype, accumulate=False, ratio="decayed"):
    generator = torch.Generator().manual_seed(0)
    draw = lambda shape: torch.randn(shape, generator=generator)  # noqa: E731
    full = {key: draw(shape) for key, shape in SHAPES.items()}
    full["zero.weight"].zero_()  # has no norm to scale by
    named = {key: nn.Parameter(value.to(dtype)) for key, value in full.items()}
    lamb = LambConfig(beta1=0.7, beta2=0.85, weight_decay=0.1, ratio=ratio)
    config = optim.OptimizerConfig(optimizer=name, sharded=False, lamb=lamb)
    rule = lambda shard: ListRule(shard, config.rule)  # noqa: E731
    options = {"masters": full, "accumulate": accumulate}
    return WholeOptimizer(named.items(), rule, alone(), **options)


def _take(optimizer, steps):
    """Steps of which number 2 overflows."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for view in optimizer.buckets.views:
            view.copy_(torch.randn(view.shape, generator=generator))
            view.mul_(float("inf") if step == 2 else 1.0)
        scale = torch.tensor(float("nan") if step == 2 else 0.25)
        lr = torch.tensor(0.1 / (step + 1))
        optimizer.step(lr, scale, None if step == 4 else torch.tensor(step != 2))


def _assert_same(ours, theirs, rounding=0.0):
    """rounding: of the directions."""
    assert ours["num_steps"] == theirs["num_steps"]
    for part in ("masters", "first_moments", "second_moments"):
        slack = rounding if part == "masters" else 0.0
        for name, tensor in ours[part].items():
            close = {"atol": 1e-6 + slack, "rtol": 1e-5, "msg": f"{part} {name}"}
            torch.testing.assert_close(theirs[part][name], tensor, **close)


@pytest.mark.parametrize("ratio", ["decayed", "all"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["one", "accumulated"])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_it_takes_our_steps_and_skips_an_overflow(dtype, accumulate, ratio, installed):
    ours, theirs = (
        _optimizer(name, dtype, accumulate, ratio) for name in ("lamb", "apex_lamb")
    )
    for optimizer in (ours, theirs):
        _take(optimizer, range(6))
    assert int(ours.num_steps) == 5
    in_low = dtype in LOW and not accumulate
    # Directions, of about 1, are rounded to the gradients' 8 or 11 bits; the rates add up to 0.2.
    _assert_same(ours.state_dict(), theirs.state_dict(), 2e-3 if in_low else 0.0)
    rounded = theirs.shard.masters.to(dtype)
    assert torch.equal(theirs.shard.weights, rounded), "apex writes what it should"


def test_checkpoints_resume_to_the_bit_and_go_from_one_to_the_other(installed):
    whole, first, second, lamb = (
        _optimizer(name, torch.bfloat16) for name in (*["apex_lamb"] * 3, "lamb")
    )
    _take(whole, range(6))
    _take(first, range(3))
    for other in (second, lamb):
        other.load_state_dict(first.state_dict())
        _take(other, range(3, 6))
    assert same([*whole.state_tensors()], [*second.state_tensors()])
    _assert_same(whole.state_dict(), lamb.state_dict(), 2e-3)


def test_without_apex_or_with_another_package_of_that_name_one_line_says_how_it_comes(
    monkeypatch,
):
    apex_stand_in.install(monkeypatch)
    absent = {
        "amp_C": None,  # built without extensions
        "apex.optimizers": types.ModuleType("apex.optimizers"),  # another package
        "apex": None,
    }
    asked = optim.OptimizerConfig(optimizer="apex_lamb", sharded=False)
    for name, module in absent.items():
        monkeypatch.setitem(sys.modules, name, module)
        with pytest.raises(ConfigError, match=r"NGC's PyTorch image has it") as error:
            asked.check(torch.device("cuda"))
        assert "PyPI's apex is another project" in str(error.value)
        assert "\n" not in str(error.value)


def test_it_needs_a_gpu_and_whole_parameters_and_logs_lamb(monkeypatch):
    apex_stand_in.install(monkeypatch)
    whole = optim.OptimizerConfig(optimizer="apex_lamb", sharded=False)
    with pytest.raises(ConfigError, match="needs a GPU"):
        whole.check(torch.device("cpu"))
    with pytest.raises(ConfigError, match="set SHARD_OPTIMIZER=0"):
        optim.OptimizerConfig(optimizer="apex_lamb").check(torch.device("cuda"))
    whole.check(torch.device("cuda"))
    assert whole.hyperparameters() == optim.OptimizerConfig().hyperparameters()
    assert apex.ApexRule.capturable
