"""The model of the step counts what is launched: every product's operations, every part's time, what is not hidden."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest

from bert.data.synthetic import synthetic_records

RATES = ("--memory", "1e9", "--issue", "1e9", "--bf16", "1e12")  # so slow that the figures of a tiny model have digits
CASES = {
    "alone": ("--precision", "bf16", "--evaluation", "100000", "--evaluation-rows", "4", *RATES),
    "shared": ("--gpus", "8", "--evaluation", "100000", "--evaluation-rows", "16"),
    "fp8": ("--precision", "fp8", "--memory", "1e8", "--issue", "1e9"),
}
ALL = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import step_model as m
for case in json.loads(sys.argv[2]):
    sys.argv = ["step_model.py", "--tiny", "--rows", "4", *case]
    m.main()
config = m.BertConfig(**m.TINY)
batch = m.static_batch(m.packed_batches(4, 1, config)[0], m.capacity(4, 64))
launches = {name: m.record(config, batch, name, evaluates=True) for name in ("bf16", "fp8")}
launches["step"] = m.record(config, batch, "fp8")
os.environ |= {"FP8_FAST_SUMS": "all", "FP8_OUTPUT_PROJECTION": "1"}
launches["step as set"] = m.record(config, batch, "fp8")
print(json.dumps({name: [(each.phase, each.part, each.precision) for each in some] for name, some in launches.items()}))
"""


@pytest.fixture(scope="module")
def printed(repository):
    """The lines of the script for a tiny model, and the launches that it records; compiled kernels, not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", ALL, str(repository / "bench"), json.dumps(list(CASES.values()))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip([*CASES, "recorded"], map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture
def alone(printed):
    """In bf16 on one GPU."""
    return printed["alone"]


@pytest.fixture
def recorded(printed):
    """Phase, part and precision of each launch of a tiny model's steps and evaluations."""
    return {name: [tuple(each) for each in some] for name, some in printed["recorded"].items()}


def test_the_operations_of_every_product_are_counted(alone):
    tokens, layers, width, inner, vocabulary = 4 * 64, 2, 32, 64, 216
    masked, sequences = int(0.15 * tokens + 0.5 * 12), 12 + 4  # the capacities of 4 rows
    encoder = layers * tokens * (4 * width * width + 2 * width * inner)
    heads = masked * (width * width + width * vocabulary) + sequences * (width * width + 2 * width)
    assert alone["product_operations"] == 3 * 2 * (encoder + heads)


def test_the_parts_are_the_step(alone):
    parts = alone["milliseconds"]
    assert sum(parts.values()) == pytest.approx(alone["total"], abs=0.02)
    expected = {"attention", "LayerNorm", "GELU", "LAMB", "products forward", "products backward", "head, loss"}
    assert expected <= parts.keys()
    assert all(parts[name] > 0 for name in expected)
    assert parts["communication"] == 0


def test_an_evaluation_is_its_batches_and_its_share_that_of_the_time_between_two(alone, printed):
    seconds, share, batches = (alone["evaluation"][name] for name in ("seconds", "share", "batches"))
    assert share == pytest.approx(seconds / (seconds + 100_000 / alone["sequences_per_second"]), abs=0.01)
    step, tokens = alone["total"] / 1e3, int(synthetic_records(10_000, 64, 211, False, 0).sequence_lengths.sum())
    assert tokens / (4 * 64) <= batches <= 1.1 * tokens / (4 * 64), "full ones of 4 rows"
    assert 0.1 * step < seconds / batches < 0.5 * step, "a forward pass"
    shared = printed["shared"]["evaluation"]
    assert batches / 32 <= shared["batches"] <= 1.1 * batches / 32 + 1


def test_fp8_brings_casts_and_slower_memory_more_time(alone, printed):
    fp8 = printed["fp8"]
    assert fp8["milliseconds"]["casts"] > 0
    assert fp8["product_operations"] == alone["product_operations"]
    assert fp8["milliseconds"]["LayerNorm"] > 9 * alone["milliseconds"]["LayerNorm"]


def test_settings_of_fp8_count_as_for_a_run(recorded):
    layers = 2
    assert recorded["step"].count(("backward", "products", "fp8_exact")) == 2 * 3 * layers
    assert recorded["step as set"].count(("backward", "products", "fp8_fast")) == 2 * 4 * layers
    assert recorded["step as set"].count(("forward", "products", "fp8_fast")) == 4 * layers


def test_an_evaluation_in_fp8_casts_each_weight_once_and_multiplies_in_fp8(recorded):
    bf16, fp8, layers = recorded["bf16"], recorded["fp8"], 2
    assert "weights" not in {phase for phase, *_ in bf16}
    assert fp8.count(("weights", "casts", "")) == 3 * layers
    assert ("forward", "products", "fp8_exact") not in fp8
    assert fp8.count(("forward", "products", "fp8_fast")) == 3 * layers
    assert [sum(bool(precision) for *_, precision in some) for some in (bf16, fp8)] == [4 * layers + 4] * 2


def test_transfers_cost_only_what_the_pass_does_not_hide(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "bench"))
    exposed = importlib.import_module("step_model").exposed_seconds
    assert exposed([10.0, 10.0], [1.0, 1.0], 10.0, 1) == 0, "one rank sends nothing"
    assert exposed([10.0, 10.0], [1.0, 1.0], 5.0, 2) == pytest.approx(1.0), "the last bucket is ready at the end"
    assert exposed([20.0, 0.0], [1.0, 9.0], 5.0, 2) == 0, "an early one hides behind the rest"
    assert exposed([10.0, 10.0], [0.0, 0.0], 10.0, 10**9) == pytest.approx(2.0)


def test_measured_parts_stand_beside_the_modelled_ones_the_slowest_first(repository, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(repository / "bench"))
    train_step = importlib.import_module("train_step")
    kernels = {
        "bias_gelu__forward": 2.0, "dropout_add_layer_norm__backward": 9.0, "nvjet_hsh_128x256_64x4_TNT": 60.0,
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": 5.0, "attention_triton__key_gradient": 7.0,
        "sm90_xmma_gemm_bf16": 4.0, "Memcpy DtoD": 1.0, "lamb__moments": 3.0,
    }  # fmt: skip
    found = train_step.by_part(kernels.items())
    assert found == {"GELU": 2, "LayerNorm": 9, "products": 64, "attention": 12, "other": 1, "LAMB": 3}
    results = tmp_path / "results.jsonl"
    profile = {"profile": "bf16", "rows": 48, "parts": found}
    results.write_text("\n".join(map(json.dumps, [profile | {"rows": 24}, profile, profile | {"profile": "fp8"}])))
    modelled = {"products forward": 20.0, "products backward": 40.0, "LayerNorm": 5.5, "GELU": 6.0, "casts": 1.0}
    table = train_step.beside(modelled, results, "bf16", 48)
    assert next(iter(table)) == "attention"
    assert table["products"] == {"modelled": 60.0, "measured": 64.0, "difference": 4.0}
    assert list(table)[-1] == "GELU"
    with pytest.raises(SystemExit, match="not a results file"):
        train_step.beside(modelled, tmp_path / "absent", "bf16", 48)
    with pytest.raises(SystemExit, match="no profile of 96 rows in bf16"):
        train_step.beside(modelled, results, "bf16", 96)


def test_every_triton_kernel_has_a_part_and_tells_its_module_in_a_profile(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "bench"))
    train_step = importlib.import_module("train_step")
    names = {
        path.stem
        for path in (repository / "implementations/bert/kernels").glob("*.py")
        if "\n@jit\n" in path.read_text()
    }
    helpers = {"dropout", "triton_support", "assembly_check"}  # launched by others, or never in a step
    assert names - helpers == set(train_step.PARTS)
