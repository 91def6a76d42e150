"""FUSED and PRECISION: what is asked for runs, or the run stops."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

# Of bert.pretraining.check; the kernels need it not.
pytest.importorskip("mlperf_logging")

from bert.kernels import FUSABLE, OPERATIONS, KernelsConfig, bind_kernels
from bert.kernels.precision import LossScaler, PrecisionConfig
from bert.pretraining import check
from bert.pretraining.config import PretrainingConfig
from common.env import ConfigError, from_env

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_auto_and_none_are_the_references_on_a_cpu():
    for value in ("auto", "none"):
        assert KernelsConfig(fused=value).names(CPU) == set()
        bound = bind_kernels(KernelsConfig(fused=value), CPU)
        for name, module in OPERATIONS.items():
            assert getattr(bound, name) is module.reference
    assert KernelsConfig().describe(CPU) == "plain PyTorch (the device is a CPU)"


@pytest.mark.parametrize(
    ("fused", "refused"),
    [
        ("lamb, bias_gelu", "FUSED asks for bias_gelu, lamb, but the"),
        ("all", "FUSED asks for bias_gelu"),
        ("gelu,lamb", "FUSED names gelu: known are all, none or auto alone, .*, lamb"),
    ],
)
def test_a_kernel_that_cannot_run_or_is_unknown_is_an_error(fused, refused):
    with pytest.raises(ConfigError, match=refused):
        KernelsConfig(fused=fused).names(CPU)


def test_names_choose_kernels_one_by_one(device):
    for everything in ("auto", "all"):
        assert KernelsConfig(fused=everything).names(device) == set(FUSABLE)
    two = {"fused": "cross_entropy,bias_gelu", "attention": "sdpa_loop"}
    bound = bind_kernels(KernelsConfig(**two), device)
    assert bound.bias_gelu is OPERATIONS["bias_gelu"].fused
    layer_norm = OPERATIONS["dropout_add_layer_norm"]
    assert bound.dropout_add_layer_norm is layer_norm.reference
    kinds = "Triton for bias_gelu, cross_entropy; plain PyTorch for embeddings, "
    assert KernelsConfig(**two).describe(device).startswith(kinds)


def test_check_names_what_is_used(prepared):
    report = check.report(from_env(PretrainingConfig, prepared))
    rows = [" ".join(line.split()) for line in report.splitlines()]
    assert "kernels plain PyTorch (the device is a CPU)" in rows
    asked = from_env(PretrainingConfig, prepared | {"FUSED": "lamb"})
    with pytest.raises(ConfigError, match="FUSED asks for lamb, but the device"):
        check.report(asked)


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


def test_tf32_is_fp32_whose_products_the_gpu_may_round():
    products = torch.backends.cuda.matmul
    before = products.allow_tf32
    try:
        for name, rounds in (("fp32", False), ("tf32", True)):
            products.allow_tf32 = False
            resolved = PrecisionConfig(precision=name).resolve(GPU)
            resolved.apply()
            assert resolved.dtype == torch.float32
            assert products.allow_tf32 == rounds
    finally:
        products.allow_tf32 = before


TF32 = r"PRECISION=tf32 needs a GPU of compute capability 8\.0"


@pytest.mark.parametrize(
    ("device", "capability", "settings", "refused"),
    [
        (CPU, None, "PRECISION=tf32", TF32),
        (GPU, (7, 5), "PRECISION=tf32", TF32),
        (GPU, (8, 0), "PRECISION=tf32", None),
        (GPU, (8, 6), "PRECISION=fp8", r"PRECISION=fp8 needs compute capability 8\.9"),
        (GPU, (8, 9), "PRECISION=fp8", None),
        (CPU, None, "PRECISION=auto LOSS_SCALE=1024", "LOSS_SCALE=1024 is for fp16"),
        (CPU, None, "PRECISION=bf16 LOSS_SCALE=1024", "LOSS_SCALE=1024 is for fp16"),
        (CPU, None, "PRECISION=fp16 LOSS_SCALE=1024", None),
        (CPU, None, "PRECISION=fp8 FP8_TRIALS=projection,fast_backward", None),
        (CPU, None, "PRECISION=fp8 FP8_TRIALS=fast_forward", "FP8_TRIALS"),
        (CPU, None, "PRECISION=bf16 FP8_TRIALS=projection", "does nothing without PRECISION=fp8"),
    ],
)  # fmt: skip
def test_what_does_nothing_or_no_hardware_has_is_refused(
    device, capability, settings, refused, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    environ = dict(word.split("=") for word in settings.split())
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        config = from_env(PrecisionConfig, environ)
        config.check(device)
        trials = environ.get("FP8_TRIALS", "none").split(",")
        assert config.resolve(device).fp8_trials == {*trials}
