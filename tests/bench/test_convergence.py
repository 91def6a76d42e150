"""The fast paths train like the plain ones, and those like Hugging Face's BERT with a LAMB of a few
lines.
"""

from __future__ import annotations

import importlib

import pytest
import torch


@pytest.fixture
def convergence(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "bench"))
    return importlib.import_module("convergence")


@pytest.fixture
def peer(convergence):
    return importlib.import_module("tests.bench.against_huggingface")


GPU_PAIRS = (
    "fused against reference",
    "graph against eager",
    "fp8 in kernels and graph against bf16",
)
RESULTS = {}  # of all pairs at once: they share variants


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "pair",
    [
        "bf16 against fp32",
        "fp8 against bf16",
        *(pytest.param(pair, marks=pytest.mark.gpu) for pair in GPU_PAIRS),
    ],
)
def test_curves_overlay_while_the_loss_falls(pair, convergence):
    if pair in GPU_PAIRS and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if not RESULTS:
        RESULTS.update(convergence.compare(300)["pairs"])
    found = RESULTS[pair]
    # From the logarithm of the vocabulary, and of two, to near that of a topic's three words.
    assert found["plain"][0] > 4 > 1.7 > found["plain"][-1], found["plain"]
    assert found["overlay"], found


@pytest.mark.parametrize(
    "steps",
    [25, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_losses_equal_those_of_an_independent_implementation(steps, peer):
    """With the same initial weights and batches, without dropout."""
    found = peer.agreement(steps)
    assert found["largest_relative_gap"] < 1e-5, found
    if steps == 500:
        assert found["ours"][-1] < 1.7, found
