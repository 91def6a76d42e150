"""bench/cpu_step.py at a tiny size: each comparison runs and prints its ratios."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("what", ["transformers", "recompute", "last-layer", "network"])
def test_a_comparison_takes_its_turns(what, repository):
    command = [sys.executable, "bench/cpu_step.py", what, "--tiny", "--repeats", "2", "--rows", "2"]
    done = subprocess.run(
        command, cwd=repository, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if what == "transformers":
        assert found["ratio"] > 0
        assert all(len(spans) == 2 for spans in found["seconds"].values())
    elif what == "recompute":
        for layers in (0, 1, 2, 4):
            median, least, most = found[f"recompute_{layers}"]["time_ratio"]
            assert 0 < least <= median <= most
        assert found["recompute_0"]["time_ratio"] == [1.0, 1.0, 1.0]
    elif what == "last-layer":
        assert set(found["seconds"]) == {"whole", "of_rows"}
        assert 0 < found["time_ratio"][1] <= found["time_ratio"][2]
    else:
        for ranks in ("2_ranks", "4_ranks"):
            assert all(len(spans) == 2 for spans in found[ranks]["seconds"].values())
            assert all(share <= 1 for share in found[ranks]["hidden"].values())
