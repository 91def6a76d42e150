"""Machine code kept on disk is that of the sources as they are."""

from __future__ import annotations

import subprocess
import sys


def test_a_changed_helper_in_another_file_is_compiled_anew(tmp_path, repository):
    head = "from bert.data.compiled import compiled\n"
    (tmp_path / "caller.py").write_text(
        f"{head}from helper import helper\n@compiled\ndef caller(x):\n    return helper(x) + 1\nprint(caller(1))\n"
    )
    command = [sys.executable, "-B", str(tmp_path / "caller.py")]
    environment = {"PYTHONPATH": str(repository / "implementations")}
    for factor in (10, 20):
        (tmp_path / "helper.py").write_text(f"{head}@compiled\ndef helper(x):\n    return {factor} * x\n")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"{factor + 1}\n"
    assert len(list((tmp_path / "__pycache__").glob("numba-*"))) == 2


def test_a_changed_helper_in_another_room_of_the_package_is_compiled_anew(tmp_path, repository):
    head = "from bert.data.compiled import compiled\n"
    package = tmp_path / "package"
    for folder in (package, package / "low", package / "high"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    caller = f"{head}from package.low.helper import helper\n@compiled\ndef caller(x):\n    return helper(x) + 1\n"
    (package / "high" / "caller.py").write_text(caller + "print(caller(1))\n")
    environment = {"PYTHONPATH": f"{repository / 'implementations'}:{tmp_path}"}
    for factor in (10, 20):
        (package / "low" / "helper.py").write_text(f"{head}@compiled\ndef helper(x):\n    return {factor} * x\n")
        command = [sys.executable, "-B", "-m", "package.high.caller"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"{factor + 1}\n"


def test_whether_machine_code_is_kept_is_known_before_it_is_used(tmp_path, repository):
    (tmp_path / "caller.py").write_text(
        "from bert.data.compiled import compiled, is_kept\n@compiled\ndef caller(x):\n    return x + 1\n"
        "print(is_kept(caller), caller(1), is_kept(caller))\n"
    )
    command = [sys.executable, "-B", str(tmp_path / "caller.py")]
    environment = {"PYTHONPATH": str(repository / "implementations")}
    for before in (False, True):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"{before} 2 True\n"
