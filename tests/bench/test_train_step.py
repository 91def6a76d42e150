"""bench/train_step.py: operations, the peer's inputs, faults of a variant, parts of a profile."""

import importlib
import json
import re
import time

import numpy as np
import pytest
import torch

from bert.model.flops import model_flops


def test_operations_are_counted_from_real_lengths(bench):
    torch_lib = bench("torch_lib")
    config = torch_lib.BertConfig(**torch_lib.TINY)
    batch = torch_lib.packed_batches(3, 1, config)[0]
    lengths = np.diff(batch.cu_seqlens.numpy())
    # Multiply-adds of a token: QKV, output, feed-forward; two products of attention.
    linear = 32 * 96 + 32 * 32 + 32 * 64 + 64 * 32
    layer = lengths.sum() * linear + 2 * (lengths**2.0).sum() * 32
    heads = batch.num_masked * (32 * 32 + 32 * 211) + len(lengths) * (32 * 32 + 32 * 2)
    expected = 3 * 2 * (config.num_hidden_layers * layer + heads)
    assert model_flops(config, batch) == pytest.approx(expected, rel=1e-12)


def test_a_variant_that_fails_is_a_problem_of_its_own(bench, monkeypatch):
    train_step = bench("train_step")

    def build(variant, *_):
        def run(number):
            time.sleep(0.001)
            if variant.name == "fails" and number > 5:
                raise RuntimeError("an illegal memory access was encountered")

        return run

    monkeypatch.setattr(train_step, "build_ours", build)
    config = train_step.BertConfig(**train_step.TINY)
    fails, good = (
        train_step.measured(train_step.Variant(name=n, rows=2, graph=False), config, 2, 1, 1.0)
        for n in ("fails", "good")
    )  # fmt: skip
    assert fails["problem"] == "RuntimeError: an illegal memory access was encountered"
    assert "milliseconds" not in fails
    assert good["milliseconds"] > 0
    changed = {"PRECISION": "bf16", "BATCHSIZE": "2", "CUDA_GRAPH": "0"}
    assert good["settings"] == changed
    trial = train_step.Variant(name="trial", fused="none", trials="projection")
    assert trial.settings().keys() - changed.keys() == {"FUSED", "FP8_TRIALS"}


def test_attention_is_tried_outside_of_the_meta_device(bench, monkeypatch):
    """Where a GPU opens for one process alone its trials run in this one."""
    train_step, found = bench("train_step"), []
    bind = train_step.kernels.bind_kernels

    def seen(*arguments):
        found.append(torch.empty(0).device.type)
        return bind(*arguments)

    monkeypatch.setattr(train_step.kernels, "bind_kernels", seen)
    variant = train_step.Variant(name="ours", rows=2, graph=False)
    train_step.build_ours(variant, train_step.BertConfig(**train_step.TINY), [])
    assert found == ["cpu"]


def test_kernels_in_a_profile_are_assigned_to_parts_by_name(repository, bench):
    train_step = bench("train_step")
    kernels = {
        "bias_gelu__forward": 2.0, "dropout_add_layer_norm__backward": 9.0, "nvjet_hsh_128x256_64x4_TNT": 60.0,
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": 5.0, "triton_attention__key_gradient": 7.0,
        "sm90_xmma_gemm_bf16": 4.0, "Memcpy DtoD": 1.0, "lamb__moments": 3.0,
    }  # fmt: skip
    assert train_step.by_part(kernels.items()) == {
        "GELU": 2, "LayerNorm": 9, "products": 64, "attention": 12, "other": 1, "LAMB": 3,
    }  # fmt: skip
    paths = (repository / "implementations/bert/kernels").rglob("*.py")
    names = {path.stem for path in paths if "\n@jit\n" in path.read_text()}
    # Launched by others, or never in a step.
    assert names - {"dropout", "triton_support"} == set(train_step.PARTS)


WITHOUT_GELU = "FUSED=embeddings,dropout_add_layer_norm,cross_entropy"  # without GELU and the casts in it


@pytest.fixture
def self_check(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "tests"))
    return importlib.import_module("self_check")


def test_self_check_names_the_setting_without_what_is_wrong(repository, self_check):
    checked = {check.__name__ for check in self_check.CHECKS}
    assert set(self_check.CURES) == checked
    *cures, leaves_most_out = self_check.CURES.values()
    page = (repository / "docs" / "train.md").read_text()
    steps = re.findall(r"^\| \d \| `([A-Z_]+=\w+)`", page, re.MULTILINE)
    assert [*dict.fromkeys(cure.split()[0] for cure in cures)] == steps
    assert set(leaves_most_out.split()) <= set(steps)
    others = {"graphs": {"bf16": "loss"}, "attention_backends": {"flash": "nan"}}
    no_graph, no_kernel = "CUDA_GRAPH=0", "ATTENTION=sdpa_loop CUDA_GRAPH=0"
    gelu = {"bias_gelu tanh-bf16": "error 1"}
    wrong = {"fused_kernels": gelu, "optimizers": {"lamb b": "1"}}
    for problems, settings in (
        ({}, []),
        (others, [no_graph, no_kernel]),
        (others | wrong, [no_graph, WITHOUT_GELU, no_kernel]),
        (wrong | {"whole_step": {"loss": "5"}}, [WITHOUT_GELU, "FUSED=none"]),
        ({"fused_kernels": {"failed": "no compiler"}}, ["FUSED=none"]),
    ):
        assert self_check.way_down(problems) == settings


def test_self_check_ends_at_an_error_a_gpu_repeats(self_check, monkeypatch, capsys):
    """An illegal access: what comes after it cannot be judged, and is not at fault."""

    def fused_kernels():
        monkeypatch.setattr(self_check, "lost", lambda: True)
        names = ("bias_gelu tanh-bf16", "cross_entropy", "embeddings")
        return dict.fromkeys(names, "an illegal memory access was encountered")

    def graphs():
        raise AssertionError("nothing runs on that GPU any more")

    monkeypatch.setattr(self_check, "CHECKS", (fused_kernels, graphs))
    monkeypatch.setattr("sys.argv", ["self_check.py"])
    assert self_check.main() == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["graphs"] == "not tested"
    assert last["way_down"] == [f"{WITHOUT_GELU},lamb"]
