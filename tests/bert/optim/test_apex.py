"""apex's LAMB behind our interface is our LAMB: against a double of apex, since the real one needs a GPU."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from bert import optim
from bert.core.dist import Config as DistConfig
from bert.core.dist import World
from bert.optim import apex
from common.env import ConfigError

from .whole import Whole

_spec = importlib.util.spec_from_file_location(
    "apex_double", Path(__file__).with_name("apex_double.py")
)
double = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(double)

SHAPES = {"a.weight": (7, 3), "a.bias": (5,), "LayerNorm.weight": (5,), "zero.weight": (4,)}
SETTINGS = optim.rules.LambConfig(beta1=0.7, beta2=0.85, eps=1e-6, weight_decay=0.1)


def _optimizer(name, dtype):
    generator = torch.Generator().manual_seed(0)
    full = {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}
    full["zero.weight"].zero_()  # has no norm to scale by
    parameters = {key: nn.Parameter(value.to(dtype)) for key, value in full.items()}
    config = optim.Config(optimizer=name, sharded=False if name == "lamb" else None, lamb=SETTINGS)
    return Whole(parameters.items(), config.rule, full if dtype != torch.float32 else None)


def _steps(optimizer, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for parameter in optimizer.parameters:
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = gradient * float("inf") if step == 2 else gradient
        scale = torch.tensor(float("nan") if step == 2 else 0.25)
        optimizer.step(
            torch.tensor(0.1 / (step + 1)), scale, None if step == 4 else torch.tensor(step != 2)
        )


def _assert_same(ours, theirs):
    assert ours["num_steps"] == theirs["num_steps"]
    for part in ("masters", "first_moments", "second_moments"):
        for name, tensor in ours[part].items():
            torch.testing.assert_close(
                theirs[part][name], tensor, atol=1e-6, rtol=1e-5, msg=f"{part} {name}"
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_apex_takes_our_steps_and_skips_an_overflow(dtype, monkeypatch):
    double.install(monkeypatch)
    ours, theirs = _optimizer("lamb", dtype), _optimizer("apex_lamb", dtype)
    for optimizer in (ours, theirs):
        _steps(optimizer, 0, 6)
    assert ours.state_dict()["num_steps"] == 5
    _assert_same(ours.state_dict(), theirs.state_dict())
    for a, b in zip(ours.parameters, theirs.parameters, strict=True):
        torch.testing.assert_close(
            b.float(), a.float(), atol=1e-6, rtol=2**-7 if dtype != torch.float32 else 1e-5
        )


def test_checkpoints_go_from_one_to_the_other(monkeypatch):
    double.install(monkeypatch)
    whole, first, second = (
        _optimizer(name, torch.bfloat16) for name in ("lamb", "apex_lamb", "lamb")
    )
    _steps(whole, 0, 6)
    _steps(first, 0, 3)
    second.load_state_dict(first.state_dict())
    _steps(second, 3, 5)
    third = _optimizer("apex_lamb", torch.bfloat16)
    third.load_state_dict(second.state_dict())
    _steps(third, 5, 6)
    _assert_same(whole.state_dict(), third.state_dict())


def test_training_steps_with_apex_are_ours(tiny, make_records, batch_of, make_model, monkeypatch):
    double.install(monkeypatch)
    from bert.kernels.precision import Config as PrecisionConfig
    from bert.training.step import build_step

    batch, outcomes = batch_of(make_records(3), range(4)), []
    for name in ("lamb", "apex_lamb"):
        model = make_model(tiny, dtype=torch.float32).eval()
        settings = optim.Config(optimizer=name, max_grad_norm=0.5)
        world = World(DistConfig(device="cpu"))
        precision = PrecisionConfig(precision="fp32").resolve(torch.device("cpu"))
        step = build_step(model, precision, settings, world, accumulate=False, fused_update=False)
        before = [tensor.clone() for tensor in step.state_tensors()]
        for lr in (0.01, 0.02):
            assert step([batch], lr).finite
        assert any(not torch.equal(a, b) for a, b in zip(before, step.state_tensors(), strict=True))
        outcomes.append(
            {n: p.detach() for n, p in model.named_parameters() if not n.endswith("key.bias")}
        )
    for name, weight in outcomes[
        0
    ].items():  # the true gradient of key.bias is 0: rounding is normalised
        torch.testing.assert_close(outcomes[1][name], weight, atol=2e-4, rtol=1e-3, msg=name)


def test_without_apex_or_with_another_package_of_that_name_one_line_says_what_to_do(monkeypatch):
    for module in (None, types.ModuleType("apex")):
        monkeypatch.setitem(sys.modules, "apex", module)
        with pytest.raises(
            ConfigError, match=r"OPTIMIZER=apex_lamb needs NVIDIA's apex .* or set OPTIMIZER=lamb"
        ):
            apex.load()
    double.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "amp_C", None)
    with pytest.raises(ConfigError, match="with its CUDA extensions"):
        apex.load()


def test_apex_needs_a_gpu_and_whole_parameters(monkeypatch):
    double.install(monkeypatch)
    with pytest.raises(ConfigError, match="needs a GPU"):
        optim.Config(optimizer="apex_lamb").check(torch.device("cpu"))
    with pytest.raises(ConfigError, match="leave SHARD_OPTIMIZER unset"):
        optim.Config(optimizer="apex_lamb", sharded=True).check(torch.device("cuda"))
    optim.Config(optimizer="apex_lamb").check(torch.device("cuda"))
    assert optim.Config(optimizer="apex_lamb").hyperparameters() == optim.Config().hyperparameters()
