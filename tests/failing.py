"""Tests that fail beside what they started, one for each way in which tests start processes: run by
test_leftovers.py, and by nothing else.
"""

import os
import subprocess
import sys
import time

import pytest

from . import forked
from .bert.ranks import run_ranks

# Of test_leftovers.py: where a process has no environment it is known by its command line.
WHOSE = os.environ.get("WHOSE", "")
SLEEP = f"import time; time.sleep(6000)  # {WHOSE}"


@pytest.fixture(autouse=True, scope="module")
def _served() -> None:
    """What forks has started: a request that waits for that is not answered after its test."""
    forked.Command("timeit", {}, ("-n", "1", "pass")).finish()


def _wait(world: object) -> None:
    time.sleep(6000)


@pytest.mark.timeout(3, func_only=True)
def test_ranks_wait_until_the_limit() -> None:
    run_ranks(_wait, 2)


def test_a_forked_command() -> None:
    forked.Command("timeit", {}, ("-n", "1", SLEEP))
    pytest.fail("while it runs")


@pytest.mark.parametrize("options", [{}, {"env": {}, "start_new_session": True}])
def test_a_process_also_with_an_empty_environment(options) -> None:
    subprocess.Popen([sys.executable, "-c", SLEEP], **options)
    pytest.fail("while it runs")


def test_a_daemon_whose_parent_has_ended() -> None:
    subprocess.run(["sh", "-c", "setsid sleep 6000 >/dev/null 2>&1 &"], check=True)
    pytest.fail("while it runs")


def test_a_script_that_calls_the_quick_python(quick_python) -> None:
    subprocess.Popen(["sh", "-c", f"'{quick_python}' -m timeit -n 1 '{SLEEP}'; true"])
    time.sleep(1)  # until it has been handed over, or not
    pytest.fail("while it runs")
