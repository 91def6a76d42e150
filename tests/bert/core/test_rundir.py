"""The description of machine and software in a run's folder."""

from __future__ import annotations

import pytest
import torch

from bert.core import rundir


def test_the_version_of_torch_names_its_build(monkeypatch):
    # Whose package metadata say 2.13.0.
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    packages = rundir.environment(torch.device("cpu"))["packages"]
    assert packages["torch"] == "2.13.0+cu130"
    assert packages["numpy"]


@pytest.mark.parametrize(
    ("error", "on_gpu", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True, "lower BATCHSIZE"),
        (RuntimeError("an illegal memory access"), True, "self_check.py names the"),
        (RuntimeError("an illegal memory access"), False, "illegal memory access\n"),
    ],
)
def test_an_error_that_nobody_foresaw_on_a_gpu_says_what_to_do(
    error, on_gpu, advice, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    assert rundir.failed(rundir.RunConfig(), "bert", error) == 1
    assert advice in capsys.readouterr().err
