"""Runs that are started, resumed, moved, killed, doubled, damaged and starved of room, in any
order, two trials of them in one CHECKPOINT_DIR.

After each operation every checkpoint equals that of an undisturbed run at the same step: bit for
bit, or, where steps were made on other ranks or with the other engine, within rounding, and bit for
bit that of any run with the same history. None that was there is lost but by ``keep``, no byte of
the other trial, of a finished one, or after what was refused is another, nothing is left over, and
exit status and last line are true. A few orders in the suite; more by

    python -m pytest tests/bert/pretraining/test_run_states.py -m slow [--hypothesis-seed=N]
"""

import copy
import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from bert.checkpoint import sharded
from bert.checkpoint.save import read_checkpoint
from bert.pretraining.identity import is_whole

from ...forked import Command
from ...waiting import state, wait_until
from ..states import UNTIMED, content, same, without_dropout, zero_json
from .test_long_runs import FULL_DISK
from .test_trial import flip

STEPS = 8
TRIALS = (0, 1)
# How steps are made: each has two micro-batches of three rows.
RANKS = {"one rank": 1, "two ranks": 2, "DeepSpeed": 2}
# A run that stands still before the n-th change that its thread of checkpoints makes to files: the
# same n leaves the same checkpoints, whatever the load, as no other thread writes any.
STANDING = """
import os, signal, sys, threading
left = iter(range(int(os.environ["CHANGES"])))
def count(event, arguments):
    changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
    changes |= event == "open" and arguments[1] == "w"
    if changes and threading.current_thread().name == "checkpoint" and next(left, None) is None:
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()  # the signal may come late
sys.addaudithook(count)
"""
# That of a second checkpoint in shards and the removal of the one before, or all of four files.
MOST_CHANGES = 20


def state_of(path):
    """A checkpoint's state as plain dicts, but for what tells engines apart."""
    saved = read_checkpoint(path / sharded.INDEX if path.is_dir() else path)
    parts = saved["optimizer"]
    # Copies: shards are mapped, and would change with the file when a bit of it is flipped.
    tensors = copy.deepcopy(
        {name: parts[name] for name in parts.keys() - {"num_steps"}}
    )
    return {"step": saved["step"], "samples": saved["samples"], **tensors}


# Commands that are refused, and by what.
REFUSED = (
    ({"LERNING_RATE": "3"}, "did you mean LR?"),
    ({"OPT_MADGRAD_MOMENTUM": "0.5"}, "is gone"),
    ({"BATCHSIZE": "none"}, "BATCHSIZE='none'"),
    ({"DATADIR_PHASE2_PACKED": "/nowhere"}, ""),
    ({"EVAL_ITER_SAMPLES": "24", "EVALDIR": "/nowhere"}, ""),
    ({"INIT_CHECKPOINT": "/nowhere.pt"}, ""),
    ({"SUBMISSION_DIVISION": "closed"}, "the closed division does not allow"),
)


def check_close(found, expected):
    """Equal within rounding. Keys' biases have no gradient but rounding, which LAMB blows up."""
    for name in ("step", "samples"):
        assert found[name] == expected[name], name
    for name, weight in expected["masters"].items():
        if not name.endswith("key.bias"):
            near = {"rtol": 0, "atol": 5e-5, "msg": name}
            torch.testing.assert_close(found["masters"][name], weight, **near)


def machine(environment, run_bert, folder: Path, ways):
    """The class of a state machine whose runs are in subfolders of ``folder``."""
    (folder / "full.py").write_text(FULL_DISK)
    (folder / "standing.py").write_text(STANDING)
    without_dropout(environment)
    numbers = iter(range(1 << 30))
    known = {}  # state by trial and the way in which each step was made

    def of_trial(trial):
        return {"TRIAL": str(trial), "SEED": str(7 + trial)}

    def in_way(way):
        steps = {"GRADIENT_STEPS": str(2 // RANKS[way])}
        if way == "DeepSpeed":
            steps |= zero_json(folder)
        return steps

    def undisturbed(trial, ranks):
        """States of a run on so many ranks from the start, which decides who gets which rows."""
        way = "one rank" if ranks == 1 else "two ranks"
        if (trial, (way,)) not in known:
            home = folder / f"whole_{ranks}"
            whole = environment | of_trial(trial) | in_way(way)
            whole |= {"CHECKPOINT_KEEP": "99", "CHECKPOINT_EVERY_STEPS": "1"}
            whole |= {"CHECKPOINT_DIR": str(home), "RUN_DIR": str(home / "run")}
            assert run_bert(whole, ranks=ranks).returncode == 0
            for path in sharded.complete(home / ("" if trial == 0 else "trial_1")):
                known[trial, (way,) * sharded.step_of(path)] = state_of(path)
        return [known[trial, (way,) * step] for step in range(1, STEPS + 1)]

    last = [undisturbed(trial, 1)[-1]["masters"] for trial in TRIALS]
    assert not same(*last), "no two trials have one history"

    class Runs(RuleBasedStateMachine):
        trials = st.sampled_from(TRIALS)
        drawn_ways = st.sampled_from(ways)
        few = st.integers(1, 3)
        changes = st.integers(0, MOST_CHANGES)

        def __init__(self):
            super().__init__()
            self.home = folder / f"example_{next(numbers)}"
            self.saved = self.home / "c"
            self.saved.mkdir(parents=True)
            self.histories = {trial: {0: ()} for trial in TRIALS}  # by step
            folders = {"CHECKPOINT_DIR": self.saved, "RUN_DIR": self.home / "run"}
            own = {name: str(path) for name, path in folders.items()}
            self.settings = environment | own

        def teardown(self):
            shutil.rmtree(self.home)

        def folder(self, trial):
            return self.saved if trial == 0 else self.saved / f"trial_{trial}"

        def complete(self, trial):
            return sharded.complete(self.folder(trial))

        def steps(self, trial):
            return [sharded.step_of(path) for path in self.complete(trial)]

        def last(self, trial):
            return max(self.steps(trial), default=0)

        def content(self, trial):
            saved = self.complete(trial)
            files = {str(path): path.read_bytes() for path in saved if path.is_file()}
            return files | content(*saved)

        def files(self, trial=None):
            """Bytes of all files, or of those that are a trial's alone, but for claims."""
            run = self.home / "run"
            names = [run] if trial is None else run.glob(f"*_{trial}.*")
            files = [path for name in names for path in (name, *name.rglob("*"))]
            known = {str(path): path.read_bytes() for path in files if path.is_file()}
            for each in TRIALS if trial is None else (trial,):
                known |= self.content(each)
            return {name: known[name] for name in known if "/.writer" not in name}

        def noted(self, trial):
            return self.home / "run" / f"identity_{trial}.json"

        def finished(self, trial):
            """Whether a trial has ended, and has noted that."""
            path = self.noted(trial)
            return path.is_file() and is_whole(json.loads(path.read_text()))

        def has_ended_in(self, trial, way):
            noted = json.loads(self.noted(trial).read_text())
            engine = "deepspeed" if way == "DeepSpeed" else "own"
            return (noted["ENGINE"], noted["WORLD_SIZE"]) == (engine, RANKS[way])

        def given(self, trial, way, changed):
            return self.settings | of_trial(trial) | in_way(way) | changed

        def run(self, trial, way="one rank", **changed):
            before, other = self.last(trial), self.files(1 - trial)
            mine = self.files(trial) if self.finished(trial) else {}
            given = self.given(trial, way, changed)
            done = run_bert(given, ranks=RANKS[way])
            assert self.files(1 - trial) == other, "the other trial's is not touched"
            assert self.files(trial).items() >= mine.items(), "nor a finished one's"
            self.note(trial, way, before)
            return done

        def note(self, trial, way, before):
            """What was saved since continues step ``before``."""
            history = self.histories[trial]
            made = range(before + 1, STEPS + 1)
            history |= {
                step: history[before] + (way,) * (step - before) for step in made
            }

        def continues(self, trial, way, steps, **changed):
            before = self.last(trial)
            if self.finished(trial) and not self.has_ended_in(trial, way):
                self.refused(trial, "is of a run with", way, **changed)
                return
            if self.finished(trial) and before < STEPS:
                lacks = "lacks the last checkpoint of a run that is complete"
                self.refused(trial, lacks, way, RESUME="1")
                return
            plain = "nothing is left" if self.finished(trial) else "from step"
            done = self.run(trial, way, STEPS_THIS_RUN=str(steps), **changed)
            assert done.returncode == 0, done.stderr
            if "RESUME" in changed:
                assert ("from the start" if not before else plain) in done.stderr or (
                    before < STEPS == self.last(trial)
                )
            now = min(before + steps, STEPS)
            assert self.last(trial) == now
            if now < STEPS:
                said = f"stopped at step {now} (STEPS_THIS_RUN); RESUME=1 continues"
                assert done.stderr.splitlines()[-1] == f"bert: {said}"
            assert not list(self.folder(trial).glob(".*")), "nothing is left"

        def refused(self, trial, said, way="one rank", **changed):
            before = self.files()
            done = self.run(trial, way, **changed)
            assert done.returncode == 2, done.stderr
            assert said in done.stderr.splitlines()[-1]
            after = self.files()
            if not (self.home / "run" / f"result_{trial}.txt").exists():
                error = str(self.home / "run" / f"error_{trial}.txt")
                after.pop(error, None)
                before.pop(error, None)
            assert after == before, "what is refused changes nothing"

        @rule(trial=trials, steps=few)
        def start_or_restart(self, trial, steps):
            if self.last(trial) == STEPS or self.finished(trial):
                self.refused(trial, "another")  # folder, for a new run
            else:
                self.continues(trial, "one rank", steps)

        @rule(trial=trials, way=drawn_ways, steps=few, shards=st.booleans())
        def resume_on_any_ranks_and_engine_with_either_kind_of_checkpoint(
            self, trial, way, steps, shards
        ):
            kind = {"CHECKPOINT_SHARDS": str(int(shards))}
            self.continues(trial, way, steps, RESUME="1", **kind)

        @rule(trial=trials, changes=changes, shards=st.booleans(), second=st.booleans())
        def kill_while_it_writes(self, trial, changes, shards, second):
            before = self.last(trial)
            if before == STEPS or self.finished(trial):
                return
            given = self.given(trial, "one rank", {
                "PATH": os.environ["PATH"], "HOME": "/nonexistent", "RESUME": "1",
                "FIRST": str(folder / "standing.py"), "CHANGES": str(changes),
                "CHECKPOINT_SHARDS": str(int(shards)),
            })  # fmt: skip
            command = Command("bert", given)
            try:
                wait_until(lambda: not command.running() or state(command.pid) == "T")
                self.note(trial, "one rank", before)
                if second and command.running():
                    self.refused(trial, f"process {command.pid} on", RESUME="1")
            finally:
                command.kill()  # one that stands still would outlive this test
            assert self.last(trial) >= before

        @rule(trial=trials, case=st.sampled_from(REFUSED))
        def give_a_command_that_is_refused(self, trial, case):
            changed, said = case
            self.refused(trial, said, RESUME="1", **changed)

        @rule(trial=trials)
        def flip_a_bit_and_remove_what_is_named(self, trial):
            if not self.complete(trial):
                return
            last = self.complete(trial)[-1]
            flip(last / "rank_00000.pt" if last.is_dir() else last)
            # One that is finished is known by its ranks before its checkpoint is read.
            might = not self.finished(trial)
            way = next(way for way in RANKS if might or self.has_ended_in(trial, way))
            self.refused(trial, f"{last}: damaged checkpoint (", way, RESUME="1")
            shutil.rmtree(last) if last.is_dir() else last.unlink()

        @rule(trial=trials)
        def train_on_a_full_disk(self, trial):
            before = self.steps(trial)
            if self.last(trial) == STEPS or self.finished(trial):
                return
            full = {"FIRST": str(folder / "full.py"), "ROOM_UNTIL": "0", "RESUME": "1"}
            done = self.run(trial, **full)
            assert done.returncode == 1, done.stderr
            assert " cannot be written (" in done.stderr.splitlines()[-1]
            assert self.steps(trial) == before

        @invariant()
        def every_checkpoint_is_that_of_an_undisturbed_run(self):
            for trial in TRIALS:
                for path in self.complete(trial):
                    history = self.histories[trial][sharded.step_of(path)]
                    found = state_of(path)
                    whole = undisturbed(trial, RANKS[history[0]])
                    first = known.setdefault((trial, history), found)
                    assert same(found, first), (path, history)
                    check_close(found, whole[len(history) - 1])

    return Runs


def _settings(examples, steps, **more):
    checks = list(HealthCheck)
    return settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None,
        suppress_health_check=checks, phases=[Phase.generate], **more,
    )  # fmt: skip


@pytest.fixture
def runs(prepared, run_bert, tmp_path):
    """runs(ways): the state machine of runs whose steps are made in these ways."""
    environment = prepared | UNTIMED | {"LR": "0.001", "SHARD_OPTIMIZER": "1"}
    return lambda ways: machine(environment, run_bert, tmp_path, ways)


@pytest.mark.parametrize(
    "ways",
    [["one rank", "two ranks"], pytest.param(list(RANKS), marks=pytest.mark.deepspeed)],
    ids=["ours", "DeepSpeed"],
)
def test_a_few_orders_of_what_befalls_a_run(runs, ways):
    run_state_machine_as_test(runs(ways), settings=_settings(2, 7, derandomize=True))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_orders_of_what_befalls_a_run(runs):
    ways = [way for way in RANKS if way != "DeepSpeed" or find_spec("deepspeed")]
    run_state_machine_as_test(runs(ways), settings=_settings(25, 15))
