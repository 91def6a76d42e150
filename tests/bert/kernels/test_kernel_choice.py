"""The attention backend of a run: the fastest that works on every rank, told before the clock and by --check."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bert import kernels
from bert.kernels import attention
from bert.kernels.attention import benchmark
from bert.kernels.attention.benchmark import Trial
from bert.kernels.precision import Config as PrecisionConfig
from bert.model.config import BertConfig
from common.env import ConfigError

from .. import no_gpu

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    no_gpu.in_name(monkeypatch)


def _choose(
    monkeypatch, results, others_fail=False, uses_graph=True, first_rank_takes=None, **settings
):
    """resolve_attention() on a GPU that exists in name only."""
    monkeypatch.setattr(
        benchmark, "benchmark_backends", lambda device, heads, name: results
    )  # it asks the GPU
    names = list(attention.BACKENDS)
    world = SimpleNamespace(
        device=CUDA,
        broadcast_int=lambda number: names.index(first_rank_takes) if first_rank_takes else number,
        any=lambda failed: failed or others_fail,
    )
    precision = PrecisionConfig(precision=settings.pop("precision", "bf16")).resolve(CUDA)
    choice, words = kernels.Config(**settings).resolve_attention(
        BertConfig(), precision.dtype, uses_graph, world
    )
    return choice.attention, words, choice.attention_fallback


TRIALS = [
    Trial(name="cudnn", milliseconds=None, problem="not here"),
    Trial(name="flash", milliseconds=0.5),
    Trial(name="triton", milliseconds=0.4),
]


def test_auto_is_the_fastest_and_says_what_was_tried(monkeypatch):
    assert _choose(monkeypatch, TRIALS) == (
        "triton", "triton (tried: cudnn not here; flash 0.50 ms; triton 0.40 ms)", "",
    )  # fmt: skip


def test_a_compiling_backend_is_used_only_in_graphs_and_replaced_if_it_fails(monkeypatch):
    tried = [*TRIALS, Trial(name="cudnn_frontend", milliseconds=0.3)]
    assert _choose(monkeypatch, tried)[::2] == ("cudnn_frontend", "triton")
    assert _choose(monkeypatch, tried, uses_graph=False)[::2] == ("triton", "")
    assert _choose(monkeypatch, tried, attention="cudnn_frontend")[::2] == ("cudnn_frontend", "")


def test_every_rank_takes_what_rank_0_takes_if_it_works_there(monkeypatch):
    assert _choose(monkeypatch, TRIALS, first_rank_takes="flash")[0] == "flash"
    for trouble, where in (
        ({"first_rank_takes": "cudnn"}, r"this GPU \(not here\)"),
        ({"others_fail": True}, "another rank's GPU"),
    ):
        with pytest.raises(
            ConfigError, match=f"fails on {where}: set ATTENTION to another one, or auto"
        ):
            _choose(monkeypatch, TRIALS, **trouble)


def test_nothing_that_works_is_an_error_in_a_graph_only(monkeypatch):
    assert _choose(monkeypatch, TRIALS[:1], uses_graph=False)[0] == "sdpa_loop"
    with pytest.raises(
        ConfigError, match=r"no attention backend works here \(cudnn not here\): set CUDA_GRAPH=0"
    ):
        _choose(monkeypatch, TRIALS[:1])


def test_a_named_backend_is_tried_alone_and_refused_where_it_fails_and_fp32_tries_none(monkeypatch):
    assert _choose(monkeypatch, [], attention="flash") == ("flash", "flash (ATTENTION)", "")
    with pytest.raises(ConfigError, match=r"attention cudnn fails on this GPU \(not here\)"):
        _choose(monkeypatch, TRIALS[:1], attention="cudnn")
    assert _choose(monkeypatch, [], precision="fp32")[0] == "sdpa_loop"


def test_on_an_amd_gpu_runs_what_is_there_for_it_and_the_rest_is_refused(monkeypatch):
    """PyTorch says of an MI300X that its capability is 9.4, as if it were an NVIDIA GPU past Hopper."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(attention.libraries, "CUDNN_VARLEN_SINCE", (2, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)  # MIOpen
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert list(attention.candidates(CUDA)) == ["flash"]
    assert "AMD" in kernels.Config().describe(CUDA)
    assert PrecisionConfig().resolve(CUDA).dtype == torch.bfloat16
    for precision in ("fp8", "tf32"):
        with pytest.raises(ConfigError, match=f"PRECISION={precision} is for NVIDIA GPUs"):
            PrecisionConfig(precision=precision).check(CUDA)
