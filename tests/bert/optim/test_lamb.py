"""LAMB by hand, and its masters; test_rules.py has its formula over many steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bert.optim.rules import LambConfig, LambRule, is_decayed

from .whole import Whole


def _lamb(named_parameters, masters=None, **settings):
    config = LambConfig(**settings)
    return Whole(named_parameters, lambda shards: LambRule(shards, config), masters)


def test_first_step_is_the_closed_form():
    """On step 1 the corrected moments are g and g^2, so the update is g / (|g| + eps) + wd p."""
    weight = nn.Parameter(torch.tensor([3.0, -4.0], dtype=torch.float64))
    bias = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    named = [("dense.weight", weight), ("dense.bias", bias)]
    lamb = _lamb(named, eps=1e-6, weight_decay=0.1)
    weight.grad = torch.tensor([0.5, 0.25], dtype=torch.float64)
    bias.grad = torch.tensor([-2.0], dtype=torch.float64)
    lamb.step(lr=0.01)
    u = [0.5 / (0.5 + 1e-6) + 0.3, 0.25 / (0.25 + 1e-6) - 0.4]
    ratio = 5.0 / math.hypot(*u)
    expected = [3.0 - 0.01 * ratio * u[0], -4.0 - 0.01 * ratio * u[1]]
    assert weight.tolist() == pytest.approx(expected, abs=1e-12)
    # No decay: no trust ratio.
    assert bias.tolist() == pytest.approx([1.0 + 0.01 * 2.0 / (2.0 + 1e-6)], abs=1e-12)


def test_low_precision_parameters_follow_fp32_masters():
    torch.manual_seed(0)
    full = torch.randn(1000)
    parameter = nn.Parameter(full.bfloat16())
    lamb = _lamb([("w.weight", parameter)], masters={"w.weight": full})
    assert torch.equal(lamb.shards.masters[0], full)
    assert lamb.shards.masters[0] is not full
    for _ in range(20):
        parameter.grad = torch.ones_like(parameter)
        lamb.step(1e-4)  # far below what bf16 alone could add up
    assert torch.equal(parameter, lamb.shards.masters[0].bfloat16())
    assert (full - lamb.shards.masters[0]).mean() > 1e-3


@pytest.mark.parametrize(
    ("name", "decayed"),
    [
        ("bert.encoder.layer.0.attention.self.query.weight", True),
        ("bert.encoder.layer.0.attention.self.query.bias", False),
        ("bert.encoder.layer.0.output.LayerNorm.weight", False),
        ("cls.predictions.bias", False),
        ("bert.embeddings.word_embeddings.weight", True),
    ],
)
def test_biases_and_layer_norms_are_not_decayed(name, decayed):
    assert is_decayed(name) is decayed
