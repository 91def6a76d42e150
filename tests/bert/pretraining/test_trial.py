"""A trial's files are its own: no byte of a finished or foreign one changes, whatever is refused; what tells a run from
another one, in its folder, in its checkpoints and between its ranks; and what a log says of itself is so.
"""

import json
import os
import re
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

from bert.checkpoint import sharded, sums
from bert.checkpoint.save import read_checkpoint
from bert.core import rundir
from bert.core.claim import Claim
from bert.core.dist import World, _where_they_differ
from bert.data.shards import INDEX
from bert.pretraining import identity, resume, trial
from bert.pretraining.config import PretrainingConfig
from bert.training import schedule
from common.env import ConfigError, from_env
from review.logs.mllog import read_log
from review.results.benchmark import starting_point
from review.results.run import run_of
from review.verdict.training_rules import check_run

from ..states import content, newest, same


def altered(folder: Path, under_the_digest: bool = False) -> str:
    """A copy of a data set, or with ``under_the_digest`` itself, with another label."""
    copy = folder if under_the_digest else folder.with_name("altered")
    if copy != folder:
        shutil.copytree(folder, copy)
    with h5py.File(copy / "part_00001_of_00003.hdf5", "r+") as file:
        file["masked_lm_ids"][3] ^= 1
    return str(copy)


def test_a_finished_run_keeps_every_byte(train, tmp_path):
    train(RESUME=1)
    folders = tmp_path / "run", tmp_path / "c"
    before = content(*folders)
    assert b"run_stop" in before[str(tmp_path / "run" / "result_0.txt")]
    other_data = altered(tmp_path / "packed")
    (Path(other_data) / "part_00000_of_00003.hdf5").unlink()
    for changed in (
        {"LR": "0.02", "RESUME": "1"},
        {"RESUME": "0"},
        {"RESUME": "1", "DATADIR_PHASE2_PACKED": other_data},
        {"RESUME": "1", "DATADIR_PHASE2_PACKED": "/nowhere"},
        {"LERNING_RATE": "3"},
        {"BATCHSIZE": "none"},
        {"RESUME": "1", "MAX_STEPS": "9"},
        {"TRIAL": "1", "LR": "0.02"},
    ):
        refused = train(status=2, **changed)
        assert len(refused.stderr.splitlines()) == 1, refused.stderr
        assert content(*folders) == before, changed
    train(("--check",), status=2, LR=0.02)
    said = "of this very run, complete (success): nothing is left\n"
    assert train(RESUME=1).stderr.endswith(said)
    assert content(*folders) == before


def test_a_run_that_ended_short_of_its_target_is_complete_too(train, tmp_path):
    target = {"EVAL_ITER_SAMPLES": "24", "TARGET_MLM_ACCURACY": "0.99", "RESUME": "1"}
    train(**target, status=3)
    before = content(tmp_path / "run")
    again = train(**target, status=3)
    assert "complete (aborted)" in again.stderr
    assert content(tmp_path / "run") == before


def test_a_run_that_stopped_loses_nothing_to_what_is_refused_and_says_where_it_goes_on(
    train, tmp_path
):
    for ranks in (1, 2):
        part = {"STEPS_THIS_RUN": 2, "GRADIENT_STEPS": 2 // ranks}
        done = train(ranks=ranks, RESUME=1, **part)
        folder = f"CHECKPOINT_DIR={tmp_path / 'c'}"
        anew = f"RESUME=1: no checkpoint in {folder}: from the start, 8 steps"
        on = f"continues {folder} from step 2: 6 of 8 steps are left"
        assert f"bert: {anew if ranks == 1 else on}\n" in done.stderr
    before = content(tmp_path / "run", tmp_path / "c")
    same = {"RESUME": "1", "GRADIENT_STEPS": "2"}
    for changed in (
        {"LR": "0.02"},
        {"DATADIR_PHASE2_PACKED": altered(tmp_path / "packed")},
        {"EVAL_ITER_SAMPLES": "24", "EVALDIR": "/nowhere"},
        {"CHECKPOINT_DIR": str(tmp_path / "mistyped"), "LR": "0.02"},
    ):
        train(status=2, **same | changed)
        assert content(tmp_path / "run", tmp_path / "c") == before, changed
    checked = train(("--check",), **same)
    assert "step 4 of" in checked.stdout, checked.stderr
    assert "ATTENTION" not in checked.stdout, "as the run resolves what is auto"
    (tmp_path / "run" / "error_0.txt").unlink()
    train(**same)
    assert not (tmp_path / "run" / "error_0.txt").exists()


def test_what_one_rank_cannot_evaluate_stops_all_at_the_start(train, tmp_path):
    evaluates = {"EVAL_ITER_SAMPLES": "48", "EVAL_ITER_START_SAMPLES": "48"}
    odd = {"EVALDIR": str(tmp_path / "gone")}
    refused = train(ranks=2, odd=odd, status=2, **evaluates)
    assert f"EVALDIR={tmp_path / 'gone'}" in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "run" / "result_0.txt").exists()


def test_a_rehearsal_has_folders_of_its_own(train, prepared, tmp_path):
    rehearsal = {"REHEARSAL": "1", "EVAL_ITER_SAMPLES": "24", "MAX_STEPS": "2"}
    train(**rehearsal)
    assert (tmp_path / "run" / "rehearsal" / "result_0.txt").is_file()
    train()
    for name in ("x_rehearsal", "x_rehearsal/running_0"):
        given = prepared | rehearsal | {"RUN_DIR": f"/{name}"}
        config = from_env(PretrainingConfig, given).rehearsed()
        assert str(config.run.run_dir) == f"/{name}", "as the launch scripts name it"


# A closed run of any model on any data, which are called the benchmark's.
CLOSED = """
from bert.pretraining import closed_division
closed_division.check = lambda *_, **__: None
known = {"weights": "ab", "training_data": "cd", "evaluation_data": "ef", "unproved": []}
closed_division.starting_point = lambda *_: known
"""


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_closed_log_claims_proof_once_data_are_read(is_changed, train, tmp_path):
    (tmp_path / "first.py").write_text(CLOSED)
    closed = {"SUBMISSION_DIVISION": "closed", "FIRST": tmp_path / "first.py"}
    if is_changed:
        altered(tmp_path / "packed", under_the_digest=True)
    train(status=2 if is_changed else 0, **closed)
    run = run_of(read_log(tmp_path / "run" / "result_0.txt"))
    first, *rest = [event.value["unproved"] for event in run.log.all("starting_point")]
    assert first == ["training_data", "evaluation_data"]
    assert rest == ([] if is_changed else [[]])
    assert starting_point(run)["unproved"] == (first if is_changed else [])
    assert run.status == ("error" if is_changed else "success")
    broken = [finding for finding in check_run(run) if finding.key == "run_error"]
    why = ["was changed after" in finding.message for finding in broken]
    assert why == [True] * is_changed
    stops = [event.metadata["status"] for event in run.log.all("run_stop")]
    assert stops == ["success", "aborted"][: 1 + is_changed], "for other readers"


@pytest.mark.parametrize("place", ["", "model.ckpt-9", "model.ckpt-9.index"])
def test_a_checkpoint_of_tensorflow_is_to_be_converted(place, prepared, tmp_path):
    folder = tmp_path / "tf"
    folder.mkdir()
    for suffix in ("index", "meta", "data-00000-of-00001"):
        (folder / f"model.ckpt-9.{suffix}").touch()
    prefix = folder / "model.ckpt-9"
    given = prepared | {"INIT_CHECKPOINT": str(folder / place)}
    with pytest.raises(ConfigError) as caught:
        from_env(PretrainingConfig, given).check()
    convert = f"convert_checkpoint --source {prefix} --target {prefix}.pt"
    assert convert in str(caught.value)


def test_a_schedule_that_is_no_polynomial_logs_no_power(prepared, monkeypatch):
    power = "opt_lamb_learning_rate_decay_poly_power"
    config = from_env(PretrainingConfig, prepared)
    assert config.hyperparameters(7)[power] == 1.0
    flat = schedule.ScheduleRule(lambda step, config: config.lr)
    monkeypatch.setitem(schedule.RULES, "mlperf", flat)
    assert power not in config.hyperparameters(7)
    json.dumps(config.hyperparameters(7))


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


def test_a_log_with_an_end_is_complete_once_that_is_noted(finished, tmp_path):
    for begun in ({}, finished.run.owner):  # an earlier version noted it there
        (tmp_path / "c" / ".owner.json").write_text(json.dumps(begun))
        with pytest.raises(ConfigError, match="does not record its settings and data"):
            trial.ended(finished)
    # Killed before its last checkpoint was written.
    identity.note(finished, identity.settings_of(finished))
    assert trial.ended(finished) is None
    identity.note(finished, identity.of_trial(finished))
    assert trial.ended(finished).status == "success"


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ("evaluation data", "eval/part_eval_10k.hdf5"),
        ("training data", "packed/part_00001_of_00003.hdf5"),
        (identity._WEIGHTS, "w.pt"),
    ],
)
def test_a_complete_trial_is_of_its_data_and_starting_weights(
    changed, path, finished, config, tmp_path
):
    identity.note(finished, identity.of_trial(finished))
    with open(tmp_path / path, "ab") as file:
        file.write(b"0")
    weights = {"INIT_CHECKPOINT": str(tmp_path / path)} if path == "w.pt" else {}
    with pytest.raises(ConfigError, match=f"is of a run with {changed} "):
        trial.ended(config(**weights))


def test_a_run_in_its_own_folder_may_grow_and_resolve_what_was_auto(finished, config):
    begun = identity.settings_of(finished)
    identity.note(finished, begun | {"PRECISION": "auto"})
    assert (
        trial.ended(config(MAX_STEPS="16", LR_DECAY_STEPS="8", LOG_EVERY_STEPS="3"))
        is None
    )
    resolved = identity.settings_of(config(PRECISION="fp32"))
    assert begun["PRECISION"] == resolved["PRECISION"]
    assert identity.run_identity(finished, 7)["MASKING"] is None, "as noted before"
    for name, value in {"LR": "0.01", "SEED": "6", "OPT_LAMB_BETA_1": "0.8"}.items():
        with pytest.raises(ConfigError, match=f"is of a run with {name} "):
            trial.ended(config(**{name: value}))


def test_a_trial_has_begun_with_its_folder_of_checkpoints_alone(config, tmp_path):
    first = config()
    identity.note(first, identity.settings_of(first))
    assert identity.has_begun(first)
    assert not identity.has_begun(config(CHECKPOINT_DIR=str(tmp_path / "d")))
    other = config(TRIAL="1")
    assert not identity.has_begun(other)
    assert resume.has_whole_clock(other, None)
    assert not resume.has_whole_clock(other, {"step": 4}), "it was begun elsewhere"


@pytest.mark.parametrize("name", ["x.hdf5", "x.hdf", "part_00000"])
def test_data_are_known_by_sizes_and_the_index_that_has_their_digests(name, tmp_path):
    """Of record files, whatever they are called, or of one file of any name."""
    digests = []
    for file in (name, name, INDEX, ".DS_Store"):
        with open(tmp_path / file, "ab") as written:
            written.write(b"a")
        digests.append(identity.contents(tmp_path))
    assert len(set(digests[:3])) == 3
    assert digests[3] == digests[2], "a hidden one does not count"
    one = tmp_path / "x.bin"
    one.write_bytes(b"a")
    before = identity.contents(one)
    one.write_bytes(b"ab")
    assert identity.contents(one) != before


def test_drawn_data_are_known_by_their_rows(config):
    """Which have no digests."""
    counts = np.array([3])
    drawn = SimpleNamespace(vocab_md5="", row_counts=lambda: counts, identity=dict)
    saved = {"row_counts": [3], "data_digest": identity.data_digest({})}
    resume.check_data(config().checkpoint, saved, drawn)
    with pytest.raises(ConfigError, match="4 rows in 1 files, this one has 3 in 1: "):
        resume.check_data(config().checkpoint, saved | {"row_counts": [4]}, drawn)
    with pytest.raises(ConfigError, match="this one has 3 in 1 with other contents: "):
        resume.check_data(config().checkpoint, saved | {"data_digest": "x"}, drawn)


def test_a_folder_is_a_trials_own_attempt_by_its_number():
    attempts = ("running_1", True), ("running_1_2", True), ("running_0", False)
    for name, is_attempt in attempts:
        run = rundir.RunConfig(run_dir=rundir.Path("/x", name), trial=1)
        assert run.folder == rundir.Path("/x" if is_attempt else f"/x/{name}")
    nowhere = rundir.RunConfig()
    # Without a folder none can be told from another.
    assert not nowhere.owns(nowhere.owner)


def test_only_an_interrupted_run_follows_a_checkpoint_unasked(config, tmp_path):
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


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_fresh_run_that_finds_anothers_checkpoints_stops(train, tmp_path):
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


def test_a_trial_begun_outside_its_log_has_no_time(train, prepared, tmp_path):
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


def test_a_run_that_ended_and_lost_its_result_ends_so_again(train, tmp_path):
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
    folder = altered(tmp_path / "packed", under_the_digest=True)
    said = f"{folder}/part_00001_of_00003.hdf5 was changed after it was written"
    for arguments in ((), ("--check",)):
        folder = tmp_path / f"r{len(arguments)}"
        refused = train(arguments, status=2, RESUME=1, RUN_DIR=folder)
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
def test_a_flipped_bit_is_named_at_a_resumption_and_a_start(train, tmp_path, shards):
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
    other = kind | {"CHECKPOINT_DIR": tmp_path / "d", "INIT_CHECKPOINT": last}
    for arguments in ((), ("--check",)):
        folder = tmp_path / f"r{len(arguments)}"
        refused = train(arguments, status=2, **other, RUN_DIR=folder)
        said = refused.stderr.splitlines()[-1]
        assert "differs from its checksum" in said
        assert f"INIT_CHECKPOINT={last}" in said


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
    # Parts of an earlier checkpoint, and of the next one.
    for name in (".step_0000000002.7", ".step_0000000106.8"):
        (tmp_path / name).mkdir()
    sharded.prune(tmp_path, 2, 100)
    assert names(tmp_path) == [".step_0000000106.8", "step_0000000100.pt"]


def test_a_kill_while_a_checkpoint_is_removed_leaves_no_half(tmp_path, monkeypatch):
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


def test_a_model_that_differs_late_in_its_description_is_shown_where_it_does():
    common = json.dumps({"hidden_size": 1024, "layers": 24, "more": "x" * 90})
    mine, theirs = _where_they_differ(common + "vocab 30522", common + "vocab 30528")
    assert mine != theirs
    assert len(mine) <= 83
