"""Whole runs with ENGINE=deepspeed: evaluation, log, and checkpoints of both kinds, from which both engines resume."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from bert.__main__ import main
from bert.training.debug import differences

from ..states import newest, same

pytestmark = pytest.mark.deepspeed
SHARED = re.compile(r"layer\.\d+(\.attention|\.output|\.attention\.output)?(\.1)?\.gradient$")


def _events(environment, key):
    lines = (Path(environment["RUN_DIR"]) / "result_0.txt").read_text().splitlines()
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    return [event["value"] for event in events if event["key"] == key]


@pytest.fixture
def environ(prepared, tmp_path):
    """environ(stage or 0 for our own engine, **variables) of a run of 8 steps and two evaluations."""

    def make(stage, **variables):
        common = {
            "OPTIMIZER": "adamw",
            "LR": "0.003",
            "PRECISION": "fp32",
            "EVAL_ITER_SAMPLES": "48",
            "EVAL_ITER_START_SAMPLES": "48",
        }
        if stage:
            path = tmp_path / f"ds_{stage}.json"
            path.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
            common |= {"ENGINE": "deepspeed", "DEEPSPEED_CONFIG": str(path)}
        return prepared | common | {"RUN_DIR": str(tmp_path / f"run_{stage}")} | variables

    return make


def _losses(finished):
    return [float(value) for value in re.findall(r"loss ([\d.]+) \(mlm", finished.stderr)]


def _run(run_bert, environment):
    finished = run_bert(environment, ranks=2)
    assert finished.returncode == 3, finished.stderr  # short of its target
    return finished


def test_a_run_in_stage_3_reports_and_evaluates_as_with_our_own_engine(environ, run_bert):
    looked_at = {"CAPTURE": "inputs,activations,gradients", "PROFILE_STEPS": "2,3"}
    own, other = environ(0, **looked_at), environ(3, **looked_at)
    reports = [_losses(_run(run_bert, environment)) for environment in (own, other)]
    assert len(reports[0]) == 4
    assert reports[1] == pytest.approx(reports[0], abs=2e-4)
    assert len(_events(own, "eval_accuracy")) == 2
    for key in ("eval_accuracy", "global_batch_size", "opt_base_learning_rate", "run_stop"):
        assert _events(other, key) == _events(own, key), key
    for rank in "01":
        files = [
            Path(run["RUN_DIR"]) / f"capture_0/step_1_rank_{rank}.safetensors"
            for run in (own, other)
        ]
        # A layer gives one tensor twice, of which stage 3 makes two, each with its share of the gradient.
        found = {
            name: relative for name, _, relative in differences(*files) if not SHARED.search(name)
        }
        assert {"inputs", "activation", "gradient"} <= {
            word for name in found for word in name.split(".")
        }
        assert max(found.values()) < 1e-4, max(found, key=lambda name: found[name])
    assert json.loads((Path(other["RUN_DIR"]) / "trace_0.json").read_text())["traceEvents"]


@pytest.mark.parametrize("stage", [2, 3])
def test_masked_lm_alone_trains_is_evaluated_and_saved_as_with_our_own_engine(
    environ, run_bert, tmp_path, stage
):
    """NSP=0: without pooler and next-sentence head in model, log and checkpoint."""
    found = []
    for engine in (0, stage):
        settings = {
            "NSP": "0",
            "TARGET_MLM_ACCURACY": "0",
            "CHECKPOINT_DIR": str(tmp_path / str(engine)),
        }
        environment = environ(engine, **settings)
        finished = run_bert(environment, ranks=2)
        assert finished.returncode == 0, finished.stderr
        assert "nsp" not in finished.stderr
        found.append((_losses(finished), _events(environment, "eval_accuracy")))
        saved = newest(tmp_path / str(engine))["model"]
        assert not [
            name for name in saved if name.startswith(("bert.pooler.", "cls.seq_relationship."))
        ]
    assert len(found[0][0]) == 4
    assert found[1][0] == pytest.approx(found[0][0], abs=2e-4)
    assert found[1][1] == found[0][1]


def test_a_rank_alone_with_another_json_is_named(environ, run_bert):
    odd = environ(2)["DEEPSPEED_CONFIG"]
    finished = run_bert(environ(3), ranks=2, odd={"DEEPSPEED_CONFIG": odd})
    assert finished.returncode == 2
    said = finished.stderr.splitlines()[-1]
    assert re.search(r"ranks differ: rank 1 on \S+ has DEEPSPEED_CONFIG={.*'stage': 2", said), said


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_deepspeeds_checkpoints_resume_exactly_convert_to_ours_and_are_made_of_ours(
    environ, run_bert, tmp_path, stage
):
    whole = environ(
        stage,
        CHECKPOINT_SHARDS="1",
        CHECKPOINT_EVERY_STEPS="4",
        CHECKPOINT_DIR=str(tmp_path / "whole"),
    )
    _run(run_bert, whole)
    names = ["deepspeed_0000000004", "deepspeed_0000000008"]
    assert (
        sorted(path.name for path in (tmp_path / "whole").glob("[!.]*") if path.is_dir()) == names
    )
    assert (tmp_path / "whole" / "latest").read_text() == names[1]
    first, last = tmp_path / "step_0000000004.pt", tmp_path / "last.pt"
    assert main(["deepspeed-checkpoint", str(tmp_path / "whole" / names[0]), str(first)], {}) == 0
    assert main(["deepspeed-checkpoint", str(tmp_path / "whole" / names[1]), str(last)], {}) == 0
    ends = {}
    for kind in ("deepspeed", "ours", "own"):
        folder = tmp_path / kind
        folder.mkdir()
        if kind == "deepspeed":
            shutil.copytree(tmp_path / "whole" / names[0], folder / names[0])
            # A writer killed mid-way leaves such a folder; it must be neither found nor in the way.
            shutil.copytree(tmp_path / "whole" / names[1], folder / f".{names[1]}.partial")
        else:
            shutil.copy(first, folder)
        settings = {"RESUME": "1", "CHECKPOINT_DIR": str(folder)}
        _run(run_bert, environ(0, **settings) if kind == "own" else whole | settings)
        if kind == "own":
            ends[kind] = torch.load(folder / "step_0000000008.pt", weights_only=True)
        else:
            assert (
                main(["deepspeed-checkpoint", str(folder / names[1]), str(folder / "end.pt")], {})
                == 0
            )
            ends[kind] = torch.load(folder / "end.pt", weights_only=True)
    expected = torch.load(last, weights_only=True)
    assert same(ends["deepspeed"], expected)
    assert same(ends["ours"], expected)
    for name, weight in ends["own"]["optimizer"]["masters"].items():
        if not name.endswith("key.bias"):  # its gradient is 0 but for rounding, which Adam blows up
            torch.testing.assert_close(
                weight, expected["model"][name], atol=2e-5, rtol=1e-4, msg=name
            )


def test_a_folder_that_is_no_checkpoint_of_deepspeeds_is_one_line(tmp_path, capsys):
    assert main(["deepspeed-checkpoint", str(tmp_path), str(tmp_path / "out.pt")], {}) == 2
    assert "expected CHECKPOINT_DIR/deepspeed_<step>" in capsys.readouterr().err
    (tmp_path / "bert.pt").write_bytes(b"damaged")
    assert main(["deepspeed-checkpoint", str(tmp_path), str(tmp_path / "out.pt")], {}) == 2
    said = capsys.readouterr().err
    assert (
        "damaged checkpoint (bert.pt is not what torch.save writes, or cut off): give another"
        in said
    )
    assert "weights_only" not in said
