"""What is not BERT-large trained to the target is shown apart: never ranked, never official,
whatever it says.
"""

from __future__ import annotations

import json

import pytest

from review.__main__ import main
from review.results.score import load_results
from review.verdict.checking import judge

from ..conftest import OWN, STARTING_POINT, write_submission
from ..mutations import LARGE, RECORD, WITHOUT, take_record
from ..verdict.damage import ALL, both, drop, edit, of_key, put, shift, system


def record(folder, **sections):
    (folder / "config.json").write_text(json.dumps({**RECORD, **sections}))


def own(folder, **sections):
    """Makes the logs those of a run of ours, with its record."""
    write_submission(folder.parents[2], file=OWN)
    record(folder, **sections)


def league(folder, capsys):
    assert main(["league", str(folder), "--published", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def a_tenth(event):
    return {"value": event["value"] / 10}


def copies(folder):
    for number in range(1, 10):
        (folder / f"result_{number}.txt").write_text(
            (folder / "result_0.txt").read_text()
        )


def test_a_run_of_the_benchmark_is_ranked_by_its_own_record(submission, capsys):
    own(submission)
    assert judge(load_results(submission)[0]).official
    found = league(submission, capsys)
    assert found["apart"] == []
    assert [one["own"] for one in found["results"]].count(True) == 1


@pytest.mark.parametrize(("sections", "says"), [
    ({"model": {**LARGE, "num_hidden_layers": 2}}, "num_hidden_layers 2, not 24"),
    ({"model": None}, "does not record the model settings"),
    ({"data": {"max_seq_length": 128, "synthetic": False}}, "max_seq_length 128, not 512"),
    ({"data": {"max_seq_length": 512, "synthetic": True}}, "synthetic true, not false"),
    ({"evaluate": {"target": 0.1, "every_samples": 1}}, "target 0.1, not 0.720"),
    ({"mlperf": {"division": "open"}}, "run in the open division, not closed"),
    ({"mlperf": {}}, "division not recorded"),
])  # fmt: skip
def test_another_model_target_or_data_is_neither_ranked_nor_official(
    sections, says, submission, capsys
):
    own(submission, **sections)
    (result,) = load_results(submission)
    assert not judge(result).official
    assert says in "; ".join(result.departures)
    found = league(submission, capsys)
    assert not any(one["own"] for one in found["results"])
    assert says in found["apart"][0]["obstacles"][0]
    assert main(["check", str(submission)]) == 1
    assert says in capsys.readouterr().out


def test_a_record_that_cannot_be_read_is_not_taken_for_the_benchmark_s(
    submission, capsys
):
    (submission / "config.json").write_text('{"model": ')
    assert "unknown settings" in load_results(submission)[0].departures[0]
    assert league(submission, capsys)["apart"]


@pytest.mark.parametrize("instead", WITHOUT)
@pytest.mark.parametrize("division", ["closed", "open"])
def test_a_run_of_ours_without_its_settings_is_neither_ranked_nor_official(
    division, instead, tmp_path, capsys
):
    folder = write_submission(tmp_path / "EXAMPLE", file=OWN)
    both(put("submission_division", value=division), system(division=division))(folder)
    take_record(folder / "config.json", instead)
    (result,) = load_results(folder)
    assert not judge(result).official
    assert "settings" in result.departures[0]
    assert not any(one["own"] for one in league(folder, capsys)["results"])


def test_logs_of_others_need_no_record_of_ours(submission, capsys):
    (submission / "config.json").write_text('{"their": "own"}')
    assert judge(load_results(submission)[0]).official
    assert league(submission, capsys)["apart"] == []


@pytest.mark.parametrize("accuracy", [0.7, 75.0])
def test_a_closed_run_of_ours_that_never_reached_the_target_is_not_ranked(
    accuracy, submission, capsys
):
    own(submission)
    put("eval_accuracy", value=accuracy)(submission)
    found = league(submission, capsys)
    assert "says success at" in found["apart"][0]["obstacles"][0]


@pytest.mark.parametrize("accuracy", [75.0, -1])
def test_an_accuracy_that_is_no_share_is_not_official(accuracy, submission, capsys):
    def change(events):
        first = next(event for event in events if event["key"] == "eval_accuracy")
        first["value"] = accuracy

    edit(submission, *ALL, change=change)
    assert not judge(load_results(submission)[0]).official
    assert not league(submission, capsys)["apart"][0]["checked"]


@pytest.mark.parametrize("milliseconds", [0, -60_000])
def test_runs_that_stop_before_they_start_have_no_rank(
    milliseconds, submission, capsys
):
    start = load_results(submission)[0].runs[0].run_start.time_ms
    put("run_start", time_ms=start)(submission)
    put("run_stop", 3, time_ms=start + milliseconds)(submission)
    (result,) = load_results(submission)
    assert result.runs[3].minutes is None
    assert not judge(result).official
    put("run_stop", time_ms=start + milliseconds)(submission)
    (found,) = league(submission, capsys)["apart"]
    assert (found["minutes"], found["checked"]) == (None, False)


def test_a_log_of_ours_that_calls_a_low_accuracy_success_stands_apart(
    tmp_path, writer, capsys
):
    """As of a demonstration, whose record was not copied with its logs."""
    for number in range(10):
        log = writer(
            seed=number, division="open", target=0.103, interval=100_000, file=OWN
        )
        log.change("eval_accuracy", value=0.103).write(
            tmp_path / "demo" / f"result_{number}.txt"
        )
    found = league(tmp_path / "demo", capsys)
    assert (
        "says success at an accuracy of 0.1030, below 0.720"
        in found["apart"][0]["obstacles"][0]
    )
    assert main(["show", str(tmp_path / "demo")]) == 0
    assert ", official" not in capsys.readouterr().out


def test_open_runs_say_that_their_weights_and_data_are_not_recorded(
    tmp_path, writer, capsys
):
    for number in range(10):
        writer(seed=number, division="open", file=OWN).write(
            tmp_path / f"result_{number}.txt"
        )
    record(tmp_path, mlperf={"division": "open"})
    assert load_results(tmp_path)[0].departures == ("weights and data not recorded",)


@pytest.mark.parametrize(
    "value", [None, "ab", {}, {**STARTING_POINT, "weights": ""}, {"unproved": []}]
)
def test_a_closed_run_of_ours_that_does_not_log_its_weights_and_data_is_not_official(
    value, submission, capsys
):
    own(submission)
    change = put("starting_point", 3, value=value)
    (change if value is not None else drop("starting_point", 3))(submission)
    (result,) = load_results(submission)
    assert result.departures == ("weights and data not recorded",)
    assert not judge(result).official
    found = league(submission, capsys)
    assert not any(one["own"] for one in found["results"])
    assert main(["check", str(submission)]) == 1


def test_what_a_run_does_not_prove_is_said_where_it_is_ranked(submission, capsys):
    own(submission)
    unproved = ["weights", "training_data"]
    put("starting_point", value={**STARTING_POINT, "unproved": unproved})(submission)
    says = "not shown to be the benchmark's"
    assert main(["show", str(submission)]) == 0
    assert f"weights, training data: {says}" in capsys.readouterr().out
    (standing,) = league(submission, capsys)["standing"]
    assert f"; weights, training data {says}" in standing["said"]


@pytest.mark.parametrize(("change", "says"), [
    (shift("run_start", 100, *ALL), "comes 100"),
    (copies, "is that of result_0.txt"),
    (of_key("eval_accuracy", how=a_tenth), "says success at an accuracy of 0.0720, below 0.720"),
    (drop("cache_clear"), "cache_clear is missing"),
    (lambda folder: (folder / "result_9.txt").unlink(), "9 of 10 runs"),
])  # fmt: skip
@pytest.mark.parametrize("file", [OWN, "train.py"])
def test_what_the_rules_reject_is_ranked_nowhere(file, change, says, tmp_path, capsys):
    folder = write_submission(tmp_path / "EXAMPLE", file=file)
    if file == OWN:
        record(folder)
    change(folder)
    found = league(folder, capsys)
    assert not any(one["own"] for one in found["results"])
    assert not found["standing"]
    assert says in "; ".join(found["apart"][0]["obstacles"])


def test_a_log_alone_of_another_model_does_not_pass(submission, capsys):
    own(submission)
    log = str(submission / "result_0.txt")
    assert main(["check", log]) == 0
    record(submission, model={**LARGE, "hidden_size": 128})
    capsys.readouterr()
    assert main(["check", log]) == 1
    assert "error       not the benchmark: hidden_size 128" in capsys.readouterr().out


def test_every_carrier_of_a_score_says_unverified(submission, tmp_path, capsys):
    def shown(*words):
        assert main([*words]) in (0, 1)
        return capsys.readouterr().out

    target = str(submission)
    for command in ("show", "league", "compare"):
        targets = [target, target] if command == "compare" else [target]
        for form in (
            ((), ("--json",), ("--csv",)) if command == "show" else ((), ("--json",))
        ):
            assert "unverified" in shown(command, *targets, *form), (command, form)
    for form in ((), ("--json",)):
        assert "unverified" in shown("check", target, *form), form
    page, picture = tmp_path / "page.html", tmp_path / "league.svg"
    shown("report", target, "-o", str(page))
    assert "unverified" in page.read_text()
    shown("league", target, "--published", "-o", str(page), "--svg", str(picture))
    assert "unverified" in page.read_text()
    assert "1 of them unverified" in picture.read_text()
