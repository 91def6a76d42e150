#!/usr/bin/env python3
"""Runs make test with every supported Python of this machine, each in an environment of its own,
.cache/pythons/VERSION. Itself for any Python from 3.6 on.

    pythons.py [--list] [INTERPRETER...]      none: those on PATH, pyenv's, the system's
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from shutil import which

# Through shims, links and environments.
IDENTIFY = """
import os, platform, sys
if (3, 10) <= sys.version_info[:2] <= (3, 14):
    print(platform.python_version(), os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
"""


def candidates():
    """Interpreters that may be there."""
    names = ["python3", *(f"python3.{minor}" for minor in range(10, 15))]
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return [
        *filter(None, map(which, names)),
        *(f"/usr/bin/{name}" for name in names),
        *sorted(root.glob("versions/*/bin/python")),
    ]


def supported(interpreters):
    """Version and real path of the first interpreter of each supported version."""
    found = {}
    for interpreter in interpreters:
        command = [str(interpreter), "-c", IDENTIFY]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # fmt: skip
        except OSError:  # there is none
            continue
        version, _, path = done.stdout.decode().strip().partition(" ")
        if done.returncode == 0 and path:
            found.setdefault(version, path)
    by_number = lambda one: [int(part) for part in re.findall(r"\d+", one[0])]  # noqa: E731
    return sorted(found.items(), key=by_number)


def test(version, python):
    """Whether the tests pass. PYTHON is only to make the environment: launch scripts read it too."""
    venv = f".cache/pythons/{version}"
    plain = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    environ = {**plain, "PYTHON": python}
    if subprocess.call(["make", f"VENV={venv}", f"{venv}/.dev-ready"], env=environ):
        return False
    return subprocess.call(["make", f"VENV={venv}", "test"], env=plain) == 0


def main(words):
    """Exit status: 1 if the tests fail with one of them, 2 if there is none."""
    os.chdir(Path(__file__).resolve().parents[1])
    listed = words[:1] == ["--list"]
    pythons = supported(words[listed:] or candidates())
    if not pythons:
        cure = f"name interpreters: {sys.argv[0]} INTERPRETER..."
        said = f"test_pythons: error: no Python 3.10 to 3.14 found; {cure}"
        print(said, file=sys.stderr)
        return 2
    if listed:
        print(*map(" ".join, pythons), sep="\n")
        return 0
    results = {}
    for version, python in pythons:
        print(f"test_pythons: Python {version}, {python}", flush=True)
        started = time.time()
        passed = test(version, python)
        seconds = f"{time.time() - started:.0f} s, {python}"
        results[f"{version} {'passed' if passed else 'FAILED'} in {seconds}"] = passed
    print(*(f"test_pythons: {line}" for line in results), sep="\n")
    return int(not all(results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
