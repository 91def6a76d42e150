"""`compare` finds a difference that is there, and none that is not."""

from __future__ import annotations

import json
import shutil

import pytest

from review.__main__ import main
from review.compare import compare
from review.logs.output import ReviewError
from review.results.score import load_results

from .conftest import OWN, write_submission
from .mutations import LARGE, RECORD
from .verdict.damage import ALL, put


def results(*folders):
    return [result for folder in folders for result in load_results(folder)]


@pytest.fixture
def faster(submission, tmp_path, writer):
    """The same runs on a machine that trains 5% faster."""
    folder = tmp_path / "faster" / "results" / "dgx" / "bert"
    for index, count in enumerate((17, 18, 17, 16, 17, 14, 13, 16, 16, 17)):
        log = writer(seed=index, evaluations=count, seconds_per_evaluation=12.5 / 1.05)
        log.write(folder / f"result_{index}.txt")
    return folder


def test_a_result_equals_itself(submission):
    (comparison,) = compare(results(submission, submission))
    for found in comparison.ratios.values():
        assert found.value == pytest.approx(1)
        assert found.p == pytest.approx(1)
        assert not found.significant
    assert "no significant difference" in comparison.verdict()


@pytest.mark.parametrize("milliseconds", [1e160, 1.7e308])
@pytest.mark.parametrize("names", [(3,), ALL])
def test_impossible_times_stop_no_comparison(
    names, milliseconds, submission, faster, capsys
):
    put("run_stop", *names, time_ms=milliseconds)(faster)
    for pair in ((submission, faster), (faster, submission)):
        assert main(["compare", *map(str, pair)]) == 0


def test_a_faster_machine_is_seen_through_the_noise_of_convergence(submission, faster):
    (comparison,) = compare(results(submission, faster))
    time, normalized = comparison.ratios["time"], comparison.ratios["normalized_time"]
    assert time.value == pytest.approx(
        1.048, abs=0.002
    )  # evaluations take as long as before
    assert not time.significant
    assert normalized.value == pytest.approx(time.value, rel=1e-3)
    assert normalized.significant
    assert comparison.ratios["samples"].value == pytest.approx(1)


def test_a_result_that_converged_early_by_luck_is_not_faster_at_the_same_samples(
    submission, tmp_path, writer
):
    lucky = tmp_path / "lucky"
    for index in range(10):
        writer(seed=index, evaluations=16).write(lucky / f"result_{index}.txt")
    first, second = results(submission, lucky)
    (comparison,) = compare([first, second])
    assert second.scaling_factor > 1
    assert comparison.ratios["time"].value == pytest.approx(
        first.score / second.score, rel=1e-12
    )
    assert comparison.ratios["samples"].value > 1.01
    assert comparison.ratios["normalized_time"].value == pytest.approx(1, abs=1e-3)


def test_one_failed_run_counts_as_the_slowest_as_in_the_score(
    submission, faster, writer
):
    writer(target=0.7).write(faster / "result_1.txt")  # the slowest of them
    first, second = results(submission, faster)
    assert second.olympic.failed == 1
    (comparison,) = compare([first, second])
    assert comparison.ratios["time"].value == pytest.approx(
        first.score / second.score, rel=1e-12
    )


def test_differing_hyperparameters_are_listed(submission, tmp_path, writer, capsys):
    other = tmp_path / "other"
    writer().change("opt_base_learning_rate", value=0.5).write(other / "result_0.txt")
    assert main(["compare", "--json", str(submission), str(other)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["differing_hyperparameters"] == {
        "opt_base_learning_rate": [0.00096, 0.5]
    }
    assert report["comparisons"][0]["ratios"]["time"]["p"] is None
    assert main(["compare", str(submission), str(other)]) == 0
    shown = capsys.readouterr().out
    assert "hyper-parameters that differ" in shown
    assert "too few runs to tell whether by chance" in shown


def test_fewer_than_two_results_are_an_error_of_usage(submission, tmp_path, capsys):
    with pytest.raises(ReviewError, match="two results"):
        compare(results(submission))
    assert main(["compare", str(submission)]) == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "result_0.txt").write_text("")
    assert main(["compare", str(submission), str(empty)]) == 0
    assert "no times to compare" in capsys.readouterr().out


def test_results_of_one_name_are_distinguished_by_their_folder(
    submission, tmp_path, capsys
):
    copy = tmp_path / "COPY" / "results" / "dgx" / "bert"
    shutil.copytree(submission.parents[2], tmp_path / "COPY")
    assert main(["compare", "--json", str(submission), str(copy)]) == 0
    names = [
        result["name"] for result in json.loads(capsys.readouterr().out)["results"]
    ]
    assert names == [f"dgx ({submission})", f"dgx ({copy})"]


def open_runs(folder, writer, count, *, seconds, datadir="/data/english"):
    """Open runs of a few evaluations, with the settings of this repository's trainer beside
    them.
    """
    for index in range(count):
        log = writer(
            seed=index,
            division="open",
            evaluations=3 + index % 2,
            seconds_per_evaluation=seconds,
        )
        log.write(folder / f"result_{index}.txt")
    settings = {
        "data": {"datadir": datadir},
        "evaluate": {"evaldir": f"{datadir}/eval"},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("count", [1, 2, 3])
def test_nothing_is_claimed_of_fewer_than_four_runs_a_side(count, tmp_path, writer):
    slow = open_runs(tmp_path / "slow", writer, 10, seconds=40)
    fast = open_runs(tmp_path / "fast", writer, count, seconds=10)
    for first, second in ((slow, fast), (fast, slow)):
        (comparison,) = compare(results(first, second))
        assert "significant" not in comparison.verdict()
        assert not any(
            found.significant or found.low is not None
            for found in comparison.ratios.values()
        )


def test_four_runs_a_side_are_enough(tmp_path, writer):
    slow, fast = (open_runs(tmp_path / str(s), writer, 4, seconds=s) for s in (40, 10))
    (comparison,) = compare(results(slow, fast))
    assert "significant at 5%" in comparison.verdict()
    assert comparison.ratios["throughput"].low > 1


def test_runs_on_other_data_are_not_compared(tmp_path, writer, capsys):
    english = open_runs(tmp_path / "english", writer, 10, seconds=40)
    german = open_runs(
        tmp_path / "german", writer, 10, seconds=10, datadir="/data/german"
    )
    assert main(["compare", str(english), str(german)]) == 0
    shown = capsys.readouterr().out
    assert "not comparable, they differ in data.datadir, evaluate.evaldir" in shown
    assert "significant" not in shown


def of_ours(root, **sections):
    folder = write_submission(root, file=OWN)
    (folder / "config.json").write_text(json.dumps({**RECORD, **sections}))
    return folder


def test_closed_runs_are_of_one_data_set_wherever_it_lies(tmp_path):
    one, other = (
        of_ours(tmp_path / name, data={**RECORD["data"], "datadir": f"/{name}"})
        for name in ("data", "raid")
    )
    (comparison,) = compare(results(one, other))
    assert comparison.unlike == []


@pytest.mark.parametrize(("sections", "says"), [
    ({"model": {**LARGE, "hidden_size": 128}}, "hidden_size 128, not 1024"),
    ({"data": {"max_seq_length": 512, "synthetic": True}}, "synthetic true, not false"),
])  # fmt: skip
def test_a_closed_run_of_another_model_or_data_is_not_compared(
    sections, says, submission, tmp_path, capsys
):
    other = of_ours(tmp_path / "other", **sections)
    assert main(["compare", str(submission), str(other)]) == 0
    shown = capsys.readouterr().out
    assert f"not the benchmark: {says}" in shown
    assert "not comparable, they differ in departures from the benchmark" in shown
    assert "significant" not in shown


def test_runs_to_the_same_lower_target_are_compared(tmp_path, writer):
    """Whatever the accuracies at which they ended."""
    folders = []
    for target in (0.1031, 0.1046):
        folders.append(tmp_path / f"{target}")
        for number in range(10):
            log = writer(seed=number, division="open", target=target, file=OWN)
            log.change("eval_accuracy", value=target)
            log.write(folders[-1] / f"result_{number}.txt")
        record = {"evaluate": {"target": 0.1}, "mlperf": {"division": "open"}}
        (folders[-1] / "config.json").write_text(json.dumps({**RECORD, **record}))
    (comparison,) = compare(results(*folders))
    assert comparison.unlike == []
