"""A bad batch can be left out by its number, and the best checkpoint is kept beside the newest."""

from __future__ import annotations

import json

import pytest
import torch

from bert.checkpoint import sharded
from bert.kernels.precision import LossScaler, PrecisionConfig
from bert.pretraining.config import PretrainingConfig
from bert.training.loop import StepCounter
from common.env import ConfigError, from_env

from ..states import newest, same
from .test_owner import UNTIMED

# The loss of batch 3 is no number.
BAD = """
import torch
from bert.training.loop import StepCounter
begun = StepCounter.begin
StepCounter.begin = lambda steps: begun(steps) * (float("nan") if steps.batches == 3 else 1)
"""


def test_a_run_that_breaks_at_a_batch_goes_on_without_it(prepared, run_bert, tmp_path):
    (tmp_path / "first.py").write_text(BAD)
    given = prepared | UNTIMED | {"LOG_EVERY_STEPS": "1", "LR": "0.001"}
    given |= {
        "CHECKPOINT_DIR": str(tmp_path / "c"),
        "FIRST": str(tmp_path / "first.py"),
    }
    broken = run_bert(given)
    assert broken.returncode == 1
    assert "at step 4, batch 4" in broken.stderr, "after the update of batch 3"
    done = run_bert(given | {"RESUME": "1", "SKIP_BATCHES": "3"})
    assert done.returncode == 0, done.stderr
    assert "bert: batch 3 is left out (SKIP_BATCHES)" in done.stderr
    saved = newest(tmp_path / "c")
    assert (saved["step"], saved["batches"], saved["left_out"]) == (8, 9, [3])
    log = (tmp_path / "run" / "result_0.txt").read_text()
    assert '"key": "batch_left_out", "value": 3' in log
    whole = given | {"SKIP_BATCHES": "3", "CHECKPOINT_DIR": str(tmp_path / "whole")}
    assert run_bert(whole | {"RUN_DIR": str(tmp_path / "r")}).returncode == 0
    assert same(newest(tmp_path / "whole")["model"], saved["model"])


def test_rates_of_steps_do_not_move_with_batches_that_are_left_out():
    scaler = LossScaler(
        PrecisionConfig(precision="fp16").resolve(torch.device("cpu")),
        torch.device("cpu"),
    )
    steps = StepCounter(lambda step: step / 10, 5, scaler)
    rates = []
    for batch in range(1, 5):
        if batch == 2:
            steps.leave_out()
        else:
            rates.append(round(float(steps.begin()), 3))
    assert rates == [0.1, 0.2, 0.3]
    assert steps.resolve()
    assert (steps.done, steps.batches) == (3, 4)
    resumed = StepCounter(lambda step: step / 10, 5, scaler, 3, 4)
    assert round(float(resumed.begin()), 3) == 0.4


@pytest.mark.parametrize(
    ("text", "numbers"), [("", set()), ("3", {3}), ("2, 5-7", {2, 5, 6, 7})]
)
def test_batches_are_numbers_and_spans(text, numbers, prepared):
    config = from_env(PretrainingConfig, prepared | {"SKIP_BATCHES": text})
    assert config.left_out == numbers
    for wrong in ("x", "3-", "-1"):
        config = from_env(PretrainingConfig, prepared | {"SKIP_BATCHES": wrong})
        with pytest.raises(ConfigError, match="expected numbers and spans"):
            config.check()


def test_the_best_checkpoint_is_kept_beside_the_newest(prepared, run_bert, tmp_path):
    folder = tmp_path / "c"
    given = prepared | {"CHECKPOINT_DIR": str(folder), "CHECKPOINT_BEST": "1"}
    given |= {"TARGET_MLM_ACCURACY": "0", "CHECKPOINT_EVERY_STEPS": "2"}
    for steps in ("6", "0"):
        done = run_bert(given | {"RESUME": "1", "STEPS_THIS_RUN": steps})
        assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics_0.jsonl").read_text().splitlines()
    accuracies = {
        line["step"]: line["accuracy"]
        for line in map(json.loads, lines)
        if line["kind"] == "evaluation"
    }
    (best,) = sharded.complete(folder / "best")
    step = sharded.step_of(best)
    assert accuracies[step] == max(accuracies.values())
    assert torch.load(best, weights_only=True)["best"] == accuracies[step]
    assert newest(folder)["step"] == 8
