"""`check` agrees with the official tools, explains their verdict, and finds what they miss."""

from __future__ import annotations

import json
import os
import random
import shutil
import time

import pytest

from review.__main__ import main
from review.logs.output import ERROR, ReviewError
from review.results.score import load_results
from review.rulebook import official as official_checkers
from review.verdict.checking import OFFICIAL, check, judge, own_findings

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
    ("nine files", remove(4), ("error", "bert", None, "9 of 10 runs")),
    ("no file", remove(*ALL[1:]), ("error", "bert", None, "1 of 10 runs")),
    (
        "two aborted",
        put("run_stop", 2, 6, metadata={"status": "aborted"}),
        ("error", "bert", "RCP", "result_2.txt, result_6"),
    ),
    (
        "two short of the target",
        put("eval_accuracy", 2, 6, value=0.7),
        ("error", "result_2.txt", None, "highest is 0.7"),
    ),
    (
        "one seed",
        put("seed", value=3),
        ("error", "result_1.txt", "seed", "is 3, as in result_0.txt"),
    ),
    (
        "one without seed",
        drop("seed", 5),
        ("error", "result_5.txt", "seed", "is missing"),
    ),
    (
        "a seed of words",
        put("seed", 5, value="five"),
        ("error", "result_5.txt", "seed", "not a seed"),
    ),
    (
        "half the samples",
        scale_samples(0.5),
        ("error", "bert", "RCP", "the minimum is"),
    ),
    (
        "no reference",
        put("global_batch_size", value=32768),
        ("error", "bert", "RCP", "please submit RCP"),
    ),
    (
        "differing batch",
        put("global_batch_size", 3, value=896),
        ("error", "result_3.txt", "global_batch_size", "is 896"),
    ),
    (
        "no accuracy",
        drop("eval_accuracy"),
        ("error", "result_0.txt", "eval_accuracy", "is missing"),
    ),
    (
        "no benchmark",
        drop("submission_benchmark"),
        ("error", "result_9.txt", "submission_benchmark", "is missing"),
    ),
    (
        "no train_samples",
        drop("train_samples"),
        ("error", "result_8.txt", "train_samples", "is missing"),
    ),
    (
        "a field is missing",
        system(cooling="DROP"),
        ("error", "dgx.json", "cooling", "is missing"),
    ),
    (
        "a field is a number",
        system(accelerators_per_node=8),
        ("error", "dgx.json", "accelerators_per_node", "a string"),
    ),
    (
        "unknown status",
        system(status="on shelf"),
        ("error", "dgx.json", "status", "'on shelf'"),
    ),
    (
        "description is no JSON",
        rewrite("../../../systems/dgx.json", "{"),
        ("error", "dgx.json", None, "is not JSON"),
    ),
    (
        "description is a list",
        rewrite("../../../systems/dgx.json", "[]"),
        ("error", "dgx.json", None, "not a JSON object"),
    ),
    (
        "no description",
        lambda f: (f / "../../../systems/dgx.json").unlink(),
        ("error", "dgx.json", None, "is missing"),
    ),
    (
        "a broken log",
        rewrite("result_1.txt", ":::MLLOG {\n"),
        ("error", "result_1.txt", "seed", "cannot be read"),
    ),
    (
        "one cut off",
        crop,
        ("error", "result_7.txt", "seed", "cannot be read, since a line is not JSON"),
    ),
    # One bad log of ten is accepted, unless an official checker crashes on it.
    (
        "no accuracy in one",
        drop("eval_accuracy", 3),
        ("error", "bert", "RCP", "crashes on result_3.txt"),
    ),
    (
        "no count in one",
        put("eval_accuracy", 3, metadata={}),
        ("error", "bert", "RCP", "without a number epoch_num"),
    ),
    (
        "no status in one",
        put("run_stop", 3, metadata={}),
        ("error", "bert", "RCP", "run_stop without a status"),
    ),
    (
        "another benchmark",
        put("submission_benchmark", 3, value="rgat"),
        ("error", "bert", "RCP", "_benchmark"),
    ),
    (
        "no division",
        put("submission_division", 3, value="x"),
        ("error", "result_3.txt", None, "asks for rules"),
    ),
    (
        "odd accuracy",
        put("eval_accuracy", 3, value={}),
        ("error", "result_3.txt", None, "cannot be evaluated"),
    ),
    (
        "a copied log",
        copy_log,
        ("error", "result_3.txt", "run_start", "that of result_1.txt"),
    ),
]
OVERLOOKED = [
    ("one aborted", put("run_stop", 2, metadata={"status": "aborted"}), None),
    (
        "one short of the target",
        put("eval_accuracy", 2, value=0.7),
        ("warning", "result_2.txt", None, "one run of ten"),
    ),
    (
        "differing rates",
        put("opt_base_learning_rate", 3, value=1),
        ("error", "result_3.txt", "opt_base_learning_rate", "0.00096"),
    ),
    (
        "few samples",
        put("eval_samples", value=5000),
        ("error", "result_0.txt", "eval_samples", "5,000"),
    ),
    (
        "divisions",
        put("submission_division", 1, value="open"),
        ("error", "result_1.txt", "submission_division", "is open"),
    ),
    (
        "description of open",
        system(division="open"),
        ("warning", "dgx.json", "division", "in the logs 'closed'"),
    ),
    (
        "division in capitals",
        system(division="Closed"),
        ("error", "dgx.json", "division", "'Closed'"),
    ),
    ("misnamed folder", rename, ("error", "Bert", None, "is named 'Bert'")),
    (
        "clock goes back",
        shift("run_stop", -3600),
        ("error", "result_4.txt", "run_stop", "before run_start"),
    ),
    (
        "an event from the past",
        shift("train_samples", -60),
        ("warning", "result_4.txt", "train_samples", " s earlier than line "),
    ),
    (
        "accuracy at start",
        initial(0.36),
        ("warning", "result_2.txt", "eval_accuracy", "0.3600 before the first step"),
    ),
    ("accuracy at start is right", initial(0.3409), None),
    (
        "past",
        lambda f: edit(f, *ALL, change=go_on),
        ("warning", "result_0.txt", "eval_accuracy", "the run continues"),
    ),
    (
        "rare evaluations",
        scale_samples(2),
        ("warning", "result_0.txt", "eval_accuracy", "every 300,000 samples"),
    ),
    (
        "no submitter",
        drop("submission_org"),
        ("warning", "result_0.txt", "submission_org", "is missing"),
    ),
    (
        "blank cooling",
        system(cooling=""),
        ("warning", "dgx.json", "cooling", "is blank"),
    ),
    (
        "blank count",
        system(number_of_nodes=""),
        ("error", "dgx.json", "number_of_nodes", "is blank"),
    ),
    (
        "count in words",
        system(number_of_nodes="one"),
        ("error", "dgx.json", "number_of_nodes", "'one'"),
    ),
    (
        "submitter",
        system(submitter="OTHER"),
        ("warning", "dgx.json", "submitter", "'OTHER'"),
    ),
    (
        "caches not cleared",
        put("cache_clear", value=False),
        ("warning", "result_0.txt", "cache_clear", "is false"),
    ),
    (
        "stray file",
        rewrite("notes.md", ""),
        ("warning", "bert", None, "also holds notes.md"),
    ),
    (
        "stale scaling",
        rewrite("scaling.json", '{"scaling_factor": 2}'),
        ("warning", "scaling.json", "scaling_factor", "2.0"),
    ),
    (
        "scaling of no number",
        rewrite("scaling.json", '{"scaling_factor": NaN}'),
        ("error", "scaling.json", "scaling_factor", "no sc"),
    ),
    (
        "bypass with newline",
        rewrite("package_checker_params", "rcp-bypass\n"),
        ("warning", "package_checker_params", None, "without"),
    ),
    (
        "bypass",
        rewrite("package_checker_params", "rcp-bypass"),
        ("note", "package_checker_params", None, "asks for rcp-bypass"),
    ),
]
CASES = OFFICIAL_FAILURES + OVERLOOKED


@pytest.mark.parametrize(
    ("name", "mutate", "expected"), [pytest.param(*case, id=case[0]) for case in CASES]
)
def test_each_mutation_has_the_official_verdict_and_is_found(
    name, mutate, expected, submission
):
    mutate(submission)
    (result, *_) = check(submission.parents[2])
    # The slow tests, which run the same on published results, ask the official tools anew.
    assert result.official_passed == (name in [case[0] for case in OVERLOOKED])
    if expected:
        severity, file, key, message = expected
        found = [
            (f.severity, f.file.name, f.key, message in f.message)
            for f in result.findings
        ]
        assert (severity, file, key, True) in found, result.findings
    assert result.passed() == (not [f for f in result.findings if f.severity == ERROR])
    if not result.official_passed:
        reasons = [f for f in result.findings if f.severity == ERROR]
        assert reasons
        assert all(f.source != "package" and f.rule and f.hint for f in reasons), (
            reasons
        )
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
    assert _stands(result) == official(submission.parents[2]), [
        *judge(result).obstacles
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mutate"), [pytest.param(*case[:2], id=case[0]) for case in CASES]
)
def test_each_mutation_of_published_results_has_the_official_verdict(
    name, mutate, real_folders, tmp_path
):
    for folder in real_folders:
        organization = duplicate(folder.parents[2], tmp_path / folder.parents[2].name)
        (organization / "results" / folder.parent.name).rename(
            organization / "results" / "dgx"
        )
        (organization / "systems" / f"{folder.parent.name}.json").rename(
            organization / "systems" / "dgx.json"
        )
        mutate(organization / "results" / "dgx" / "bert")
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
    said = "\n".join(
        message for outcome in result.outcomes for message in outcome.messages
    )
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


@pytest.mark.parametrize(
    "mutate",
    [
        rewrite("power", ""),
        lambda folder: (folder / "power").mkdir(),
        lambda folder: (folder / "power" / "result_0" / "node_x.txt").mkdir(
            parents=True
        ),
        link("power", "/dev/null"),
        link("../../again", ".."),
        lambda folder: (folder.parents[1] / "other" / "bert").mkdir(parents=True),
        lambda folder: (folder / "result_10.txt").mkdir(),
        lambda folder: (folder / "package_checker_params").mkdir(),
        lambda folder: (folder / "package_checker_params").write_bytes(b"\xff"),
        lambda folder: (folder.parent / "package_checker_params").mkdir(),
    ],
)
def test_what_stops_the_official_checker_is_not_official(mutate, submission, capsys):
    mutate(submission)
    assert not official(submission.parents[2])
    (result, *_) = check(submission.parents[2])
    assert not result.official_passed
    assert all(
        f.message.count("official package_checker crashes") == 0
        for f in result.findings
    ), result.findings
    main(["show", "--json", str(submission)])
    assert not json.loads(capsys.readouterr().out)[0]["official"]


@pytest.mark.parametrize("command", ["show", "check", "compare", "league", "report"])
def test_a_ruleset_that_does_not_exist_is_a_one_line_error_and_no_result(
    command, submission, capsys
):
    assert main([command, str(submission), "--ruleset", "5.1.0"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(
        "review: error: --ruleset 5.1.0: unknown or without BERT; choose 0.7.0, "
    )
    assert (said.out, said.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    "name",
    [
        "result_3.txt",
        "package_checker_params",
        "../package_checker_params",
        "../../../systems/other.json",
    ],
)
def test_a_pipe_that_would_keep_the_official_checker_waiting_is_refused_and_named(
    name, submission, capsys
):
    os.mkfifo(submission / "pipe")
    (submission / "pipe").replace(submission / name)
    checked = check(submission.parents[2])
    assert not checked[0].official_passed
    assert "TimeoutError" not in str([one.outcomes for one in checked])
    path = (submission / name).resolve()
    assert path in [
        f.file.resolve() for f in checked[0].findings if f.severity == ERROR and f.file
    ]
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
    assert ("result_3.txt", 6) in [
        (f.file.name, f.line) for f in result.findings if f.severity == ERROR
    ]
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
    path.write_text(
        path.read_text().replace('"system_name": "', '"system_name": "é'),
        encoding="utf-8",
    )
    for encoding, stands in (("utf-8", True), ("ascii", False)):
        monkeypatch.setattr(
            "locale.getpreferredencoding", lambda _, encoding=encoding: encoding
        )
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
    assert ("spare.json", "cooling") in [
        (f.file.name, f.key) for f in organization.findings
    ]


def test_missing_scripts_are_named(submission):
    folder = submission.parents[2] / "benchmarks" / "bert" / "implementations" / "dgx"
    folder.mkdir(parents=True)
    (folder / "setup.sh").write_text("")
    found = {
        finding.file.name
        for finding in check(submission.parents[2])[-1].findings
        if finding.severity == "warning"
    }
    assert found == {
        "README.md",
        "init_datasets.sh",
        "verify_dataset.sh",
        "run_and_time.sh",
    }


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
