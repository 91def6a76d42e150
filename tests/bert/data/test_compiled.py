"""Cached machine code is that of the current sources."""

import functools
import os
import sys

import numba
import pytest

from ...forked import Command

HEAD = "from bert.data.compiled import compiled, is_cached\n"


def _as_if_started_in(folder):
    """Finds modules there, writes no byte code, and keeps machine code where the environment says."""
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
    ("low", "high", "chosen"),
    [("", "", ""), ("", "", "chosen"), ("package.low.", "package.high.", "")],
    ids=["beside the sources", "in NUMBA_CACHE_DIR", "in another room of the package"],
)
def test_a_changed_helper_in_another_file_is_compiled_anew(low, high, chosen, tmp_path):
    helper, caller = (
        (tmp_path / f"{room}{name}".replace(".", "/")).with_suffix(".py")
        for room, name in ((low, "helper"), (high, "caller"))
    )
    for file in (helper, caller):
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in {file.parent, file.parent.parent} if low else ():
            (folder / "__init__.py").touch()
    text = f"from {low}helper import helper\n@compiled\ndef caller(x):\n    return helper(x) + 1\nprint(caller(1))\n"
    caller.write_text(HEAD + text)
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / chosen)} if chosen else {}
    for factor in (10, 20):
        text = f"{HEAD}@compiled\ndef helper(x):\n    return {factor} * x\n"
        helper.write_text(text)
        assert said(tmp_path, f"{high}caller", **environment) == f"{factor + 1}\n"
    if not low:
        cache = tmp_path / (chosen or "__pycache__")
        assert len(list(cache.glob("numba-*"))) == 2


def test_whether_machine_code_is_cached_is_known_before_it_is_used(tmp_path):
    text = "@compiled\ndef caller(x):\n    return x + 1\nprint(is_cached(caller), caller(1), is_cached(caller))\n"
    (tmp_path / "caller.py").write_text(HEAD + text)
    for before in (False, True):
        assert said(tmp_path, "caller") == f"{before} 2 True\n"
