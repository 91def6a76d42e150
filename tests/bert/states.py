"""Checkpoints as tests compare them."""

from __future__ import annotations

from pathlib import Path

import torch


def same(a, b):
    """Whether two states, nested dicts of tensors and values, are equal bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def newest(folder):
    """The state in the newest checkpoint of a folder."""
    return torch.load(sorted(Path(folder).glob("step_*.pt"))[-1], weights_only=True)
