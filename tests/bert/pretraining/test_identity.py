"""What tells a run from another one: in its folder, in its checkpoints, and between its ranks."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from bert.checkpoint import sharded
from bert.core import rundir
from bert.core.dist import World
from bert.data.shards import INDEX
from bert.pretraining import identity, resume, trial
from bert.pretraining.config import PretrainingConfig
from common.env import ConfigError, from_env

STOP = {"key": "run_stop", "value": None, "metadata": {"status": "success"}}


@pytest.fixture
def config(prepared, tmp_path):
    """config(**settings): of a run into the folders ``run`` and ``c``."""
    for name in ("run", "c"):
        (tmp_path / name).mkdir()
    folders = {"CHECKPOINT_DIR": str(tmp_path / "c"), "RUN_DIR": str(tmp_path / "run")}
    return lambda **settings: from_env(PretrainingConfig, prepared | folders | settings)


@pytest.fixture
def finished(config, tmp_path):
    """The configuration of a trial that has logged its end."""
    (tmp_path / "run" / "result_0.txt").write_text(f":::MLLOG {json.dumps(STOP)}\n")
    return config()


def test_a_log_with_an_end_is_complete_once_its_trial_has_noted_that(
    finished, tmp_path
):
    for begun in ({}, finished.run.owner):  # an earlier version noted it there
        (tmp_path / "c" / ".owner.json").write_text(json.dumps(begun))
        with pytest.raises(ConfigError, match="does not record its settings and data"):
            trial.ended(finished)
    # Killed before its last checkpoint was written.
    identity.note(finished, identity.settings_of(finished))
    assert trial.ended(finished) is None
    identity.note(finished, identity.of_trial(finished))
    assert trial.ended(finished).status == "success"


@pytest.mark.parametrize("changed", ["evaluation data", identity._WEIGHTS])
def test_a_complete_trial_is_of_its_evaluation_data_and_starting_weights(
    changed, finished, config, tmp_path
):
    identity.note(finished, identity.of_trial(finished))
    if changed == "evaluation data":
        with open(tmp_path / "eval" / "part_eval_10k.hdf5", "ab") as file:
            file.write(b"0")
        other = config()
    else:
        (tmp_path / "w.pt").write_bytes(b"0")
        other = config(INIT_CHECKPOINT=str(tmp_path / "w.pt"))
    with pytest.raises(ConfigError, match=f"is of a run with {changed} "):
        trial.ended(other)


def test_a_run_in_its_own_folder_may_grow_and_resolve_what_was_auto(finished, config):
    begun = identity.settings_of(finished)
    identity.note(finished, begun | {"PRECISION": "auto"})
    assert trial.ended(config(MAX_STEPS="16", LR_DECAY_STEPS="8")) is None
    resolved = identity.settings_of(config(PRECISION="fp32"))
    assert begun["PRECISION"] == resolved["PRECISION"]
    assert identity.run_identity(finished, 7)["MASKING"] is None, "as noted before"
    with pytest.raises(ConfigError, match="is of a run with LR "):
        trial.ended(config(LR="0.01"))


def test_a_trial_has_begun_with_its_folder_of_checkpoints_alone(config, tmp_path):
    first = config()
    identity.note(first, identity.settings_of(first))
    assert identity.has_begun(first)
    assert not identity.has_begun(config(CHECKPOINT_DIR=str(tmp_path / "d")))
    other = config(TRIAL="1")
    assert not identity.has_begun(other)
    assert resume.has_whole_clock(other, None)
    assert not resume.has_whole_clock(other, {"step": 4}), "it was begun elsewhere"


def test_data_are_known_by_the_index_that_has_their_digests(tmp_path, prepared):
    before = identity.contents(tmp_path / "eval")
    (tmp_path / "eval" / INDEX).write_text("{}")
    assert identity.contents(tmp_path / "eval") != before


def test_drawn_data_are_known_by_their_rows(config):
    """Which have no digests."""
    counts = np.array([3])
    drawn = SimpleNamespace(vocab_md5="", row_counts=lambda: counts, identity=dict)
    saved = {"row_counts": [3], "data_digest": identity.data_digest({})}
    resume.check_data(config().checkpoint, saved, drawn)
    with pytest.raises(ConfigError, match="4 rows in 1 files, this one has 3 in 1: "):
        resume.check_data(config().checkpoint, saved | {"row_counts": [4]}, drawn)


def test_a_folder_is_a_trials_own_attempt_by_its_number():
    attempts = ("running_1", True), ("running_1_2", True), ("running_0", False)
    for name, is_attempt in attempts:
        run = rundir.RunConfig(run_dir=rundir.Path("/x", name), trial=1)
        assert run.folder == rundir.Path("/x" if is_attempt else f"/x/{name}")
    nowhere = rundir.RunConfig()
    # Without a folder none can be told from another.
    assert not nowhere.owns(nowhere.owner)


def test_only_an_interrupted_run_with_these_settings_follows_a_checkpoint_unasked(
    config, tmp_path
):
    def saved(**facts):
        first = config()
        run = {"run": identity.run_identity(first, 7)}
        run["computed"] = identity.computed(first)
        sharded.save(path, {**run, **first.run.owner, "ended": False, **facts})
        return path

    path = tmp_path / "c" / "step_0000000004.pt"
    assert resume.may_follow(config(), saved())
    assert not resume.may_follow(config(LR="0.01"), path)
    assert not resume.may_follow(config(TRIAL="1"), path)
    assert resume.may_follow(config(TRIAL="1", RESUME="1"), path)
    assert resume.may_follow(config(), saved(ended=True)), "its result is lost"
    (tmp_path / "run" / "result_0.txt").touch()
    assert not resume.may_follow(config(), path), "it is complete"
    (tmp_path / "run" / "result_0.txt").unlink()
    left = {"step": 4, "ended": True}
    assert resume.describe(config(), left).endswith("step 4: the run had ended there")
    closed = config(SUBMISSION_DIVISION="closed", DGXSYSTEM="x")
    # It is timed from its start.
    assert resume.newest(closed, World(closed.dist)) is None
    assert "it replaces what" in resume.describe(closed, None)


def test_ranks_compare_code_extension_checkpoint_and_whether_they_save(config):
    seen = []
    world = SimpleNamespace(agree=lambda facts, _: seen.append(facts))
    for changed, saved in (
        ({"EXTENSION": "json"}, None),  # any module that is imported
        ({"CHECKPOINT_DIR": ""}, {"token": 3}),
        ({}, {"token": 4}),
    ):
        resume.check_ranks(config(**changed), world, saved)
    assert [facts["CHECKPOINT_DIR"] for facts in seen] == ["set", "unset", "set"]
    assert [facts.get("the newest checkpoint") for facts in seen] == [None, 3, 4]
    assert seen[0]["LR"] == 0.05
    assert re.fullmatch("json [0-9a-f]{16}", seen[0]["EXTENSION"]), "its code as well"
    assert {"code", "torch", "BERT_CONFIG"} <= seen[0].keys()
    assert not {"RANK", "OMP_NUM_THREADS"} & seen[0].keys(), "a rank's own"


def test_the_first_reason_of_a_failure_is_kept(config, tmp_path):
    for reason in ("cause", "a peer is gone"):
        rundir.write_error(config().run, reason)
    assert (tmp_path / "run" / "error_0.txt").read_text() == "cause\n"
