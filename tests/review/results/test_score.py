"""Scores and RCP verdicts are the official ones, to the last digits."""

from __future__ import annotations

import json
import logging
import statistics

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from review.__main__ import main
from review.results.score import load_results
from review.rulebook import rcp
from review.verdict.checking import judge


@pytest.fixture(scope="session")
def official_rcp():
    """The official checker's verdict, its reason and its scaling factor for a folder."""
    from mlperf_logging.rcp_checker import rcp_checker

    def verdict(folder, ruleset="5.0.0"):
        logging.disable(logging.CRITICAL)
        try:
            return rcp_checker.check_directory(
                str(folder),
                "training",
                ruleset,
                False,
                False,
                rcp_pass="pruned_rcps",
                set_scaling=False,
            )
        finally:
            logging.disable(logging.NOTSET)

    return verdict


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    batch_size=st.sampled_from(
        [32, 256, 448, 449, 768, 1536, 4608, 6912, 8192, 12000, 16384, 16385]
    ),
    interval=st.integers(100_000, 350_000),
    evaluations=st.lists(st.integers(8, 22), min_size=10, max_size=10),
    aborted=st.sets(st.integers(0, 9), max_size=2),
)
def test_rcp_verdict_and_scaling_are_the_official_ones(
    batch_size, interval, evaluations, aborted, writer, tmp_path, official_rcp
):
    for index, count in enumerate(evaluations):
        log = writer(seed=index, evaluations=count, interval=interval).change(
            "global_batch_size", value=batch_size
        )
        if index in aborted:
            log.change("run_stop", metadata={"status": "aborted"})
        log.write(tmp_path / f"result_{index}.txt")
    passed, reason, factor = official_rcp(tmp_path)
    (result,) = load_results(tmp_path)
    assert result.rcp_test.passed == passed
    assert result.rcp_test.scaling_factor == pytest.approx(factor, rel=1e-12)
    if result.batch_size is not None and len(aborted) < 2:
        assert result.rcp_test.reason == reason


def test_the_verdict_on_the_edge_is_the_official_one(writer, tmp_path, official_rcp):
    minimum = rcp.find(768)[0].minimum
    for samples, expected in ((int(minimum), False), (int(minimum) + 1, True)):
        for index in range(10):
            log = writer(seed=index)
            last = [line for line in log.lines if line["key"] == "eval_accuracy"][-1]
            last["metadata"]["epoch_num"] = samples
            log.write(tmp_path / f"result_{index}.txt")
        (result,) = load_results(tmp_path)
        assert (result.rcp_test.passed, official_rcp(tmp_path)[0]) == (
            expected,
            expected,
        )


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    counts=st.lists(st.integers(10, 20), min_size=10, max_size=10),
    speeds=st.lists(st.floats(5, 20), min_size=10, max_size=10),
    failing=st.none() | st.integers(0, 9),
)
def test_the_score_is_the_official_one(
    counts, speeds, failing, writer, tmp_path, official_rcp
):
    from mlperf_logging.result_summarizer import result_summarizer

    folder = tmp_path / "results" / "box" / "bert"
    for index, (count, seconds) in enumerate(zip(counts, speeds, strict=True)):
        target = 0.7 if index == failing else 0.7203
        log = writer(
            seed=index, evaluations=count, seconds_per_evaluation=seconds, target=target
        )
        log.write(folder / f"result_{index}.txt")
    factor = official_rcp(folder)[2]
    (folder / "scaling.json").write_text(json.dumps({"scaling_factor": factor}))
    logging.disable(logging.CRITICAL)
    try:
        score, *_ = result_summarizer._compute_strong_score_standalone(
            "bert", "box", False, str(folder), "training", "5.0.0"
        )
    finally:
        logging.disable(logging.NOTSET)
    (result,) = load_results(folder)
    assert result.olympic.minutes * factor == pytest.approx(score, rel=1e-12)


def test_fewer_runs_have_a_median_and_the_reason_why_there_is_no_score(submission):
    for index in range(2, 10):
        (submission / f"result_{index}.txt").unlink()
    (result,) = load_results(submission)
    minutes = [run.minutes for run in result.runs]
    assert result.olympic.median == statistics.median(minutes)
    assert (result.score, judge(result).official) == (None, False)
    assert [*judge(result).obstacles] == ["2 of 10 runs"]


def test_every_obstacle_to_an_official_score_is_named(submission, writer):
    for index in (2, 5):
        log = writer(
            seed=77, evaluations=14, start_ms=1_760_000_000_000 + index * 600_000
        )
        log.drop("eval_samples").write(submission / f"result_{index}.txt")
    for index in (0, 1, 3, 4):
        log = writer(
            seed=index, evaluations=12, start_ms=1_770_000_000_000 + index * 600_000
        )
        log.write(submission / f"result_{index}.txt")
    verdict = judge(load_results(submission)[0])
    assert verdict.obstacles[:2] == (
        "seed is 77, as in result_2.txt, in result_5.txt:8",
        "RCP test fails: mean of 2,043,750 samples, the minimum is 2,306,738 (RCP Interpolation)",
    )
    assert {f.id for f in verdict.findings if f.blocks} >= {
        "key_missing",
        "seed_again",
        "rcp_failed",
    }


def test_a_run_that_continued_after_a_restart_has_no_time_and_every_command_says_so(
    submission, capsys
):
    """Its run_start is the restart's, so that run_stop minus run_start leaves out the time
    before.
    """
    path = submission / "result_4.txt"
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"run_start"' in line)
    event = json.loads(lines[at].removeprefix(":::MLLOG "))
    event |= {"key": "clock_not_whole", "value": {"continued_at_step": 977}}
    event["metadata"] |= {"epoch_num": 750_000}
    lines.insert(at + 1, f":::MLLOG {json.dumps(event)}")
    path.write_text("\n".join(lines) + "\n")
    (result,) = load_results(submission)
    assert (result.runs[4].minutes, judge(result).official) == (None, False)
    for command in ("show", "check", "report"):
        output = (
            ["-o", str(submission.parent / "page.html")] if command == "report" else []
        )
        main([command, str(submission), *output])
    said = capsys.readouterr().out + (submission.parent / "page.html").read_text()
    why = "says that the run continued at 750,000 samples: it has no time"
    assert said.count(why) == 4, "show, check, and twice the page"
    assert main(["check", str(submission)]) == 1
    capsys.readouterr()
    assert main(["league", str(submission), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["apart"]
    assert not entry["checked"]
