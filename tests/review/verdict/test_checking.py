"""`check` agrees with the official tools, explains their verdict, and finds what they miss."""

import os
import random
import shutil
import time

import pytest

from review.logs.output import ERROR, WARNING
from review.results.score import load_results
from review.rulebook import official as official_checkers
from review.verdict.checking import OFFICIAL, check, judge, own_findings
from review.verdict.submission_rules import SCRIPTS

from . import damage
from .damage import drop, duplicate, official, put, rewrite, scale_samples, system

OFFICIAL_FAILURES = [
    (damage.remove(4), "ten_runs error bert"),
    (damage.remove(*damage.ALL[1:]), "ten_runs error bert"),
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
    (damage.crop, "seed_unreadable error result_7.txt"),
    (drop("eval_accuracy", 3), "rcp_impossible error bert"),
    (put("eval_accuracy", 3, metadata={}), "rcp_impossible error bert"),
    (put("run_stop", 3, metadata={}), "rcp_impossible error bert"),
    (put("submission_benchmark", 3, value="rgat"), "rcp_impossible error bert"),
    (put("submission_division", 3, value="x"), "no_rules error result_3.txt"),
    (put("eval_accuracy", 3, value={}), "rule_crash error result_3.txt"),
    (damage.copy_log, "copied_clock error result_3.txt"),
]  # fmt: skip
OVERLOOKED = [
    (put("run_stop", 2, metadata={"status": "aborted"}), ""),  # one aborted
    (put("eval_accuracy", 2, value=0.7), "target_missed warning result_2.txt"),
    (put("opt_base_learning_rate", 3, value=1), "one_configuration error result_3.txt"),
    (put("eval_samples", value=5000), "eval_samples error result_0.txt"),
    (put("submission_division", 1, value="open"), "one_submitter error result_1.txt"),
    (system(division="open"), "same_division warning dgx.json"),
    (system(division="Closed"), "field_division error dgx.json"),
    (damage.rename, "folder_name error Bert"),
    (damage.shift("run_stop", -3600), "clock error result_4.txt"),
    (damage.shift("train_samples", -60), "time_order warning result_4.txt"),
    (damage.initial(0.36), "initial_accuracy warning result_2.txt"),
    (damage.initial(0.3409), ""),  # accuracy at start is right
    (damage.go_on, "ends_at_target warning result_0.txt"),
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


def errors_of(result):
    return [finding for finding in result.findings if finding.severity == ERROR]


def _stands(result):
    """Whether the official tools accept it, as far as our own findings know."""
    found = [f for f in own_findings(result) if f.severity == ERROR]
    return result.score is not None and not any(f.source in OFFICIAL for f in found)


@pytest.mark.parametrize(("mutate", "expected"), CASES)
def test_each_damage_has_the_official_verdict(mutate, expected, submission):
    mutate(submission)
    (result,) = check(submission.parent)
    # The slow tests, which run the same on published results, ask the official tools anew.
    assert result.official_passed == ((mutate, expected) in OVERLOOKED)
    found = [(f.id, f.severity, f.file.name if f.file else "") for f in result.findings]
    assert expected in {"", *map(" ".join, found)}, result.findings
    errors = errors_of(result)
    assert result.passed() == (not errors)
    assert result.official_passed or errors
    if not result.official_passed:
        assert all(f.source != "package" and f.rule and f.hint for f in errors)
    assert _stands(result.result) == result.official_passed, result.obstacles


def slow(*cases):
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("seed", [*range(5), *slow(*range(5, 60))])
def test_a_result_damaged_at_random_has_the_official_verdict(seed, submission):
    damage.damage(submission, random.Random(seed))
    (result,) = load_results(submission)
    assert _stands(result) == official(submission.parents[2]), judge(result).obstacles


@pytest.mark.parametrize("mutate", [None, *slow(*(mutate for mutate, _ in CASES))])
def test_published_results_have_the_official_verdict(mutate, real_folders, tmp_path):
    for folder in real_folders:
        organization = duplicate(folder.parents[2], tmp_path / folder.parents[2].name)
        results, systems = organization / "results", organization / "systems"
        (results / folder.parent.name).rename(results / "dgx")
        (systems / f"{folder.parent.name}.json").rename(systems / "dgx.json")
        if mutate:
            mutate(results / "dgx" / "bert")
        (result, whole) = check(organization)
        assert result.official_passed == official(organization)
        assert result.passed() == (not errors_of(result))
        sources = {finding.source for finding in errors_of(result)}
        assert result.official_passed or sources - {"package"}
        assert mutate or (result.passed() and whole.passed())


def test_nothing_is_written_into_the_checked_tree_which_messages_name(submission):
    damage.remove(0)(submission)
    root = submission.parents[2]
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    (result,) = check(submission)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    said = str([outcome.messages for outcome in result.outcomes])
    assert str(submission) in said
    assert "review-check-" not in said


def test_a_folder_alone_is_checked_as_a_submission(submission, tmp_path):
    loose = shutil.copytree(submission, tmp_path / "loose" / "run")
    assert [one.passed() for one in check(loose)] == [True]
    damage.remove(9)(loose)
    assert [one.passed() for one in check(loose)] == [False]


def test_an_open_result_is_checked_for_neither_seeds_nor_samples(submission):
    put("submission_division", value="open")(submission)
    put("seed", value=1)(submission)
    put("eval_samples", value=7)(submission)
    scale_samples(0.1)(submission)
    system(division="open")(submission)
    (result,) = check(submission)
    assert result.passed()
    assert official(submission.parents[2])


NO_JSON = rewrite("../../../systems/dgx.json", "{")


@pytest.mark.parametrize(("mutate", "target", "status", "says"), [
    (lambda folder: None, "result_0.txt", 0, "compliance_checker passes"),
    (drop("eval_samples", 0), "result_0.txt", 1, "eval_samples is missing"),
    (put("seed", 2, 5, value=77), ".", 1, "seed is 77, as in result_2.txt"),
    (NO_JSON, ".", 1, "official    package_checker crashes: JSONDecodeError: "),
    (NO_JSON, ".", 1, "dgx.json is not JSON"),
])  # fmt: skip
def test_a_reason_is_said_once(mutate, target, status, says, submission, command):
    mutate(submission)
    found, shown, _ = command("check", submission / target)
    assert (found, shown.count(says)) == (status, 1)


def test_exit_codes_are_0_1_for_failing_2_for_usage(submission, command, tmp_path):
    root = submission.parents[2]
    assert command("check", root).status == 0
    assert command("check", "--strict", root).status == 1, "blanks, and no code"
    (tmp_path / "empty").mkdir()
    for name, says in (("absent", "no such"), ("empty", "no result_*.txt here")):
        status, _, error = command("check", tmp_path / name)
        assert (status, says in error, error.count("\n")) == (2, True, 1)
    report = command("check", "--json", root).json
    assert report["passed"]
    assert [one["official_passed"] for one in report["checked"]] == [True, True]


def made(name, kind="mkdir", *options):
    """Makes a folder, or a file by another method of paths, with those above it."""

    def mutate(folder):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        getattr(folder / name, kind)(*options)

    return mutate


@pytest.mark.parametrize("mutate", [
    made("power", "touch"), made("power"), made("power/result_0/node_x.txt"), made("power", "symlink_to", "/dev/null"),
    made("../../again", "symlink_to", ".."), made("../../other/bert"), made("result_10.txt"),
    made("package_checker_params"), made("package_checker_params", "write_bytes", b"\xff"),
    made("../package_checker_params"),
])  # fmt: skip
def test_what_stops_the_official_checker_is_not_official(mutate, submission, command):
    mutate(submission)
    assert not official(submission.parents[2])
    (result, *_) = check(submission.parents[2])
    assert not result.official_passed
    crashes = "official package_checker crashes"
    assert not [f for f in result.findings if crashes in f.message]
    assert not command("show", "--json", submission).json[0]["official"]


@pytest.mark.parametrize("word", ["show", "check", "compare", "league", "report"])
def test_an_unknown_ruleset_is_a_one_line_error(word, submission, command):
    status, out, error = command(word, submission, "--ruleset", "5.1.0")
    assert (status, out, error.count("\n")) == (2, "", 1)
    why = "--ruleset 5.1.0: unknown or without BERT; choose 0.7.0, "
    assert error.startswith(f"review: error: {why}")


@pytest.mark.parametrize("name", [
    "result_3.txt",
    "package_checker_params",
    "../package_checker_params",
    "../../../systems/other.json",
])  # fmt: skip
def test_a_pipe_is_named_and_not_waited_for(name, submission, command):
    os.mkfifo(submission / "pipe")
    (submission / "pipe").replace(submission / name)
    checked = check(submission.parents[2])
    assert not checked[0].official_passed
    assert "TimeoutError" not in str([one.outcomes for one in checked])
    named = [f.file.resolve() for f in errors_of(checked[0]) if f.file]
    assert (submission / name).resolve() in named
    assert not command("show", "--json", submission).json[0]["official"]


@pytest.mark.parametrize(("words", "count"), [(" ", 20_000_000), (" x", 300_000)])
def test_too_long_a_line_is_named_and_not_waited_for(words, count, submission, command):
    path = submission / "result_3.txt"
    lines = path.read_text().splitlines()
    lines[5] += count * words
    path.write_text("\n".join(lines))
    (result,) = check(submission)
    assert not result.official_passed
    assert "not asked" in result.outcomes[0].crash
    places = [(finding.file.name, finding.line) for finding in errors_of(result)]
    assert ("result_3.txt", 6) in places
    assert not command("show", "--json", submission).json[0]["official"]


def test_a_checker_that_waits_for_its_turn_still_gives_its_verdict(monkeypatch):
    # A second of CPU time, of which waiting takes none.
    monkeypatch.setattr(official_checkers, "LIMIT", 0)
    outcome = official_checkers._run("checker", lambda: [time.sleep(1.2) is None])
    assert (outcome.passed, outcome.crash) == (True, None)


@pytest.mark.parametrize(("encoding", "stands"), [("utf-8", True), ("ascii", False)])
def test_the_official_encoding_is_read(encoding, stands, submission, monkeypatch):
    path = submission.parents[2] / "systems" / "dgx.json"
    text = path.read_text().replace('"system_name": "', '"system_name": "é')
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr("locale.getpreferredencoding", lambda _: encoding)
    found = [finding.id for finding in own_findings(load_results(submission)[0])]
    assert ("description_json" in found) != stands


@pytest.mark.parametrize(("mutate", "says", "stands"), [
    # Names are what the repository checker looks at.
    (made("../../../benchmarks/bert/implementations/a b"), "unfriendly", True),
    (made("../../../systems/spare.json", "write_text", "{}"), "spare.json cooling", False),
])  # fmt: skip
def test_what_belongs_to_no_result_is_judged(mutate, says, stands, submission):
    mutate(submission)
    whole = check(submission.parents[2])[-1]
    assert not whole.passed()
    assert official(submission.parents[2]) == stands
    found = [f"{f.file.name} {f.key} {f.message}" for f in errors_of(whole)]
    assert any(says in one for one in found)


def test_missing_scripts_are_named(submission):
    made("../../../benchmarks/bert/implementations/dgx/setup.sh", "touch")(submission)
    findings = check(submission.parents[2])[-1].findings
    found = {finding.file.name for finding in findings if finding.severity == WARNING}
    assert found == {*SCRIPTS} - {"setup.sh"}
    customary = {finding.file.name for finding in findings if finding.id == "customary"}
    assert customary == {"README.md", "LICENSE.md"}
