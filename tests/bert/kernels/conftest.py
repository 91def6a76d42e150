"""The kernels on a GPU where there is one, else in Triton's interpreter (which tests/conftest.py has asked for)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bert.kernels import jit


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Where the Triton kernels run; skips where Triton is not installed."""
    if jit.triton is None:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    with jit.interpreted():
        yield torch.device("cpu")


@pytest.fixture
def gpu() -> torch.device:
    """A GPU; skips where there is none."""
    if jit.triton is None or not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device("cuda")
