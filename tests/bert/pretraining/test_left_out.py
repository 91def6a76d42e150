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

from ..plain import CPU
from ..states import newest, same

# The loss of batch 3 is no number.
BAD = """
import torch
from bert.training.loop import StepCounter
begun = StepCounter.begin
StepCounter.begin = lambda steps: begun(steps) * (float("nan") if steps.batches == 3 else 1)
"""


def test_a_run_that_breaks_at_a_batch_goes_on_without_it(train, tmp_path):
    (tmp_path / "first.py").write_text(BAD)
    given = {"LOG_EVERY_STEPS": "1", "LR": "0.001", "FIRST": tmp_path / "first.py"}
    broken = train(status=1, **given)
    assert "at step 4, batch 4" in broken.stderr, "after the update of batch 3"
    done = train(RESUME=1, SKIP_BATCHES=3, **given)
    assert "bert: batch 3 is left out (SKIP_BATCHES)" in done.stderr
    saved = newest(tmp_path / "c")
    assert (saved["step"], saved["batches"], saved["left_out"]) == (8, 9, [3])
    log = (tmp_path / "run" / "result_0.txt").read_text()
    assert '"key": "batch_left_out", "value": 3' in log
    whole = {"CHECKPOINT_DIR": tmp_path / "whole", "RUN_DIR": tmp_path / "r"}
    train(SKIP_BATCHES=3, **given, **whole)
    assert same(newest(tmp_path / "whole")["model"], saved["model"])


def test_rates_of_steps_do_not_move_with_batches_that_are_left_out():
    precision = PrecisionConfig(precision="fp16").resolve(CPU)
    scaler = LossScaler(precision, CPU)
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


def test_the_best_checkpoint_is_kept_beside_the_newest(train, tmp_path):
    best = {"CHECKPOINT_BEST": "1", "EVAL_ITER_SAMPLES": "24"}
    for steps in (6, 0):
        train(RESUME=1, STEPS_THIS_RUN=steps, **best)
    folder = tmp_path / "c"
    text = (tmp_path / "run" / "metrics_0.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    accuracies = {line["step"]: line["accuracy"] for line in evaluations}
    (best,) = sharded.complete(folder / "best")
    step = sharded.step_of(best)
    assert accuracies[step] == max(accuracies.values())
    assert torch.load(best, weights_only=True)["best"] == accuracies[step]
    assert newest(folder)["step"] == 8
