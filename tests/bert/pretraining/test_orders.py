"""Bare commands in any order, by seed: two folders of runs and of checkpoints, two trials, other
settings and data, runs that stop, end, resume or are repeated, and commands that are refused.

No byte of a finished trial or of another run changes, and nothing at all by what is refused. A few
orders in the suite, and 500 in this process, in minutes:

    python -m pytest tests/bert/pretraining/test_orders.py -m slow
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from bert.core import rundir
from bert.pretraining.run import run

from ..states import UNTIMED, content
from .test_trial import altered

COMMANDS = 8  # of an order
OWN = *4 * [{}], {"LR": "0.02"}, {"SEED": "8"}, {"OPTIMIZER": "lans"}, {"EVAL_ITER_SAMPLES": "6", "CHECKPOINT_BEST": "1"}  # fmt: skip
REFUSED = (
    {"LERNING_RATE": "3"},
    {"OPT_MADGRAD_MOMENTUM": "0.5"},
    {"BATCHSIZE": "none"},
    {"DATADIR_PHASE2_PACKED": "/nowhere"},
    {"EVAL_ITER_SAMPLES": "6", "EVALDIR": "/nowhere"},
    {"INIT_CHECKPOINT": "/nowhere.pt"},
    {"SUBMISSION_DIVISION": "closed"},
)


def drawn(generator: random.Random, home: Path, other_data: str) -> dict[str, str]:
    """What a command is given besides the run's settings."""
    given = {
        "RUN_DIR": str(home / generator.choice("ab")),
        "CHECKPOINT_DIR": str(home / f"c{generator.choice('ab')}"),
        "TRIAL": str(generator.choice((0, 0, 1))),
        "RESUME": str(generator.choice((0, 1, 1))),
        "STEPS_THIS_RUN": str(generator.choice((0, 0, 1))),
    } | generator.choice(OWN)
    if generator.random() < 0.1:
        given["DATADIR_PHASE2_PACKED"] = other_data
    return given | (generator.choice(REFUSED) if generator.random() < 0.2 else {})


def files(home: Path) -> dict[str, bytes]:
    """But for claims and kept digests."""
    known = content(home)
    return {name: known[name] for name in known if "/.writer" not in name}


def play(
    environment: dict[str, str], home: Path, other_data: str, seed: int
) -> Counter:
    """Gives an order of commands; returns how often each came to what."""
    generator, came_to = random.Random(seed), Counter()
    finished: dict[tuple[str, str], dict[str, bytes]] = {}
    for number in range(COMMANDS):
        given = drawn(generator, home, other_data)
        folder, trial = given["RUN_DIR"], given["TRIAL"]
        saved = given["CHECKPOINT_DIR"] + f"/trial_{trial}" * (trial != "0")
        rundir._begun.clear()  # of another process
        before = files(home)
        status = run(environment | given)
        after = files(home)
        changed = {x for x in before | after if before.get(x) != after.get(x)}
        what = f"seed {seed}, command {number}: {given}: status {status}"
        if status == 2:
            had_logs = any(name.startswith(f"{folder}/result_") for name in before)
            mine = set() if had_logs else {f"{folder}/error_{trial}.txt"}
            assert changed <= mine, f"{what}: what is refused changes nothing"
        elif (folder, trial) in finished:
            assert not changed, f"{what}: nor what is finished already"
        else:
            for name in changed:
                path = Path(name)
                of_run = str(path.parent) == folder and (
                    path.stem.endswith(f"_{trial}") or path.suffix == ".json"
                )
                assert of_run or name.startswith(f"{saved}/"), f"{what}: {name}"
                of_other = trial == "0" and name.startswith(f"{saved}/trial_")
                assert not of_other, f"{what}: {name}"
        for known in finished.values():
            assert after.items() >= known.items(), what
        log = after.get(f"{folder}/result_{trial}.txt", b"")
        if status == 0 and b"run_stop" in log:
            came_to["again" if (folder, trial) in finished else "finished"] += 1
            finished[folder, trial] = {
                name: after[name]
                for name in after
                if name.startswith(folder) and f"_{trial}." in name
            }
        else:
            came_to[status] += 1
    return came_to


@pytest.fixture
def orders(prepared, tmp_path, capfd):
    """orders(seeds): plays them; what the commands came to."""
    environment = prepared | UNTIMED | {"MAX_STEPS": "2", "LOG_EVERY_STEPS": "1"}
    environment["CHECKPOINT_EVERY_STEPS"] = "1"
    other_data = altered(tmp_path / "packed")

    def all_of(seeds):
        came_to = Counter()
        for seed in seeds:
            home = tmp_path / "home"
            home.mkdir()
            came_to += play(environment, home, other_data, seed)
            capfd.readouterr()
            shutil.rmtree(home)
        return came_to

    return all_of


def test_a_few_orders_of_commands_change_no_byte_of_another_run(orders):
    assert orders(range(4)).keys() == {0, 2, "finished", "again"}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_five_hundred_orders_of_commands_change_no_byte_of_another_run(orders):
    came_to = orders(range(500))
    assert sum(came_to.values()) == 500 * COMMANDS
    assert min(came_to.values()) > 100, "each kind is tried often"
