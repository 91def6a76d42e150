"""bench/cpu_step.py at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_both_take_their_turns(repository):
    command = [
        sys.executable,
        "bench/cpu_step.py",
        "--repeats",
        "2",
        "--rows",
        "2",
    ]
    done = subprocess.run(
        command, cwd=repository, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["ratio"] > 0
    assert found["ratio_of_medians"] > 0
