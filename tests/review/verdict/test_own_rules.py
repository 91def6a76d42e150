"""Rules that no official tool tests: fixed values, implausible clocks, copies, files of other
kinds.
"""

from __future__ import annotations

import gzip
import json
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
        f"{key} {value}",
        log_also(key, value) if key in LOGGED else put(key, value=value),
        ("error", "result_3.txt", key, f"is {value}, "),
    )
    for key, value in WRONG_VALUES.items()
]
DOUBTFUL = [
    (
        "train_samples 1",
        put("train_samples", value=1),
        ("warning", "result_0.txt", "train_samples", "is 1, the last"),
    ),
    (
        "0.99",
        put("eval_accuracy", 5, value=0.99),
        ("warning", "result_5.txt", "eval_accuracy", "no published run"),
    ),
    (
        "status",
        put("submission_status", value="x"),
        ("warning", "result_0.txt", "submission_status", "is 'x'"),
    ),
    (
        "cloud",
        put("submission_status", value="cloud"),
        ("warning", "dgx.json", "status", "in the logs 'onprem'"[:11]),
    ),
    (
        "80 accelerators",
        both(system(accelerators_per_node="80"), ranks(8)),
        (
            "warning",
            "dgx.json",
            "accelerators_per_node",
            "80 accelerators in all, 8 ranks",
        ),
    ),
    (
        "weights of unknown origin",
        log_also("starting_point", {**STARTING_POINT, "unproved": ["weights"]}),
        ("warning", "result_1.txt", "starting_point", "does not prove"),
    ),
    (
        "an error after success",
        log_also("run_error", "DataError: the data were changed"),
        ("error", "result_1.txt", "run_error", "ended in an error: DataError"),
    ),
    (
        "other weights in one run",
        both(
            log_also("starting_point", {"weights": "ab"}),
            put("starting_point", 1, value={"weights": "cd"}),
        ),
        ("error", "result_1.txt", "starting_point", "of most runs"),
    ),
    (
        "caches late",
        move("cache_clear", "run_start"),
        ("error", "result_0.txt", "cache_clear", "after run_start"),
    ),
    (
        "two on a line",
        glue,
        ("warning", "result_6.txt", "eval_start", "the last of several"),
    ),
    (
        "aborted at the target",
        put("run_stop", 2, metadata={"status": "aborted"}),
        ("warning", "result_2.txt", "run_stop", "though the target was reached"),
    ),
    (
        "placeholder",
        put("submission_org", value="SUBMISSION_ORG_PLACEHOLDER"),
        ("warning", "result_0.txt", "submission_org", "PLACEHOLDER"),
    ),
    (
        "seed of a person",
        put("seed", 0, value=42),
        ("warning", "result_0.txt", "seed", "is 42"),
    ),
    (
        "too often",
        scale_samples(0.02),
        ("error", "result_0.txt", "eval_accuracy", "comes every 3,000"),
    ),
]
CLOCKS = [
    (
        "stops early",
        shift("run_stop", -60),
        ("error", "result_4.txt", "run_stop", "s before eval_samples"),
    ),
    (
        "starts late",
        shift("run_start", 60),
        ("error", "result_4.txt", "run_start", "s after epoch_start"),
    ),
    (
        "starts early",
        shift("run_start", -60),
        ("error", "result_4.txt", "run_start", "s before init_stop"),
    ),
    (
        "seconds",
        clock(lambda time: time / 1000),
        ("error", "result_0.txt", "run_start", "not a date of a run"),
    ),
    (
        "nan",
        clock(lambda time: float("nan")),
        ("error", "result_0.txt", "run_stop", "not a date of a run"),
    ),
    (
        "a copy",
        copy_with_another_clock,
        ("error", "result_3.txt", "eval_accuracy", "result_1.txt in all 18"),
    ),
]


CASES = FIXED + DOUBTFUL + CLOCKS


def test_a_sound_result_has_no_findings(submission):
    (sound,) = load_results(submission)
    assert not [
        finding
        for finding in own_findings(sound)
        if finding.source == "rules" and finding.key != "RCP"
    ]


@pytest.mark.parametrize(
    ("name", "mutate", "expected"), [pytest.param(*case, id=case[0]) for case in CASES]
)
def test_each_damage_is_found(name, mutate, expected, submission):
    mutate(submission)
    (result,) = load_results(submission)
    severity, file, key, message = expected
    found = [
        (f.severity, f.file.name, f.key, message in f.message)
        for f in own_findings(result)
    ]
    assert (severity, file, key, True) in found, own_findings(result)


@pytest.mark.parametrize("lines", [5, 12])
def test_the_one_run_that_may_fail_fails_nothing_else(lines, submission):
    cut(lines)(submission)
    (result, *_) = check(submission.parents[2])
    errors = [finding for finding in result.findings if finding.severity == ERROR]
    assert result.official_passed == (not errors), errors
    assert not [f for f in errors if f.source == "rules"], (
        "a log cut short lacks hyper-parameters, and may"
    )


@pytest.mark.parametrize(
    "mutate",
    [copy_with_another_clock, *(case[1] for case in CLOCKS), system(status="on shelf")],
)
def test_nothing_is_called_official_that_check_rejects(mutate, submission, capsys):
    mutate(submission)
    assert main(["show", str(submission)]) == 0
    shown = capsys.readouterr().out
    assert ", official" not in shown
    assert main(["show", "--json", str(submission)]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["official"] is False
    assert result["obstacles"]


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
    assert (
        shown.splitlines()[-1]
        == "PASS: 1 warning at 10 places, 1 note  unverified by MLCommons"
    )


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
    assert "3.5222 min" in shown or "min" in shown
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
    assert [
        f.message
        for f in result.findings
        if f.file and f.file.name == "result_3.txt" and f.source == "compliance"
    ] == [
        "is 'llama2_70b_lora': not a log of BERT, not checked further; one run of ten may fail"
    ]


@pytest.mark.parametrize(
    "content", [gzip.compress(b":::MLLOG {}\n"), b""], ids=["gzip", "empty"]
)
def test_a_file_that_is_no_log_is_reported_in_one_finding(content, submission):
    (submission / "result_4.txt").write_bytes(content)
    (result, *_) = check(submission)
    messages = {
        f.message for f in result.findings if f.file and f.file.name == "result_4.txt"
    }
    assert any(
        message.startswith("no MLLOG lines: it is empty, or no log")
        for message in messages
    ), messages
    assert not any(message == "is missing" for message in messages), messages


def test_a_missing_pair_of_keys_is_named_once(tmp_path, writer):
    path = writer().drop("block_stop", "epoch_stop").write(tmp_path / "result_0.txt")
    (result,) = check(path)
    assert [f.message for f in result.findings if "required" in f.message] == [
        "one of block_stop or epoch_stop is required, none is logged"
    ]


def test_what_an_official_tool_warns_of_in_passing_is_passed_on(
    submission, power_files
):
    power_files(submission)
    (submission / "power" / "result_2" / "notes.txt").write_text("")
    (result, *_) = check(submission)
    assert result.official_passed
    assert [
        f.severity
        for f in result.findings
        if "package_checker says: Detected 2 total files" in f.message
    ] == ["note"]
