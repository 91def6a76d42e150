"""A trial's files are its own: no byte of a finished or foreign one changes, whatever is refused; and
what a log says of itself is so.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import pytest

from bert.pretraining.config import PretrainingConfig
from bert.training import schedule
from common.env import ConfigError, from_env
from review.logs.mllog import read_log
from review.results.benchmark import starting_point
from review.results.run import run_of
from review.verdict.training_rules import check_run

from ..states import content


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


def test_what_one_rank_alone_cannot_evaluate_stops_all_before_the_first_step(
    train, tmp_path
):
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
def test_a_closed_log_claims_proof_only_once_the_data_are_read(
    is_changed, train, tmp_path
):
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
def test_a_checkpoint_of_tensorflow_is_named_with_what_converts_it(
    place, prepared, tmp_path
):
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
