"""Scores and RCP verdicts are the official ones, to the last digits; `rcp` says the reference point
of a batch size, and `show` what it asks of results.
"""

import json
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from review.results.score import load_results
from review.rulebook import rcp
from review.verdict.checking import judge

from ..conftest import UNTIMED, LogWriter, official_rcp, official_score, write_runs
from ..verdict.damage import ALL, drop, edit, put, remove

BATCHES = [32, 256, 448, 449, 768, 1536, 4608, 6912, 8192, 12000, 16384, 16385]


@settings(max_examples=15, **UNTIMED)
@given(
    batch_size=st.sampled_from(BATCHES),
    interval=st.integers(100_000, 350_000),
    evaluations=st.lists(st.integers(8, 22), min_size=10, max_size=10),
    aborted=st.sets(st.integers(0, 9), max_size=2),
)
def test_rcp_verdict_is_official(batch_size, interval, evaluations, aborted, tmp_path):
    write_runs(tmp_path, evaluations, interval=interval)
    put("global_batch_size", value=batch_size)(tmp_path)
    if aborted:
        put("run_stop", *aborted, metadata={"status": "aborted"})(tmp_path)
    passed, reason, factor = official_rcp(tmp_path)
    (result,) = load_results(tmp_path)
    assert result.rcp_test.passed == passed
    assert result.rcp_test.scaling_factor == pytest.approx(factor, rel=1e-12)
    if result.batch_size is not None and len(aborted) < 2:
        assert result.rcp_test.reason == reason


@pytest.mark.parametrize(("more", "passed"), [(0, False), (1, True)])
def test_the_verdict_on_the_edge_is_the_official_one(more, passed, tmp_path):
    def at_the_edge(events):
        last = [event for event in events if event["key"] == "eval_accuracy"][-1]
        last["metadata"]["epoch_num"] = int(rcp.find(768)[0].minimum) + more

    edit(write_runs(tmp_path), *ALL, change=at_the_edge)
    (result,) = load_results(tmp_path)
    assert result.rcp_test.passed == official_rcp(tmp_path)[0] == passed


@settings(max_examples=6, **UNTIMED)
@given(
    runs=st.lists(
        st.tuples(st.integers(10, 20), st.floats(5, 20)), min_size=10, max_size=10
    ),
    failing=st.none() | st.integers(0, 9),
)
def test_the_score_is_the_official_one(runs, failing, tmp_path):
    folder = tmp_path / "results" / "box" / "bert"
    for index, (count, seconds) in enumerate(runs):
        target = 0.7 if index == failing else 0.7203
        log = LogWriter(index, count, seconds_per_evaluation=seconds, target=target)
        log.write(folder / f"result_{index}.txt")
    factor = official_rcp(folder)[2]
    (folder / "scaling.json").write_text(json.dumps({"scaling_factor": factor}))
    (result,) = load_results(folder)
    score, _ = official_score(folder)
    assert result.olympic.minutes * factor == pytest.approx(score, rel=1e-12)


def test_fewer_runs_have_a_median_and_the_reason_why_there_is_no_score(submission):
    remove(*ALL[2:])(submission)
    (result,) = load_results(submission)
    minutes = [run.minutes for run in result.runs]
    assert result.olympic.median == statistics.median(minutes)
    assert (result.score, judge(result).official) == (None, False)
    assert [*judge(result).obstacles] == ["2 of 10 runs"]


def test_every_obstacle_to_an_official_score_is_named(submission):
    def replaced(index, seed, evaluations, start_ms):
        log = LogWriter(seed, evaluations, start_ms=start_ms + index * 600_000)
        log.write(submission / f"result_{index}.txt")

    for index in (2, 5):
        replaced(index, 77, 14, 1_760_000_000_000)
    drop("eval_samples", 2, 5)(submission)
    for index in (0, 1, 3, 4):
        replaced(index, index, 12, 1_770_000_000_000)
    verdict = judge(load_results(submission)[0])
    assert verdict.obstacles[:2] == (
        "seed is 77, as in result_2.txt, in result_5.txt:8",
        "RCP test fails: mean of 2,043,750 samples, the minimum is 2,306,738 (RCP Interpolation)",
    )
    found = {finding.id for finding in verdict.findings if finding.blocks}
    assert found >= {"key_missing", "seed_again", "rcp_failed"}


def test_a_run_that_continued_after_a_restart_has_no_time_and_every_command_says_so(
    submission, command, tmp_path
):
    """Its run_start is the restart's, so that run_stop minus run_start leaves out the time before."""

    def continued(events):
        at = next(i for i, event in enumerate(events) if event["key"] == "run_start")
        about = {"metadata": events[at]["metadata"] | {"epoch_num": 750_000}}
        event = {"key": "clock_not_whole", "value": {"continued_at_step": 977}}
        events.insert(at + 1, events[at] | event | about)

    edit(submission, 4, change=continued)
    (result,) = load_results(submission)
    assert (result.runs[4].minutes, judge(result).official) == (None, False)
    said = command("show", submission).out + command("check", submission).out
    command("report", submission, "-o", tmp_path / "page.html")
    said += (tmp_path / "page.html").read_text()
    why = "says that the run continued at 750,000 samples: it has no time"
    assert said.count(why) == 4, "show, check, and twice the page"
    assert command("check", submission).status == 1
    (entry,) = command("league", submission, "--json").json["apart"]
    assert not entry["checked"]


@pytest.mark.parametrize(("batch_size", "status", "said"), [
    (448, 0, "mean 2,414,421, minimum 2,274,732 samples (exact)"),
    (64, 0, "mean 2,414,421, minimum 2,274,732 samples (of batch 448, the smallest with one)"),
    (768, 0, "mean 2,443,934, minimum 2,306,738 samples (between 448 and 4,608)"),
    (16385, 1, "Missing RCP"),  # above every reference
    (0, 2, "must be at least 1"),
])  # fmt: skip
def test_the_reference_point_is_that_of_the_rules(batch_size, status, said, command):
    found = command("rcp", batch_size)
    assert (found.status, said in found.out + found.err) == (status, True)
    if status < 2:
        assert ("mean" in command("rcp", batch_size, "--json").json) == (status == 0)


@pytest.mark.parametrize("train_samples", [False, True])
def test_train_samples_are_judged_as_officially(train_samples, submission):
    for index in ALL:  # train_samples of their own, around the minimum
        put("train_samples", index, value=2_280_000 + 9_000 * index)(submission)
    (result,) = load_results(submission, train_samples=train_samples)
    test = result.rcp_test
    found = (test.passed, test.reason, pytest.approx(test.scaling_factor, rel=1e-12))
    assert official_rcp(submission, train_samples) == found


def test_a_failing_result_says_what_is_missing_or_what_to_run(submission, command):
    assert "short on average" not in command("show", submission).out
    write_runs(submission, [15] * 10)
    shown = command("show", submission).out
    short = rcp.find(768)[0].minimum - 2_250_000
    said = f"{short:,.0f} short on average, {8 * short:,.0f} over the 8 runs that count"
    assert said in shown
    assert "reference of batch 4,608" in shown
    put("global_batch_size", value=20_000)(submission)
    shown = command("show", submission).out
    assert "run the reference 20 times at 20000" in shown
