"""The model of the step counts what is launched: every product's operations, every part's time, what is not hidden."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest

from bert.data.synthetic import synthetic_records


@pytest.fixture(scope="module")
def predicted(repository):
    """predict(*arguments): the line that the script prints for a tiny model; compiled kernels, not interpreted ones."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def predict(*arguments: str) -> dict:
        command = [sys.executable, str(repository / "bench" / "step_model.py"), "--tiny", "--rows", "4", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    return predict


@pytest.fixture(scope="module")
def alone(predicted):
    """In bf16, on a GPU so slow that the figures of a tiny model have digits."""
    rates = "--memory", "1e9", "--issue", "1e9", "--bf16", "1e12"
    return predicted("--precision", "bf16", "--evaluation", "100000", "--evaluation-rows", "4", *rates)


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


def test_an_evaluation_is_its_batches_and_its_share_that_of_the_time_between_two(alone, predicted):
    seconds, share, batches = (alone["evaluation"][name] for name in ("seconds", "share", "batches"))
    assert share == pytest.approx(seconds / (seconds + 100_000 / alone["sequences_per_second"]), abs=0.01)
    step, tokens = alone["total"] / 1e3, int(synthetic_records(10_000, 64, 211, False, 0).sequence_lengths.sum())
    assert tokens / (4 * 64) <= batches <= 1.1 * tokens / (4 * 64), "full ones of 4 rows"
    assert 0.1 * step < seconds / batches < 0.5 * step, "a forward pass"
    shared = predicted("--gpus", "8", "--evaluation", "100000", "--evaluation-rows", "16")["evaluation"]
    assert batches / 32 <= shared["batches"] <= 1.1 * batches / 32 + 1


def test_fp8_brings_casts_and_slower_memory_more_time(alone, predicted):
    fp8 = predicted("--precision", "fp8", "--memory", "1e8", "--issue", "1e9")
    assert fp8["milliseconds"]["casts"] > 0
    assert fp8["product_operations"] == alone["product_operations"]
    assert fp8["milliseconds"]["LayerNorm"] > 9 * alone["milliseconds"]["LayerNorm"]


def test_transfers_cost_only_what_the_pass_does_not_hide(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "bench"))
    exposed = importlib.import_module("step_model").exposed_seconds
    assert exposed([10.0, 10.0], [1.0, 1.0], 10.0, 1) == 0, "one rank sends nothing"
    assert exposed([10.0, 10.0], [1.0, 1.0], 5.0, 2) == pytest.approx(1.0), "the last bucket is ready at the end"
    assert exposed([20.0, 0.0], [1.0, 9.0], 5.0, 2) == 0, "an early one hides behind the rest"
    assert exposed([10.0, 10.0], [0.0, 0.0], 10.0, 10**9) == pytest.approx(2.0)
