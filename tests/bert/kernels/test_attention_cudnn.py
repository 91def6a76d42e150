"""cuDNN through its frontend, against a stand-in of the same interface."""

import gc
import importlib.util
import re
import sys
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bert import kernels
from bert.kernels import attention
from bert.kernels.attention import benchmark, cudnn_frontend
from bert.kernels.support.dropout import ForwardPass
from common.env import ConfigError

from .. import no_gpu
from ..plain import CPU
from . import fake_cudnn

# Odd lengths, of 1, and empty ones in the middle and at the end.
OFFSETS = [0, 5, 5, 18, 19, 40, 40, 40]
HEADS, WIDTH, LONGEST = 3, 16, 24


@pytest.fixture
def cudnn(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", fake_cudnn)
    caches = cudnn_frontend._plans, cudnn_frontend._handle
    for cache in caches:
        cache.cache_clear()
    fake_cudnn.built.clear()
    yield fake_cudnn
    for cache in caches:
        cache.cache_clear()


def _pass() -> ForwardPass:
    return ForwardPass(torch.tensor(OFFSETS, dtype=torch.int32), LONGEST)


def _qkv(dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(OFFSETS[-1], 3, HEADS, WIDTH, generator=generator)
    return qkv.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_context_and_gradient_equal_the_reference(cudnn, dtype):
    upstream = _qkv(dtype)[:, 0].detach()
    qkv = _qkv(dtype)
    context = cudnn_frontend.attention(qkv, _pass(), 0.0)
    context.backward(upstream)
    exact = qkv.detach().float().requires_grad_()
    expected = attention.sdpa_loop(exact, _pass(), 0.0)
    expected.backward(upstream.float())
    assert torch.allclose(context.float(), expected, atol=2e-2)
    assert (qkv.grad.float() - exact.grad).norm() < 1e-2 * exact.grad.norm()


@pytest.fixture
def trial(monkeypatch):
    """trial(run): what is wrong with a backend."""
    monkeypatch.setattr(benchmark, "LENGTHS", (48, 33, 1, 56))

    def trial(run):
        torch.manual_seed(0)
        return benchmark.disagreement(run, CPU, benchmark.Heads(num_heads=4))

    return trial


def test_a_trial_of_it_finds_nothing_and_finds_masks_that_differ_between_the_passes(
    cudnn, trial, monkeypatch
):
    assert trial(cudnn_frontend.attention) == ""
    backward = cudnn_frontend._start_backward

    def other_mask(plans, gradient, qkv, context, sums, shared):
        changed = {name: of + (name == "seed") for name, of in shared.items()}
        return backward(plans, gradient, qkv, context, sums, changed)

    monkeypatch.setattr(cudnn_frontend, "_start_backward", other_mask)
    problem = trial(cudnn_frontend.attention)
    assert "its two passes drop different probabilities" in problem


def test_a_trial_finds_dropout_that_drops_nothing_or_does_not_scale(trial):
    oracle = attention.sdpa_loop
    assert trial(oracle) == ""
    assert trial(lambda qkv, of, _: oracle(qkv, of, 0.0)) == "it drops nothing"
    unscaled = trial(lambda qkv, of, rate: oracle(qkv, of, rate) * (1 - rate))
    # 1 - dropout but for what was drawn.
    assert re.search(r"on average 0\.(8[89]|9[01]|9 )", unscaled)


def test_sites_draw_apart_and_a_site_that_is_repeated_draws_the_same(cudnn):
    qkv, of = _qkv().detach(), _pass()
    first, second = (cudnn_frontend.attention(qkv, of, 0.5) for _ in range(2))
    of.sites.num_sites = 0
    again = cudnn_frontend.attention(qkv, of, 0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    of.sites.num_sites = cudnn_frontend.SITES
    far = cudnn_frontend.attention(qkv, of, 0.5)
    assert not torch.equal(first, far)
    # Another pass, another seed.
    assert not torch.equal(first, cudnn_frontend.attention(qkv, _pass(), 0.5))


class Launches(TorchDispatchMode):
    """Names of the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


def test_nothing_is_copied_and_later_layers_of_a_pass_allocate_only(cudnn, monkeypatch):
    monkeypatch.setattr(fake_cudnn.pygraph, "_forward", lambda self, given: None)
    monkeypatch.setattr(fake_cudnn.pygraph, "_backward", lambda self, given: None)
    of, gradient = _pass(), torch.ones(OFFSETS[-1], HEADS, WIDTH, dtype=torch.bfloat16)
    cudnn_frontend.attention(_qkv(), of, 0.1).backward(gradient)
    qkv = _qkv()
    with Launches() as launches:
        context = cudnn_frontend.attention(qkv, of, 0.1)
        torch.autograd.grad(context, qkv, gradient)
    new = {"empty.memory_format", "empty", "new_empty", "empty_like"}
    assert set(launches.names) <= new | {"detach", "fill_"}
    assert launches.names.count("fill_") == 2, "the stand-in's, of its work space"


def test_plans_are_made_once_a_size_and_both_passes_run_before_the_first_result(cudnn):
    for _ in range(2):
        cudnn_frontend.attention(_qkv().detach(), _pass(), 0.1)
    forward, backward = cudnn.built
    assert (forward.runs, backward.runs) == (2, 1)
    one = ForwardPass(torch.tensor([0, 40], dtype=torch.int32), 40)
    cudnn_frontend.attention(_qkv().detach(), one, 0.1)
    assert len(cudnn.built) == 4


def test_plans_of_a_graph_are_kept_while_other_sizes_come_and_go(cudnn, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cudnn_frontend, "_captured", set())
    for size, captures in ((40, True), (39, False)):
        answer = lambda captures=captures: captures  # noqa: E731
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", answer)
        _attend(size)
    captured, other = (weakref.ref(graph) for graph in cudnn.built[::2])
    cudnn.built.clear()
    for size in range(cudnn_frontend.MOST_PLANS):
        _attend(size + 1)
    cudnn.built.clear()
    gc.collect()
    assert captured() is not None
    assert other() is None


def _attend(longest: int) -> None:
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    cudnn_frontend.attention(_qkv().detach(), ForwardPass(offsets, 40 + longest), 0.1)


def test_sizes_without_a_plan_are_an_error_of_one_line(cudnn):
    with pytest.raises(ConfigError, match=r"^ATTENTION=cudnn_frontend: no plan for "):
        cudnn_frontend.attention(_qkv()[..., :12], _pass(), 0.1)
    with pytest.raises(TypeError, match="in bf16 or fp16"):
        cudnn_frontend.attention(_qkv(torch.float32), _pass(), 0.1)


@pytest.mark.parametrize("fails", ["check_support", "_forward", "_backward"])
def test_under_auto_a_failure_is_one_line_and_the_fallback_takes_over_for_good(
    cudnn, monkeypatch, capsys, fails
):
    calls = []

    def failing(*_):
        calls.append(1)
        raise RuntimeError("CUDNN_STATUS\nEXECUTION_FAILED")

    monkeypatch.setattr(fake_cudnn.pygraph, fails, failing)
    run, of = attention.with_fallback("cudnn_frontend", "sdpa_loop"), _pass()
    qkv = _qkv()
    assert run(qkv, of, 0.1).shape == qkv[:, 0].shape
    context = run(qkv, of, 0.0)
    context.backward(torch.ones_like(context))
    assert torch.equal(context, attention.sdpa_loop(qkv, of, 0.0))
    assert len(calls) == 1
    # The fallback has the sites that it would have had alone.
    assert of.sites.num_sites == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("attention: cudnn_frontend failed, sdpa_loop takes its")
    assert "CUDNN_STATUS EXECUTION_FAILED" in line


def test_auto_always_has_the_fallback(cudnn, monkeypatch, capsys):
    no_gpu.in_name(monkeypatch)
    times = {"cudnn_frontend": 1.0, "sdpa_loop": 2.0}
    results = [benchmark.Trial(name=n, milliseconds=ms) for n, ms in times.items()]
    monkeypatch.setattr(benchmark, "benchmark_backends", lambda device: results)
    names = kernels.KernelsConfig(fused="none")
    chosen = kernels.bind_kernels(names, torch.device("cuda"))
    qkv = _qkv()[..., :12]  # cuDNN takes multiples of 8
    expected = attention.sdpa_loop(qkv, _pass(), 0.0)
    assert torch.equal(chosen.attention(qkv, _pass(), 0.0), expected)
    assert "sdpa_loop takes its place" in capsys.readouterr().err


def test_the_package_is_asked_for_by_its_name_where_a_gpu_could_use_it(monkeypatch):
    missing = attention.BACKENDS["cudnn_frontend"].missing
    assert "GPU" in missing(CPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for capability, found in {
        (7, 5): "it needs compute capability 8.0 or later",
        (8, 0): "the package nvidia-cudnn-frontend with cudnn is not installed",
    }.items():
        asked = lambda _, its=capability: its  # noqa: E731
        monkeypatch.setattr(torch.cuda, "get_device_capability", asked)
        assert missing(torch.device("cuda")) == found
