"""Two results are compared with a confidence interval, over the runs that count; the statistics
agree with scipy, and with themselves.
"""

import math
import shutil
from random import Random

import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from review.compare import LEVEL, compare, ratio, trimmed_mean
from review.logs.output import ReviewError
from review.results.score import load_results

from .conftest import COUNTS, OWN, LogWriter, write_runs, write_submission
from .verdict.damage import ALL, LARGE, RECORD, own, put, record


def compared(first, second):
    """The comparison of two folders, and the ratio of their scores."""
    results = load_results(first) + load_results(second)
    (comparison,) = compare(results)
    scores = [result.score for result in results]
    return comparison, scores[0] / scores[1] if all(scores) else None


@pytest.fixture
def faster(tmp_path):
    """The same runs on a machine that trains 5% faster."""
    folder = tmp_path / "faster" / "results" / "dgx" / "bert"
    return write_runs(folder, COUNTS, seconds_per_evaluation=12.5 / 1.05)


def test_a_result_equals_itself(submission):
    comparison, _ = compared(submission, submission)
    for found in comparison.ratios.values():
        assert (found.value, found.p) == pytest.approx((1, 1))
        assert not found.significant
    assert "no significant difference" in comparison.verdict()


@pytest.mark.parametrize("milliseconds", [1e160, 1.7e308])
@pytest.mark.parametrize("names", [(3,), ALL])
def test_odd_times_stop_nothing(names, milliseconds, submission, faster, command):
    put("run_stop", *names, time_ms=milliseconds)(faster)
    for pair in ((submission, faster), (faster, submission)):
        assert command("compare", *pair).status == 0


def test_a_faster_machine_is_seen_through_the_noise_of_convergence(submission, faster):
    ratios = compared(submission, faster)[0].ratios
    time, normalized = ratios["time"], ratios["normalized_time"]
    # Evaluations take as long as before.
    assert time.value == pytest.approx(1.048, abs=0.002)
    assert not time.significant
    assert normalized.value == pytest.approx(time.value, rel=1e-3)
    assert normalized.significant
    assert ratios["samples"].value == pytest.approx(1)


def test_luck_of_convergence_is_no_speed_at_the_same_samples(submission, tmp_path):
    lucky = write_runs(tmp_path / "lucky", [16] * 10)
    assert load_results(lucky)[0].scaling_factor > 1
    comparison, scores = compared(submission, lucky)
    assert comparison.ratios["time"].value == pytest.approx(scores, rel=1e-12)
    assert comparison.ratios["samples"].value > 1.01
    assert comparison.ratios["normalized_time"].value == pytest.approx(1, abs=1e-3)


def test_one_failed_run_counts_as_the_slowest_as_in_the_score(submission, faster):
    LogWriter(target=0.7).write(faster / "result_1.txt")  # the slowest of them
    assert load_results(faster)[0].olympic.failed == 1
    comparison, scores = compared(submission, faster)
    assert comparison.ratios["time"].value == pytest.approx(scores, rel=1e-12)


def test_differing_hyperparameters_are_listed(submission, tmp_path, command):
    log = LogWriter().change("opt_base_learning_rate", value=0.5)
    log.write(tmp_path / "other" / "result_0.txt")
    pair = (submission, tmp_path / "other")
    report = command("compare", "--json", *pair).json
    differing = {"opt_base_learning_rate": [0.00096, 0.5]}
    assert report["differing_hyperparameters"] == differing
    assert report["comparisons"][0]["ratios"]["time"]["p"] is None
    shown = command("compare", *pair).out
    assert "hyper-parameters that differ" in shown
    assert "too few runs to tell whether by chance" in shown


def test_fewer_than_two_results_are_an_error_of_usage(submission, tmp_path, command):
    with pytest.raises(ReviewError, match="two results"):
        compare(load_results(submission))
    assert command("compare", submission).status == 2
    (tmp_path / "result_0.txt").write_text("")
    status, said, _ = command("compare", submission, tmp_path / "result_0.txt")
    assert (status, "no times to compare" in said) == (0, True)


def test_results_of_one_name_have_their_folder(submission, tmp_path, command):
    copy = tmp_path / "COPY" / "results" / "dgx" / "bert"
    shutil.copytree(submission.parents[2], tmp_path / "COPY")
    found = command("compare", "--json", submission, copy).json["results"]
    names = [result["name"] for result in found]
    assert names == [f"dgx ({submission})", f"dgx ({copy})"]


def open_runs(folder, count, seconds, datadir="/data/english"):
    """Open runs of a few evaluations, with the settings of this repository's trainer."""
    counts = [3 + index % 2 for index in range(count)]
    write_runs(folder, counts, division="open", seconds_per_evaluation=seconds)
    record(folder, data={"datadir": datadir}, evaluate={"evaldir": f"{datadir}/eval"})
    return folder


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_nothing_is_claimed_of_fewer_than_four_runs_a_side(count, tmp_path):
    slow = open_runs(tmp_path / "slow", 10 if count < 4 else 4, 40)
    fast = open_runs(tmp_path / "fast", count, 10)
    for pair in ((slow, fast), (fast, slow)):
        comparison, _ = compared(*pair)
        ratios = comparison.ratios.values()
        assert ("significant at 5%" in comparison.verdict()) == (count == 4)
        assert any(one.significant for one in ratios) == (count == 4)
        assert any(one.low is not None for one in ratios) == (count == 4)


def test_runs_on_other_data_are_not_compared(tmp_path, command):
    english = open_runs(tmp_path / "english", 10, 40)
    german = open_runs(tmp_path / "german", 10, 10, datadir="/data/german")
    shown = command("compare", english, german).out
    assert "not comparable, they differ in data.datadir, evaluate.evaldir" in shown
    assert "significant" not in shown


def test_closed_runs_are_of_one_data_set_wherever_it_lies(tmp_path):
    folders = [write_submission(tmp_path / name) for name in ("data", "raid")]
    for folder in folders:
        own(folder, data={**RECORD["data"], "datadir": f"/{folder.parents[2].name}"})
    assert compared(*folders)[0].unlike == []


@pytest.mark.parametrize(("sections", "says"), [
    ({"model": {**LARGE, "hidden_size": 128}}, "hidden_size 128, not 1024"),
    ({"data": {"max_seq_length": 512, "synthetic": True}}, "synthetic true, not false"),
])  # fmt: skip
def test_other_models_or_data_stand_alone(
    sections, says, submission, tmp_path, command
):
    other = write_submission(tmp_path / "other")
    own(other, **sections)
    shown = command("compare", submission, other).out
    assert f"not the benchmark: {says}" in shown
    assert "not comparable, they differ in departures from the benchmark" in shown
    assert "significant" not in shown


def test_runs_to_the_same_lower_target_are_compared(tmp_path):
    """Whatever the accuracies at which they ended."""
    folders = []
    for target in (0.1031, 0.1046):
        options = {"division": "open", "target": target, "file": OWN}
        folders.append(write_runs(tmp_path / f"{target}", **options))
        put("eval_accuracy", value=target)(folders[-1])
        record(folders[-1], evaluate={"target": 0.1}, mlperf={"division": "open"})
    assert compared(*folders)[0].unlike == []


MINUTES = st.lists(st.floats(1, 100), min_size=4, max_size=12)


@settings(max_examples=100, deadline=None)
@given(values=MINUTES, others=st.lists(st.floats(1, 100), min_size=12, max_size=12))
def test_of_means_that_lie_close_the_test_is_the_trimmed_one_of_scipy(values, others):
    first = [1000 + value / 100 for value in values]
    second = [1000 + value / 100 for value in others[: len(values)]]
    a, b = trimmed_mean(first), trimmed_mean(second)
    assume(a.error2 > 1e-9 and b.error2 > 1e-9)
    trim = 1 / len(values) + 1e-12
    expected = scipy.stats.ttest_ind(first, second, equal_var=False, trim=trim).pvalue
    assert ratio(a, b).p == pytest.approx(expected, rel=0.02, abs=1e-6)


@settings(max_examples=200, deadline=None)
@given(first=MINUTES, second=MINUTES, factor=st.floats(0.01, 100))
def test_interval_and_test_agree_turned_over_and_in_other_units(first, second, factor):
    a, b = trimmed_mean(first), trimmed_mean(second)
    found, other = ratio(a, b), ratio(b, a)
    scaled = [trimmed_mean([factor * x for x in values]) for values in (first, second)]
    assert ratio(*scaled).value == pytest.approx(found.value)
    assume(found.low is not None)
    assert found.low > 0
    turned = (1 / found.low, 1 / found.high, found.p)
    assert turned == pytest.approx((other.high, other.low, other.p))
    assume(a.error2 > 1e-9 and b.error2 > 1e-9)
    assume(abs(found.p - (1 - LEVEL)) > 1e-9)
    assert found.low <= found.value <= found.high
    assert found.significant == (not found.low <= 1 <= found.high)


def test_coverage_of_the_interval_is_its_level():
    random, hits, trials = Random(0), 0, 400
    for _ in range(trials):
        first = trimmed_mean([random.gauss(10, 1) for _ in range(10)])
        second = trimmed_mean([random.gauss(8, 2) for _ in range(10)])
        found = ratio(first, second)
        hits += found.low <= 10 / 8 <= found.high
    assert abs(hits / trials - LEVEL) < 0.03


def test_a_failed_run_is_the_worst_and_changes_nothing_but_the_trimming():
    values = [3.0, 3.5, 3.6, 3.7, 4.0, 4.2, 4.3, 4.4, 4.5]
    failed, slow = trimmed_mean([*values, math.inf]), trimmed_mean([*values, 1e6])
    assert failed == slow
    assert failed.value == pytest.approx(sum(values[1:]) / 8)


def test_too_few_values_have_no_interval_and_none_no_mean():
    single = trimmed_mean([2.0], trim=0)
    found = ratio(single, trimmed_mean([1.0, 3.0], trim=0))
    assert (found.value, found.low, found.p) == (1.0, None, None)
    for values in ([1.0, 2.0], [1.0, math.inf, math.inf]):
        with pytest.raises(ValueError, match="nothing"):
            trimmed_mean(values)
