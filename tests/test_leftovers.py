"""A test that fails leaves no process, however it started it."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from . import leftovers
from .waiting import processes_with, wait_until


def _commands_with(pattern: str) -> list[str]:
    """Command lines of processes that hold the pattern."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(command.read_text())
    return [command for command in found if pattern in command]


def test_failing_tests_leave_no_process(repository, tmp_path):
    pattern = f"{os.getpid()}-of-leftovers"
    options = ["-n", "1", "--timeout", "900", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/failing.py"], cwd=repository,
        env=os.environ | {"WHOSE": pattern, "TMPDIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    failed = re.findall(r"^FAILED .*::test_(\w+)", done.stdout, re.MULTILINE)
    assert len(failed) == 6, done.stdout
    # What serves all tests of a process ends by itself, after it.
    left = lambda: processes_with(pattern) + _commands_with(pattern)  # noqa: E731
    wait_until(lambda: not left(), 300)


def test_what_began_before_the_test_is_left_alone():
    before = subprocess.Popen(["sleep", "600"])
    try:
        start = leftovers.now() + 0.02  # a tick later
        while leftovers.now() < start:
            pass
        after = subprocess.Popen(["sleep", "600"])
        assert leftovers.end(start) == [after.pid]
        assert before.poll() is None
    finally:
        before.kill()
        before.wait()
    assert after.wait() == -9
