"""Modules of bench/, which are no package."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture
def bench(repository, monkeypatch):
    """import_(name): a module of bench/."""
    monkeypatch.syspath_prepend(str(repository / "bench"))
    return importlib.import_module
