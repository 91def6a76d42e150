"""Shared fixtures. Tests that need the reference data beside the checkout skip, saying so, where it is absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("BERT_TEST_SHARED", REPOSITORY.parent / "shared"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data beside the checkout; skips where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no reference data at {SHARED} (set BERT_TEST_SHARED)")
    return SHARED
