"""Runs without a target, in several processes, whose checkpoints are written while they train."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from bert.checkpoint import save
from bert.checkpoint.save import CheckpointConfig, Writer
from bert.data.format import open_records
from bert.pretraining.config import PretrainingConfig
from common.env import ConfigError, from_env

from ...disks import enlarge, small_disk
from ..states import newest, same


@pytest.fixture
def endless(prepared, tmp_path):
    """Without evaluation, on a schedule of 8 steps."""
    settings = {"EVAL_ITER_START_SAMPLES": "", "EVAL_ITER_SAMPLES": "", "TARGET_MLM_ACCURACY": "", "EVALDIR": "",
                "LR_DECAY_STEPS": "8", "WARMUP_PROPORTION": "0.5", "CHECKPOINT_DIR": str(tmp_path / "c")}  # fmt: skip
    return prepared | settings


def test_a_run_without_a_target_succeeds_at_its_last_step(endless, run_bert):
    finished = run_bert(endless)
    assert finished.returncode == 0, finished.stderr
    folder = Path(endless["RUN_DIR"])
    events = [
        json.loads(line[9:])
        for line in (folder / "result_0.txt").read_text().splitlines()
    ]
    (stop,) = [event for event in events if event["key"] == "run_stop"]
    assert stop["metadata"]["status"] == "success"
    (most,) = [
        event["value"] for event in events if event["key"] == "max_predictions_per_seq"
    ]
    shards = Path(endless["DATADIR_PHASE2_PACKED"]).glob("*.hdf5")
    assert most == max(
        np.diff(open_records(path)[0].masked_lm_offsets).max()
        for path in sorted(shards)[-1:]
    )
    assert not [event for event in events if event["key"].startswith("eval_a")]
    assert not (folder / "error_0.txt").exists()
    assert (
        json.loads((folder / "metrics_0.jsonl").read_text().splitlines()[-1])["step"]
        == 8
    )


def test_the_check_needs_no_evaluation_set_where_nothing_is_evaluated(
    endless, run_bert
):
    checked = run_bert(endless, arguments=("--check",))
    assert checked.returncode == 0, checked.stderr
    assert "evaluation     none, no target" in checked.stdout


def test_a_run_in_parts_whose_end_moves_is_the_run_in_one_piece(
    endless, run_bert, tmp_path
):
    whole = run_bert(endless)
    assert whole.returncode == 0, whole.stderr
    parts = endless | {"CHECKPOINT_DIR": str(tmp_path / "parts"), "RESUME": "1"}
    parts["RUN_DIR"] = str(tmp_path / "run_parts")
    first = run_bert(parts | {"MAX_STEPS": "5", "STEPS_THIS_RUN": "3"})
    assert first.returncode == 0, first.stderr
    assert (
        first.stderr.splitlines()[-1]
        == "bert: stopped at step 3 (STEPS_THIS_RUN); RESUME=1 continues"
    )
    second = run_bert(parts | {"MAX_STEPS": "5", "STEPS_THIS_RUN": "3"})
    assert "stopped" not in second.stderr, "step 5 is the last"
    assert newest(tmp_path / "parts")["step"] == 5
    # The log of five steps is complete, and stays.
    parts["RUN_DIR"] = str(tmp_path / "run_of_more")
    third = run_bert(parts | {"STEPS_THIS_RUN": "100"})
    assert third.returncode == 0, third.stderr
    assert same(newest(tmp_path / "parts"), newest(tmp_path / "c"))
    parts["RUN_DIR"] = str(tmp_path / "run_of_other")
    shorter = run_bert(parts | {"LR_DECAY_STEPS": "9"})
    assert shorter.returncode == 2
    assert "LR_DECAY_STEPS 8, this one has 9" in shorter.stderr


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"MAX_STEPS": "9000000"}, 2_333_334),
        ({"MAX_STEPS": "9000000", "TARGET_MLM_ACCURACY": "0"}, 9_000_000),
        ({"MAX_STEPS": "9000000", "EVAL_ITER_SAMPLES": "0"}, 9_000_000),
        (
            {
                "MAX_STEPS": "9000000",
                "EVAL_ITER_SAMPLES": "0",
                "MAX_SAMPLES_TERMINATION": "60",
            },
            10,
        ),
    ],
    ids=["target", "no-target", "no-evaluation", "said"],
)
def test_only_a_run_with_a_target_gives_up_by_itself(settings, steps, prepared):
    assert from_env(PretrainingConfig, prepared | settings).max_steps == steps


def test_a_part_of_a_run_that_could_not_continue_is_refused(prepared):
    with pytest.raises(
        ConfigError, match="STEPS_THIS_RUN is set and CHECKPOINT_DIR is not"
    ):
        from_env(PretrainingConfig, prepared | {"STEPS_THIS_RUN": "3"}).check()


def test_training_continues_while_a_checkpoint_is_written_and_does_not_change_it(
    tmp_path, monkeypatch
):
    written, release = save.save_checkpoint, threading.Event()
    monkeypatch.setattr(
        save,
        "save_checkpoint",
        lambda *arguments: release.wait(60) and written(*arguments),
    )
    writer, tensor = Writer(CheckpointConfig(directory=tmp_path, keep=9)), torch.ones(3)
    shared = {"weights": tensor}
    writer.start(1, {"model": shared, "optimizer": {"masters": shared}})
    tensor.add_(1)  # the next step, while the thread still waits
    assert not list(tmp_path.iterdir())
    release.set()
    writer.start(2, {"model": shared})  # waits for the first
    writer.wait()
    states = [
        torch.load(tmp_path / f"step_000000000{step}.pt", weights_only=True)
        for step in (1, 2)
    ]
    assert [float(state["model"]["weights"][0]) for state in states] == [1.0, 2.0]
    masters = states[0]["optimizer"]["masters"]["weights"]
    assert masters.data_ptr() == states[0]["model"]["weights"].data_ptr(), (
        "what is said twice is stored once"
    )


def test_a_full_disk_is_reported_and_the_next_checkpoint_is_tried(
    tmp_path, monkeypatch, capfd
):
    save, full = torch.save, [True]

    def torn(state, file):
        file.write(b"half")
        if full[0]:
            raise OSError(28, "No space left on device")
        file.seek(0)
        save(state, file)

    monkeypatch.setattr(torch, "save", torn)
    writer = Writer(CheckpointConfig(directory=tmp_path))
    writer.start(4, {"step": 4})
    writer.wait()
    assert (
        "bert: warning: the checkpoint of step 4 cannot be written"
        in capfd.readouterr().err
    )
    assert not list(tmp_path.iterdir()), "the half that was written is gone"
    full[0] = False
    writer.start(8, {"step": 8})
    writer.wait()
    assert writer.error is None
    assert newest(tmp_path) == {"step": 8}


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


@pytest.mark.parametrize("steps_this_run", ["0", "6"], ids=["complete", "stopped"])
def test_a_run_survives_a_full_disk_but_does_not_claim_that_its_last_weights_are_safe(
    steps_this_run, endless, run_bert, tmp_path
):
    (tmp_path / "first.py").write_text(FULL_DISK)
    environment = endless | {
        "FIRST": str(tmp_path / "first.py"), "ROOM_UNTIL": "2", "CHECKPOINT_EVERY_STEPS": "2",
        "STEPS_THIS_RUN": steps_this_run,
    }  # fmt: skip
    finished = run_bert(environment)
    assert [path.name for path in (tmp_path / "c").glob("[!.]*")] == [
        "step_0000000002.pt"
    ]
    assert "checkpoint of step 4 cannot be written to" in finished.stderr
    assert finished.returncode == 1
    where = "the last is step 8" if steps_this_run == "0" else "stopped at step 6"
    assert (
        f"{where}, and its checkpoint cannot be written"
        in finished.stderr.splitlines()[-1]
    )
    last = "RESUME=1 continues from step_0000000002.pt"
    assert finished.stderr.splitlines()[-1].endswith(last)
    if steps_this_run == "0":
        return
    again = run_bert(endless | {"RESUME": "1"})
    assert again.returncode == 0, again.stderr
    apart = {name: str(tmp_path / "whole") for name in ("CHECKPOINT_DIR", "RUN_DIR")}
    whole = run_bert(endless | apart)
    assert whole.returncode == 0, whole.stderr
    assert same(newest(tmp_path / "c"), newest(tmp_path / "whole")), (
        "a full disk has lost nothing"
    )


def test_a_run_that_never_had_room_does_not_offer_to_resume(
    endless, run_bert, tmp_path
):
    (tmp_path / "first.py").write_text(FULL_DISK)
    full = {"FIRST": str(tmp_path / "first.py"), "ROOM_UNTIL": "0"}
    finished = run_bert(endless | full)
    assert finished.returncode == 1
    assert "none was written: make room" in finished.stderr.splitlines()[-1]
    assert "RESUME=1" not in finished.stderr
    # Not to the end, but to the step at which the next would be written, at the latest.
    early = run_bert(endless | full | {"CHECKPOINT_EVERY_STEPS": "2"})
    assert early.returncode == 1
    last = early.stderr.splitlines()[-1]
    assert (
        f"{tmp_path / 'c'} has no checkpoint, and the first cannot be written" in last
    )
    assert last.endswith("make room, or give another CHECKPOINT_DIR")
    assert "step      5/8" not in early.stderr
    assert "RESUME=1" not in early.stderr


@pytest.mark.parametrize("room", [4096, 20480], ids=["description", "log"])
def test_a_full_disk_of_results_ends_the_run_with_that_reason(
    endless, run_bert, tmp_path, room
):
    small = tmp_path / "small"
    with small_disk(small, room):
        finished = run_bert(endless | {"RUN_DIR": str(small)})
        assert finished.returncode == 1
        assert (
            f"bert: error: No space left in {small}: "
            in finished.stderr.splitlines()[-1]
        )
        assert "Traceback" not in finished.stderr


def test_a_file_system_that_fills_up_keeps_the_last_good_checkpoint_and_the_run_continues(
    endless, run_bert, tmp_path
):
    """On a disk with room for two checkpoints and a half: the third and the fourth do not fit."""
    often = endless | {"CHECKPOINT_EVERY_STEPS": "2", "CHECKPOINT_KEEP": "99"}
    whole = run_bert(often | {"CHECKPOINT_DIR": str(tmp_path / "whole")})
    assert whole.returncode == 0, whole.stderr
    size, small = (
        max(path.stat().st_size for path in (tmp_path / "whole").iterdir()),
        tmp_path / "small",
    )
    with small_disk(small, int(2.5 * size)):
        resumed = often | {"CHECKPOINT_DIR": str(small), "RESUME": "1"}
        resumed["RUN_DIR"] = str(tmp_path / "run_resumed")
        finished = run_bert(resumed)
        warnings = [line for line in finished.stderr.splitlines() if "warning" in line]
        said = (
            f"bert: warning: the checkpoint of step {{}} cannot be written to {small}: "
        )
        assert [
            line.startswith(said.format(step))
            for line, step in zip(warnings, (6, 8), strict=True)
        ] == [True, True]
        full = rf"No space left in {small}: step_0+8.pt needs {size / 1e6:,.1f} MB, \d.\d MB are free: make room there"
        assert re.search(full, warnings[-1])
        last = finished.stderr.splitlines()[-1]
        assert re.search(
            rf"the last is step 8, and its checkpoint cannot be written \({full}\)",
            last,
        )
        assert finished.returncode == 1
        assert sorted(path.name for path in small.glob("[!.]*")) == [
            "step_0000000002.pt",
            "step_0000000004.pt",
        ]
        assert same(
            newest(small),
            torch.load(tmp_path / "whole" / "step_0000000004.pt", weights_only=True),
        )
        enlarge(small, 9 * size)
        again = run_bert(resumed)
        assert again.returncode == 0, again.stderr
        assert same(newest(small), newest(tmp_path / "whole"))
