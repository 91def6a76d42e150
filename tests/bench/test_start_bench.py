"""What bench/start.py says of a start: medians, ratios of those that took turns, and a failed rank is no figure."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def start(repository, monkeypatch):
    """bench/start.py."""
    monkeypatch.syspath_prepend(str(repository / "bench"))
    return importlib.import_module("start")


def test_checkouts_take_turns_and_are_compared_turn_by_turn(start, monkeypatch):
    seconds = iter([4.0, 2.0, 9.0, 3.0, 5.0, 2.5])
    called = []

    def one(checkout, settings, ranks):
        called.append((checkout.name, settings, ranks))
        init = next(seconds)
        return {"init": init, "cpu_of_the_run": 2 * init} | ({"weights": 1.0} if checkout.name == "new" else {})

    monkeypatch.setattr(start, "start", one)
    found = start.starts({"before": Path("old"), "now": Path("new")}, {"A": "1"}, ranks=2, repeats=3)
    assert called == [("old", {"A": "1"}, 2), ("new", {"A": "1"}, 2)] * 3
    assert found["before"] == {"init": 5.0, "cpu_of_the_run": 10.0}
    assert found["now"] == {"init": 2.5, "cpu_of_the_run": 5.0, "weights": 1.0}
    assert found["ratios"]["init"] == [2.0, 2.0, 3.0]


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
        start.start(tmp_path, {}, 2)


@pytest.mark.slow
def test_both_figures_at_a_tiny_size(repository):
    for more in ([], ["--kernels"]):
        command = [sys.executable, str(repository / "bench" / "start.py"), "--tiny", "--repeats", "1", *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
        assert done.returncode == 0, done.stderr[-2000:]
        figures = json.loads(done.stdout)["figures"]
        if more:
            assert figures["from the cache"]["cpu"] < figures["once"]["cpu"] < figures["each for itself"]["cpu"]
        else:
            assert 0 < figures["now"]["init"] < sum(figures["now"].values())
