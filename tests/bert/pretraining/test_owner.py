"""A folder of checkpoints belongs to one trial of one run, and what is read back is what was
written.
"""

from __future__ import annotations

import json
import os
import zipfile

import h5py
import pytest
import torch

from bert.checkpoint import sharded, sums
from bert.checkpoint.save import read_checkpoint
from bert.core.claim import Claim
from bert.core.dist import _where_they_differ
from bert.pretraining import identity, resume
from bert.pretraining.config import PretrainingConfig
from common.env import from_env

from ..states import content, newest, same


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_trials_never_share_a_folder_and_each_resumes_its_own(train, tmp_path):
    for trial, seed in ((0, 7), (1, 8)):
        train(TRIAL=trial, SEED=seed, RESUME=1, STEPS_THIS_RUN=4)
    first, second = tmp_path / "c", tmp_path / "c" / "trial_1"
    assert (newest(first)["run"]["SEED"], newest(second)["run"]["SEED"]) == (7, 8)
    assert not same(newest(first)["model"], newest(second)["model"])
    train(TRIAL=1, SEED=8, RESUME=1)
    assert (newest(first)["step"], newest(second)["step"]) == (4, 8)
    whose = newest(second)
    assert (whose["trial"], whose["run_dir"]) == (1, str(tmp_path / "run"))
    log = (tmp_path / "run" / "result_1.txt").read_text()
    assert '"key": "clock_not_whole", "value": {"continued_at_step": 4}' in log


def test_a_fresh_run_that_finds_anothers_checkpoints_stops_and_names_both_ways_on(
    train, tmp_path
):
    train(STEPS_THIS_RUN=4)
    before = names(tmp_path / "c")
    for changed in ({}, {"LR": "0.01"}, {"SEED": "9"}):
        refused = train(RUN_DIR=tmp_path / "other", status=2, **changed)
        (line,) = refused.stderr.splitlines()
        said = "holds step_0000000004.pt of another or an earlier run: set RESUME=1"
        assert said in line
        assert line.endswith("or for a new run give another CHECKPOINT_DIR")
    assert names(tmp_path / "c") == before


def test_a_restart_of_the_very_same_run_continues_without_resume(train, tmp_path):
    train(RUN_DIR=tmp_path / "whole", CHECKPOINT_DIR=tmp_path / "whole")
    home = tmp_path / "run"
    # As the launch scripts name a trial's folder.
    for staging, steps in (("running_0", 4), ("running_0_1", 0)):
        train(RUN_DIR=home / staging, STEPS_THIS_RUN=steps)
    assert same(newest(tmp_path / "whole")["model"], newest(tmp_path / "c")["model"])
    # As they collect it.
    result = home / "result_0.txt"
    (home / "running_0_1" / result.name).rename(result)
    before = content(home, tmp_path / "c")
    for folder in ({}, {"CHECKPOINT_DIR": tmp_path / "d"}):
        # A run that has ended is not restarted.
        again = train(RUN_DIR=home / "running_0", status=2, **folder)
        assert f"{result} is complete" in again.stderr
    assert content(home, tmp_path / "c") == before


def test_a_folder_of_an_earlier_version_is_whose_it_says(train, tmp_path):
    """That noted it beside the checkpoints, and not in the trial's identity."""
    train(STEPS_THIS_RUN=4)
    saved, noted = tmp_path / "c", tmp_path / "run" / "identity_0.json"
    for path in sharded.complete(saved):
        state = read_checkpoint(path)
        owner = {name: state.pop(name) for name in ("trial", "run_dir")}
        sharded.save(path, state)
    (saved / ".owner.json").write_text(json.dumps(owner | {"first_weights": 1}))
    noted.write_text(json.dumps({"LR": 0.05}))
    train(RUN_DIR=tmp_path / "other", status=2)
    done = train(STEPS_THIS_RUN=2)
    assert "from step 4: 4 of 8 steps are left" in done.stderr
    for path in sharded.complete(saved):
        path.unlink()
    noted.unlink()
    train()
    assert "clock_not_whole" in (tmp_path / "run" / "result_0.txt").read_text()


def test_a_trial_whose_first_start_is_not_in_its_log_has_no_time(
    train, prepared, tmp_path
):
    """Restarted before its first checkpoint; in the closed division that is another run."""
    train(STEPS_THIS_RUN=2)
    for path in sharded.complete(tmp_path / "c"):
        path.unlink()
    given = prepared | {"CHECKPOINT_DIR": str(tmp_path / "c"), "DGXSYSTEM": "x"}
    cases = ("open", "0", False), ("closed", "0", True), ("closed", "1", False)
    for division, resume_, whole in cases:
        given |= {"SUBMISSION_DIVISION": division, "RESUME": resume_}
        config = from_env(PretrainingConfig, given)
        assert resume.has_whole_clock(config, None) == whole
    config = from_env(PretrainingConfig, given | {"RUN_DIR": str(tmp_path / "r")})
    assert resume.has_whole_clock(config, None)
    train()
    log = (tmp_path / "run" / "result_0.txt").read_text()
    assert '"key": "clock_not_whole", "value": {"continued_at_step": 0}' in log


def test_a_run_that_ended_and_lost_its_result_ends_in_the_same_way_again(
    train, tmp_path
):
    target = {"EVAL_ITER_SAMPLES": "24", "TARGET_MLM_ACCURACY": "0.3"}
    staging, before = str(tmp_path / "run" / "running_0"), None
    for _ in range(2):
        train(**target, MAX_STEPS=20, RUN_DIR=staging)
        (tmp_path / "run" / "running_0" / "result_0.txt").unlink()
        before = before or newest(tmp_path / "c")
        assert same(before, newest(tmp_path / "c"))
    assert before["ended"]
    assert before["step"] < 20


def test_whose_a_checkpoint_is_is_for_rank_0_to_say(train, tmp_path):
    """Over ssh the other machines may not see the folder of the run."""
    for steps in (4, 0):
        odd = {"RUN_DIR": str(tmp_path / f"tmp_{steps}")}
        train(ranks=2, odd=odd, STEPS_THIS_RUN=steps)


def test_the_second_of_two_writers_is_refused_and_touches_nothing(train, tmp_path):
    told = tmp_path / "run" / "error_0.txt"
    for folder, name, file in (
        (tmp_path / "run", "RUN_DIR", ".writer_0"),
        (tmp_path / "c", "CHECKPOINT_DIR", ".writer"),
    ):
        with Claim(folder / file, f"{name}={folder}"):
            (line,) = train(status=2).stderr.splitlines()
            assert f"{name}={folder}: process {os.getpid()} on" in line
            assert names(folder) == [file]
            assert told.exists() == (name == "CHECKPOINT_DIR")
        assert names(folder) == []
    assert "CHECKPOINT_DIR=" in told.read_text()


def test_runs_from_other_weights_are_not_continued(train, tmp_path):
    first = tmp_path / "first"
    train(CHECKPOINT_DIR=first, RUN_DIR=tmp_path / "r", STEPS_THIS_RUN=4)
    weights = [first / f"step_000000000{step}.pt" for step in (2, 4)]
    train(INIT_CHECKPOINT=weights[0], STEPS_THIS_RUN=2)
    refused = train(INIT_CHECKPOINT=weights[1], RESUME=1, status=2)
    assert "is of a run from other weights than INIT_CHECKPOINT=" in refused.stderr


def test_a_run_does_not_continue_on_data_altered_in_place(train, tmp_path):
    train(STEPS_THIS_RUN=4)
    path = tmp_path / "packed" / "part_00001_of_00003.hdf5"
    with h5py.File(path, "r+") as file:
        file["masked_lm_ids"][3] ^= 1
    for arguments in ((), ("--check",)):
        folder = tmp_path / f"r{len(arguments)}"
        refused = train(arguments, status=2, RESUME=1, RUN_DIR=folder)
        said = f"{path} was changed after it was written"
        assert said in refused.stderr.splitlines()[-1]


def flip(path, record_of="data/"):
    """Flips a bit in the middle of a record of tensors."""
    with zipfile.ZipFile(path) as archive:
        records = [one for one in archive.infolist() if record_of in one.filename]
        record = max(records, key=lambda one: one.file_size)
        begin = record.header_offset + 30
        names = path.read_bytes()[begin - 4 : begin]
        begin += sum(int.from_bytes(names[i : i + 2], "little") for i in (0, 2))
    with open(path, "r+b") as file:
        file.seek(begin + record.file_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("shards", ["0", "1"])
def test_a_flipped_bit_is_named_and_the_checkpoint_before_is_offered(
    train, tmp_path, shards
):
    kind = {"SHARD_OPTIMIZER": "1", "CHECKPOINT_SHARDS": shards}
    train(**kind, STEPS_THIS_RUN=4)
    (_, last) = sharded.complete(tmp_path / "c")
    flip(last / "rank_00000.pt" if shards == "1" else last)
    suffix = "" if shards == "1" else ".pt"
    (line,) = train(**kind, RESUME=1, status=2).stderr.splitlines()
    assert f"step_0000000004{suffix}: damaged checkpoint (" in line
    assert "differs from its checksum" in line
    before = f"remove it to resume from step_0000000002{suffix}, the one before"
    assert line.endswith(before)


@pytest.mark.parametrize("shards", ["0", "1"])
def test_a_flipped_bit_in_the_weights_to_start_from_is_found(train, tmp_path, shards):
    kind = {"SHARD_OPTIMIZER": "1", "CHECKPOINT_SHARDS": shards}
    train(**kind, STEPS_THIS_RUN=2)
    (path,) = sharded.complete(tmp_path / "c")
    flip(path / "rank_00000.pt" if shards == "1" else path)
    other = {"CHECKPOINT_DIR": str(tmp_path / "d"), "INIT_CHECKPOINT": str(path)}
    for arguments in ((), ("--check",)):
        folder = tmp_path / f"r{len(arguments)}"
        refused = train(arguments, status=2, **other, RUN_DIR=folder)
        said = refused.stderr.splitlines()[-1]
        assert "differs from its checksum" in said
        assert f"INIT_CHECKPOINT={path}" in said


def test_a_whole_shard_of_another_checkpoint_is_found(train, tmp_path):
    kind = {"SHARD_OPTIMIZER": "1", "CHECKPOINT_SHARDS": "1"}
    train(**kind, STEPS_THIS_RUN=4)
    before, last = sharded.complete(tmp_path / "c")
    (last / "rank_00000.pt").write_bytes((before / "rank_00000.pt").read_bytes())
    sums.check(last / "rank_00000.pt")
    said = r"rank_00000\.pt is of another checkpoint"
    with pytest.raises(sums.ChecksumError, match=said):
        sharded.check(last, 0, 1)


def test_every_bit_of_a_file_is_found_or_changes_nothing_that_is_read(tmp_path):
    path = tmp_path / "step_1.pt"
    state = {"a": torch.arange(40), "b": {"c": "text", "d": 1.5}}
    torch.save(state, path)
    data = path.read_bytes()
    unseen = 0
    for place in range(0, len(data), 7):
        flipped = bytes([data[place] ^ 1])
        path.write_bytes(data[:place] + flipped + data[place + 1 :])
        try:
            sums.check(path)
            unseen += not same(torch.load(path, weights_only=True), state)
        except Exception:
            continue
    assert unseen == 0


def test_a_repeated_attempt_replaces_the_checkpoints_of_the_one_before(tmp_path):
    for step in (900, 1000, 100):
        (tmp_path / f"step_{step:010d}.pt").touch()
    sharded.prune(tmp_path, 2, 100)
    assert names(tmp_path) == ["step_0000000100.pt"]


def test_prune_leaves_the_parts_of_the_next_checkpoint(tmp_path):
    for name in (".step_0000000002.7", ".step_0000000006.8"):
        (tmp_path / name).mkdir()
    sharded.prune(tmp_path, 2, 4)
    assert names(tmp_path) == [".step_0000000006.8"]


def test_a_kill_while_a_checkpoint_is_removed_leaves_no_half_that_counts(
    tmp_path, monkeypatch
):
    for name in ("step_0000000002", "global_step3", "step_0000000004"):
        (tmp_path / name).mkdir()
        for file in (sharded.INDEX, "rank_00000.pt"):
            (tmp_path / name / file).touch()
    halves = []

    def killed(path, ignore_errors):
        (path / "rank_00000.pt").unlink()
        halves.append(path)

    with monkeypatch.context() as patch:
        patch.setattr(sharded.shutil, "rmtree", killed)
        sharded.prune(tmp_path, 1, 4)
    assert len(halves) == 2
    assert sharded.complete(tmp_path) == [tmp_path / "step_0000000004"]
    sharded.remove_unfinished(tmp_path)
    assert names(tmp_path) == ["step_0000000004"]


def test_another_split_of_the_batch_is_told_as_more_than_rounding(prepared):
    split = prepared | {"BATCHSIZE": "2", "GRADIENT_STEPS": "3"}
    before = from_env(PretrainingConfig, split)
    saved = {"run": identity.run_identity(before, 7), "computed": identity.computed(before)}  # fmt: skip
    after = from_env(PretrainingConfig, prepared | {"BATCHSIZE": "6"})
    said = "losses differ by the weight of each token in its micro-batch, more than by"
    assert said in identity.check_identity(after, 7, saved)


def test_a_model_that_differs_late_in_its_description_is_shown_where_it_does():
    common = json.dumps({"hidden_size": 1024, "layers": 24, "more": "x" * 90})
    mine, theirs = _where_they_differ(common + "vocab 30522", common + "vocab 30528")
    assert mine != theirs
    assert len(mine) <= 83
