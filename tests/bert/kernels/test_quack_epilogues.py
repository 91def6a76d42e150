"""GELU and its casts inside QuACK's fp8 products: what separate kernels compute, and taken only where that is so."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys

import pytest
import torch

from bert.kernels import QUACK, Config, feed_forward, select, trials
from bert.kernels.fp8 import Recipe
from bert.model.encoder import Encoder
from common.env import ConfigError

from . import fake_quack, fp8_cases
from .test_feed_forward import HEADS
from .test_fp8_feed_forward import CASTS_IN_KERNELS, CONFIG, _run

# Of the norm: a hundredth of the gradients, rounded to bf16 or not, goes to another of two neighbours in fp8, up to a
# quarter away.
NEIGHBOURS = 2.0**-4


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_feed_forward_is_that_of_separate_kernels_but_for_a_rounding(
    approximate, device, quack
):
    # Tiles in part, both ways.
    found = fp8_cases.differences(device, 80, 16, 272, approximate, dropout=0.0, by_quack=True)
    assert max(found.values()) <= NEIGHBOURS, found
    assert any(found.values()), "another kernel ran"


def test_every_layer_uses_it_once_a_step_has_measured_the_scales(device, quack, monkeypatch):
    shape = dataclasses.replace(CONFIG, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    outcomes, calls = [], []
    gemm = fake_quack.Epilogue.gemm
    monkeypatch.setattr(
        fake_quack.Epilogue,
        "gemm",
        lambda *args, **named: calls.append(named) or gemm(*args, **named),
    )
    for by_quack in (False, True):
        chosen = select(Config(fused=CASTS_IN_KERNELS, attention="sdpa_loop"), device)
        torch.manual_seed(5)
        encoder = Encoder(shape, dataclasses.replace(chosen, fp8_feed_forward=by_quack)).to(
            device, torch.bfloat16
        )
        scaling = encoder.use_fp8(Recipe(fast_backward=True), device) or encoder.fp8_scaling
        _run(encoder, device, factor=1.0)
        scaling.mark_calibrated()
        assert not calls, "the first step measures"
        outcomes.append(_run(encoder, device, factor=1.0))
    assert len(calls) == 2 * shape.num_hidden_layers
    assert all(dict(one["post_init_attrs"]) == {"fp8_slow_accum": False} for one in calls)
    separate, by_quack = outcomes
    for name, tensor in separate.items():
        if not name.endswith("key.bias"):  # whose gradient is 0 but for rounding
            assert fp8_cases.relative_difference(by_quack[name], tensor) < NEIGHBOURS, name


def test_what_is_not_finite_is_seen_or_goes_on(device, quack):
    module = importlib.import_module(fake_quack.EPILOGUES)
    for bad in (float("inf"), float("nan")):
        target = fp8_cases.new_target(torch.float8_e4m3fn, 1.0, device)
        bias = torch.zeros(32, dtype=torch.bfloat16, device=device)
        bias[3] = bad
        x8 = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
        weight, one = (
            torch.ones(32, 16, device=device).to(torch.float8_e4m3fn),
            torch.ones((), device=device),
        )
        _, cast, transposed = module.gelu_of_product(x8, weight, (one, one), bias, "tanh", target)
        assert cast.float()[:, 3].isnan().all() if bad != bad else target.largest == bad
        assert torch.equal(cast.float().t().nan_to_num(), transposed.float().nan_to_num())


FAULTS = {
    "": "",
    "cast": "its result differs from fp32's by 0.",
    "inner": "its bias' gradient differs from fp32's by ",
    "bias": "its bias' gradient differs from fp32's by 0.",
    "largest": "its largest magnitude differs from fp32's by 0.",
    "slow": "slower: 3.00 ms, ours 2.00 ms",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_trial_finds_what_is_wrong_or_slower(fault, device, quack, monkeypatch):
    times = iter([2.0, 3.0 if fault == "slow" else 1.0])
    monkeypatch.setattr(trials, "_milliseconds", lambda run, device: (run(1), next(times))[1])
    module = importlib.import_module(fake_quack.EPILOGUES)
    start = module._start

    def wrong(epilogue, a, b, output, c, fast, target, **named):
        start(epilogue, a, b, output, c, fast, target, **named)
        spoiled = {"inner": output if c is None else None, "largest": target.largest, **named}.get(
            fault
        )
        if spoiled is not None and (fault != "bias" or c is not None):
            spoiled.copy_(1.1 * spoiled.float())

    monkeypatch.setattr(module, "_start", wrong)
    assert trials.attempt("fp8_feed_forward", device, HEADS).problem.startswith(FAULTS[fault])


def test_a_run_takes_it_only_where_it_is_there_and_was_found_right(device, monkeypatch):
    monkeypatch.setitem(QUACK, "fp8_feed_forward", lambda device: "it is not there")
    with pytest.raises(ConfigError, match="FUSED names fp8_feed_forward, but it is not there"):
        Config(fused=f"{CASTS_IN_KERNELS},fp8_feed_forward").names(device)
    monkeypatch.setitem(QUACK, "fp8_feed_forward", lambda device: None)
    assert "fp8_feed_forward" in Config(fused="auto").names(device)
    with pytest.raises(ConfigError, match="FUSED=fp8_feed_forward requires fp8_cast"):
        Config(fused="fp8_feed_forward").names(device)


@pytest.mark.parametrize(
    ("capability", "reason"), [((9, 0), None), ((10, 0), "its fp8 needs compute capability 9.0")]
)
def test_its_products_of_both_formats_are_hoppers(capability, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(feed_forward, "missing", lambda device: None)
    assert feed_forward.missing_in_fp8(torch.device("cuda")) == reason


COMPILE = """
import os, sys, torch
os.environ |= {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a", "QUACK_CACHE_DIR": sys.argv[1]}
import quack.gemm_runtime.host as host
host.get_max_active_clusters = lambda size, *_: 132 // size
launched = []
host.launch_gemm = lambda *args, **named: launched.append(args)
from torch._subclasses.fake_tensor import FakeTensorMode
from bert.kernels import quack_epilogues, triton_support
from bert.kernels.fp8 import Target
triton_support.triton = None
quack_epilogues.transpose = lambda x: x.t()
with FakeTensorMode():
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device="cuda")
    forward, backward = torch.float8_e4m3fn, torch.float8_e5m2
    x8, weight = new(24576, 1024, dtype=forward), new(4096, 1024, dtype=forward)
    bias, inverses = new(4096, dtype=torch.bfloat16), (new(), new())
    target = lambda dtype: Target(dtype=dtype, scale=new(), inverse=new(), largest=new())
    quack_epilogues.column_sums = lambda sums, dtype: sums.sum(0).to(dtype)
    for form in ("tanh", "none"):
        inner, _, _ = quack_epilogues.gelu_of_product(x8, weight, inverses, bias, form, target(forward))
        g8 = new(24576, 1024, dtype=backward)
        for fast in (False, True):
            quack_epilogues.gelu_gradient_of_product(g8, weight, inverses, inner, bias, form, target(backward), fast)
        linear = new(24576, 4096, dtype=torch.bfloat16)
        operands = new(24576, 1024, dtype=torch.bfloat16), new(1024, 4096, dtype=torch.bfloat16), linear
        quack_epilogues.gelu_backward_of_product(*operands, form)
print(len(launched))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("quack") is None, reason="quack-kernels is not installed"
)
def test_the_packages_kernels_compile_for_hopper(tmp_path, repository):
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    done = subprocess.run(
        command, cwd=repository / "implementations", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr
