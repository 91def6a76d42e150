"""Runs without a target, in several processes, whose checkpoints are written while they train; a bad
batch can be left out by its number, and the best checkpoint is kept beside the newest.
"""

import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from bert.checkpoint import save, sharded
from bert.checkpoint.save import CheckpointConfig, Writer
from bert.data.format import open_records
from bert.pretraining.config import PretrainingConfig
from common.env import ConfigError, from_env

from ...disks import enlarge, small_disk
from ..states import events, losses, newest, same, values


@pytest.fixture
def endless(prepared, tmp_path):
    """Without evaluation, on a schedule of 8 steps."""
    settings = {"EVAL_ITER_START_SAMPLES": "", "EVAL_ITER_SAMPLES": "", "TARGET_MLM_ACCURACY": "", "EVALDIR": "",
                "LR_DECAY_STEPS": "8", "WARMUP_PROPORTION": "0.5", "CHECKPOINT_DIR": str(tmp_path / "c")}  # fmt: skip
    return prepared | settings


def test_a_run_without_a_target_succeeds_at_its_last_step(endless, run_bert):
    checked = run_bert(endless, arguments=("--check",), status=0)
    assert "evaluation     none, no target" in checked.stdout
    run_bert(endless, status=0)
    folder = Path(endless["RUN_DIR"])
    told = events(endless)
    (stop,) = [event for event in told if event["key"] == "run_stop"]
    assert stop["metadata"]["status"] == "success"
    *_, last = sorted(Path(endless["DATADIR_PHASE2_PACKED"]).glob("*.hdf5"))
    most = np.diff(open_records(last)[0].masked_lm_offsets).max()
    assert values(endless, "max_predictions_per_seq") == [most]
    assert not [event for event in told if event["key"].startswith("eval_a")]
    assert not (folder / "error_0.txt").exists()
    *_, summary = (folder / "metrics_0.jsonl").read_text().splitlines()
    assert json.loads(summary)["step"] == 8


def test_a_run_in_parts_whose_end_moves_is_the_whole_run(endless, run_bert, tmp_path):
    whole = run_bert(endless, status=0, LOG_EVERY_STEPS=1)
    parts = endless | {"CHECKPOINT_DIR": str(tmp_path / "parts"), "RESUME": "1"}
    parts |= {"RUN_DIR": str(tmp_path / "run_parts"), "LOG_EVERY_STEPS": "1"}
    first = run_bert(parts, status=0, MAX_STEPS=5, STEPS_THIS_RUN=3)
    said = "bert: stopped at step 3 (STEPS_THIS_RUN); RESUME=1 continues"
    assert first.stderr.splitlines()[-1] == said
    second = run_bert(parts, MAX_STEPS=5, STEPS_THIS_RUN=3)
    assert "stopped" not in second.stderr, "step 5 is the last"
    assert newest(tmp_path / "parts")["step"] == 5
    # The log of five steps is complete, and stays.
    parts["RUN_DIR"] = str(tmp_path / "run_of_more")
    third = run_bert(parts, status=0, STEPS_THIS_RUN=100)
    assert same(newest(tmp_path / "parts"), newest(tmp_path / "c"))
    said = [loss for part in (first, second, third) for loss in losses(part)]
    assert said == losses(whole)
    assert values(parts, "train_samples") == values(endless, "train_samples")
    parts["RUN_DIR"] = str(tmp_path / "run_of_other")
    shorter = run_bert(parts, status=2, LR_DECAY_STEPS=9)
    assert "LR_DECAY_STEPS 8, this one has 9" in shorter.stderr


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 2_333_334),
        ({"TARGET_MLM_ACCURACY": "0"}, 9_000_000),
        ({"EVAL_ITER_SAMPLES": "0"}, 9_000_000),
        ({"EVAL_ITER_SAMPLES": "0", "MAX_SAMPLES_TERMINATION": "60"}, 10),
    ],
    ids=["target", "no-target", "no-evaluation", "said"],
)
def test_only_a_run_with_a_target_gives_up_by_itself(settings, steps, prepared):
    given = prepared | {"MAX_STEPS": "9000000"} | settings
    assert from_env(PretrainingConfig, given).max_steps == steps


def test_a_part_of_a_run_that_could_not_continue_is_refused(prepared):
    said = "STEPS_THIS_RUN is set and CHECKPOINT_DIR is not"
    with pytest.raises(ConfigError, match=said):
        from_env(PretrainingConfig, prepared | {"STEPS_THIS_RUN": "3"}).check()


def test_training_continues_while_a_checkpoint_is_written_and_does_not_change_it(
    tmp_path, monkeypatch
):
    written, release = save.save_checkpoint, threading.Event()

    def late(*arguments):
        return release.wait(60) and written(*arguments)

    monkeypatch.setattr(save, "save_checkpoint", late)
    writer, tensor = Writer(CheckpointConfig(directory=tmp_path, keep=9)), torch.ones(3)
    shared = {"weights": tensor}
    writer.start(1, {"model": shared, "optimizer": {"masters": shared}})
    tensor.add_(1)  # the next step, while the thread still waits
    assert not list(tmp_path.iterdir())
    release.set()
    writer.start(2, {"model": shared})  # waits for the first
    writer.wait()
    states = [newest(tmp_path, f"step_*{step}.pt") for step in (1, 2)]
    assert [float(state["model"]["weights"][0]) for state in states] == [1.0, 2.0]
    masters = states[0]["optimizer"]["masters"]["weights"]
    # What is said twice is stored once.
    assert masters.data_ptr() == states[0]["model"]["weights"].data_ptr()


# The disk is full at every checkpoint, or from the second on.
FULL_DISK = """
import os
from bert.checkpoint import save
written = save.save_checkpoint
def save_with_room(config, step, state):
    if step > int(os.environ["ROOM_UNTIL"]):
        raise OSError(28, "No space left on device")
    return written(config, step, state)
save.save_checkpoint = save_with_room
"""


def test_a_run_that_never_had_room_offers_no_resume(endless, run_bert, tmp_path):
    (tmp_path / "first.py").write_text(FULL_DISK)
    full = {"FIRST": str(tmp_path / "first.py"), "ROOM_UNTIL": "0"}
    finished = run_bert(endless | full, status=1)
    assert "none was written: make room" in finished.stderr.splitlines()[-1]
    assert "RESUME=1" not in finished.stderr
    # Not to the end, but to the step at which the next would be written, at the latest.
    early = run_bert(endless | full, status=1, CHECKPOINT_EVERY_STEPS=2)
    last = early.stderr.splitlines()[-1]
    said = f"{tmp_path / 'c'} has no checkpoint, and the first cannot be written"
    assert said in last
    assert last.endswith("make room, or give another CHECKPOINT_DIR")
    assert "step      5/8" not in early.stderr
    assert "RESUME=1" not in early.stderr


@pytest.mark.parametrize("room", [4096, 20480], ids=["description", "log"])
def test_a_full_disk_of_results_is_the_reason(endless, run_bert, tmp_path, room):
    small = tmp_path / "small"
    with small_disk(small, room):
        finished = run_bert(endless, status=1, RUN_DIR=small)
        said = f"bert: error: No space left in {small}: "
        assert said in finished.stderr.splitlines()[-1]
        assert "Traceback" not in finished.stderr


def test_a_file_system_that_fills_up_keeps_the_last_good_checkpoint_and_the_run_continues(
    endless, run_bert, tmp_path
):
    """On a disk with room for two checkpoints and a half: the third and the fourth do not fit."""
    often = endless | {"CHECKPOINT_EVERY_STEPS": "2", "CHECKPOINT_KEEP": "99"}
    whole, small = tmp_path / "whole", tmp_path / "small"
    run_bert(often, status=0, CHECKPOINT_DIR=whole)
    size = max(path.stat().st_size for path in whole.iterdir())
    with small_disk(small, int(2.5 * size)):
        resumed = often | {"CHECKPOINT_DIR": str(small), "RESUME": "1"}
        resumed["RUN_DIR"] = str(tmp_path / "run_resumed")
        finished = run_bert(resumed, status=1)
        warnings = [line for line in finished.stderr.splitlines() if "warning" in line]
        said = "bert: warning: the checkpoint of step {} cannot be written to {}: "
        for line, step in zip(warnings, (6, 8), strict=True):
            assert line.startswith(said.format(step, small))
        full = rf"No space left in {small}: step_0+8.pt needs {size / 1e6:,.1f} MB, \d.\d MB are free: make room there"
        assert re.search(full, warnings[-1])
        last = finished.stderr.splitlines()[-1]
        ended = "the last is step 8, and its checkpoint cannot be written"
        assert re.search(rf"{ended} \({full}\)", last)
        kept = ["step_0000000002.pt", "step_0000000004.pt"]
        assert sorted(path.name for path in small.glob("[!.]*")) == kept
        assert same(newest(small), newest(whole, kept[1]))
        enlarge(small, 9 * size)
        run_bert(resumed, status=0)
        assert same(newest(small), newest(whole))


# The loss of batch 3 is no number.
BAD = """
import torch
from bert.training.loop import StepCounter
begun = StepCounter.begin
StepCounter.begin = lambda steps: begun(steps) * (float("nan") if steps.batches == 3 else 1)
"""


def test_a_run_that_breaks_at_a_batch_goes_on_without_it(train, tmp_path):
    (tmp_path / "first.py").write_text(BAD)
    given = {"LOG_EVERY_STEPS": "1", "LR": "0.001", "FIRST": tmp_path / "first.py"}
    broken = train(status=1, **given)
    assert "at step 4, batch 4" in broken.stderr, "after the update of batch 3"
    done = train(RESUME=1, SKIP_BATCHES=3, **given)
    assert "bert: batch 3 is left out (SKIP_BATCHES)" in done.stderr
    saved = newest(tmp_path / "c")
    assert (saved["step"], saved["batches"], saved["left_out"]) == (8, 9, [3])
    log = (tmp_path / "run" / "result_0.txt").read_text()
    assert '"key": "batch_left_out", "value": 3' in log
    whole = {"CHECKPOINT_DIR": tmp_path / "whole", "RUN_DIR": tmp_path / "r"}
    train(SKIP_BATCHES=3, **given, **whole)
    assert same(newest(tmp_path / "whole")["model"], saved["model"])


@pytest.mark.parametrize(
    ("text", "numbers"), [("", set()), ("3", {3}), ("2, 5-7", {2, 5, 6, 7})]
)
def test_batches_are_numbers_and_spans(text, numbers, prepared):
    config = from_env(PretrainingConfig, prepared | {"SKIP_BATCHES": text})
    assert config.left_out == numbers
    for wrong in ("x", "3-", "-1"):
        config = from_env(PretrainingConfig, prepared | {"SKIP_BATCHES": wrong})
        with pytest.raises(ConfigError, match="expected numbers and spans"):
            config.check()


def test_the_best_checkpoint_is_kept_beside_the_newest(train, tmp_path):
    best = {"CHECKPOINT_BEST": "1", "EVAL_ITER_SAMPLES": "24"}
    for steps in (6, 0):
        train(RESUME=1, STEPS_THIS_RUN=steps, **best)
    folder = tmp_path / "c"
    text = (tmp_path / "run" / "metrics_0.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    accuracies = {line["step"]: line["accuracy"] for line in evaluations}
    (best,) = sharded.complete(folder / "best")
    step = sharded.step_of(best)
    assert accuracies[step] == max(accuracies.values())
    assert torch.load(best, weights_only=True)["best"] == accuracies[step]
    assert newest(folder)["step"] == 8
