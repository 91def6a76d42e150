"""Whole runs with ENGINE=deepspeed: evaluation, log, and checkpoints of both kinds, from which both
engines resume.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from bert.checkpoint import sharded
from bert.training.debug import differences

from ..states import folders, losses, newest, values, zero_json
from .engines import same_optimizer

pytestmark = pytest.mark.deepspeed


@pytest.fixture
def environ(prepared, tmp_path):
    """environ(stage or 0 for our own engine, **variables) of a run of 8 steps and two
    evaluations.
    """

    def make(stage, **variables):
        common = {"OPTIMIZER": "adamw", "LR": "0.003", "PRECISION": "fp32"}
        twice = dict.fromkeys(("EVAL_ITER_SAMPLES", "EVAL_ITER_START_SAMPLES"), "48")
        engine = zero_json(tmp_path, stage) if stage else {}
        folder = {"RUN_DIR": str(tmp_path / f"run_{stage}")}
        return prepared | common | twice | engine | folder | variables

    return make


def _losses(finished):
    return [float(loss) for loss in losses(finished)]


def test_a_run_in_stage_2_reports_and_evaluates_as_with_our_own_engine(
    environ, run_bert
):
    looked_at = {"CAPTURE": "1", "PROFILE_STEPS": "2,3"}
    own, other = environ(0, **looked_at), environ(2, **looked_at)
    reports = [_losses(run_bert(each, 2, status=3)) for each in (own, other)]
    assert len(reports[0]) == 4
    assert reports[1] == pytest.approx(reports[0], abs=2e-4)
    assert len(values(own, "eval_accuracy")) == 2
    logged = "eval_accuracy global_batch_size opt_base_learning_rate run_stop"
    for key in logged.split():
        assert values(other, key) == values(own, key), key
    for rank in "01":
        name = f"capture_0/step_1_rank_{rank}.safetensors"
        files = [Path(run["RUN_DIR"], name) for run in (own, other)]
        found = {name: relative for name, _, relative in differences(*files)}
        words = {word for name in found for word in name.split(".")}
        assert {"inputs", "activation", "gradient"} <= words
        assert max(found.values()) < 1e-4, max(found, key=lambda name: found[name])
    trace = json.loads(Path(other["RUN_DIR"], "trace_0.json").read_text())
    assert trace["traceEvents"]


def test_masked_lm_alone_trains_is_evaluated_and_saved_as_with_our_own_engine(
    environ, run_bert, tmp_path
):
    """NSP=0: without pooler and next-sentence head in model, log and checkpoint."""
    found = []
    for engine in (0, 2):
        folder = tmp_path / str(engine)
        settings = {"NSP": "0", "TARGET_MLM_ACCURACY": "0"}
        environment = environ(engine, CHECKPOINT_DIR=str(folder), **settings)
        finished = run_bert(environment, 2, status=0)
        assert "nsp" not in finished.stderr
        found.append((_losses(finished), values(environment, "eval_accuracy")))
        heads = ("bert.pooler.", "cls.seq_relationship.")
        assert not [name for name in newest(folder)["model"] if name.startswith(heads)]
    assert len(found[0][0]) == 4
    assert found[1][0] == pytest.approx(found[0][0], abs=2e-4)
    assert found[1][1] == found[0][1]


def test_a_rank_alone_with_another_json_is_named(environ, run_bert):
    odd = {"DEEPSPEED_CONFIG": environ(2)["DEEPSPEED_CONFIG"]}
    said = run_bert(environ(1), 2, odd=odd, status=2).stderr.splitlines()[-1]
    another = r"ranks differ: rank 1 on \S+ has DEEPSPEED_CONFIG={.*'stage': 2"
    assert re.search(another, said), said


def test_sharded_checkpoints_resume_exactly_and_move_to_our_own_engine(
    environ, run_bert, tmp_path
):
    every = {"CHECKPOINT_SHARDS": "1", "CHECKPOINT_EVERY_STEPS": "4"}
    whole = tmp_path / "whole"
    run_bert(environ(2, **every), 2, status=3, CHECKPOINT_DIR=whole)
    names = ["step_0000000004", "step_0000000008"]
    assert sorted(path.name for path in whole.glob("step_*")) == names
    expected = sharded.read(whole / names[1])["optimizer"]
    for stage in (2, 0):
        folder = tmp_path / f"resumed_{stage}"
        shutil.copytree(whole / names[0], folder / names[0])
        resumed = {"RESUME": "1", "SHARD_OPTIMIZER": "1"} | folders(
            tmp_path, folder.name
        )
        run_bert(environ(stage, **every | resumed), 2, status=3)
        found = sharded.read(folder / names[1])["optimizer"]
        assert found["num_steps"] == 8
        same_optimizer(found, expected, exact=stage > 0)
