"""bench/cpu_step.py on few rows."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_both_take_their_turns(repository):
    command = [sys.executable, "bench/cpu_step.py", "--repeats", "2", "--rows", "2"]
    done = subprocess.run(command, cwd=repository, capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert min(found["ratio"], found["ratio_of_medians"]) > 0
