"""Cached machine code is that of the current sources."""

from __future__ import annotations

import functools
import os
import sys

import numba
import pytest

from ...forked import Command


def _as_if_started_in(folder):
    """Finds modules there, writes no byte code, and keeps machine code where the environment
    says.
    """
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    numba.config.reload_config()


def said(folder, module, **environment):
    """Output of ``python -B -m module`` in the folder."""
    before = functools.partial(_as_if_started_in, str(folder))
    environ = {"PATH": os.environ["PATH"]} | environment
    done = Command(module, environ, before=before).finish()
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "chosen", [False, True], ids=["beside the sources", "in NUMBA_CACHE_DIR"]
)
def test_a_changed_helper_in_another_file_is_compiled_anew(chosen, tmp_path):
    head = "from bert.data.compiled import compiled\n"
    (tmp_path / "caller.py").write_text(
        f"{head}from helper import helper\n@compiled\ndef caller(x):\n    return helper(x) + 1\nprint(caller(1))\n"
    )
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "chosen")} if chosen else {}
    for factor in (10, 20):
        (tmp_path / "helper.py").write_text(
            f"{head}@compiled\ndef helper(x):\n    return {factor} * x\n"
        )
        assert said(tmp_path, "caller", **environment) == f"{factor + 1}\n"
    folder = tmp_path / ("chosen" if chosen else "__pycache__")
    assert len(list(folder.glob("numba-*"))) == 2


def test_a_changed_helper_in_another_room_of_the_package_is_compiled_anew(tmp_path):
    head = "from bert.data.compiled import compiled\n"
    package = tmp_path / "package"
    for folder in (package, package / "low", package / "high"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    caller = f"{head}from package.low.helper import helper\n@compiled\ndef caller(x):\n    return helper(x) + 1\n"
    (package / "high" / "caller.py").write_text(caller + "print(caller(1))\n")
    for factor in (10, 20):
        (package / "low" / "helper.py").write_text(
            f"{head}@compiled\ndef helper(x):\n    return {factor} * x\n"
        )
        assert said(tmp_path, "package.high.caller") == f"{factor + 1}\n"


def test_whether_machine_code_is_cached_is_known_before_it_is_used(tmp_path):
    (tmp_path / "caller.py").write_text(
        "from bert.data.compiled import compiled, is_cached\n@compiled\ndef caller(x):\n    return x + 1\n"
        "print(is_cached(caller), caller(1), is_cached(caller))\n"
    )
    for before in (False, True):
        assert said(tmp_path, "caller") == f"{before} 2 True\n"
