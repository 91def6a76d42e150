"""The step model: operations of every product, time of every part, exposed communication."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

# With rates so slow that the figures of a tiny model have digits.
CASES = {
    "alone": ("bf16", {"memory": 1e9, "attention": 1e12, "bf16": 1e12}),
    "fp8": ("fp8", {"memory": 1e8}),
}
ALL = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
import step_model as m
import torch_lib
config = m.BertConfig(**torch_lib.TINY)
for precision, rates in json.loads(sys.argv[2]):
    print(json.dumps(m.predict(config, 4, precision, dataclasses.replace(m.GPUS["h200"], **rates))))
launches, _ = m.recorded_step(config, 4, "fp8", False)
print(json.dumps([(each.phase, each.part, each.kind) for each in launches]))
"""


@pytest.fixture(scope="module")
def printed(repository):
    """The model of a tiny step, and the launches that it records, with compiled kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    cases = json.dumps(list(CASES.values()))
    done = subprocess.run(
        [sys.executable, "-c", ALL, str(repository / "bench"), cases], env=environment,
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = map(json.loads, done.stdout.splitlines())
    return dict(zip([*CASES, "recorded"], lines, strict=True))


@pytest.fixture
def alone(printed):
    """In bf16 on one GPU."""
    return printed["alone"]


def test_the_operations_of_every_product_are_counted(alone):
    tokens, layers, width, inner, vocabulary = 4 * 64, 2, 32, 64, 216
    masked, sequences = int(0.15 * tokens + 0.5 * 12), 12 + 4  # capacities of 4 rows
    qkv, rest = 3 * width * width, width * width + 2 * width * inner
    last = masked + sequences  # tokens of the last layer
    encoder = layers * tokens * qkv + ((layers - 1) * tokens + last) * rest
    heads = masked * width * (width + vocabulary) + sequences * width * (width + 2)
    assert alone["product_operations"] == 3 * 2 * (encoder + heads)
    parts = alone["milliseconds"]
    assert sum(parts.values()) == pytest.approx(alone["total"], abs=0.02)
    named = "attention", "LayerNorm", "GELU", "LAMB", "head, loss", "products forward"
    assert all(parts[name] > 0 for name in (*named, "products backward"))
    assert parts["communication"] == 0


def test_fp8_adds_casts_and_slower_memory_adds_time(alone, printed):
    fp8, layers, recorded = printed["fp8"], 2, printed["recorded"]
    assert fp8["milliseconds"]["casts"] > 0
    padding = -(int(0.15 * 4 * 64 + 0.5 * 12) + 12 + 4) % 16  # rows of the last layer
    more = 3 * 2 * padding * (32 * 32 + 2 * 32 * 64)
    assert fp8["product_operations"] == alone["product_operations"] + more
    assert fp8["milliseconds"]["LayerNorm"] > 9 * alone["milliseconds"]["LayerNorm"]
    # Sums are fast forward alone.
    assert recorded.count(["forward", "products", "fp8_fast"]) == 3 * layers
    assert recorded.count(["backward", "products", "fp8_exact"]) == 2 * 3 * layers


@pytest.fixture
def model(bench):
    return bench("step_model")


@pytest.mark.parametrize(
    ("transfers", "ready", "seconds"),
    [
        ([(2.0,), (2.0,)], [1.0, 1.0], 3.0),  # the last bucket is ready at the end
        ([(4.0,), (0.0,)], [1.0, 9.0], 0.0),  # an early one hides behind the rest
        ([(1.0,), (1.0,)], [0.0, 0.0], 2.0),
        ([(1.0, 2.0), (1.0, 2.0)], [0.0, 0.0], 5.0),  # one is sent on while the next comes
    ],
)  # fmt: skip
def test_only_exposed_transfers_cost_time(transfers, ready, seconds, model):
    assert model.exposed_seconds(transfers, ready) == pytest.approx(seconds)


def test_a_transfer_takes_its_bytes_over_its_link_and_its_messages(model):
    rates = model.Rates(memory=1.0, nvlink=100.0, nic=10.0, latency=0.5)
    assert model.transfer_seconds(800.0, rates, 8) == pytest.approx((7 + 1.5, 0))
    # Within a node, and each GPU's share between two.
    two = model.transfer_seconds(800.0, rates, 16)
    assert two == pytest.approx((7 + 1.5, 2 * (400 / 80 + 0.5)))


def test_attention_computes_whole_blocks_and_its_backward_pass_repeats_products(model):
    """A length of 100 is two blocks of 64; one of 64 is one."""
    config = model.BertConfig(hidden_size=32, num_attention_heads=2)
    product = 2 * config.hidden_size * (128**2 + 64**2)
    assert model.attention_operations(config, np.array([100, 64])) == {
        "_forward": 2 * product,
        "_query_gradient": 3 * product,
        "_key_gradient": 4 * product,
    }


def test_systems_of_the_league_are_read_with_their_layout_and_resubmissions_once(model):
    rates_of = model.systems()
    known = {(one.gpu, one.gpus): one for one in rates_of}
    largest = known["h100", 3472]
    assert (largest.rows, largest.accumulate) == (2, 1)
    assert len(rates_of[largest]) == 1, "submitted three times"
    assert min(rates_of[largest]) > 218.8, "the evaluations are left out"
    assert len(rates_of[known["h100", 8]]) > 10
    assert known["a100", 4096].rows == 2
    assert min(gpus for _, gpus in known) == 8


def test_the_two_constants_are_recovered_from_synthetic_systems(model, monkeypatch):
    def predict(config, rows, precision, rates, gpus, accumulate, whole):
        assert whole
        seconds = 0.001 * rows + 50 * rates.latency * gpus / 8
        return {"sequences_per_second": rows / seconds}

    monkeypatch.setattr(model, "predict", predict)
    sizes = (8, 48), (64, 36), (512, 3)
    made = [model.System("h100", gpus, rows, accumulate=1) for gpus, rows in sizes]
    systems = {one: {0.8 * one.predicted(7e-6)} for one in made}
    monkeypatch.setattr(model, "systems", lambda: systems)
    text = model.published()
    assert "Fitted: 0.80 of the modelled rate, 7 us a collective" in text
    assert "Error: 0% in the median, 0% at worst." in text
    assert "| 512 H100 | 3 | " in text
