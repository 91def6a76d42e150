"""bench/cpu_step.py at a tiny size: each comparison takes its steps and says how many times the one is the other."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("what", ["transformers", "recompute"])
def test_a_comparison_takes_its_turns(what, repository):
    command = [sys.executable, "bench/cpu_step.py", what, "--tiny", "--repeats", "2", "--rows", "2"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if what == "transformers":
        assert found["ratio"] > 0
        assert all(len(spans) == 2 for spans in found["seconds"].values())
    else:
        for layers in (0, 1, 2, 4):
            median, least, most = found[f"recompute_{layers}"]["time_ratio"]
            assert 0 < least <= median <= most
        assert found["recompute_0"]["time_ratio"] == [1.0, 1.0, 1.0]
