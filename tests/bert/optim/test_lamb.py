"""LAMB: by hand, and against an implementation written independently."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bert.optim.rules import LambConfig, LambRule, is_decayed

from .whole import Whole


def _lamb(named_parameters, masters=None, **settings):
    return Whole(
        named_parameters,
        lambda shards: LambRule(shards, LambConfig(**settings)),
        masters,
    )


def test_first_step_is_the_closed_form():
    """On step 1 the corrected moments are g and g^2, so the update is g / (|g| + eps) + wd p."""
    weight = nn.Parameter(torch.tensor([3.0, -4.0], dtype=torch.float64))
    bias = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    lamb = _lamb(
        [("dense.weight", weight), ("dense.bias", bias)], eps=1e-6, weight_decay=0.1
    )
    weight.grad = torch.tensor([0.5, 0.25], dtype=torch.float64)
    bias.grad = torch.tensor([-2.0], dtype=torch.float64)
    lamb.step(lr=0.01)
    u = [0.5 / (0.5 + 1e-6) + 0.3, 0.25 / (0.25 + 1e-6) - 0.4]
    ratio = 5.0 / math.hypot(*u)
    assert weight.tolist() == pytest.approx(
        [3.0 - 0.01 * ratio * u[0], -4.0 - 0.01 * ratio * u[1]], abs=1e-12
    )
    # No decay: no trust ratio.
    assert bias.tolist() == pytest.approx([1.0 + 0.01 * 2.0 / (2.0 + 1e-6)], abs=1e-12)


def _independent_lamb(parameters, gradients, decays, lr, b1, b2, eps, steps):
    """Scalar loops over lists, from the algorithm's text."""
    m = [[0.0] * len(p) for p in parameters]
    v = [[0.0] * len(p) for p in parameters]
    for t in range(1, steps + 1):
        for n, p in enumerate(parameters):
            g = gradients[t - 1][n]
            u = []
            for i in range(len(p)):
                m[n][i] = b1 * m[n][i] + (1 - b1) * g[i]
                v[n][i] = b2 * v[n][i] + (1 - b2) * g[i] ** 2
                u.append(
                    m[n][i] / (1 - b1**t) / (math.sqrt(v[n][i] / (1 - b2**t)) + eps)
                    + decays[n] * p[i]
                )
            p_norm, u_norm = (
                math.sqrt(sum(x * x for x in p)),
                math.sqrt(sum(x * x for x in u)),
            )
            ratio = p_norm / u_norm if decays[n] and p_norm and u_norm else 1.0
            parameters[n] = [x - lr * ratio * y for x, y in zip(p, u, strict=True)]
    return parameters


def test_many_steps_equal_an_independent_implementation():
    generator = torch.Generator().manual_seed(0)
    names = ["a.weight", "a.bias", "LayerNorm.weight", "zero.weight"]
    sizes = [7, 3, 5, 4]
    start = [torch.randn(n, dtype=torch.float64, generator=generator) for n in sizes]
    start[3].zero_()  # a zero tensor has no norm to scale by
    gradients = [
        [torch.randn(n, dtype=torch.float64, generator=generator) for n in sizes]
        for _ in range(6)
    ]
    parameters = [nn.Parameter(x.clone()) for x in start]
    lamb = _lamb(
        zip(names, parameters, strict=True),
        beta1=0.6,
        beta2=0.85,
        eps=1e-6,
        weight_decay=0.1,
    )
    for step in gradients:
        for p, g in zip(parameters, step, strict=True):
            p.grad = g.clone()
        lamb.step(0.02, grad_scale=torch.tensor(0.5, dtype=torch.float64))
    halved = [[(0.5 * g).tolist() for g in step] for step in gradients]
    expected = _independent_lamb(
        [x.tolist() for x in start], halved, [0.1, 0, 0, 0.1], 0.02, 0.6, 0.85, 1e-6, 6
    )
    for p, e in zip(parameters, expected, strict=True):
        assert p.tolist() == pytest.approx(e, abs=1e-12)


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
