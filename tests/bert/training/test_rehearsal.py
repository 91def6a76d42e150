"""REHEARSAL=1 trains the start of a closed run, and the review compares it with a band: all of it on a CPU."""

from pathlib import Path

import pytest

from bert.pretraining.config import PretrainingConfig
from bert.training.schedule import learning_rate
from common.env import ConfigError, from_env
from review.results import published_curves
from review.results.published_curves import CurveRange


def test_it_is_the_same_run_but_for_its_start_its_end_and_its_division(prepared):
    environ = prepared | {"MAX_STEPS": "3680", "BATCHSIZE": "384"}
    environ |= {"MAX_SAMPLES_TERMINATION": "4500000", "SUBMISSION_DIVISION": "closed"}
    environ |= {"EVAL_ITER_SAMPLES": "150000", "EVAL_ITER_START_SAMPLES": "150000"}
    whole = from_env(PretrainingConfig, environ).rehearsed()
    start = from_env(PretrainingConfig, environ | {"REHEARSAL": "1"}).rehearsed()
    assert (whole.max_steps, whole.mlperf.division) == (3680, "closed")
    assert 0 not in whole.evaluation_steps
    assert start.max_steps == 391  # the first step with 300,000 samples
    assert start.evaluation_steps == {0, 196, 391}
    assert start.mlperf.division == "open"
    for step in (1, 200, 391):
        rate = learning_rate(step, whole.schedule)
        assert learning_rate(step, start.schedule) == rate


@pytest.mark.parametrize(
    ("every", "last"),
    [(150_000, 300_000), (175_000, 350_000), (200_000, 400_000), (325_000, 325_000)],
)
def test_it_ends_with_an_evaluation(prepared, every, last):
    environ = prepared | {"REHEARSAL": "1", "MAX_STEPS": "1000000"}
    names = "EVAL_ITER_SAMPLES", "EVAL_ITER_START_SAMPLES"
    environ |= dict.fromkeys(names, str(every))
    start = from_env(PretrainingConfig, environ).rehearsed()
    assert start.max_samples == last
    assert start.max_steps in start.evaluation_steps


def test_without_an_evaluation_there_is_nothing_to_compare(prepared):
    environ = prepared | {"EVAL_ITER_SAMPLES": "0", "REHEARSAL": "1"}
    config = from_env(PretrainingConfig, environ)
    with pytest.raises(ConfigError, match=r"there are none: set EVAL_ITER_SAMPLES"):
        config.rehearsed()


def test_from_training_to_the_verdict_on_a_cpu(prepared, run_bert, monkeypatch):
    """A small model, whose accuracies no published run has; on a GPU the same code runs."""
    small = {"REHEARSAL": "1", "MAX_SAMPLES_TERMINATION": "48", "MAX_STEPS": "100"}
    # It ends short of the target, which is what a rehearsal does.
    run_bert(prepared | small, status=0, TARGET_MLM_ACCURACY=1)
    log = Path(prepared["RUN_DIR"]) / "rehearsal" / "result_0.txt"
    band = CurveRange(6, 10, "this test", ((6, 0.0, 1.0), (60, 0.0, 1.0)), {})
    monkeypatch.setattr(published_curves, "published", lambda: (band,))
    found = published_curves.rehearsal(log)
    assert [round(point.samples / 24) for point in found.points] == [0, 1, 2]
    assert [point.within_range for point in found.points] == [False, True, True]
    assert not found.go, "the accuracy before the first step is not the checkpoint's"
