"""Every command has the one verdict on a folder, and a fault in one folder is that folder's alone."""

from __future__ import annotations

import json
import shutil

import pytest

from review.__main__ import main
from review.league.entries import published
from review.logs.output import SEVERITIES
from review.results.score import load_results
from review.rulebook.rules import table
from review.verdict import training_rules
from review.verdict.checking import judge, own_findings

from .damage import ALL, clock, edit, put


def ids(folder):
    (result,) = load_results(folder)
    return {finding.id for finding in own_findings(result)}


def said(capsys, *words):
    """What a command prints as JSON."""
    assert main([*map(str, words), "--json"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def stop_at_once(power):
    path = power / "result_3" / "node_0.txt"
    lines = path.read_text().splitlines(keepends=True)
    lines[-1] = lines[0].replace("power_measurement_start", "power_measurement_stop")
    path.write_text("".join(lines))


@pytest.mark.parametrize(("change", "finding"), [
    (stop_at_once, "power_energy"),
    (lambda power: shutil.rmtree(power / "result_3"), "power_of_all_runs"),
])  # fmt: skip
def test_a_result_whose_power_fails_is_official_and_ranked_nowhere(
    change, finding, submission, power_files, capsys, tmp_path
):
    power_files(submission)
    change(submission / "power")
    assert finding in ids(submission)
    (shown,) = said(capsys, "show", submission)
    ranked = said(capsys, "league", submission)
    assert not said(capsys, "check", submission)["passed"]
    assert not shown["official"]
    assert not any(one["own"] for one in ranked["results"])
    assert not said(capsys, "compare", submission, submission)["results"][0]["official"]
    said(capsys, "report", submission, "-o", tmp_path / "page.html")
    assert "by the official rules" not in (tmp_path / "page.html").read_text()


COUNTS = {
    "1e308": put("eval_accuracy", 2, 3, 4, metadata={"epoch_num": 1e308}),
    "digits": put("eval_accuracy", 2, 3, metadata={"epoch_num": 10**320}),
    "accuracies": put("eval_accuracy", 2, 3, value=10**320),
    "batch": put("global_batch_size", value=1e308),
    "times": put("run_stop", 2, 3, time_ms=1e308),
    "nan": put("train_samples", 2, 3, value=float("nan")),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_number_that_cannot_be_computed_with_is_a_finding_on_its_folder_alone(
    name, submission, make_submission, tmp_path, capsys
):
    make_submission(tmp_path / "GOOD")
    COUNTS[name](submission)
    found = said(capsys, "show", submission, tmp_path / "GOOD")
    assert [one["official"] for one in found] == [False, True]
    assert "unjudged" not in ids(submission)
    assert ids(submission) & {"number", "date", "closed_value"}


def test_what_nobody_foresaw_in_one_folder_is_its_finding(
    submission, make_submission, tmp_path, capsys, monkeypatch
):
    other = make_submission(tmp_path / "GOOD")
    for name in ("results.score.departures", "verdict.checking.check_power"):

        def fails(first, *_, name=name):
            if "GOOD" not in str(getattr(first, "folder", first)):
                raise OverflowError("too large")
            return []

        with monkeypatch.context() as patch:
            patch.setattr(f"review.{name}", fails)
            found = said(capsys, "show", submission, other)
            assert [one["official"] for one in found] == [False, True], name
            checked = said(capsys, "check", submission)["checked"][0]
        assert "unjudged" in [finding["id"] for finding in checked["findings"]]


@pytest.mark.parametrize("described", [True, False])
def test_a_faster_clock_is_never_judged_better_and_an_impossible_one_is_an_error(
    described, submission, capsys
):
    if not described:
        (submission.parents[2] / "systems" / "dgx.json").unlink()
        submission = submission.rename(submission.parents[3] / "loose")
    worst = []
    factors = (1, 1.5, 2, 3, 10, 30, 100, 1000)
    for factor in factors:
        by = factor / (factors[len(worst) - 1] if worst else 1)
        clock(lambda time, by=by: 1.75e12 + (time - 1.75e12) / by)(submission)
        (result,) = load_results(submission)
        found = [*training_rules.check_speed(result)]
        worst.append(min([SEVERITIES.index(one.severity) for one in found], default=3))
    assert worst == sorted(worst, reverse=True)
    assert worst[0] == 3
    assert worst[-1] == 0
    assert worst[factors.index(3)] == (0 if described else 3)
    ranked = said(capsys, "league", submission)
    assert not any(one["own"] for one in ranked["results"])


def test_limits_are_above_what_published_results_reached():
    fastest = {}
    for entry in published():
        if entry.per_accelerator:
            most, known = training_rules.limits(entry.accelerator)
            assert entry.per_accelerator < known + 1 <= most + 1, entry.accelerator
            fastest[known] = max(fastest.get(known, 0), entry.per_accelerator)
    named = {known for _, known in table("accelerators").values()}
    assert all(known - 1 < fastest[known] for known in named if known in fastest)


@pytest.mark.parametrize("status", ["success", "aborted"])
def test_a_log_whose_run_ended_in_an_error_says_so_to_every_reader(
    status, submission, capsys, tmp_path
):
    (submission / "error_3.txt").write_text("RuntimeError: rank 5 is gone\n")
    put("run_stop", 3, metadata={"status": status})(submission)
    why = "ended in an error: RuntimeError: rank 5 is gone"
    (shown,) = said(capsys, "show", submission)
    assert not shown["official"]
    assert shown["runs"][3]["error"] == "RuntimeError: rank 5 is gone"
    log = submission / "result_3.txt"
    for words in (("show", submission), ("check", submission), ("check", log)):
        assert main([*map(str, words)]) in (0, 1)
        assert why in capsys.readouterr().out
    main(["report", str(submission), "-o", str(tmp_path / "page.html")])
    assert why in (tmp_path / "page.html").read_text()


def test_ignored_findings_fail_nothing_stay_in_sight_and_make_nothing_official(
    submission, capsys, tmp_path
):
    put("eval_samples", value=5000)(submission)
    assert main(["check", str(submission)]) == 1
    assert main(["check", str(submission), "--ignore", "eval_samples"]) == 0
    shown = capsys.readouterr().out
    assert "1 ignored at 10 places (eval_samples)" in shown.splitlines()[-1]
    found = said(capsys, "check", submission, "--ignore", "eval_samples")
    severities = {f["id"]: f["severity"] for f in found["checked"][0]["findings"]}
    assert severities["eval_samples"] == "ignored"
    page = tmp_path / "page.html"
    said(capsys, "report", submission, "--ignore", "eval_samples", "-o", page)
    assert "by the official rules" not in page.read_text()
    assert "eval_samples" in page.read_text()
    assert not judge(load_results(submission)[0]).ignoring(["eval_samples"]).official
    assert main(["check", str(submission), "--ignore", "eval_sample"]) == 2
    assert "see eval_samples" in capsys.readouterr().err


def test_an_official_failure_cannot_be_ignored(submission):
    for name in ALL[:2]:
        edit(submission, name, change=lambda events: events.pop(0))
    (result,) = load_results(submission)
    verdict = judge(result, ask=True).ignoring(["key_missing"])
    assert not verdict.passed()
