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
