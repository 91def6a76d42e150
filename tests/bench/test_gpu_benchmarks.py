"""GPU benchmarks start from a plain checkout, and report a missing GPU in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "name",
    [
        "attention",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemm", "operations")),
    ],
)
def test_without_a_gpu_one_line_says_so(repository, tmp_path, name):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(repository / "bench" / "kernels.py"), name]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "kernels.py: no GPU: this benchmark measures GPU kernels\n"
