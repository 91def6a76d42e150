"""Modules of bench/, which are no package."""

import importlib

import pytest


@pytest.fixture
def bench(repository, monkeypatch):
    """import_(name): a module of bench/."""
    monkeypatch.syspath_prepend(str(repository / "bench"))
    return importlib.import_module
