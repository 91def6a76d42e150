"""kill -9 in both phases and between them: the same command continues, with the weights of an
undisturbed run.

The whole tour, of run_pretraining.sh and at ten moments, is in tests/launch/test_pretraining.py.
"""

from __future__ import annotations

import os
from functools import partial

from ...forked import Command
from ...waiting import state, wait_until
from ..states import folders, newest, same


def _stands(command):
    return not command.running() or state(command.pid) == "T"


def run(environ, folder, moments):
    """The trainer to its end; before, it is killed at each moment, when such a file is there, and
    begun again.
    """
    base = folders(folder.parent, folder.name)
    base |= {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "RESUME": "1"}
    for pattern in [*moments, None]:
        held = {"STANDS_AT": str(folder / pattern)} if pattern else {}
        command = Command("bert", environ | base | held)
        if pattern:
            wait_until(partial(_stands, command))
            assert command.running(), f"it ended before {pattern}: {command.finish()}"
            command.kill()
        finished = command.finish() if pattern is None else None
    assert finished is not None
    assert finished.returncode == 0, finished.stderr


def test_killed_at_three_moments_it_ends_with_the_weights_of_an_undisturbed_run(
    prepared, tmp_path
):
    settings = prepared | {"EVAL_ITER_SAMPLES": "0", "MAX_STEPS": "8", "LR_SCHEDULE": "dle",
                           "WARMUP_STEPS": "3", "CHECKPOINT_EVERY_STEPS": "2", "CHECKPOINT_KEEP": "99"}  # fmt: skip
    ends = []
    tours = ([], []), (["step_*06.pt", ".step_*.partial"], ["step_*04.pt"])
    for number, (first, second) in enumerate(tours):
        one, two = tmp_path / f"{number}" / "one", tmp_path / f"{number}" / "two"
        one.mkdir(parents=True)
        two.mkdir()
        run(settings, one, first)
        assert newest(one)["step"] == 8
        warm = {"INIT_CHECKPOINT": str(one), "INIT_OPTIMIZER": "1"}
        run(settings | {"LR": "0.01"} | warm, two, second)
        ends.append(newest(two))
    assert same(*ends)
    assert ends[0]["step"] == 8
