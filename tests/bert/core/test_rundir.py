"""Errors that end a run."""

from __future__ import annotations

import pytest
import torch

from bert.core import rundir


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
