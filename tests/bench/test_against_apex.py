"""against_apex.py: all that apex has is called as its interface wants it, and its absence is
told beside the other figures.
"""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ..bert.optim import apex_stand_in

KERNELS = {"lamb", "xentropy", "dense_gelu_dense"}
KERNELS |= {f"layer_norm_{width}" for width in (768, 1024, 2048)}


@pytest.fixture
def bench(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "bench"))
    return importlib.import_module("tests.bench.against_apex")


class FastLayerNorm(nn.LayerNorm):
    def __init__(self, hidden_size, eps=1e-5, memory_efficient=False):
        super().__init__(hidden_size, eps)


class SoftmaxCrossEntropyLoss:
    @staticmethod
    def apply(logits, labels, smoothing=0.0, padding_idx=0, half_to_float=False):
        assert (smoothing, padding_idx, half_to_float) == (0.0, -100, True)
        return F.cross_entropy(logits.float(), labels, reduction="none")


class FusedDenseGeluDense(nn.Module):
    def __init__(self, in_features, intermediate_features, out_features, bias=True):
        super().__init__()
        self.weight1 = nn.Parameter(torch.empty(intermediate_features, in_features))
        self.bias1 = nn.Parameter(torch.empty(intermediate_features))
        self.weight2 = nn.Parameter(torch.empty(out_features, intermediate_features))
        self.bias2 = nn.Parameter(torch.empty(out_features))

    def forward(self, x):
        hidden = F.gelu(F.linear(x, self.weight1, self.bias1))
        return F.linear(hidden, self.weight2, self.bias2)


def test_each_of_apex_runs_beside_ours_and_pytorchs(bench, monkeypatch):
    apex_stand_in.install(monkeypatch)
    for name, has in {
        "apex.contrib": None,
        "apex.contrib.layer_norm": FastLayerNorm,
        "apex.contrib.xentropy": SoftmaxCrossEntropyLoss,
        "apex.fused_dense": FusedDenseGeluDense,
    }.items():
        module = types.ModuleType(name)
        if has is not None:
            setattr(module, has.__name__, has)
        monkeypatch.setitem(sys.modules, name, module)
    found = bench.measure(tiny=True)
    assert found.keys() == KERNELS
    for kernel, ways in found.items():
        assert ways.keys() == {"ours", "pytorch", "apex"}
        for way, figures in ways.items():
            assert figures["ms"] > 0, f"{kernel} {way} {figures}"


def test_without_apex_the_others_are_measured_and_its_line_says_why(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)
    for ways in bench.measure(tiny=True).values():
        assert ways["ours"]["ms"] > 0
        assert ways["pytorch"]["ms"] > 0
        assert "apex" in ways["apex"]["does_not_run"]
