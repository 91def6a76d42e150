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

from ..states import newest, same

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
    first = run_bert(
        common | {"CHECKPOINT_DIR": str(tmp_path / "one"), "MAX_STEPS": "5"}
    )
    assert first.returncode == 0, first.stderr
    saved = newest(tmp_path / "one")
    reset = saved | {
        "step": 0,
        "batches": 0,
        "samples": 0,
        "optimizer": saved["optimizer"] | {"num_steps": 0},
    }
    reset["run"] = saved["run"] | {"LR": 0.02}
    (tmp_path / "continued").mkdir()
    torch.save(reset, tmp_path / "continued" / "step_0000000000.pt")
    second = common | {"MAX_STEPS": "5", "LR": "0.02"}
    continued = run_bert(
        second
        | {"CHECKPOINT_DIR": str(tmp_path / "continued"), "RESUME": "1"}
        | {"RUN_DIR": str(tmp_path / "run_continued")}
    )
    assert continued.returncode == 0, continued.stderr
    warm = second | {
        "CHECKPOINT_DIR": str(tmp_path / "two"),
        "RUN_DIR": str(tmp_path / "run_two"),
        "RESUME": "1",
        "INIT_OPTIMIZER": "1",
    }
    finished = run_bert(
        warm | {"INIT_CHECKPOINT": str(tmp_path / "one" / "step_0000000005.pt")}
    )
    assert finished.returncode == 0, finished.stderr
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
    return {
        part: {name: torch.randn(shape) for name, shape in shapes.items()}
        for part in PARTS
    }


def _read(path, prepared, shapes):
    config = from_env(
        PretrainingConfig,
        prepared | {"INIT_CHECKPOINT": str(path), "INIT_OPTIMIZER": "1"},
    )
    return resume.warm_start(
        config.checkpoint.init_checkpoint, config.optim.optimizer, shapes
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s["optimizer"].pop("masters"),
            "holds no optimizer state: expected a step_",
        ),
        (
            lambda s: s["run"].update(OPTIMIZER="adamw"),
            "is of OPTIMIZER=adamw, this run has lamb: use the same",
        ),
        (
            lambda s: s["optimizer"]["masters"].update(
                {"cls.predictions.bias": torch.zeros(7)}
            ),
            "masters of .* do not fit BERT_CONFIG: cls.predictions.bias is .7,., expected .216,.$",
        ),
        (
            lambda s: s["optimizer"]["first_moments"].pop("cls.predictions.bias"),
            "predictions.bias is missing$",
        ),
    ],
    ids=["weights-only", "other-optimizer", "other-vocabulary", "incomplete"],
)
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
    tensors = {
        name: p.detach()
        for name, p in make_model(tiny, dtype=torch.float32).named_parameters()
    }
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
