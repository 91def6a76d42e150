"""Rules that no official tool tests: fixed values, implausible clocks, copies, files of other
kinds, categories; power files of another run, or without a usable energy.
"""

import gzip
import os
import re
import shutil

import pytest

from review.logs import tree
from review.logs.output import ERROR, WARNING
from review.results.score import load_results
from review.verdict.checking import check, judge, own_findings
from review.verdict.submission_rules import categories

from ..conftest import STARTING_POINT, LogWriter, write_power
from . import damage
from .damage import put, scale_samples, system

LOGGED = {  # values that the closed division forbids; the error is at the key
    "opt_name": "sgd", "opt_gradient_clip_norm": 2, "opt_end_learning_rate": 1e-5,
    "opt_lamb_learning_rate_decay_poly_power": 2,
}  # fmt: skip
CHANGED = {
    "max_sequence_length": 128, "max_predictions_per_seq": 20, "opt_lamb_beta_1": 1.9, "opt_lamb_beta_2": -0.1,
    "opt_base_learning_rate": -0.001, "opt_lamb_weight_decay_rate": "abc", "opt_lamb_epsilon": 0,
    "opt_learning_rate_training_steps": 0, "opt_learning_rate_warmup_steps": -1,
}  # fmt: skip
FORBIDDEN = [
    *((key, damage.log_also(key, value)) for key, value in LOGGED.items()),
    *((key, put(key, value=value)) for key, value in CHANGED.items()),
]
FIXED = [(how, f"closed_value error result_3.txt {key}") for key, how in FORBIDDEN]
DOUBTFUL = [
    (put("train_samples", value=1), "train_samples warning result_0.txt"),
    (put("eval_accuracy", 5, value=0.99), "too_accurate warning result_5.txt"),
    (put("submission_status", value="x"), "status warning result_0.txt"),
    (put("submission_status", value="cloud"), "same_category warning dgx.json"),
    (damage.both(system(accelerators_per_node="80"), damage.ranks(8)), "same_accelerators warning dgx.json"),
    (damage.log_also("starting_point", {**STARTING_POINT, "unproved": ["weights"]}), "starting_point warning result_1.txt"),
    (damage.log_also("run_error", "DataError: the data were changed"), "ended_in_error error result_1.txt"),
    (damage.both(damage.log_also("starting_point", {"weights": "ab"}), put("starting_point", 1, value={"weights": "cd"})), "one_starting_point error result_1.txt"),
    (damage.move("cache_clear", "run_start"), "cleared_before error result_0.txt"),
    (damage.glue, "one_event_a_line warning result_6.txt"),
    (put("run_stop", 2, metadata={"status": "aborted"}), "success warning result_2.txt"),
    (put("submission_org", value="SUBMISSION_ORG_PLACEHOLDER"), "submitter warning result_0.txt"),
    (put("seed", 0, value=42), "seed_unset warning result_0.txt"),
    (scale_samples(0.02), "interval error result_0.txt"),
]  # fmt: skip
CLOCKS = [
    (damage.shift("run_stop", -60), "neighbours error result_4.txt"),
    (damage.shift("run_start", 60), "neighbours error result_4.txt"),
    (damage.shift("run_start", -60), "neighbours error result_4.txt"),
    (damage.clock(lambda time: time / 1000), "date error result_0.txt"),
    (damage.clock(lambda time: float("nan")), "date error result_0.txt"),
    (damage.copy_with_another_clock, "copied_accuracies error result_3.txt"),
]  # fmt: skip


CASES = FIXED + DOUBTFUL + CLOCKS


def test_a_sound_result_has_no_findings(submission):
    (sound,) = load_results(submission)
    found = [f.key for f in own_findings(sound) if f.source == "rules"]
    assert {*found} <= {"RCP"}


@pytest.mark.parametrize(("mutate", "expected"), CASES)
def test_each_damage_is_found(mutate, expected, submission):
    mutate(submission)
    (result,) = load_results(submission)
    found = [f"{f.id} {f.severity} {f.file.name} {f.key}" for f in own_findings(result)]
    assert any(one.startswith(expected) for one in found), own_findings(result)


SPELLINGS = {
    "onprem": ["Available on-premise", "available on premise", "onprem"],
    "cloud": ["Available cloud", "cloud"],
    "onprem cloud": ["available"],
    "preview": ["Preview"],
    "research": ["Research, Development, or Internal (RDI)", "research"],
    "": ["banana", None],
}


@pytest.mark.parametrize("logged", SPELLINGS)
def test_every_spelling_of_a_category_is_known(logged):
    for status in SPELLINGS[logged]:
        assert categories(status) == {*logged.split()}, status


@pytest.mark.parametrize(("status", "logged", "warned"), [
    ("Preview", "onprem", True),
    ("Available on-premise", "preview", True),
    ("Available cloud", "research", True),
    ("Research, Development, or Internal (RDI)", "cloud", True),
    ("Preview", "preview", False),
    ("Available cloud", "cloud", False),
])  # fmt: skip
def test_another_category_than_the_logs_is_told(status, logged, warned, submission):
    system(status=status)(submission)
    put("submission_status", value=logged)(submission)
    (result,) = load_results(submission)
    found = [f for f in own_findings(result) if f.id == "same_category"]
    assert [f.severity for f in found] == [WARNING] * warned
    assert all(repr(logged) in f.message for f in found)


@pytest.mark.parametrize("lines", [5, 12])
def test_the_one_run_that_may_fail_fails_nothing_else(lines, submission):
    damage.cut(lines)(submission)
    (result, *_) = check(submission.parents[2])
    errors = [finding for finding in result.findings if finding.severity == ERROR]
    assert result.official_passed == (not errors), errors
    assert not [f for f in errors if f.source == "rules"], "it may lack settings"


def test_the_division_is_that_of_the_description(submission):
    system(division="open")(submission)
    scale_samples(0.5)(submission)
    (result, *_) = check(submission.parents[2])
    assert result.passed()
    assert "rcp" not in [finding.source for finding in result.findings]


def test_an_open_run_of_ones_own_lacks_nothing(tmp_path, command):
    log = LogWriter(division="open", evaluations=3).write(tmp_path / "result_0.txt")
    status, shown, _ = command("check", tmp_path)
    assert (status, "RCP" in shown, "fail" in shown) == (0, False, False)
    assert "1 of 10" in shown, "said as a note"
    LogWriter(evaluations=3).write(log)
    assert command("check", tmp_path).status == 1


def test_the_last_line_counts_what_is_printed_above_it(submission, command):
    put("cache_clear", value=False)(submission)
    status, shown, _ = command("check", submission)
    assert status == 0
    assert shown.count("  warning   ") == shown.count("  note   ") == 1
    counts = "1 warning at 10 places, 1 note"
    assert shown.splitlines()[-1] == f"PASS: {counts}  unverified by MLCommons"


def test_one_bad_file_does_not_hide_the_rest(submission, command):
    (submission / "result_10.txt").symlink_to("nowhere")
    os.mkfifo(submission / "result_11.txt")
    (result, *_) = check(submission)
    places = {f.file.name: f.message for f in result.findings if f.severity == ERROR}
    assert places == {
        "result_10.txt": "cannot be read: No such file or directory",
        "result_11.txt": "is not a regular file",
    }
    status, shown, _ = command("show", submission)
    assert (status, ", official" in shown) == (0, False)
    for said in (" min", "result_11.txt is not a regular file"):
        assert said in shown
    assert command("show", submission / "result_10.txt").status == 2


def test_a_folder_that_vanishes_is_left_out(submission, monkeypatch, command):
    (submission.parent / "gone").mkdir()
    (submission.parent / "gone" / "result_0.txt").write_text("")
    real = tree.result_files

    def vanish(folder):
        if folder.name == "gone":
            raise FileNotFoundError(2, "No such file or directory", str(folder))
        return real(folder)

    monkeypatch.setattr(tree, "result_files", vanish)
    status, shown, _ = command("show", submission.parent)
    assert (status, "10 of 10 count" in shown) == (0, True)


NO_LOG = "no MLLOG lines: it is empty, or no log"


@pytest.mark.parametrize(("content", "says"), [
    (lambda log: gzip.compress(b":::MLLOG {}\n"), NO_LOG),
    (lambda log: b"", NO_LOG),
    (lambda log: log.replace(b'"bert"', b'"llama2"'), "is 'llama2': not a log of BERT, not checked"),
])  # fmt: skip
def test_a_file_that_is_no_log_of_bert_says_so_once(content, says, submission):
    log = submission / "result_3.txt"
    log.write_bytes(content(log.read_bytes()))
    (result, *_) = check(submission)
    found = [f for f in result.findings if f.file and f.file.name == log.name]
    (only,) = [f.message for f in found if f.source == "compliance"]
    assert says in only


def test_a_missing_pair_of_keys_is_named_once(tmp_path):
    path = LogWriter().drop("block_stop", "epoch_stop").write(tmp_path / "result_0.txt")
    (result,) = check(path)
    (only,) = [f.message for f in result.findings if "required" in f.message]
    assert only == "one of block_stop or epoch_stop is required, none is logged"


def test_what_an_official_tool_warns_of_in_passing_is_passed_on(submission):
    write_power(submission)
    (submission / "power" / "result_2" / "notes.txt").write_text("")
    (result, *_) = check(submission)
    assert result.official_passed
    said = "package_checker says: Detected 2 total files"
    assert [f.severity for f in result.findings if said in f.message] == ["note"]


def errors(folder, findings=None):
    findings = findings or own_findings(load_results(folder)[0])
    found = [f for f in findings if f.severity == ERROR]
    return [(f.file.relative_to(folder).as_posix(), f.message) for f in found]


NODE = "result_3/node_0.txt"


def swap(old, new, name=NODE):
    def change(power):
        for path in power.glob(name):
            path.write_text(re.sub(old, new, path.read_text()))

    return change


def of_lines(keep):
    """Keeps some lines of a file: events from start to stop."""

    def change(power):
        lines = (power / NODE).read_text().splitlines(keepends=True)
        (power / NODE).write_text("".join(keep(lines)))

    return change


def every_second(lines):
    kept = [line for i, line in enumerate(lines[:-1]) if i < 2 or i % 2 == 0]
    return [*kept, lines[-1]]


def stops_at_its_start(lines):
    start = re.search(r'"time_ms": (\d+)', lines[0])[0]
    return [*lines[:-1], re.sub(r'"time_ms": \d+', start, lines[-1])]


def copied(power):
    shutil.copy(power / "result_2" / "node_0.txt", power / NODE)


def another_node(power):
    text = (power / NODE).read_text().replace("5003", "5004")
    (power / "result_3" / "node_1.txt").write_text(text)


def renumbered(power):
    (power / NODE).rename(power / "result_3" / "node_1.txt")


def switch_without_watts(power):
    for folder in power.iterdir():
        (folder / "sw_0.txt").write_text("")


POWER = [  # what is changed, of which file, what is found
    (of_lines(every_second), NODE, "is read every 2.0"),
    (swap(r'"value": 5(\d\d\d)\.', r'"value": 5.\1', "*/*"), "", "W on average, with 8 ac"),
    (swap('"value": 5003.0', '"value": NaN'), NODE, "readings that are no number"),
    (of_lines(lambda lines: lines[:61] + lines[-1:]), NODE, "has 59 readings"),
    (of_lines(stops_at_its_start), NODE, "gives no energy"),
    (another_node, "result_3", "has 2 nodes, most runs 1"),
    (renumbered, "result_3", "holds node_1.txt, not node_0.txt"),
    (swap('"scope": "node"', '"scope": "accelerators only"'), NODE, "accelerators alone"),
    (swap('"value": 1.0', '"value": 94'), NODE, "has a conversion_eff of 94"),
    (switch_without_watts, "result_", "lacks interconnect_power_est"),
    (lambda power: shutil.rmtree(power / "result_3"), "result_3", "has no power files"),
    (swap('"value": 5003.0', '"value": 0'), NODE, "nothing but 0 W"),
    (swap('"value": 5003.0', '"value": -5', "result_3/*"), NODE, "readings below 0 W"),
    (of_lines(lambda lines: lines[:-1]), NODE, "lacks power_measurement_stop"),
    (copied, NODE, "a copy of result_2/node_0.txt"),
    (swap('"time_ms": 175', '"time_ms": 174'), NODE, "s before run_stop of result_3.txt"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "file", "message"), POWER)
def test_power_of_something_else_is_found(change, file, message, submission):
    write_power(submission)
    change(submission / "power")
    verdict = judge(load_results(submission)[0])
    found = errors(submission, verdict.findings)
    assert all(name.startswith(f"power/{file}") for name, _ in found), found
    assert any(message in said for _, said in found), found
    assert not verdict.official


def test_a_system_of_two_nodes_needs_the_readings_of_both(submission):
    write_power(submission)
    assert errors(submission) == []
    system(number_of_nodes="2")(submission)
    assert errors(submission) == [("power", "holds readings of 1 of the 2 nodes")]


def test_a_minute_without_readings_is_seen(submission):
    write_power(submission)
    of_lines(lambda lines: lines[:70] + lines[90:])(submission / "power")
    (result,) = load_results(submission)
    (found,) = [f for f in own_findings(result) if f.id == "power_gap"]
    said = "has no reading for 21.0 s of the timed part"
    assert (found.severity, found.message) == (WARNING, said)
