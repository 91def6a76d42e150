"""Attention backends: missing requirements are reported before the run; on a GPU each equals the
reference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import pytest
import torch

from bert import kernels
from bert.kernels import attention
from bert.kernels.attention import Attention, benchmark
from bert.kernels.support.dropout import ForwardPass
from common.env import ConfigError

from ..plain import CPU

TWO = benchmark.Heads(num_heads=2)
ON_GPU = [name for name in attention.BACKENDS if name != "sdpa_loop"]


@pytest.mark.parametrize("name", ON_GPU)
def test_backend_that_cannot_run_on_this_device_is_refused_by_name(name):
    reason = rf"ATTENTION={name} cannot run here: .*(GPU|CPU).*; use auto"
    with pytest.raises(ConfigError, match=reason):
        attention.check(name, CPU, torch.bfloat16, in_graph=False)


def test_the_reference_is_refused_in_a_graph_and_tensor_cores_in_fp32(monkeypatch):
    with pytest.raises(ConfigError, match="reads the lengths on the host"):
        attention.check("sdpa_loop", CPU, torch.bfloat16, in_graph=True)
    attention.check("sdpa_loop", CPU, torch.bfloat16, in_graph=False)
    chosen = kernels.bind_kernels(kernels.KernelsConfig(), CPU)
    assert chosen.attention is attention.sdpa_loop
    flash = attention.BACKENDS["flash"]
    installed = dataclasses.replace(flash, missing=lambda device: None)
    monkeypatch.setitem(attention.BACKENDS, "flash", installed)
    reason = "flash computes in bf16 or fp16: not with PRECISION=fp32"
    with pytest.raises(ConfigError, match=reason):
        attention.check("flash", CPU, torch.float32, in_graph=False)


def test_of_a_candidate_that_fails_in_a_graph_the_first_error_is_reported(monkeypatch):
    @contextlib.contextmanager
    def capture():
        try:
            yield
        finally:
            raise RuntimeError("failed due to a previous error during capture")

    def fails(qkv, forward_pass, dropout):
        with capture():
            raise ValueError("head size 64\nis not supported")

    backend = attention.Backend(fails, lambda device: None)
    monkeypatch.setitem(attention.BACKENDS, "new", backend)
    trial = benchmark.attempt("new", CPU, benchmark.BERT_LARGE)
    assert trial == benchmark.Trial(name="new", problem="head size 64 is not supported")


def leaks(qkv, forward_pass, dropout):
    """Attends across sequences."""
    whole = ForwardPass(forward_pass.cu_seqlens[[0, -1]], forward_pass.max_seqlen)
    return attention.sdpa_loop(qkv, whole, dropout)


def trips(qkv, forward_pass, dropout):
    """Over the empty sequences of a graph's batch."""
    context = attention.sdpa_loop(qkv, forward_pass, dropout)
    is_empty = (forward_pass.cu_seqlens.diff() == 0).any()
    return context * float("nan") if is_empty else context


@pytest.mark.parametrize(
    ("run", "problem"),
    [(leaks, "context differs"), (trips, "context is not finite")],
)
def test_a_wrong_backend_is_told_from_a_right_one(run, problem, monkeypatch):
    monkeypatch.setattr(benchmark, "LENGTHS", (48, 33, 1, 56))
    assert problem in benchmark.disagreement(run, CPU, TWO)


FAULTS = {  # of a sequence's logits [N, L, L] and values [L, N, H]: where a gradient is NaN
    "64 of a tile of 128": lambda s, v: len(v) % 128 == 64 and s.logsumexp(-1).min() < -88.7,
    "one token": lambda s, v: len(v) == 1 and s.max() < -88.7,
    "129 tokens": lambda s, v: len(v) == 129,
    "exp of large logits": lambda s, v: s.max() > 88.7,
    "values beyond fp16": lambda s, v: v.abs().max() > 65504,
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("part", range(3), ids=("queries", "keys", "values"))
def test_a_gradient_that_is_not_a_number_at_rare_magnitudes_or_lengths_is_found(
    part, fault, monkeypatch
):
    monkeypatch.setattr(benchmark, "LENGTHS", (48, 33))

    def faulty(qkv, forward_pass, dropout):
        given = qkv.clone()

        def spoil(gradient):
            gradient = gradient.clone()
            ends = forward_pass.cu_seqlens.tolist()
            for begin, end in itertools.pairwise(ends):
                q, k, v = qkv.detach()[begin:end].float().unbind(1)
                logits = torch.einsum("inh,jnh->nij", q, k) / 8
                if begin < end and FAULTS[fault](logits, v):
                    gradient[end - 1, part, 0, -1] = float("nan")
            return gradient

        if given.requires_grad:
            given.register_hook(spoil)
        return attention.sdpa_loop(given, forward_pass, dropout)

    found = benchmark.disagreement(faulty, CPU, TWO)
    assert found.startswith("its gradient of the ")
    assert "not finite" in found


@pytest.fixture(params=ON_GPU)
def backend(request, gpu) -> Attention:
    """Each one that this GPU and its packages can run."""
    if reason := attention.BACKENDS[request.param].missing(gpu):
        pytest.skip(reason)
    return attention.BACKENDS[request.param].run


@pytest.mark.gpu
def test_backend_gives_the_reference_context_and_gradient(backend, gpu):
    assert benchmark.disagreement(backend, gpu) == ""


@pytest.mark.gpu
def test_dropout_repeats_with_the_seed(backend, gpu):
    cu_seqlens = benchmark.offsets(2 * benchmark.LENGTHS, gpu)
    tokens = 2 * sum(benchmark.LENGTHS)
    qkv = torch.randn(tokens, 3, 16, 64, device=gpu, dtype=torch.bfloat16)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(backend(qkv, ForwardPass(cu_seqlens, 512), 0.1))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.gpu
def test_automatic_choice_is_a_backend_that_was_tried_with_success(gpu):
    tried = benchmark.benchmark_backends(gpu)
    good = {trial.name for trial in tried if trial.milliseconds is not None}
    assert benchmark.fastest(tried) in good
