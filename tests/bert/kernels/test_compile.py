"""The kernels compile for the GPUs they are meant for, without one: types, constants and warps of the real launches."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bert.kernels import OPERATIONS
from bert.kernels.support import triton_support

SCRIPT = Path(__file__).with_name("ahead_of_time.py")
BODIES = ("_forward", "_backward", "_query_gradient", "_key_gradient", "_moments", "_update", "_squared_sums",
          "_gelu_cast", "_gelu_backward_cast", "_cast_transpose", "_transpose")  # fmt: skip


def compiled(arguments: list[str], folder: Path, path: str = "") -> list[dict[str, Any]]:  # fmt: skip
    """Output of ahead_of_time.py; compiled files are kept in ``folder`` by their sources. path: PYTHONPATH."""
    if triton_support.triton is None:
        pytest.skip("Triton is not installed")
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder)}
    environment |= {"PYTHONPATH": path} if path else {}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SCRIPT), *arguments]
    options = {"capture_output": True, "text": True}
    result = subprocess.run(command, env=environment, **options)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "fusion" not in result.stderr, "a default that a later Triton changes"
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_kernels_compile_without_spills_and_with_wide_accesses(repository):
    kernels = compiled(["90"], repository / ".cache" / "triton")
    names = {kernel["kernel"].split(":")[0] for kernel in kernels}
    operations = {*OPERATIONS, "attention", "lamb", "fp8", "fp8_evaluation"}
    assert names == operations
    package = Path(triton_support.__file__).parents[1]
    modules = {path.stem for path in package.rglob("*.py")}
    for kernel in kernels:
        # A profile shows whose kernel it is.
        assert kernel["symbol"].partition("__")[0] in modules
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["shared_bytes"] <= 96 * 1024, kernel
        if re.match("(dropout_add_layer_norm|fp8):_backward", kernel["kernel"]):
            # Four programs fit at once.
            assert kernel["registers"] <= 65536 // (4 * 128), kernel
        if any(body in kernel["kernel"] for body in BODIES):
            assert "v4" in kernel["vectors"], f"no 16-byte access in {kernel}"
            on_tensor_cores = kernel["kernel"].startswith("attention")
            # Hopper's matrix instructions.
            assert kernel["wgmma"] == on_tensor_cores, kernel


def fetched(target: Path, version: str) -> Path:
    """The folder of that Triton, from the package index, kept; skips where there is none."""
    if not (target / "triton" / "__init__.py").is_file():
        options = ["--no-deps", "--target", str(target), f"triton=={version}"]
        command = [sys.executable, "-m", "pip", "install", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if done.returncode:
            pytest.skip(f"Triton {version}: {done.stderr.splitlines()[-1]}")
    return target


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0"])
@pytest.mark.parametrize("capability", ["80", "89", "90", "100", "103", "120"])
def test_every_kernel_compiles_for_every_architecture_under_each_version_of_triton(
    capability, version, repository, tmp_path
):
    """No kernel spills but fp32 attention, whose operands are in registers."""
    if (capability, version) == ("103", "3.5.1"):
        pytest.skip("the ptxas of Triton 3.5.1 has no sm_103a")
    triton = fetched(repository / ".cache" / f"triton-{version}", version)
    path = os.pathsep.join(map(str, (triton, repository / "implementations", repository)))  # fmt: skip
    kernels = compiled([capability, "--all"], tmp_path, path)
    assert kernels
    for kernel in kernels:
        allowed = 256 if kernel["kernel"].startswith("attention_fp32:") else 0
        assert kernel["spilled_bytes"] <= allowed, kernel
