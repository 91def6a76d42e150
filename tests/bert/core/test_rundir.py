"""The description of machine and software in a run's folder."""

from __future__ import annotations

import torch

from bert.core import rundir


def test_the_version_of_torch_names_its_build(monkeypatch):
    monkeypatch.setattr(
        torch, "__version__", "2.13.0+cu130"
    )  # whose package metadata say 2.13.0
    packages = rundir.environment(torch.device("cpu"))["packages"]
    assert packages["torch"] == "2.13.0+cu130"
    assert packages["numpy"]
