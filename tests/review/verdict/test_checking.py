"""`check` agrees with the official tools, explains their verdict, and finds what they miss."""

from __future__ import annotations

import json
import os
import random
import shutil
import time

import pytest

from review.__main__ import main
from review.logs.output import ERROR, WARNING, ReviewError
from review.results.score import load_results
from review.rulebook import official as official_checkers
from review.verdict.checking import OFFICIAL, check, judge, own_findings
from review.verdict.submission_rules import SCRIPTS

from .damage import (
    ALL,
    copy_log,
    crop,
    damage,
    drop,
    duplicate,
    edit,
    go_on,
    initial,
    official,
    put,
    remove,
    rename,
    rewrite,
    scale_samples,
    shift,
    system,
)

OFFICIAL_FAILURES = [
    (remove(4), "ten_runs error bert"),
    (remove(*ALL[1:]), "ten_runs error bert"),
    (put("run_stop", 2, 6, metadata={"status": "aborted"}), "rcp_impossible error bert"),
    (put("eval_accuracy", 2, 6, value=0.7), "target_missed error result_2.txt"),
    (put("seed", value=3), "seed_again error result_1.txt"),
    (drop("seed", 5), "seed_missing error result_5.txt"),
    (put("seed", 5, value="five"), "seed_odd error result_5.txt"),
    (scale_samples(0.5), "rcp_failed error bert"),
    (put("global_batch_size", value=32768), "rcp_impossible error bert"),
    (put("global_batch_size", 3, value=896), "one_configuration error result_3.txt"),
    (drop("eval_accuracy"), "key_missing error result_0.txt"),
    (drop("submission_benchmark"), "key_missing error result_9.txt"),
    (drop("train_samples"), "key_missing error result_8.txt"),
    (system(cooling="DROP"), "field error dgx.json"),
    (system(accelerators_per_node=8), "field_string error dgx.json"),
    (system(status="on shelf"), "field_status error dgx.json"),
    (rewrite("../../../systems/dgx.json", "{"), "description_json error dgx.json"),
    (rewrite("../../../systems/dgx.json", "[]"), "description_object error dgx.json"),
    (lambda f: (f / "../../../systems/dgx.json").unlink(), "description error dgx.json"),
    (rewrite("result_1.txt", ":::MLLOG {\n"), "seed_unreadable error result_1.txt"),
    (crop, "seed_unreadable error result_7.txt"),
    (drop("eval_accuracy", 3), "rcp_impossible error bert"),
    (put("eval_accuracy", 3, metadata={}), "rcp_impossible error bert"),
    (put("run_stop", 3, metadata={}), "rcp_impossible error bert"),
    (put("submission_benchmark", 3, value="rgat"), "rcp_impossible error bert"),
    (put("submission_division", 3, value="x"), "no_rules error result_3.txt"),
    (put("eval_accuracy", 3, value={}), "rule_crash error result_3.txt"),
    (copy_log, "copied_clock error result_3.txt"),
]  # fmt: skip
OVERLOOKED = [
    (put("run_stop", 2, metadata={"status": "aborted"}), ""),  # one aborted
    (put("eval_accuracy", 2, value=0.7), "target_missed warning result_2.txt"),
    (put("opt_base_learning_rate", 3, value=1), "one_configuration error result_3.txt"),
    (put("eval_samples", value=5000), "eval_samples error result_0.txt"),
    (put("submission_division", 1, value="open"), "one_submitter error result_1.txt"),
    (system(division="open"), "same_division warning dgx.json"),
    (system(division="Closed"), "field_division error dgx.json"),
    (rename, "folder_name error Bert"),
    (shift("run_stop", -3600), "clock error result_4.txt"),
    (shift("train_samples", -60), "time_order warning result_4.txt"),
    (initial(0.36), "initial_accuracy warning result_2.txt"),
    (initial(0.3409), ""),  # accuracy at start is right
    (lambda f: edit(f, *ALL, change=go_on), "ends_at_target warning result_0.txt"),
    (scale_samples(2), "interval warning result_0.txt"),
    (drop("submission_org"), "submitter warning result_0.txt"),
    (system(cooling=""), "field_blank warning dgx.json"),
    (system(number_of_nodes=""), "field_count_blank error dgx.json"),
    (system(number_of_nodes="one"), "field_count error dgx.json"),
    (system(submitter="OTHER"), "same_submitter warning dgx.json"),
    (put("cache_clear", value=False), "cleared warning result_0.txt"),
    (rewrite("notes.md", ""), "strays warning bert"),
    (rewrite("scaling.json", '{"scaling_factor": 2}'), "scaling warning scaling.json"),
    (rewrite("scaling.json", '{"scaling_factor": NaN}'), "scaling error scaling.json"),
    (rewrite("package_checker_params", "rcp-bypass\n"), "bypass_newline warning package_checker_params"),
    (rewrite("package_checker_params", "rcp-bypass"), "bypass note package_checker_params"),
]  # fmt: skip
CASES = OFFICIAL_FAILURES + OVERLOOKED


@pytest.mark.parametrize(("mutate", "expected"), CASES)
def test_each_mutation_has_the_official_verdict_and_is_found(
    mutate, expected, submission
):
    mutate(submission)
    (result, *_) = check(submission.parents[2])
    # The slow tests, which run the same on published results, ask the official tools anew.
    assert result.official_passed == ((mutate, expected) in OVERLOOKED)
    found = [(f.id, f.severity, f.file.name if f.file else "") for f in result.findings]
    assert expected in {"", *map(" ".join, found)}, result.findings
    reasons = [f for f in result.findings if f.severity == ERROR]
    assert result.passed() == (not reasons)
    assert result.official_passed or reasons
    if not result.official_passed:
        assert all(f.source != "package" and f.rule and f.hint for f in reasons)
    (shown,) = load_results(result.path)
    assert _stands(shown) == result.official_passed, judge(shown).obstacles


def _stands(result):
    """Whether the official tools accept it, as far as our own findings know."""
    return result.score is not None and not any(
        f.severity == ERROR and f.source in OFFICIAL for f in own_findings(result)
    )


@pytest.mark.parametrize(
    "seed",
    [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 60))],
)
def test_a_result_damaged_at_random_has_the_official_verdict(seed, submission):
    damage(submission, random.Random(seed))
    (result,) = load_results(submission)
    stands = official(submission.parents[2])
    assert _stands(result) == stands, judge(result).obstacles


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [mutate for mutate, _ in CASES])
def test_each_mutation_of_published_results_has_the_official_verdict(
    mutate, real_folders, tmp_path
):
    for folder in real_folders:
        organization = duplicate(folder.parents[2], tmp_path / folder.parents[2].name)
        results, systems = organization / "results", organization / "systems"
        (results / folder.parent.name).rename(results / "dgx")
        (systems / f"{folder.parent.name}.json").rename(systems / "dgx.json")
        mutate(results / "dgx" / "bert")
        (result, *_) = check(organization)
        assert result.official_passed == official(organization)
        errors = [f for f in result.findings if f.severity == ERROR]
        assert result.official_passed or [f for f in errors if f.source != "package"]
        assert result.passed() == (not errors)


def test_published_results_pass_as_they_do_officially(real_folders, tmp_path):
    for folder in real_folders:
        organization = duplicate(folder.parents[2], tmp_path / folder.parents[2].name)
        checked = check(organization)
        assert [one.path.name for one in checked] == ["bert", organization.name]
        assert official(organization)
        assert all(one.passed() and one.official_passed for one in checked)


def test_nothing_is_written_into_the_checked_tree(submission):
    root = submission.parents[2]
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    check(root)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_messages_name_the_checked_tree_and_not_the_copy(submission):
    remove(0)(submission)
    (result,) = check(submission)
    said = str([outcome.messages for outcome in result.outcomes])
    assert str(submission) in said
    assert "review-check-" not in said


def test_a_folder_without_a_submission_around_it_is_checked_as_one(
    submission, tmp_path
):
    loose = tmp_path / "loose" / "run"
    shutil.copytree(submission, loose)
    (result,) = check(loose)
    assert result.passed()
    remove(9)(loose)
    (result,) = check(loose)
    assert not result.passed()


def test_an_open_result_is_checked_for_neither_seeds_nor_samples(submission):
    put("submission_division", value="open")(submission)
    put("seed", value=1)(submission)
    put("eval_samples", value=7)(submission)
    scale_samples(0.1)(submission)
    system(division="open")(submission)
    (result,) = check(submission)
    assert result.passed()
    assert official(submission.parents[2])


def test_one_log_is_checked_by_the_rules_of_one_log(submission, capsys):
    assert main(["check", str(submission / "result_0.txt")]) == 0
    assert "compliance_checker passes" in capsys.readouterr().out
    drop("eval_samples", 0)(submission)
    assert main(["check", str(submission / "result_0.txt")]) == 1
    assert "eval_samples is missing" in capsys.readouterr().out


def test_exit_codes_are_0_for_pass_1_for_fail_2_for_usage(submission, capsys, tmp_path):
    root = str(submission.parents[2])
    assert main(["check", root]) == 0
    assert main(["check", "--strict", root]) == 1  # it has blanks, and brings no code
    assert main(["check", str(tmp_path / "absent")]) == 2
    assert main(["check", "--ruleset", "9.9.9", root]) == 2
    assert capsys.readouterr().err.count("\n") == 2
    assert main(["check", "--json", root]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"]
    assert [one["official_passed"] for one in report["checked"]] == [True, True]


def link(name, to):
    return lambda folder: (folder / name).symlink_to(to)


@pytest.mark.parametrize("mutate", [
    rewrite("power", ""),
    lambda folder: (folder / "power").mkdir(),
    lambda folder: (folder / "power" / "result_0" / "node_x.txt").mkdir(parents=True),
    link("power", "/dev/null"),
    link("../../again", ".."),
    lambda folder: (folder.parents[1] / "other" / "bert").mkdir(parents=True),
    lambda folder: (folder / "result_10.txt").mkdir(),
    lambda folder: (folder / "package_checker_params").mkdir(),
    lambda folder: (folder / "package_checker_params").write_bytes(b"\xff"),
    lambda folder: (folder.parent / "package_checker_params").mkdir(),
])  # fmt: skip
def test_what_stops_the_official_checker_is_not_official(mutate, submission, capsys):
    mutate(submission)
    assert not official(submission.parents[2])
    (result, *_) = check(submission.parents[2])
    assert not result.official_passed
    crashes = "official package_checker crashes"
    assert not [f for f in result.findings if crashes in f.message]
    main(["show", "--json", str(submission)])
    assert not json.loads(capsys.readouterr().out)[0]["official"]


@pytest.mark.parametrize("command", ["show", "check", "compare", "league", "report"])
def test_a_ruleset_that_does_not_exist_is_a_one_line_error_and_no_result(
    command, submission, capsys
):
    assert main([command, str(submission), "--ruleset", "5.1.0"]) == 2
    said = capsys.readouterr()
    why = "--ruleset 5.1.0: unknown or without BERT; choose 0.7.0, "
    assert said.err.startswith(f"review: error: {why}")
    assert (said.out, said.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("name", [
    "result_3.txt",
    "package_checker_params",
    "../package_checker_params",
    "../../../systems/other.json",
])  # fmt: skip
def test_a_pipe_that_would_keep_the_official_checker_waiting_is_refused_and_named(
    name, submission, capsys
):
    os.mkfifo(submission / "pipe")
    (submission / "pipe").replace(submission / name)
    checked = check(submission.parents[2])
    assert not checked[0].official_passed
    assert "TimeoutError" not in str([one.outcomes for one in checked])
    errors = [f for f in checked[0].findings if f.severity == ERROR and f.file]
    assert (submission / name).resolve() in [f.file.resolve() for f in errors]
    main(["show", "--json", str(submission)])
    assert not json.loads(capsys.readouterr().out)[0]["official"]


@pytest.mark.parametrize("blank", [False, True])
def test_a_line_too_long_for_the_official_checker_is_named_and_not_waited_for(
    blank, submission, capsys
):
    path = submission / "result_3.txt"
    lines = path.read_text().splitlines()
    lines[5] += " " * 20_000_000 if blank else " x" * 300_000
    path.write_text("\n".join(lines))
    (result,) = check(submission)
    assert not result.official_passed
    assert "not asked" in result.outcomes[0].crash
    errors = [f for f in result.findings if f.severity == ERROR]
    assert ("result_3.txt", 6) in [(f.file.name, f.line) for f in errors]
    main(["show", "--json", str(submission)])
    assert not json.loads(capsys.readouterr().out)[0]["official"]


def test_a_checker_that_waits_for_its_turn_still_gives_its_verdict(monkeypatch):
    # A second of CPU time, of which waiting takes none.
    monkeypatch.setattr(official_checkers, "LIMIT", 0)
    outcome = official_checkers._run("checker", lambda: [time.sleep(1.2) is None])
    assert (outcome.passed, outcome.crash) == (True, None)


def test_a_description_is_read_in_the_encoding_that_the_official_checker_takes(
    submission, monkeypatch
):
    path = submission.parents[2] / "systems" / "dgx.json"
    text = path.read_text().replace('"system_name": "', '"system_name": "é')
    path.write_text(text, encoding="utf-8")
    for encoding, stands in (("utf-8", True), ("ascii", False)):
        preferred = lambda _, encoding=encoding: encoding  # noqa: E731
        monkeypatch.setattr("locale.getpreferredencoding", preferred)
        findings = own_findings(load_results(submission)[0])
        assert ("description_json" in [f.id for f in findings]) != stands


def test_names_that_git_does_not_like_fail_as_they_do_officially(submission):
    root = submission.parents[2]
    (root / "benchmarks" / "bert" / "implementations" / "a b").mkdir(parents=True)
    organization = check(root)[-1]
    assert not organization.passed()
    assert any("unfriendly" in finding.message for finding in organization.findings)


def test_a_description_without_results_is_checked_as_officially(submission):
    root = submission.parents[2]
    (root / "systems" / "spare.json").write_text("{}")
    assert not official(root)
    organization = check(root)[-1]
    assert not organization.passed()
    found = [(f.file.name, f.key) for f in organization.findings]
    assert ("spare.json", "cooling") in found


def test_missing_scripts_are_named(submission):
    folder = submission.parents[2] / "benchmarks" / "bert" / "implementations" / "dgx"
    folder.mkdir(parents=True)
    (folder / "setup.sh").write_text("")
    findings = check(submission.parents[2])[-1].findings
    found = {finding.file.name for finding in findings if finding.severity == WARNING}
    assert found == {*SCRIPTS} - {"setup.sh"}


def test_a_folder_without_logs_is_an_error_of_usage(tmp_path):
    with pytest.raises(ReviewError, match=r"no result_\*\.txt here or below"):
        check(tmp_path)


def test_a_crash_of_the_official_checker_is_reported_in_its_words(submission, capsys):
    rewrite("../../../systems/dgx.json", "{")(submission)
    assert main(["check", str(submission)]) == 1
    shown = capsys.readouterr().out
    assert "official    package_checker crashes: JSONDecodeError: " in shown
    assert "dgx.json is not JSON" in shown


def test_a_reused_seed_is_reported_once(submission, capsys):
    put("seed", 2, 5, value=77)(submission)
    assert main(["check", str(submission)]) == 1
    assert capsys.readouterr().out.count("seed is 77, as in result_2.txt") == 1
