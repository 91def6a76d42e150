"""What bench/start.py says of a start: caches full and empty, and a failed rank is no figure."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest


@pytest.fixture
def start(repository, monkeypatch):
    """bench/start.py."""
    monkeypatch.syspath_prepend(str(repository / "bench"))
    return importlib.import_module("start")


def test_kernels_are_compiled_into_empty_folders_and_read_from_the_full_one(start, monkeypatch):
    seen = []

    def compiled(ranks, how, cache, only):
        seen.append((how, any(cache.iterdir())))
        (cache / "kernel").touch()
        return {"wall": 1.0, "cpu": 2.0, "kernels": 3}

    monkeypatch.setattr(start, "compile_together", compiled)
    assert start.kernels(2, 2, "")["once"] == {"wall": 1.0, "cpu": 2.0, "kernels": 3}
    assert seen == [("each", False), ("once", False), ("once", True)] * 2


def test_a_rank_that_fails_is_no_figure(start, tmp_path):
    package = tmp_path / "implementations" / "bert"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import os, sys; sys.exit(int(os.environ['RANK']))")
    with pytest.raises(SystemExit, match=r"ended with \[0, 1\]"):
        start.start({}, 2, tmp_path)


@pytest.mark.slow
def test_both_figures_at_a_tiny_size(repository):
    for more in ([], ["--kernels"]):
        command = [sys.executable, str(repository / "bench" / "start.py"), "--tiny", "--repeats", "1", *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
        assert done.returncode == 0, done.stderr[-2000:]
        figures = json.loads(done.stdout)
        if more:
            assert figures["from the cache"]["cpu"] < figures["once"]["cpu"] < figures["each for itself"]["cpu"]
        else:
            assert 0 < figures["now"]["init"] < sum(figures["now"].values())
