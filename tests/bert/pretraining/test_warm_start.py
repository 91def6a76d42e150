"""INIT_OPTIMIZER=1: the next phase begins with weights, masters and moments of the one before, and
steps from 0.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bert.pretraining import check, resume
from bert.pretraining.config import PretrainingConfig
from common.env import ConfigError, from_env

from ..states import folders, newest, same

BIAS = "cls.predictions.bias"
PARTS = ("masters", "first_moments", "second_moments")


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


@pytest.fixture
def shapes(tiny, make_model):
    return {name: p.shape for name, p in make_model(tiny).named_parameters()}


@pytest.fixture
def state(shapes):
    numbers = lambda: {name: torch.randn(shape) for name, shape in shapes.items()}  # noqa: E731
    return {part: numbers() for part in PARTS}


def _read(path, prepared, shapes):
    given = {"INIT_CHECKPOINT": str(path), "INIT_OPTIMIZER": "1"}
    config = from_env(PretrainingConfig, prepared | given)
    return resume.warm_start(
        config.checkpoint.init_checkpoint, config.optim.optimizer, shapes
    )


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
def test_what_does_not_fit_is_one_line(
    change, message, prepared, state, shapes, tmp_path
):
    saved = {"optimizer": state, "run": {"OPTIMIZER": "lamb"}}
    change(saved)
    torch.save(saved, tmp_path / "step_0000000001.pt")
    with pytest.raises(ConfigError, match=message):
        _read(tmp_path / "step_0000000001.pt", prepared, shapes)


def test_a_warm_start_without_a_checkpoint_is_refused(prepared):
    with pytest.raises(ConfigError, match="INIT_OPTIMIZER=1 needs INIT_CHECKPOINT"):
        from_env(PretrainingConfig, prepared | {"INIT_OPTIMIZER": "1"}).check()


def test_weights_of_another_vocabulary_are_refused_by_the_check_and_by_the_run(
    prepared, tiny, make_model, tmp_path
):
    """Of the same size, so that every shape fits."""
    tensors = dict(make_model(tiny, dtype=torch.float32).state_dict())
    path = tmp_path / "step_0000000001.pt"
    torch.save({"model": tensors, "vocab_md5": "1" * 32}, path)
    config = from_env(PretrainingConfig, prepared | {"INIT_CHECKPOINT": str(path)})
    message = "step_0000000001.pt: trained with another vocabulary .md5 1{32}. than that of the training data .0{32}."
    with pytest.raises(ConfigError, match=message):
        check.report(config)
    with pytest.raises(ConfigError, match=message):
        resume.check_data(config.checkpoint, None, SimpleNamespace(vocab_md5="0" * 32))
    torch.save({"model": tensors, "vocab_md5": "0" * 32}, path)
    assert "weights" in check.report(config)
