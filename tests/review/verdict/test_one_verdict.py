"""Every command has the one verdict on a folder, and a fault in one folder is that folder's alone:
of folders damaged by seed (events, bytes, places, numbers, power files, the run's own record)
none is accepted, none stops a command, and no two commands disagree.
"""

import contextlib
import io
import json
import random
import re
import shutil

import pytest

from review.__main__ import main
from review.league.entries import published
from review.logs.output import SEVERITIES
from review.results.score import load_results
from review.rulebook.rules import table
from review.verdict import training_rules
from review.verdict.checking import judge, own_findings

from ..conftest import OWN, write_power, write_submission
from . import damage
from .damage import ALL, RECORD, edit, official, put, record

# Findings that are no errors, with which a score does not count.
UNOFFICIAL = {"benchmark", "ten_runs_to_submit"}
_OTHERS = (None, 0, 1, 128, 0.1, True, "large", [], {})
_NUMBERS = (1e308, -1e308, 10**320, float("nan"), float("inf"), 1e15, 0, -1)


def _change_some_bytes(folder, choose):
    description = folder.parents[2] / "systems" / "dgx.json"
    paths = [*sorted(folder.glob("result_*.txt")), description]
    _change_bytes(choose.choice(paths), choose)


def _change_record(folder, choose):
    path, content = folder / "config.json", json.loads(json.dumps(RECORD))
    if choose.random() < 0.2:
        return _change_bytes(path, choose)
    if choose.random() < 0.3:
        return damage.take_record(path, choose.choice(damage.WITHOUT))
    section = choose.choice(sorted(content))
    name = choose.choice(sorted(content[section]))
    values = [value for value in _OTHERS if value != content[section][name]]
    if choose.random() < 0.2:
        del content[section][name]
    else:
        content[section][name] = choose.choice(values)
    path.write_text(json.dumps(content))


def _change_power(folder, choose):
    """Power files of all runs, one of which is missing, cut, stopped at once or changed."""
    write_power(folder)
    path = folder / "power" / f"result_{choose.randrange(10)}" / "node_0.txt"
    how, lines = choose.randrange(4), path.read_text().splitlines(keepends=True)
    if how == 0:
        shutil.rmtree(path.parent)
    elif how == 1:
        path.write_text("".join(lines[: choose.randrange(len(lines))]))
    elif how == 2:
        start = re.search(r'"time_ms": \d+', lines[0])[0]
        lines[-1] = re.sub(r'"time_ms": \d+', start, lines[-1])
        path.write_text("".join(lines))
    else:
        _change_bytes(path, choose)


def _change_numbers(folder, choose):
    """A number of some logs is none that can be computed with, or all times are divided."""
    factor, value = choose.choice([1, 1, 1.2, 3, 30, 1000]), choose.choice(_NUMBERS)
    key = choose.choice(["eval_accuracy", "train_samples", "global_batch_size"])
    name = choose.choice(["value", "epoch_num", "time_ms"])

    def change(events):
        for event in events:
            event["time_ms"] = int(1.75e12 + (event["time_ms"] - 1.75e12) / factor)
            if factor == 1 and event["key"] == key:
                (event["metadata"] if name == "epoch_num" else event)[name] = value

    edit(folder, *choose.choice([(3,), (3, 4, 5), ALL]), change=change)


def _change_bytes(path, choose):
    """Flips a bit, cuts the end off, or overwrites some bytes."""
    data = bytearray(path.read_bytes())
    at, how = choose.randrange(len(data)), choose.randrange(3)
    if how == 0:
        data[at] ^= 1 << choose.randrange(8)
    elif how == 1:
        del data[at:]
    else:
        data[at : at + 20] = choose.randbytes(20)
    path.write_bytes(data)


WAYS = (damage.damage, damage.misplace, _change_some_bytes, _change_record)
WAYS += (_change_power, _change_numbers)


def is_of_the_benchmark(folder):
    """Whether config.json, read without this project's code, is of BERT-large trained to 0.720 on real data."""

    def told(record):
        names = [(section, name) for section in RECORD for name in RECORD[section]]
        names.remove(("evaluate", "every_samples"))
        return json.dumps([record[section][name] for section, name in names])

    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return told(found) == told(RECORD)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def judged(folder):
    """What the commands get wrong about a changed folder, in words; empty if nothing."""
    root = folder.parents[2]
    with contextlib.redirect_stdout(io.StringIO()):  # the official tools print
        stands = official(root)
    stands &= is_of_the_benchmark(folder)
    shown, ranked = _json("show", folder), _json("league", folder)
    compared, checked = _json("compare", folder, folder), _json("check", folder)
    answered = {answer is None for answer in (shown, ranked, compared, checked)}
    if len(answered) > 1:
        return "the commands differ in whether there is a result"
    if shown is None:
        return ""
    page = root.parent / "page.html"
    _json("report", folder, "-o", page)
    said = {
        "show": shown[0]["official"],
        "compare": compared["results"][0]["official"],
        "league": any(one["own"] for one in ranked["results"]),
        "report": "by the official rules" in page.read_text(encoding="utf-8"),
    }
    found = {finding["id"]: finding for finding in checked["checked"][0]["findings"]}
    passed = checked["checked"][0]["passed"]
    if "unjudged" in found:
        return found["unjudged"]["message"]
    if len(set(said.values())) > 1:
        return f"the commands disagree: {said}"
    if said["show"] and not (stands and passed):
        return "official, but not for check or the official tools, or of another model"
    if passed and not stands:
        return "passes, though the official tools reject it, or it is of another model"
    if passed != said["show"] and not UNOFFICIAL & found.keys():
        return "passes, but is not official"
    return ""


def _json(command, *words):
    """What a command prints; None if it refuses the folder. Raises whatever the command raises."""
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        status = main([command, "--json", *map(str, words)])
    if status == 2:
        lines = [line for line in said.getvalue().splitlines() if "error:" in line]
        assert len(lines) == 1, said.getvalue()
        return None
    return json.loads(printed.getvalue())


MORE = [pytest.param(n, marks=pytest.mark.slow) for n in range(len(WAYS), 60)]


@pytest.mark.parametrize("number", [*range(len(WAYS)), *MORE])
def test_all_commands_have_one_verdict_on_a_damaged_folder(number, tmp_path):
    folder = write_submission(tmp_path / "EXAMPLE", file=OWN)
    record(folder)
    WAYS[number % len(WAYS)](folder, random.Random(f"1 {number}"))
    assert judged(folder) == ""


def test_the_judge_of_mutations_sees_what_is_wrongly_accepted(submission, monkeypatch):
    record(submission)
    assert judged(submission) == ""
    record(submission, model={"hidden_size": 2})
    monkeypatch.setattr("review.results.score.departures", lambda *_: [])
    assert judged(submission).startswith("official, but not")


def ids(folder):
    return {finding.id for finding in own_findings(load_results(folder)[0])}


@pytest.mark.parametrize("change", [
    put("eval_accuracy", 2, 3, 4, metadata={"epoch_num": 1e308}),
    put("eval_accuracy", 2, 3, metadata={"epoch_num": 10**320}),
    put("eval_accuracy", 2, 3, value=10**320),
    put("global_batch_size", value=1e308),
    put("run_stop", 2, 3, time_ms=1e308),
    put("train_samples", 2, 3, value=float("nan")),
])  # fmt: skip
def test_an_impossible_number_is_its_folder_s_finding(change, submission, tmp_path):
    write_submission(tmp_path / "GOOD")
    change(submission)
    found = _json("show", submission, tmp_path / "GOOD")
    assert [one["official"] for one in found] == [False, True]
    assert "unjudged" not in ids(submission)
    assert ids(submission) & {"number", "date", "closed_value"}


@pytest.mark.parametrize("name", ["results.score.departures", "verdict.checking.check_power"])  # fmt: skip
def test_what_nobody_foresaw_is_its_folder_s(name, submission, tmp_path, monkeypatch):
    def fails(first, *_):
        if "GOOD" not in str(getattr(first, "folder", first)):
            raise OverflowError("too large")
        return []

    monkeypatch.setattr(f"review.{name}", fails)
    found = _json("show", submission, write_submission(tmp_path / "GOOD"))
    assert [one["official"] for one in found] == [False, True]
    (checked,) = _json("check", submission)["checked"]
    assert "unjudged" in [finding["id"] for finding in checked["findings"]]


FACTORS = (1, 1.5, 2, 3, 10, 30, 100, 1000)


@pytest.mark.parametrize("described", [True, False])
def test_a_faster_clock_is_never_judged_better(described, submission):
    if not described:
        (submission.parents[2] / "systems" / "dgx.json").unlink()
        submission = submission.rename(submission.parents[3] / "loose")
    worst = []
    for before, factor in zip((1, *FACTORS), FACTORS, strict=False):
        by = factor / before
        damage.clock(lambda time, by=by: 1.75e12 + (time - 1.75e12) / by)(submission)
        (result,) = load_results(submission)
        found = [*training_rules.check_speed(result)]
        worst.append(min([SEVERITIES.index(one.severity) for one in found], default=3))
    assert worst == sorted(worst, reverse=True)
    assert (worst[0], worst[-1]) == (3, 0)
    assert worst[FACTORS.index(3)] == (0 if described else 3)
    assert not any(one["own"] for one in _json("league", submission)["results"])


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
def test_a_run_that_ended_in_an_error_says_so(status, submission, command, tmp_path):
    why = "RuntimeError: rank 5 is gone"
    (submission / "error_3.txt").write_text(f"{why}\n")
    put("run_stop", 3, metadata={"status": status})(submission)
    (shown,) = _json("show", submission)
    assert not shown["official"]
    assert shown["runs"][3]["error"] == why
    log = submission / "result_3.txt"
    for words in (("show", submission), ("check", submission), ("check", log)):
        assert f"ended in an error: {why}" in command(*words).out
    command("report", submission, "-o", tmp_path / "page.html")
    assert f"ended in an error: {why}" in (tmp_path / "page.html").read_text()


def test_ignored_findings_stay_in_sight_and_unofficial(submission, command, tmp_path):
    put("eval_samples", value=5000)(submission)
    ignoring = (submission, "--ignore", "eval_samples")
    assert command("check", submission).status == 1
    status, shown, _ = command("check", *ignoring)
    assert status == 0
    assert "1 ignored at 10 places (eval_samples)" in shown.splitlines()[-1]
    (checked,) = _json("check", *ignoring)["checked"]
    severities = {f["id"]: f["severity"] for f in checked["findings"]}
    assert severities["eval_samples"] == "ignored"
    command("report", *ignoring, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert ("by the official rules" in page, "eval_samples" in page) == (False, True)
    assert not judge(load_results(submission)[0]).ignoring(["eval_samples"]).official
    status, _, error = command("check", submission, "--ignore", "eval_sample")
    assert (status, "see eval_samples" in error) == (2, True)


def test_an_official_failure_cannot_be_ignored(submission):
    damage.drop("cache_clear", 0, 1)(submission)
    (result,) = load_results(submission)
    assert not judge(result, ask=True).ignoring(["key_missing"]).passed()
