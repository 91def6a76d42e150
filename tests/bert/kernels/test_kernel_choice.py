"""The attention backend of a run: the fastest that works on every rank, told before the clock and
by --check.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from bert import kernels
from bert.kernels import attention
from bert.kernels.attention import benchmark
from bert.kernels.attention.benchmark import Trial
from bert.kernels.precision import PrecisionConfig
from bert.model.config import BertConfig
from common.env import ConfigError

from .. import no_gpu
from ..ranks import run_ranks

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    no_gpu.in_name(monkeypatch)


def _choose(monkeypatch, results, uses_graph=True, others=(), **settings):
    """resolve_attention() on a GPU that exists in name only. others: trials on the GPUs of other
    ranks.
    """
    # it asks the GPU
    monkeypatch.setattr(benchmark, "benchmark_backends", lambda *_: results)

    def gather(mine):
        known = [{trial.name: trial.milliseconds for trial in rank} for rank in others]
        names = attention.BACKENDS
        times = [[rank.get(name) or math.inf for name in names] for rank in known]
        return [mine, *times]

    world = SimpleNamespace(device=CUDA, gather=gather, any=lambda failed: failed)
    name = settings.pop("precision", "bf16")
    dtype = PrecisionConfig(precision=name).resolve(CUDA).dtype
    config = kernels.KernelsConfig(**settings)
    choice, words = config.resolve_attention(BertConfig(), dtype, uses_graph, world)
    return choice.attention, words, choice.attention_fallback


TRIALS = [
    Trial(name="flash_attn_2", milliseconds=None, problem="not here"),
    Trial(name="flash", milliseconds=0.5),
    Trial(name="triton", milliseconds=0.4),
]


def test_auto_is_the_fastest_and_says_what_was_tried(monkeypatch):
    assert _choose(monkeypatch, TRIALS) == (
        "triton", "triton (tried: flash_attn_2 not here; flash 0.50 ms; triton 0.40 ms)", "",
    )  # fmt: skip


def test_a_compiling_backend_is_used_only_in_graphs_and_replaced_if_it_fails(
    monkeypatch,
):
    tried = [*TRIALS, Trial(name="cudnn_frontend", milliseconds=0.3)]
    assert _choose(monkeypatch, tried)[::2] == ("cudnn_frontend", "triton")
    assert _choose(monkeypatch, tried, uses_graph=False)[::2] == ("triton", "")
    named = _choose(monkeypatch, tried, attention="cudnn_frontend")
    assert named[::2] == ("cudnn_frontend", "")


def _times(**milliseconds):
    return [Trial(name=name, milliseconds=time) for name, time in milliseconds.items()]


def test_auto_takes_the_fastest_that_works_on_every_rank(monkeypatch):
    """The same on the rank where the fastest fails and on those where it works."""
    good = _times(flash=0.5, triton=0.4)
    failed = [Trial(name="triton", problem="illegal access"), *_times(flash=0.5)]
    chosen, words, _ = _choose(monkeypatch, good, others=[failed, good])
    assert chosen == "flash"
    assert "triton fails on another rank's GPU (rank 1)" in words
    assert _choose(monkeypatch, failed, others=[good])[0] == "flash"
    with pytest.raises(ConfigError, match=r"triton fails on .* \(rank 2\): set ATTEN"):
        _choose(monkeypatch, good, others=[good, failed], attention="triton")


def _agree(world):
    results = {
        0: _times(flash=0.5, triton=0.4),
        1: [Trial(name="triton", problem="illegal access"), *_times(flash=0.9)],
        2: _times(triton=0.4, flash=0.6),
    }[world.rank]
    found = {trial.name: trial for trial in benchmark.agreed(results, world)}
    assert found["flash"].milliseconds == 0.6, "the median"
    assert found["triton"].milliseconds is None
    assert found["triton"].problem


def test_real_ranks_agree_on_what_works_and_how_fast_it_is():
    run_ranks(_agree, 3)


def test_what_replaces_a_backend_works_on_every_rank_too(monkeypatch):
    good = _times(cudnn_frontend=0.3, flash=0.5, triton=0.4)
    elsewhere = _times(cudnn_frontend=0.3, flash=0.5)
    elsewhere.append(Trial(name="triton", problem="slow"))
    chosen = _choose(monkeypatch, good, others=[elsewhere])
    assert chosen[::2] == ("cudnn_frontend", "flash")


def test_neither_noise_nor_one_rank_decides_between_backends(monkeypatch):
    """Within 3% the first of the table is taken; the median of the ranks' times counts."""
    assert _choose(monkeypatch, _times(flash=0.408, triton=0.4))[0] == "flash"
    assert _choose(monkeypatch, _times(flash=0.42, triton=0.4))[0] == "triton"
    usual, noisy = _times(flash=0.5, triton=0.4), _times(flash=0.5, triton=4.0)
    for mine, others in ((noisy, [usual, usual]), (usual, [noisy, usual])):
        assert _choose(monkeypatch, mine, others=others)[0] == "triton"


def test_nothing_that_works_is_an_error_in_a_graph_only(monkeypatch):
    assert _choose(monkeypatch, TRIALS[:1], uses_graph=False)[0] == "sdpa_loop"
    with pytest.raises(ConfigError, match=r"no attention backend .* set CUDA_GRAPH=0"):
        _choose(monkeypatch, TRIALS[:1])


def test_a_named_backend_is_tried_alone_and_refused_where_it_fails_and_fp32_tries_none(
    monkeypatch,
):
    named = _choose(monkeypatch, [], attention="flash")
    assert named == ("flash", "flash (ATTENTION)", "")
    with pytest.raises(ConfigError, match=r"flash_attn_2 fails on this GPU \(not he"):
        _choose(monkeypatch, TRIALS[:1], attention="flash_attn_2")
    assert _choose(monkeypatch, [], precision="fp32")[0] == "sdpa_loop"


def test_on_an_amd_gpu_runs_what_is_there_for_it_and_the_rest_is_refused(monkeypatch):
    """PyTorch says of an MI300X that its capability is 9.4, as if it were an NVIDIA GPU past
    Hopper.
    """
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
