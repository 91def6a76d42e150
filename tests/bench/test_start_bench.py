"""What bench/start.py says of a start; a failed rank is no figure."""

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


def test_a_rank_that_fails_is_no_figure(start, tmp_path):
    package = tmp_path / "implementations" / "bert"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import os, sys; sys.exit(int(os.environ['RANK']))")
    with pytest.raises(SystemExit, match=r"ended with \[0, 1\]"):
        start.start({}, 2, tmp_path)


@pytest.mark.slow
def test_the_figures_at_a_tiny_size(repository):
    command = [sys.executable, str(repository / "bench" / "start.py"), "--tiny", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout)
    assert 0 < figures["init"] < figures["cpu_of_the_run"]
