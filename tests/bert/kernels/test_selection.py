"""FUSED: the requested kernels run, or the run stops."""

from __future__ import annotations

import pytest
import torch

# Of bert.pretraining.check; the kernels need it not.
pytest.importorskip("mlperf_logging")

from bert.kernels import FUSABLE, OPERATIONS, KernelsConfig, bind_kernels
from bert.pretraining import check
from bert.pretraining.config import PretrainingConfig
from common.env import ConfigError, from_env

CPU = torch.device("cpu")


def test_auto_and_none_are_the_references_on_a_cpu():
    for value in ("auto", "none"):
        assert KernelsConfig(fused=value).names(CPU) == set()
        bound = bind_kernels(KernelsConfig(fused=value), CPU)
        for name, module in OPERATIONS.items():
            assert getattr(bound, name) is module.reference
    assert KernelsConfig().describe(CPU) == "plain PyTorch (the device is a CPU)"


def test_asking_for_a_kernel_that_cannot_run_is_an_error():
    with pytest.raises(ConfigError, match="FUSED asks for bias_gelu, lamb, but the"):
        KernelsConfig(fused="lamb, bias_gelu").names(CPU)
    with pytest.raises(ConfigError, match="FUSED asks for bias_gelu"):
        KernelsConfig(fused="all").names(CPU)


def test_an_unknown_kernel_is_an_error_that_names_the_known_ones(device):
    known = r"known are all, none or auto alone, embeddings, .*, lamb"
    with pytest.raises(ConfigError, match="FUSED names gelu: " + known):
        KernelsConfig(fused="gelu,lamb").names(device)


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
