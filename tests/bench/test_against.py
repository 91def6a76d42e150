"""The fast paths train like the plain ones, and those like Hugging Face's BERT with a LAMB of a few
lines; apex is called as its interface wants it.
"""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ..bert.optim.test_apex import installed  # noqa: F401 (a fixture)

GPU_PAIRS = (
    "fused against reference",
    "graph against eager",
    "fp8 in kernels and graph against bf16",
)
KERNELS = {"lamb", "xentropy", "dense_gelu_dense"}
KERNELS |= {f"layer_norm_{width}" for width in (768, 1024, 2048)}
RESULTS = {}  # of all pairs at once: they share variants


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "pair",
    ["bf16 against fp32", "fp8 against bf16", *(pytest.param(pair, marks=pytest.mark.gpu) for pair in GPU_PAIRS)],
)  # fmt: skip
def test_curves_overlay_while_the_loss_falls(pair, bench):
    if pair in GPU_PAIRS and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if not RESULTS:
        RESULTS.update(bench("convergence").compare(300)["pairs"])
    found = RESULTS[pair]
    # From the logarithm of the vocabulary, and of two, to near that of a topic's three words.
    assert found["plain"][0] > 4 > 1.7 > found["plain"][-1], found["plain"]
    assert found["overlay"], found


@pytest.mark.parametrize(
    "steps",
    [25, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_losses_equal_those_of_an_independent_implementation(steps, bench):
    """With the same initial weights and batches, without dropout."""
    peer = bench("tests.bench.against_huggingface")
    found = peer.agreement(steps)
    assert found["largest_relative_gap"] < 1e-5, found
    if steps == 500:
        assert found["ours"][-1] < 1.7, found


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


@pytest.mark.usefixtures("installed")
def test_each_of_apex_runs_beside_ours_and_pytorchs(bench, monkeypatch):
    for path, has in (
        ("apex.contrib", None),
        ("apex.contrib.layer_norm", FastLayerNorm),
        ("apex.contrib.xentropy", SoftmaxCrossEntropyLoss),
        ("apex.fused_dense", FusedDenseGeluDense),
    ):
        module = types.ModuleType(path)
        vars(module).update({has.__name__: has} if has else {})
        monkeypatch.setitem(sys.modules, path, module)
    found = bench("tests.bench.against_apex").measure(tiny=True)
    assert found.keys() == KERNELS
    for kernel, ways in found.items():
        for way in ("ours", "pytorch", "apex"):
            assert ways[way]["ms"] > 0, f"{kernel} {way} {ways}"


def test_without_apex_the_others_are_measured_and_its_line_says_why(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)
    for ways in bench("tests.bench.against_apex").measure(tiny=True).values():
        assert ways["ours"]["ms"] > 0
        assert ways["pytorch"]["ms"] > 0
        assert "apex" in ways["apex"]["does_not_run"]
