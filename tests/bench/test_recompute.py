"""bench/recompute.py at a tiny size: recomputation saves what it says, and the estimate holds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_recomputing_each_layer_takes_less_memory_and_more_time(repository):
    command = [sys.executable, "bench/recompute.py", "--tiny", "--layers", "4", "--repeats", "3"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=240, check=True)
    figures = json.loads(done.stdout)["figures"]
    assert figures["recompute_1"]["passes_ratio"] < 0.5
    assert figures["recompute_1"]["passes_ratio"] < figures["recompute_2"]["passes_ratio"] < 1
    for layers in (0, 1, 2, 4):
        found = figures[f"recompute_{layers}"]
        assert found["passes_estimate"] == pytest.approx(1, abs=0.1)
        assert found["step_estimate"] == pytest.approx(1, abs=0.1)
