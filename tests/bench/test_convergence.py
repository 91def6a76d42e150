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


@pytest.fixture(scope="module")
def results():
    return {}


def _compare(module, results):
    if not results:  # all pairs at once: they share variants
        results.update(module.compare(300)["pairs"])
    return results


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pair", ["bf16 against fp32", "fp8 against bf16"])
def test_curves_overlay_while_the_loss_falls(pair, convergence, results):
    found = _compare(convergence, results)[pair]
    assert (
        found["plain"][0] > 4
    )  # it begins at the logarithm of the vocabulary, and of two
    assert found["plain"][-1] < 1.7, found[
        "plain"
    ]  # and ends near that of a topic's three words
    assert found["overlay"], found


@pytest.mark.gpu
@pytest.mark.parametrize(
    "pair",
    [
        "fused against reference",
        "graph against eager",
        "fp8 in kernels and graph against bf16",
    ],
)
def test_curves_of_gpu_paths_overlay(pair, convergence, results):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    found = _compare(convergence, results)[pair]
    assert found["plain"][-1] < 1.7, found["plain"]
    assert found["overlay"], found


@pytest.mark.parametrize(
    "steps",
    [25, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_losses_equal_those_of_an_independent_implementation(steps, convergence):
    """With the same initial weights and batches, without dropout."""
    found = convergence.agreement(steps)
    assert found["largest_relative_gap"] < 1e-5, found
    if steps == 500:
        assert found["ours"][-1] < 1.7, found
