"""Rules that no official tool tests: fixed values, implausible clocks, copies, files of other
kinds.
"""

from __future__ import annotations

import gzip
import os

import pytest

from review.__main__ import main
from review.logs import tree
from review.logs.output import ERROR
from review.results.score import load_results
from review.verdict.checking import check, own_findings

from ..conftest import STARTING_POINT
from .damage import (
    both,
    clock,
    copy_with_another_clock,
    cut,
    glue,
    log_also,
    move,
    put,
    ranks,
    scale_samples,
    shift,
    system,
)

WRONG_VALUES = {  # of the closed division; the error is at the key
    "opt_name": "sgd",
    "opt_gradient_clip_norm": 2,
    "opt_end_learning_rate": 1e-5,
    "opt_lamb_learning_rate_decay_poly_power": 2,
    "max_sequence_length": 128,
    "max_predictions_per_seq": 20,
    "opt_lamb_beta_1": 1.9,
    "opt_lamb_beta_2": -0.1,
    "opt_base_learning_rate": -0.001,
    "opt_lamb_weight_decay_rate": "abc",
    "opt_lamb_epsilon": 0,
    "opt_learning_rate_training_steps": 0,
    "opt_learning_rate_warmup_steps": -1,
}
LOGGED = (
    "opt_name",
    "opt_gradient_clip_norm",
    "opt_end_learning_rate",
    "opt_lamb_learning_rate_decay_poly_power",
)
FIXED = [
    (
        log_also(key, value) if key in LOGGED else put(key, value=value),
        f"closed_value error result_3.txt {key}",
    )
    for key, value in WRONG_VALUES.items()
]
DOUBTFUL = [
    (put("train_samples", value=1), "train_samples warning result_0.txt"),
    (put("eval_accuracy", 5, value=0.99), "too_accurate warning result_5.txt"),
    (put("submission_status", value="x"), "status warning result_0.txt"),
    (put("submission_status", value="cloud"), "same_category warning dgx.json"),
    (both(system(accelerators_per_node="80"), ranks(8)), "same_accelerators warning dgx.json"),
    (log_also("starting_point", {**STARTING_POINT, "unproved": ["weights"]}), "starting_point warning result_1.txt"),
    (log_also("run_error", "DataError: the data were changed"), "ended_in_error error result_1.txt"),
    (both(log_also("starting_point", {"weights": "ab"}), put("starting_point", 1, value={"weights": "cd"})), "one_starting_point error result_1.txt"),
    (move("cache_clear", "run_start"), "cleared_before error result_0.txt"),
    (glue, "one_event_a_line warning result_6.txt"),
    (put("run_stop", 2, metadata={"status": "aborted"}), "success warning result_2.txt"),
    (put("submission_org", value="SUBMISSION_ORG_PLACEHOLDER"), "submitter warning result_0.txt"),
    (put("seed", 0, value=42), "seed_unset warning result_0.txt"),
    (scale_samples(0.02), "interval error result_0.txt"),
]  # fmt: skip
CLOCKS = [
    (shift("run_stop", -60), "neighbours error result_4.txt"),
    (shift("run_start", 60), "neighbours error result_4.txt"),
    (shift("run_start", -60), "neighbours error result_4.txt"),
    (clock(lambda time: time / 1000), "date error result_0.txt"),
    (clock(lambda time: float("nan")), "date error result_0.txt"),
    (copy_with_another_clock, "copied_accuracies error result_3.txt"),
]  # fmt: skip


CASES = FIXED + DOUBTFUL + CLOCKS


def test_a_sound_result_has_no_findings(submission):
    (sound,) = load_results(submission)
    found = [(f.source, f.key) for f in own_findings(sound)]
    assert {key for source, key in found if source == "rules"} <= {"RCP"}


@pytest.mark.parametrize(("mutate", "expected"), CASES)
def test_each_damage_is_found(mutate, expected, submission):
    mutate(submission)
    (result,) = load_results(submission)
    found = [f"{f.id} {f.severity} {f.file.name} {f.key}" for f in own_findings(result)]
    assert any(one.startswith(expected) for one in found), own_findings(result)


@pytest.mark.parametrize("lines", [5, 12])
def test_the_one_run_that_may_fail_fails_nothing_else(lines, submission):
    cut(lines)(submission)
    (result, *_) = check(submission.parents[2])
    errors = [finding for finding in result.findings if finding.severity == ERROR]
    assert result.official_passed == (not errors), errors
    assert not [f for f in errors if f.source == "rules"], "it may lack settings"


def test_the_division_is_that_of_the_description(submission):
    system(division="open")(submission)
    scale_samples(0.5)(submission)
    (result, *_) = check(submission.parents[2])
    assert result.passed()
    assert not [finding for finding in result.findings if finding.source == "rcp"]


def test_an_open_run_of_ones_own_lacks_nothing(tmp_path, writer, capsys):
    writer(division="open", evaluations=3).write(tmp_path / "result_0.txt")
    assert main(["check", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "RCP" not in shown
    assert "fail" not in shown
    assert "1 of 10" in shown, "said as a note"
    writer(division="closed", evaluations=3).write(tmp_path / "result_0.txt")
    assert main(["check", str(tmp_path)]) == 1


def test_the_last_line_counts_what_is_printed_above_it(submission, capsys):
    put("cache_clear", value=False)(submission)
    assert main(["check", str(submission)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("  warning   ") == shown.count("  note   ") == 1
    counts = "1 warning at 10 places, 1 note"
    assert shown.splitlines()[-1] == f"PASS: {counts}  unverified by MLCommons"


def test_one_bad_file_does_not_hide_the_rest(submission, capsys):
    (submission / "result_10.txt").symlink_to("nowhere")
    os.mkfifo(submission / "result_11.txt")
    (result, *_) = check(submission)
    places = {f.file.name: f.message for f in result.findings if f.severity == ERROR}
    assert places == {
        "result_10.txt": "cannot be read: No such file or directory",
        "result_11.txt": "is not a regular file",
    }
    assert main(["show", str(submission)]) == 0
    shown = capsys.readouterr().out
    assert "min" in shown
    assert ", official" not in shown
    assert "result_11.txt is not a regular file" in shown


def test_a_folder_that_vanishes_during_the_walk_is_left_out(
    submission, monkeypatch, capsys
):
    (submission.parent / "gone").mkdir()
    (submission.parent / "gone" / "result_0.txt").write_text("")
    real = tree.result_files

    def vanish(folder):
        if folder.name == "gone":
            raise FileNotFoundError(2, "No such file or directory", str(folder))
        return real(folder)

    monkeypatch.setattr(tree, "result_files", vanish)
    assert main(["show", str(submission.parent)]) == 0
    assert "10 of 10 count" in capsys.readouterr().out


def test_a_log_of_another_benchmark_says_so_once(submission, capsys):
    put("submission_benchmark", 3, value="llama2_70b_lora")(submission)
    (result, *_) = check(submission)
    found = [f for f in result.findings if f.file and f.file.name == "result_3.txt"]
    (only,) = [f.message for f in found if f.source == "compliance"]
    assert only.startswith("is 'llama2_70b_lora': not a log of BERT, not checked")


@pytest.mark.parametrize(
    "content", [gzip.compress(b":::MLLOG {}\n"), b""], ids=["gzip", "empty"]
)
def test_a_file_that_is_no_log_is_reported_in_one_finding(content, submission):
    (submission / "result_4.txt").write_bytes(content)
    (result, *_) = check(submission)
    found = [f for f in result.findings if f.file and f.file.name == "result_4.txt"]
    said = [f.message for f in found]
    assert any("no MLLOG lines: it is empty, or no log" in each for each in said)
    assert "is missing" not in said


def test_a_missing_pair_of_keys_is_named_once(tmp_path, writer):
    path = writer().drop("block_stop", "epoch_stop").write(tmp_path / "result_0.txt")
    (result,) = check(path)
    (only,) = [f.message for f in result.findings if "required" in f.message]
    assert only == "one of block_stop or epoch_stop is required, none is logged"


def test_what_an_official_tool_warns_of_in_passing_is_passed_on(
    submission, power_files
):
    power_files(submission)
    (submission / "power" / "result_2" / "notes.txt").write_text("")
    (result, *_) = check(submission)
    assert result.official_passed
    said = "package_checker says: Detected 2 total files"
    (only,) = [f for f in result.findings if said in f.message]
    assert only.severity == "note"
