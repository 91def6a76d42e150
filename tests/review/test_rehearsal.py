"""python -m review rehearsal: go if a run starts like published ones, else the most likely
cause.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from review.__main__ import main

from .conftest import LogWriter

SOUND = {0: 0.3408, 150_000: 0.3790, 300_000: 0.4010}


@pytest.fixture
def log(tmp_path):
    """log(accuracies by samples, batch size) -> the folder of a run that has them."""

    def write(accuracies: dict[int, float], batch_size: int = 768) -> Path:
        writer = LogWriter(division="open").drop("eval_start", "eval_stop")
        writer.drop("eval_accuracy", "tracked_stats", "run_stop")
        writer.change("global_batch_size", value=batch_size)
        for samples, accuracy in accuracies.items():
            writer.log("eval_accuracy", accuracy, epoch_num=samples)
        writer.log("run_stop", status="aborted")
        folder = tmp_path / "run_rehearsal"
        folder.mkdir(exist_ok=True)
        (folder / "result_0.txt").write_text(writer.text())
        return folder

    return write


def test_a_run_that_starts_as_the_published_ones_is_go(log, capsys):
    assert main(["rehearsal", str(log(SOUND))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("GO: ")
    assert [line.split()[-2:] for line in lines[3:6]] == [["as", "published"]] * 3
    assert "0.3946 to 0.4233  as published" in lines[5]


def test_an_accuracy_just_outside_of_the_band_is_near_and_still_go(log, capsys):
    assert main(["rehearsal", str(log(SOUND | {150_000: 0.3700}))]) == 0
    assert "0.3700   0.3713 to 0.3850  near" in capsys.readouterr().out


BEFORE = "the accuracy before the first step is"


@pytest.mark.parametrize(("accuracies", "first_cause"), [
    ({0: 0.30}, f"{BEFORE} 0.3000, but the checkpoint has 0.338 to 0.342: other weights"),
    ({0: 0.345}, f"{BEFORE} 0.3450"),
    ({150_000: 0.3408, 300_000: 0.3409}, "the accuracy stays at the checkpoint's"),
    ({150_000: 0.36, 300_000: 0.37}, "the wrong form of GELU, or no dropout"),
    ({300_000: 0.43}, "another evaluation set, or one that is part of the training data"),
])  # fmt: skip
def test_a_run_outside_of_them_is_no_go_with_the_likeliest_cause_first(
    log, capsys, accuracies, first_cause
):
    assert main(["rehearsal", str(log(SOUND | accuracies))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("NO GO: ")
    (first,) = [line for line in lines if line.startswith("1. ")]
    assert first.startswith(f"1. {first_cause}")


def test_without_the_evaluation_at_the_start_or_without_a_later_one_there_is_no_go(
    log, capsys
):
    assert main(["rehearsal", str(log({150_000: 0.379}))]) == 1
    assert "1. no evaluation before the first step" in capsys.readouterr().out
    assert main(["rehearsal", str(log({0: 0.3408, 5_000_000: 0.7}))]) == 1
    assert "1. no evaluation after the first step" in capsys.readouterr().out


def test_json_has_the_same_content(log, capsys):
    assert main(["rehearsal", str(log(SOUND | {300_000: 0.37})), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["go"] is False
    band = {"low": 0.39462, "high": 0.4233, "verdict": "low"}
    assert said["points"][2] == {"samples": 300000, "accuracy": 0.37, **band}
    assert len(said["causes"]) == 4


@pytest.mark.parametrize(("accuracies", "batch_size", "said"), [
    (SOUND, 8, "fewer than ten published runs have batch size 8: rehearse a config with one of 66, 96, 240"),
    ({5_000_000: 0.7}, 768, "none of its evaluations is at a sample count that published runs cover"),
])  # fmt: skip
def test_what_cannot_be_compared_is_a_one_line_error(
    log, capsys, accuracies, batch_size, said
):
    assert main(["rehearsal", str(log(accuracies, batch_size))]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_a_log_is_a_one_line_error(tmp_path, capsys):
    assert main(["rehearsal", str(tmp_path)]) == 2
    assert "no result_*.txt: did the rehearsal finish?" in capsys.readouterr().err


def test_every_published_run_would_be_go_but_for_its_start(shared):
    from review.results.published_curves import rehearsal

    paths = list((shared / "real_results").rglob("result_*.txt"))
    if not paths:
        pytest.skip(f"no published results in {shared}")
    assert all(point.within_range for path in paths for point in rehearsal(path).points)
