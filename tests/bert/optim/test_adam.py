"""Adam and AdamW against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bert.optim.rules import AdamConfig, AdamRule

from .whole import Whole


@pytest.mark.parametrize(
    ("decoupled", "peer"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)]
)
def test_steps_equal_pytorchs(decoupled, peer):
    generator = torch.Generator().manual_seed(0)
    names = ["a.weight", "a.bias", "LayerNorm.weight"]
    start = [torch.randn(n, dtype=torch.float64, generator=generator) for n in (7, 3, 5)]
    ours, theirs = ([nn.Parameter(x.clone()) for x in start] for _ in range(2))
    config = AdamConfig(beta1=0.8, beta2=0.81, eps=1e-9, weight_decay=0.1)
    optimizer = Whole(
        zip(names, ours, strict=True), lambda shards: AdamRule(shards, config, decoupled=decoupled)
    )
    groups = [
        {"params": theirs[:1], "weight_decay": 0.1},
        {"params": theirs[1:], "weight_decay": 0.0},
    ]
    reference = peer(groups, lr=0.01, betas=(0.8, 0.81), eps=1e-9)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, dtype=torch.float64, generator=generator)
            b.grad = a.grad * 0.5
        optimizer.step(0.01, 0.5)
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)
