"""PRECISION=tf32 and a constant loss scale: what they set, and where they are refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from bert.kernels.precision import LossScaler, PrecisionConfig
from bert.pretraining import identity
from bert.pretraining.config import PretrainingConfig
from bert.pretraining.identity import run_identity
from bert.pretraining.resume import restore
from common.env import ConfigError, from_env

from ..pretraining.test_resume import Trained

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_constant_loss_scale_stays_whatever_overflows():
    constant, dynamic = (
        PrecisionConfig(precision="fp16", **{name: 2.0**20}).resolve(CPU)
        for name in ("loss_scale", "init_loss_scale")
    )
    constant = LossScaler(replace(constant, growth_interval=2))
    dynamic = LossScaler(replace(dynamic, growth_interval=2))
    for finite in (False, True, True, True, True):
        for scaler in (constant, dynamic):
            scaler.update(torch.tensor(finite))
    assert (float(constant.scale), float(dynamic.scale)) == (2.0**20, 2.0**21)
    assert int(constant.num_skipped_steps) == int(dynamic.num_skipped_steps) == 1


@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16"])
def test_a_loss_scale_without_fp16_is_refused(precision):
    with pytest.raises(ConfigError, match=r"LOSS_SCALE=1024 is for fp16"):
        PrecisionConfig(precision=precision, loss_scale=1024.0).check(CPU)
    PrecisionConfig(precision="fp16", loss_scale=1024.0).check(CPU)


def test_tf32_is_fp32_whose_products_the_gpu_may_round():
    before = torch.backends.cuda.matmul.allow_tf32
    resolved = PrecisionConfig(precision="tf32").resolve(GPU)
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        PrecisionConfig(precision="fp32").resolve(GPU).apply()
        assert not torch.backends.cuda.matmul.allow_tf32
        resolved.apply()
        assert resolved.dtype == torch.float32
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(
    ("device", "capability", "refused"),
    [(CPU, None, True), (GPU, (7, 5), True), (GPU, (8, 0), False)],
)
def test_tf32_is_refused_where_no_hardware_has_it(
    device, capability, refused, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    needs = r"PRECISION=tf32 needs a GPU of compute capability 8\.0"
    with pytest.raises(ConfigError, match=needs) if refused else nullcontext():
        PrecisionConfig(precision="tf32").check(device)


def test_auto_is_resumed_by_the_name_of_what_it_was(prepared):
    auto, fp32, bf16 = (
        from_env(PretrainingConfig, prepared | {"PRECISION": name})
        for name in ("auto", "fp32", "bf16")
    )
    saved = {"run": run_identity(auto, 7), "computed": identity.computed(auto)}
    saved |= {"step": 4, "batches": 5, "samples": 6}
    assert saved["run"]["PRECISION"] == "fp32"
    for config in (auto, fp32):
        trained = Trained()
        assert restore(config, trained, 7, saved)[:3] == (4, 5, 6)
        assert trained.state["step"] == 4
    with pytest.raises(ConfigError, match="with PRECISION fp32, this one has bf16"):
        restore(bf16, Trained(), 7, saved)


@pytest.mark.parametrize(
    ("precision", "trials", "refused"),
    [
        ("fp8", "projection,fast_backward", None),
        ("fp8", "fast_forward", "FP8_TRIALS"),
        ("bf16", "projection", "does nothing without PRECISION=fp8"),
    ],
)
def test_trials_of_fp8_are_known_and_need_fp8(precision, trials, refused):
    settings = {"PRECISION": precision, "FP8_TRIALS": trials}
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        config = from_env(PrecisionConfig, settings)
        config.check(torch.device("cpu"))
        chosen = config.resolve(torch.device("cpu")).fp8_trials
        assert chosen == {"projection", "fast_backward"}
