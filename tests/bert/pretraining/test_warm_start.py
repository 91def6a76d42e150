"""INIT_OPTIMIZER=1: the next phase begins with weights, masters and moments of the one before, and
steps from 0; kill -9 in both phases and between them: the same command continues, with the weights
of an undisturbed run.

The whole tour, of run_pretraining.sh and at ten moments, is in tests/launch/test_pretraining.py.
"""

import os
from functools import partial

import pytest
import torch

from bert.pretraining import resume
from bert.pretraining.config import PretrainingConfig
from common.env import ConfigError, from_env

from ...forked import Command
from ...waiting import state, wait_until
from ..states import folders, newest, same

BIAS = "cls.predictions.bias"


@pytest.mark.parametrize(
    "settings",
    [{}, {"SHARD_OPTIMIZER": "1", "PRECISION": "bf16"}],
    ids=["fp32", "sharded-bf16"],
)
def test_a_warm_start_is_a_continued_run_with_its_counters_reset(
    settings, prepared, run_bert, tmp_path
):
    common = prepared | {"EVAL_ITER_SAMPLES": "0", "CHECKPOINT_KEEP": "9"} | settings
    phase = common | {"MAX_STEPS": "5"}
    run_bert(phase, status=0, CHECKPOINT_DIR=tmp_path / "one")
    saved = newest(tmp_path / "one")
    reset = saved | dict.fromkeys(("step", "batches", "samples"), 0)
    reset["optimizer"] = saved["optimizer"] | {"num_steps": 0}
    reset["run"] = saved["run"] | {"LR": 0.02}
    (tmp_path / "continued").mkdir()
    torch.save(reset, tmp_path / "continued" / "step_0000000000.pt")
    second = phase | {"LR": "0.02", "RESUME": "1"}
    run_bert(second | folders(tmp_path, "continued"), status=0)
    warm = {"INIT_OPTIMIZER": "1", "INIT_CHECKPOINT": tmp_path / "one/step_0000000005.pt"}  # fmt: skip
    run_bert(second | folders(tmp_path, "two"), status=0, **warm)
    ends = [newest(tmp_path / name) for name in ("two", "continued")]
    for end in ends:
        del end["first_weights"]  # where it comes from, which is what differs
    assert same(*ends)
    assert not same(newest(tmp_path / "two")["model"], saved["model"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["optimizer"].pop("masters"), "holds no optimizer state: expected a step_"),
        (lambda s: s["run"].update(OPTIMIZER="adamw"), "is of OPTIMIZER=adamw, this run has lamb: use the same"),
        (lambda s: s["optimizer"]["masters"].update({BIAS: torch.zeros(7)}),
         "masters of .* do not fit BERT_CONFIG: cls.predictions.bias is .7,., expected .216,.$"),
        (lambda s: s["optimizer"]["first_moments"].pop(BIAS), "predictions.bias is missing$"),
    ],
    ids=["weights-only", "other-optimizer", "other-vocabulary", "incomplete"],
)  # fmt: skip
def test_what_cannot_fit_is_told(change, message, prepared, tiny, make_model, tmp_path):
    shapes = {name: p.shape for name, p in make_model(tiny).named_parameters()}
    parts = "masters", "first_moments", "second_moments"
    state = {part: {name: torch.randn(shapes[name]) for name in shapes} for part in parts}  # fmt: skip
    saved = {"optimizer": state, "run": {"OPTIMIZER": "lamb"}}
    change(saved)
    path = tmp_path / "step_0000000001.pt"
    torch.save(saved, path)
    given = {"INIT_CHECKPOINT": str(path), "INIT_OPTIMIZER": "1"}
    config = from_env(PretrainingConfig, prepared | given)
    with pytest.raises(ConfigError, match=message):
        resume.warm_start(
            config.checkpoint.init_checkpoint, config.optim.optimizer, shapes
        )


def test_a_warm_start_without_a_checkpoint_is_refused(prepared):
    with pytest.raises(ConfigError, match="INIT_OPTIMIZER=1 needs INIT_CHECKPOINT"):
        from_env(PretrainingConfig, prepared | {"INIT_OPTIMIZER": "1"}).check()


def _stands(command):
    return not command.running() or state(command.pid) == "T"


def run(environ, folder, moments):
    """The trainer to its end; before, it is killed at each moment, when such a file is there, and begun again."""
    base = folders(folder.parent, folder.name)
    base |= {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "RESUME": "1"}
    for pattern in [*moments, None]:
        held = {"STANDS_AT": str(folder / pattern)} if pattern else {}
        command = Command("bert", environ | base | held)
        if pattern:
            wait_until(partial(_stands, command))
            assert command.running(), f"it ended before {pattern}: {command.finish()}"
            command.kill()
        finished = command.finish() if pattern is None else None
    assert finished is not None
    assert finished.returncode == 0, finished.stderr


def test_killed_at_three_moments_it_ends_with_the_same_weights(prepared, tmp_path):
    settings = prepared | {"EVAL_ITER_SAMPLES": "0", "MAX_STEPS": "8", "LR_SCHEDULE": "dle",
                           "WARMUP_STEPS": "3", "CHECKPOINT_EVERY_STEPS": "2", "CHECKPOINT_KEEP": "99"}  # fmt: skip
    ends = []
    tours = ([], []), (["step_*06.pt", ".step_*.partial"], ["step_*04.pt"])
    for number, (first, second) in enumerate(tours):
        one, two = tmp_path / f"{number}" / "one", tmp_path / f"{number}" / "two"
        one.mkdir(parents=True)
        two.mkdir()
        run(settings, one, first)
        assert newest(one)["step"] == 8
        warm = {"INIT_CHECKPOINT": str(one), "INIT_OPTIMIZER": "1"}
        run(settings | {"LR": "0.01"} | warm, two, second)
        ends.append(newest(two))
    assert same(*ends)
    assert ends[0]["step"] == 8
