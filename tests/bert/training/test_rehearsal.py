"""REHEARSAL=1 trains the start of a closed run, and the review compares it with a band: all of it on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bert.pretraining.config import Config
from bert.training.schedule import learning_rate
from common.env import ConfigError, from_env
from review.results.published_curves import rehearsal


def test_it_is_the_same_run_but_for_its_start_its_end_and_its_division(prepared):
    environ = prepared | {
        "MAX_STEPS": "3680",
        "BATCHSIZE": "384",
        "MAX_SAMPLES_TERMINATION": "4500000",
    }
    environ |= {
        "EVAL_ITER_SAMPLES": "150000",
        "EVAL_ITER_START_SAMPLES": "150000",
        "SUBMISSION_DIVISION": "closed",
    }
    whole = from_env(Config, environ).rehearsed()
    start = from_env(Config, environ | {"REHEARSAL": "1"}).rehearsed()
    assert (whole.max_steps, whole.evaluate.initial, whole.mlperf.division) == (
        3680,
        False,
        "closed",
    )
    assert start.max_steps == 391  # the first step with 300,000 samples
    assert start.evaluation_steps == {196, 391}
    assert start.evaluate.initial
    assert start.mlperf.division == "open"
    for step in (1, 200, 391):
        assert learning_rate(step, start.schedule) == learning_rate(step, whole.schedule)


@pytest.mark.parametrize(
    ("every", "last"),
    [(150_000, 300_000), (175_000, 350_000), (200_000, 400_000), (325_000, 325_000)],
)
def test_it_ends_with_an_evaluation(prepared, every, last):
    environ = prepared | {
        "EVAL_ITER_SAMPLES": str(every),
        "EVAL_ITER_START_SAMPLES": str(every),
        "REHEARSAL": "1",
    }
    start = from_env(Config, environ | {"MAX_STEPS": "1000000"}).rehearsed()
    assert start.max_samples == last
    assert start.max_steps in start.evaluation_steps


def test_without_an_evaluation_there_is_nothing_to_compare(prepared):
    with pytest.raises(
        ConfigError,
        match=r"REHEARSAL=1 compares evaluations, but there are none: set EVAL_ITER_SAMPLES",
    ):
        from_env(Config, prepared | {"EVAL_ITER_SAMPLES": "0", "REHEARSAL": "1"}).rehearsed()


def test_the_closed_guard_holds_for_a_rehearsal(prepared, capfd):
    from bert.__main__ import main

    assert (
        main(
            [],
            prepared
            | {"REHEARSAL": "1", "SUBMISSION_DIVISION": "closed", "RANK": "0", "WORLD_SIZE": "1"},
        )
        == 2
    )
    assert "the closed division does not allow " in capfd.readouterr().err


def test_from_training_to_the_verdict_on_a_cpu(prepared, run_bert, tmp_path):
    """A small model with a band for it; on a GPU the same code runs."""
    small = prepared | {
        "REHEARSAL": "1",
        "REHEARSAL_SAMPLES": "48",
        "MAX_STEPS": "100",
        "TARGET_MLM_ACCURACY": "1",
    }
    done = run_bert(small)
    assert done.returncode == 0, (
        done.stderr
    )  # it ends short of the target, which is what a rehearsal does
    log = Path(prepared["RUN_DIR"]) / "result_0.txt"
    found = rehearsal(log, band(tmp_path, [[0, 0, 1], [24, 0, 1], [48, 0, 1]]))
    assert [round(point.samples / 24) for point in found.points] == [0, 1, 2]
    assert found.go
    accuracies = [point.accuracy for point in found.points]
    elsewhere = band(tmp_path, [[0, accuracies[0], 1], [24, 0.98, 0.985], [48, 0.99, 0.995]])
    assert not rehearsal(log, elsewhere).go


def band(folder: Path, points: list[list[float]]) -> Path:
    path = folder / "band.json"
    text = json.dumps(
        {"bands": [{"batch_size": 6, "runs": 1, "source": "this test", "points": points}]}
    )
    path.write_text(text)
    return path
