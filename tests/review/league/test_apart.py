"""What is not BERT-large trained to the target is shown apart: never ranked, never official, whatever it says."""

import pytest

from review.results.score import load_results
from review.verdict.checking import judge

from ..conftest import OWN, STARTING_POINT, write_runs, write_submission
from ..verdict import damage
from ..verdict.damage import drop, own, put, record, system


@pytest.fixture
def league(command):
    """league(folder) -> what is said of it: it is ranked if it is official, else it stands apart."""

    def find(folder):
        found = command("league", folder, "--published", "--json").json
        official = judge(load_results(folder)[0]).official
        assert [one["own"] for one in found["results"]].count(True) == official
        assert len(found["apart"]) == (not official)
        assert not any(one["checked"] for one in found["apart"])
        assert len(found["standing"]) == official
        return found

    return find


@pytest.fixture
def apart(league):
    return lambda folder: league(folder)["apart"][0]


@pytest.fixture
def ranked(league):
    return lambda folder: league(folder)["standing"][0]["said"]


def test_a_run_of_the_benchmark_is_ranked_by_its_own_record(submission, ranked):
    (submission / "config.json").write_text('{"their": "own"}')
    assert ranked(submission), "logs of others need no record of ours"
    own(submission)
    assert ranked(submission)


@pytest.mark.parametrize(("sections", "says"), [
    ({"model": {**damage.LARGE, "num_hidden_layers": 2}}, "num_hidden_layers 2, not 24"),
    ({"model": None}, "does not record the model settings"),
    ({"data": {"max_seq_length": 128, "synthetic": False}}, "max_seq_length 128, not 512"),
    ({"data": {"max_seq_length": 512, "synthetic": True}}, "synthetic true, not false"),
    ({"evaluate": {"target": 0.1, "every_samples": 1}}, "target 0.1, not 0.720"),
    ({"mlperf": {"division": "open"}}, "run in the open division, not closed"),
    ({"mlperf": {}}, "division not recorded"),
])  # fmt: skip
def test_another_model_or_data_stands_apart(sections, says, submission, apart, command):
    own(submission, **sections)
    assert says in apart(submission)["obstacles"][0]
    assert says in "; ".join(load_results(submission)[0].departures)
    status, shown, _ = command("check", submission)
    assert (status, says in shown) == (1, True)


def test_a_record_that_cannot_be_read_is_not_the_benchmark_s(submission, apart):
    (submission / "config.json").write_text('{"model": ')
    assert "unknown settings" in apart(submission)["obstacles"][0]


@pytest.mark.parametrize("instead", damage.WITHOUT)
@pytest.mark.parametrize("division", ["closed", "open"])
def test_ours_without_its_settings_stands_apart(division, instead, submission, apart):
    own(submission)
    put("submission_division", value=division)(submission)
    system(division=division)(submission)
    damage.take_record(submission / "config.json", instead)
    assert apart(submission)
    assert "settings" in load_results(submission)[0].departures[0]


@pytest.mark.parametrize("accuracy", [75.0, -1])
def test_an_accuracy_that_is_no_share_is_not_official(accuracy, submission, apart):
    def change(events):
        first = next(event for event in events if event["key"] == "eval_accuracy")
        first["value"] = accuracy

    damage.edit(submission, *damage.ALL, change=change)
    assert apart(submission)


@pytest.mark.parametrize("milliseconds", [0, -60_000])
def test_runs_that_stop_before_they_start_have_no_rank(milliseconds, submission, apart):
    start = load_results(submission)[0].runs[0].run_start.time_ms
    put("run_start", time_ms=start)(submission)
    put("run_stop", 3, time_ms=start + milliseconds)(submission)
    (result,) = load_results(submission)
    assert result.runs[3].minutes is None
    assert not judge(result).official
    put("run_stop", time_ms=start + milliseconds)(submission)
    assert apart(submission)["minutes"] is None


def test_ours_that_calls_a_low_accuracy_success_stands_apart(tmp_path, apart, command):
    """As of a demonstration, whose record was not copied with its logs."""
    options = {"division": "open", "interval": 100_000, "file": OWN}
    write_runs(tmp_path, target=0.103, **options)
    put("eval_accuracy", value=0.103)(tmp_path)
    said = "says success at an accuracy of 0.1030, below 0.720"
    assert said in apart(tmp_path)["obstacles"][0]
    assert ", official" not in command("show", tmp_path).out


def test_open_runs_say_that_their_weights_and_data_are_not_recorded(tmp_path):
    write_runs(tmp_path, division="open", file=OWN)
    record(tmp_path, mlperf={"division": "open"})
    assert load_results(tmp_path)[0].departures == ("weights and data not recorded",)


UNTOLD = ("ab", {}, {**STARTING_POINT, "weights": ""}, {"unproved": []})
WITHOUT_START = [put("starting_point", 3, value=value) for value in UNTOLD]


@pytest.mark.parametrize("change", [drop("starting_point", 3), *WITHOUT_START])
def test_ours_without_weights_and_data_stands_apart(change, submission, apart, command):
    own(submission)
    change(submission)
    assert apart(submission)
    (result,) = load_results(submission)
    assert result.departures == ("weights and data not recorded",)
    assert command("check", submission).status == 1


def test_what_a_run_does_not_prove_is_said_at_its_rank(submission, ranked, command):
    own(submission)
    started = {**STARTING_POINT, "unproved": ["weights", "training_data"]}
    put("starting_point", value=started)(submission)
    says = "weights, training data{} not shown to be the benchmark's"
    assert says.format(":") in command("show", submission).out
    assert says.format("") in ranked(submission)


def a_tenth(event):
    return {"value": event["value"] / 10}


def copies(folder):
    for number in damage.ALL[1:]:
        text = (folder / "result_0.txt").read_text()
        (folder / f"result_{number}.txt").write_text(text)


@pytest.mark.parametrize(("change", "says"), [
    (damage.shift("run_start", 100, *damage.ALL), "comes 100"),
    (copies, "is that of result_0.txt"),
    (damage.of_key("eval_accuracy", how=a_tenth), "says success at an accuracy of 0.0720, below 0.720"),
    (put("eval_accuracy", value=75.0), "says success at"),
    (drop("cache_clear"), "cache_clear is missing"),
    (damage.remove(9), "9 of 10 runs"),
])  # fmt: skip
@pytest.mark.parametrize("file", [OWN, "train.py"])
def test_what_the_rules_reject_is_ranked_nowhere(file, change, says, tmp_path, apart):
    folder = write_submission(tmp_path / "EXAMPLE", file=file)
    if file == OWN:
        record(folder)
    change(folder)
    assert says in "; ".join(apart(folder)["obstacles"])


def test_a_log_alone_of_another_model_does_not_pass(submission, command):
    own(submission)
    log = submission / "result_0.txt"
    assert command("check", log).status == 0
    record(submission, model={**damage.LARGE, "hidden_size": 128})
    status, shown, _ = command("check", log)
    assert (status, "error       not the benchmark: hidden_size 128" in shown) == (1, 1)


@pytest.mark.parametrize("words", [
    ("show",), ("show", "--json"), ("show", "--csv"), ("check",), ("check", "--json"), ("league",),
    ("league", "--json"), ("compare", "TARGET"), ("compare", "--json", "TARGET"),
    ("report", "-o", "FILE"), ("league", "--published", "-o", "FILE"),
    ("league", "--published", "--svg", "FILE"),
])  # fmt: skip
def test_every_carrier_of_a_score_says_unverified(words, submission, tmp_path, command):
    places = {"TARGET": submission, "FILE": tmp_path / "file"}
    status, said, _ = command(*(places.get(word, word) for word in words), submission)
    assert status in (0, 1)
    written = places["FILE"].read_text() if places["FILE"].exists() else said
    assert "unverified" in written
