"""What a run is computed with is told whole: libraries with their builds, every line of our code."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

import certify.load  # noqa: F401 (imports review, as the acceptance test's ranks do)
from bert.core import rundir, software
from bert.training.config import Hardware

from ...structure import PACKAGES

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_the_version_of_torch_names_its_build(monkeypatch):
    # Whose package metadata say 2.13.0.
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    packages = software.environment(CPU)["packages"]
    assert packages["torch"] == "2.13.0+cu130"
    assert packages["numpy"]


@pytest.mark.parametrize("name", ["bert", "certify", "common", "review"])
def test_a_stale_copy_of_a_package_is_other_code(name, monkeypatch, tmp_path):
    before = software.code()
    found = Path(sys.modules[name].__file__).parent
    copy = shutil.copytree(found, tmp_path / name, ignore=lambda _, names: ["tests"])
    monkeypatch.setattr(sys.modules[name], "__path__", [str(copy)])
    assert software.code() == before, "where it lies does not matter"
    last = max(copy.rglob("*.py"))
    last.write_bytes(last.read_bytes() + b"#\n")
    assert software.code() != before
    assert set(software.OURS) == set(PACKAGES)


def test_ranks_on_gpus_compare_the_libraries_that_they_have_loaded(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(Hardware, "device", GPU)
    facts = rundir.shared_facts(Hardware())
    assert (facts["cudnn"], facts["nccl"]) == (91900, "2.27.5")
    assert {"torch", "cuda", "code"} <= facts.keys()
    assert software.libraries(CPU)["nccl"] is None
