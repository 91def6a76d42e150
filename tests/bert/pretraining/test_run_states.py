"""Runs that are started, resumed, killed, doubled, damaged and starved of room, in any order.

After each operation every checkpoint equals that of an undisturbed run at the same step, none that
was there is lost but by ``keep``, and what was refused has changed nothing. A few orders in the
suite; more by

    python -m pytest tests/bert/pretraining/test_run_states.py -m slow [--hypothesis-seed=N]
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import h5py
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bert.checkpoint import sharded
from bert.checkpoint.save import read_checkpoint
from bert.core.claim import Claim

from ...forked import Command
from ...waiting import state, wait_until
from ..states import same
from .test_long_runs import FULL_DISK
from .test_owner import UNTIMED, flip

STEPS = 8


def state_of(path):
    """A checkpoint's state as plain dicts, but for what tells engines apart."""
    saved = read_checkpoint(path / sharded.INDEX if path.is_dir() else path)
    parts = saved["optimizer"]
    tensors = {name: dict(part) for name, part in parts.items() if name != "num_steps"}
    return {"step": saved["step"], "samples": saved["samples"], **tensors}


def machine(environment, run_bert, folder: Path):
    """The class of a state machine whose runs are in subfolders of ``folder``."""
    (folder / "full.py").write_text(FULL_DISK)
    whole = environment | {"CHECKPOINT_KEEP": "99", "CHECKPOINT_EVERY_STEPS": "1"}
    whole |= {
        "CHECKPOINT_DIR": str(folder / "whole"),
        "RUN_DIR": str(folder / "whole_run"),
    }
    assert run_bert(whole).returncode == 0
    undisturbed = [state_of(path) for path in sharded.complete(folder / "whole")]
    numbers = iter(range(1 << 30))

    class Runs(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.home = folder / f"example_{next(numbers)}"
            self.saved = self.home / "c"
            self.saved.mkdir(parents=True)
            self.settings = environment | {
                "CHECKPOINT_DIR": str(self.saved),
                "RUN_DIR": str(self.home / "run"),
            }

        def teardown(self):
            shutil.rmtree(self.home)

        def steps(self):
            return [sharded.step_of(path) for path in sharded.complete(self.saved)]

        def last(self):
            return max(self.steps(), default=0)

        def run(self, **changed):
            return run_bert(self.settings | changed)

        def refused(self, said, **changed):
            before = self.content()
            done = self.run(**changed)
            assert done.returncode == 2, done.stderr
            assert said in done.stderr.splitlines()[-1]
            assert self.content() == before, "what is refused changes nothing"

        def content(self):
            names = sharded.complete(self.saved)
            return {str(path): path.read_bytes() for path in names if path.is_file()}

        @rule(steps=st.integers(1, 3))
        def start_or_restart(self, steps):
            before = self.last()
            if before == STEPS:
                self.refused("of another or an earlier run")
                return
            done = self.run(STEPS_THIS_RUN=str(steps))
            assert done.returncode == 0, done.stderr
            assert self.last() == min(before + steps, STEPS)

        @rule(steps=st.integers(1, 3), shards=st.booleans())
        def resume_with_either_kind_of_checkpoint(self, steps, shards):
            before = self.last()
            kind = {"CHECKPOINT_SHARDS": str(int(shards))}
            done = self.run(RESUME="1", STEPS_THIS_RUN=str(steps), **kind)
            assert done.returncode == 0, done.stderr
            assert self.last() == min(before + steps, STEPS)

        @precondition(lambda self: self.last() < STEPS)
        @rule()
        def kill_at_a_write(self):
            before = self.last()
            base = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "RESUME": "1"}
            pattern = f"{self.saved}/.step_*.partial"
            command = Command("bert", self.settings | base | {"STANDS_AT": pattern})
            wait_until(lambda: not command.running() or state(command.pid) == "T")
            command.kill()
            assert self.last() >= before

        @precondition(lambda self: self.last())
        @rule(
            changed=st.sampled_from(
                [{"LR": "0.02"}, {"SEED": "9"}, {"OPTIMIZER": "lans"}]
            )
        )
        def resume_with_other_settings(self, changed):
            self.refused("is of a run with", RESUME="1", **changed)
            self.refused("of another or an earlier run: set RESUME=1", **changed)

        @precondition(lambda self: self.last())
        @rule()
        def resume_on_other_data(self):
            path = (
                Path(self.settings["DATADIR_PHASE2_PACKED"])
                / "part_00001_of_00003.hdf5"
            )
            before = path.read_bytes()
            with h5py.File(path, "r+") as file:
                file["masked_lm_ids"][3] ^= 1
            self.refused("was changed after it was written", RESUME="1")
            path.write_bytes(before)

        @rule(name=st.sampled_from(["CHECKPOINT_DIR", "RUN_DIR"]))
        def two_at_once(self, name):
            with Claim(Path(self.settings[name]) / ".writer_0", name):
                self.refused(f"process {os.getpid()} on", RESUME="1")

        @precondition(lambda self: self.last())
        @rule()
        def flip_a_bit_and_remove_what_is_named(self):
            last = sharded.complete(self.saved)[-1]
            flip(last / "rank_00000.pt" if last.is_dir() else last)
            self.refused(f"{last}: damaged checkpoint (", RESUME="1")
            shutil.rmtree(last) if last.is_dir() else last.unlink()

        @precondition(lambda self: self.last() < STEPS)
        @rule()
        def train_on_a_full_disk(self):
            before = self.steps()
            full = {"FIRST": str(folder / "full.py"), "ROOM_UNTIL": "0", "RESUME": "1"}
            done = self.run(**full)
            assert done.returncode == 1, done.stderr
            assert "its checkpoint cannot be written (" in done.stderr.splitlines()[-1]
            assert self.steps() == before

        @invariant()
        def every_checkpoint_is_that_of_an_undisturbed_run(self):
            for path in sharded.complete(self.saved):
                assert same(state_of(path), undisturbed[sharded.step_of(path) - 1]), (
                    path
                )

    return Runs


def _settings(examples, steps, **more):
    checks = list(HealthCheck)
    return settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None,
        suppress_health_check=checks, **more,
    )  # fmt: skip


def test_a_few_orders_of_what_befalls_a_run(prepared, run_bert, tmp_path):
    environment = prepared | UNTIMED | {"LR": "0.01", "SHARD_OPTIMIZER": "1"}
    runs = machine(environment, run_bert, tmp_path)
    run_state_machine_as_test(runs, settings=_settings(2, 7, derandomize=True))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_orders_of_what_befalls_a_run(prepared, run_bert, tmp_path):
    environment = prepared | UNTIMED | {"LR": "0.01", "SHARD_OPTIMIZER": "1"}
    run_state_machine_as_test(
        machine(environment, run_bert, tmp_path), settings=_settings(60, 15)
    )
