"""PROFILE_STEPS: a trace of the steps asked for."""

from __future__ import annotations

import json

import pytest
import torch

from bert.core import rundir
from bert.core.env import ConfigError
from bert.pretraining.run import run
from bert.training.profiling import Config, ProfiledStep, unprofiled


def take_step(batches, lr):
    return torch.ones(batches, batches) @ torch.ones(batches, 1)


def test_the_trace_has_the_steps_from_the_first_to_the_last(tmp_path):
    step = ProfiledStep((2, 3), tmp_path / "run" / "trace.json", take_step)
    for number in range(1, 6):
        step(number, 0.0)
        assert (tmp_path / "run").exists() == (number >= 3)
    assert _steps_in(tmp_path / "run" / "trace.json") == 2
    assert unprofiled(take_step) is take_step


def _steps_in(trace):
    events = json.loads(trace.read_text())["traceEvents"]
    return sum(event.get("name") == "aten::matmul" for event in events)


@pytest.mark.parametrize(("taken", "words", "traced"), [(1, "1: no trace", 0), (3, "3: {} ends there", 2)])
def test_a_run_that_ends_before_the_last_of_the_steps_says_so_and_keeps_those_that_came(
    tmp_path, capsys, taken, words, traced
):
    trace = tmp_path / "trace.json"
    step = ProfiledStep((2, 5), trace, take_step)
    for number in range(1, taken + 1):
        step(number, 0.0)
    assert unprofiled(step) is take_step, "for what comes after the training"
    said = capsys.readouterr().err
    assert said.startswith(f"PROFILE_STEPS=2,5: this process ended after its step {words.format(trace)}")
    assert said.count("\n") == 1
    assert (_steps_in(trace) if trace.exists() else 0) == traced


def test_a_resumed_run_with_too_few_steps_left_says_which_were_not_profiled(prepared, tmp_path, capfd):
    settings = {"MAX_STEPS": "4", "EVAL_ITER_SAMPLES": "0", "TARGET_MLM_ACCURACY": "0"}
    settings |= {"CHECKPOINT_DIR": str(tmp_path / "saved")}
    assert run(prepared | settings | {"STEPS_THIS_RUN": "3"}) == 0
    assert run(prepared | settings | {"RESUME": "1", "PROFILE_STEPS": "2,3"}) == 0
    assert "PROFILE_STEPS=2,3: this process ended after its step 1: no trace is written" in capfd.readouterr().err
    assert not (tmp_path / "run" / "trace_0.json").exists()


def test_what_is_no_span_of_steps_is_refused(tmp_path):
    folder = rundir.Config(run_dir=tmp_path)
    Config(steps="2,3").check(folder, 3)
    with pytest.raises(ConfigError, match="PROFILE_STEPS=2,3: this process takes 2 steps: choose some of these"):
        Config(steps="2,3").check(folder, 2)
    for steps in ("3", "3,2", "0,1", "a,b"):
        with pytest.raises(ConfigError, match=r"PROFILE_STEPS='.*': expected the first and the last step"):
            Config(steps=steps).check(folder, 8)
    with pytest.raises(ConfigError, match="PROFILE_STEPS writes to RUN_DIR"):
        Config(steps="2,3").check(rundir.Config(), 8)
