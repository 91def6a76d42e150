"""PROFILE_STEPS: a trace of the steps that were asked for, and of no other."""

from __future__ import annotations

import json

import pytest
import torch

from bert import rundir
from bert.env import ConfigError
from bert.profile_steps import Config, ProfiledStep


def test_the_trace_has_the_steps_from_the_first_to_the_last(tmp_path):
    def take_step(batches, lr):
        return torch.ones(batches, batches) @ torch.ones(batches, 1)

    step = ProfiledStep((2, 3), tmp_path / "run" / "trace.json", take_step)
    for number in range(1, 6):
        step(number, 0.0)
        assert (tmp_path / "run").exists() == (number >= 3)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::matmul" for event in events) == 2


def test_what_is_no_span_of_steps_is_refused(tmp_path):
    run = rundir.Config(run_dir=tmp_path)
    Config(steps="2,3").check(run, 3)
    with pytest.raises(ConfigError, match="PROFILE_STEPS=2,3: this process takes 2 steps: choose some of these"):
        Config(steps="2,3").check(run, 2)
    for steps in ("3", "3,2", "0,1", "a,b"):
        with pytest.raises(ConfigError, match=r"PROFILE_STEPS='.*': expected the first and the last step"):
            Config(steps=steps).check(run, 8)
    with pytest.raises(ConfigError, match="PROFILE_STEPS writes to RUN_DIR"):
        Config(steps="2,3").check(rundir.Config(), 8)
