"""bench/recompute.py at a tiny size: recomputation saves what it says, and the estimate holds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_recomputing_each_layer_takes_less_memory_and_more_time(repository):
    def measured(repeats):
        command = [sys.executable, "bench/recompute.py", "--tiny", "--layers", "4", "--repeats", str(repeats)]
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=240, check=True)
        return json.loads(done.stdout)

    memory, times = measured(0), measured(2)
    assert memory["recompute_1"]["passes_ratio"] < 0.5
    assert memory["recompute_1"]["passes_ratio"] < memory["recompute_2"]["passes_ratio"] < 1
    for layers in (0, 1, 2, 4):
        assert memory[f"recompute_{layers}"]["step_estimate"] == pytest.approx(1, abs=0.1)
        median, least, most = times[f"recompute_{layers}"]["time_ratio"]
        assert 0 < least <= median <= most
