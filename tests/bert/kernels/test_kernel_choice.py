"""The attention backend of a run: the fastest that works on every rank, told before the clock and by --check."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bert import kernels
from bert.core.env import ConfigError
from bert.kernels import assembly_check, attention
from bert.kernels.attention import Trial
from bert.kernels.precision import Config as PrecisionConfig

CUDA = torch.device("cuda", 0)


def _choose(monkeypatch, trials, others_fail=False, uses_graph=True, first_rank_takes=None, **settings):
    """choose() on a GPU that exists in name only."""
    monkeypatch.setattr(assembly_check, "check", lambda device: {})  # it asks the GPU
    monkeypatch.setattr(attention, "trials", lambda device: trials)
    names = list(attention.BACKENDS)
    world = SimpleNamespace(
        device=CUDA,
        broadcast_int=lambda number: names.index(first_rank_takes) if first_rank_takes else number,
        any=lambda failed: failed or others_fail,
    )
    precision = PrecisionConfig(precision=settings.pop("precision", "bf16")).resolve(CUDA)
    choice, words = kernels.Config(**settings).choose(precision.dtype, uses_graph, world)
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


def test_what_compiles_for_each_size_is_taken_for_graphs_alone_and_another_steps_in_if_it_fails(monkeypatch):
    trials = [*TRIALS, Trial(name="cudnn_frontend", milliseconds=0.3)]
    assert _choose(monkeypatch, trials)[::2] == ("cudnn_frontend", "triton")
    assert _choose(monkeypatch, trials, uses_graph=False)[::2] == ("triton", "")
    assert _choose(monkeypatch, trials, attention="cudnn_frontend")[::2] == ("cudnn_frontend", "")


def test_every_rank_takes_what_rank_0_takes_if_it_works_there(monkeypatch):
    assert _choose(monkeypatch, TRIALS, first_rank_takes="flash")[0] == "flash"
    for trouble in ({"first_rank_takes": "cudnn"}, {"others_fail": True}):
        with pytest.raises(ConfigError, match="fails on another one: set ATTENTION"):
            _choose(monkeypatch, TRIALS, **trouble)


def test_nothing_that_works_is_an_error_in_a_graph_only(monkeypatch):
    assert _choose(monkeypatch, TRIALS[:1], uses_graph=False)[0] == "sdpa_loop"
    with pytest.raises(ConfigError, match=r"no attention backend works here \(cudnn not here\): set CUDA_GRAPH=0"):
        _choose(monkeypatch, TRIALS[:1])


def test_a_named_backend_and_fp32_need_no_trial(monkeypatch):
    monkeypatch.setattr(attention, "trials", lambda device: pytest.fail("tried"))
    assert _choose(monkeypatch, [], attention="flash") == ("flash", "flash (ATTENTION)", "")
    assert _choose(monkeypatch, [], precision="fp32")[0] == "sdpa_loop"
