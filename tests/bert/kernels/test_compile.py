"""The kernels compile for the GPUs they are meant for, without one: types, constants and warps of the real launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bert.kernels import launches, triton_support

SCRIPT = Path(__file__).with_name("ahead_of_time.py")
TABLE = Path(__file__).with_name("compiled_kernels.json")
BODIES = ("_forward", "_backward", "_query_gradient", "_key_gradient", "_moments", "_update", "_squared_sums",
          "_squares", "_gelu_cast", "_gelu_backward_cast", "_cast_transpose", "_transpose")  # fmt: skip


def compiled(capability: int, folder: Path) -> list[dict[str, Any]]:
    """Output of ahead_of_time.py for one target, cached in ``folder`` by its sources."""
    if triton_support.triton is None:
        pytest.skip("Triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder)}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_kernels_compile_without_spills_and_with_wide_accesses(repository):
    kernels = compiled(90, repository / ".cache" / "triton")
    names = {kernel["kernel"].split(":")[0] for kernel in kernels}
    expected = {
        "embeddings",
        "dropout_add_layer_norm",
        "bias_gelu",
        "cross_entropy",
        "attention",
        "lamb",
        "lans",
        "assembly",
    }
    assert names == expected | {"fp8", "fp8_evaluation"}
    modules = {path.stem for path in Path(triton_support.__file__).parent.glob("*.py")}
    for kernel in kernels:
        assert kernel["symbol"].partition("__")[0] in modules, "a profile shows whose kernel it is"
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["shared_bytes"] <= 96 * 1024, kernel
        if (
            "dropout_add_layer_norm:_backward" in kernel["kernel"]
            or "fp8:_backward" in kernel["kernel"]
        ):
            assert kernel["registers"] <= 65536 // (4 * 128), (
                f"four programs do not fit at once: {kernel}"
            )
        if any(body in kernel["kernel"] for body in BODIES):
            assert "v4" in kernel["vectors"], f"no 16-byte access in {kernel}"
            on_tensor_cores = kernel["kernel"].startswith("attention")
            assert kernel["wgmma"] == on_tensor_cores, f"Hopper's matrix instructions: {kernel}"
    table = json.loads(TABLE.read_text()).get(triton_support.triton.__version__, {}).get("90", {})
    rare = ("attention_wide", "attention_fp32")  # compiled by the slow test
    found = {kernel["kernel"]: (kernel["registers"], kernel["spilled_bytes"]) for kernel in kernels}
    known = {
        name: (of["registers"], of["spilled_bytes"])
        for name, of in table.items()
        if not name.startswith(rare)
    }
    assert not table or found == known, (
        "if that is meant: ahead_of_time.py --update (see CONTRIBUTING.md)"
    )


@pytest.fixture(scope="session")
def triton_of(repository):
    """folder(version): that version of Triton, from the package index; kept under .cache."""

    def folder(version: str) -> Path:
        target = repository / ".cache" / f"triton-{version}"
        if not (target / "triton" / "__init__.py").is_file():
            command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(target)]
            done = subprocess.run(
                [*command, f"triton=={version}"], capture_output=True, text=True, check=False
            )
            if done.returncode:
                pytest.skip(
                    f"Triton {version} cannot be installed here: {done.stderr.splitlines()[-1]}"
                )
        return target

    return folder


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])  # of NGC's PyTorch 2.11 and of PyTorch 2.13
def test_kernels_take_what_the_table_says_under_both_versions_of_triton(
    version, triton_of, repository, tmp_path
):
    """Registers, blocks per multiprocessor, instructions in all and in the longest loop, at real sizes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(triton_of(version)), str(repository / "implementations")]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    expected = json.loads(TABLE.read_text())[version]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *expected, "--table"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert found.keys() == expected.keys()
    changed = {
        f"{gpu} {name}": f"{expected[gpu].get(name)} -> {found[gpu].get(name)}"
        for gpu in found
        for name in found[gpu] | expected[gpu]
        if found[gpu].get(name) != expected[gpu].get(name)
    }
    assert not changed, (
        f"if that is meant: ahead_of_time.py --update {TABLE.name} (see CONTRIBUTING.md): {changed}"
    )


def test_no_kernel_is_much_worse_under_one_version_of_triton_than_under_the_other():
    table = {version: by_gpu["90"] for version, by_gpu in json.loads(TABLE.read_text()).items()}
    assert table["3.6.0"].keys() == table["3.7.1"].keys()
    for name, one in table["3.6.0"].items():
        other = table["3.7.1"][name]
        for figure in ("instructions", "loop"):
            smaller, larger = sorted((one[figure], other[figure]))
            assert larger <= 1.1 * smaller, f"{name}: {figure} {one[figure]} and {other[figure]}"
        blocks = [
            min(figures["blocks"], 6) for figures in (one, other)
        ]  # of more a kernel is hardly faster
        assert abs(blocks[0] - blocks[1]) <= 0.15 * blocks[1], name


def test_no_setting_of_the_table_spills_on_any_architecture_and_as_many_programs_fit_as_it_says():
    for version, by_gpu in json.loads(TABLE.read_text()).items():
        assert list(by_gpu) == ["80", "89", "90", "100", "120"]
        for gpu, kernels in by_gpu.items():
            for name, figures in kernels.items():
                most = next((most for start, most in SPILLED.items() if name.startswith(start)), 0)
                assert figures["spilled_bytes"] <= most, f"{version}, sm_{gpu}: {name}"
                assert figures["blocks"] >= 1, f"{version}, sm_{gpu}: {name} does not fit"
                if "dropout_add_layer_norm:_backward" in name and name.endswith("-1024"):
                    settings = launches.TABLE["layer norm backward"]
                    assert (
                        figures["blocks"]
                        >= settings[max(since for since in settings if since <= int(gpu))].programs
                    )


# Bytes a thread, where no setting is known without: fp32 products take their operands from registers.
SPILLED = {"attention_fp32:": 240}
