"""Attention backends: what a device or package lacks is told before the run, the fastest that works on
every rank is taken, and on a GPU each equals the reference. Packages by stand-ins of their interfaces.
"""

import contextlib
import dataclasses
import itertools
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from bert import kernels
from bert.kernels import attention
from bert.kernels.attention import Attention, benchmark, libraries
from bert.kernels.attention.benchmark import Trial
from bert.kernels.precision import PrecisionConfig
from bert.kernels.support.dropout import ForwardPass
from bert.model.config import BertConfig
from common.env import ConfigError

from .. import no_gpu
from ..plain import CPU

TWO = benchmark.Heads(num_heads=2)
CUDA = torch.device("cuda", 0)
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
    assert trial == Trial(name="new", problem="head size 64 is not supported")


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


def test_flash_attn_2_gets_the_projections_whole_and_gives_one_gradient(monkeypatch):
    """Nothing lies between the package and the projections."""
    calls, theirs = [], torch.ones(18, 2, 8)

    def flash_attn_varlen_qkvpacked_func(
        qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
        softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        assert (softmax_scale, causal, return_attn_probs) == (None, False, False)
        assert cu_seqlens.dtype == torch.int32
        assert isinstance(max_seqlen, int)
        calls.append((qkv, cu_seqlens, max_seqlen, dropout_p))
        return theirs

    function = flash_attn_varlen_qkvpacked_func
    module = SimpleNamespace(flash_attn_varlen_qkvpacked_func=function)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    qkv = torch.randn(18, 3, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([0, 5, 5, 18, 18], dtype=torch.int32)
    forward_pass = ForwardPass(offsets, 16)
    assert libraries.flash_attn_2(qkv, forward_pass, 0.1) is theirs
    ((given, *rest),) = calls
    assert given is qkv
    assert rest == [forward_pass.cu_seqlens, 16, 0.1]


def _choose(monkeypatch, results, uses_graph=True, others=(), **settings):
    """resolve_attention() on a GPU that exists in name only. others: trials on the GPUs of other ranks."""
    no_gpu.in_name(monkeypatch)
    monkeypatch.setattr(benchmark, "benchmark_backends", lambda *_: results)

    def gather(mine):
        known = [{trial.name: trial.milliseconds for trial in rank} for rank in others]
        names = attention.BACKENDS
        return [mine, *([rank.get(name) or math.inf for name in names] for rank in known)]  # fmt: skip

    world = SimpleNamespace(device=CUDA, gather=gather, any=lambda failed: failed)
    name = settings.pop("precision", "bf16")
    dtype = PrecisionConfig(precision=name).resolve(CUDA).dtype
    config = kernels.KernelsConfig(**settings)
    choice, words = config.resolve_attention(BertConfig(), dtype, uses_graph, world)
    return choice.attention, words, choice.attention_fallback


def _times(**milliseconds):
    """Trials; without a time it has failed."""
    said = lambda time: "" if time else "not here"  # noqa: E731
    given = milliseconds.items()
    return [Trial(name=name, milliseconds=time, problem=said(time)) for name, time in given]  # fmt: skip


TRIALS = _times(flash_attn_2=None, flash=0.5, triton=0.4)
COMPILED = [*TRIALS, *_times(cudnn_frontend=0.3)]
GOOD, FAILED = _times(flash=0.5, triton=0.4), _times(flash=0.5, triton=None)
NOISY, NAMED = _times(flash=0.5, triton=4.0), {"attention": "cudnn_frontend"}


@pytest.mark.parametrize(
    ("mine", "others", "settings", "chosen"),  # and what replaces it
    [
        (TRIALS, [], {}, ("triton", "")),
        # One that compiles is for graphs, and replaced if it fails, by what works on every rank too.
        (COMPILED, [], {}, ("cudnn_frontend", "triton")),
        (COMPILED, [], {"uses_graph": False}, ("triton", "")),
        (COMPILED, [], NAMED, ("cudnn_frontend", "")),
        (COMPILED, [_times(cudnn_frontend=0.3, flash=0.5, triton=None)], {}, ("cudnn_frontend", "flash")),
        # The same on the rank where the fastest fails and on those where it works.
        (GOOD, [FAILED, GOOD], {}, ("flash", "")),
        (FAILED, [GOOD], {}, ("flash", "")),
        # Within 3% the first of the table is taken; the median of the ranks' times counts.
        (_times(flash=0.408, triton=0.4), [], {}, ("flash", "")),
        (_times(flash=0.42, triton=0.4), [], {}, ("triton", "")),
        (NOISY, [GOOD, GOOD], {}, ("triton", "")),
        (GOOD, [NOISY, GOOD], {}, ("triton", "")),
        (TRIALS[:1], [], {"uses_graph": False}, ("sdpa_loop", "")),
        ([], [], {"precision": "fp32"}, ("sdpa_loop", "")),
    ],
)  # fmt: skip
def test_auto_takes_the_fastest_that_works_on_every_rank(
    mine, others, settings, chosen, monkeypatch
):
    assert _choose(monkeypatch, mine, others=others, **settings)[::2] == chosen


def test_what_was_tried_is_told(monkeypatch):
    tried = "triton (tried: flash_attn_2 not here; flash 0.50 ms; triton 0.40 ms)"
    assert _choose(monkeypatch, TRIALS)[1] == tried
    words = _choose(monkeypatch, GOOD, others=[FAILED, GOOD])[1]
    assert "triton fails on another rank's GPU (rank 1)" in words
    named = _choose(monkeypatch, [], attention="flash")
    assert named == ("flash", "flash (ATTENTION)", "")


@pytest.mark.parametrize(
    ("mine", "others", "name", "refused"),
    [
        (GOOD, [GOOD, FAILED], "triton", r"triton fails on .* \(rank 2\): set ATTEN"),
        (TRIALS[:1], [], "flash_attn_2", r"flash_attn_2 fails on this GPU \(not he"),
        (TRIALS[:1], [], "auto", r"no attention backend .* set CUDA_GRAPH=0"),
    ],
)
def test_what_works_nowhere_is_refused(mine, others, name, refused, monkeypatch):
    with pytest.raises(ConfigError, match=refused):
        _choose(monkeypatch, mine, others=others, attention=name)


def test_on_an_amd_gpu_runs_what_is_there_for_it_and_the_rest_is_refused(monkeypatch):
    """Of which PyTorch says the capability 9.4, as if it were an NVIDIA GPU past Hopper."""
    no_gpu.in_name(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    flash = "is_flash_attention_available"
    monkeypatch.setattr(torch.backends.cuda, flash, lambda: True)
    assert list(attention.candidates(CUDA)) == ["flash"]
    assert "AMD" in kernels.KernelsConfig().describe(CUDA)
    assert PrecisionConfig().resolve(CUDA).dtype == torch.bfloat16
    for precision in ("fp8", "tf32"):
        with pytest.raises(ConfigError, match=f"{precision} is for NVIDIA GPUs"):
            PrecisionConfig(precision=precision).check(CUDA)


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
