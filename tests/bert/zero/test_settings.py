"""DEEPSPEED_CONFIG: what the JSON says fills what is unset, and what contradicts it is one line naming both."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from bert.config import Config
from bert.env import ConfigError, from_env
from bert.run import run
from bert.zero.settings import merged
from bert.zero.step import check_fp16

PUBLISHED = {  # the recipe of the 5B model of the published DeepSpeed BERT, in its users' words
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 0.0015, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.02}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 900, "warmup_max_lr": 0.0007, "warmup_num_steps": 20, "warmup_type": "linear"},
    },
    "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 1.5e8},
    "zero_allow_untested_optimizer": True,
}


@pytest.fixture
def environ(prepared, tmp_path):
    """environ(JSON, **variables): of a run with DeepSpeed; the variables that the JSON speaks of are unset."""

    def make(found, **variables):
        path = tmp_path / "ds.json"
        path.write_text(found if isinstance(found, str) else json.dumps(found))
        free = {"BATCHSIZE", "LR", "LOG_EVERY_STEPS"} if "optimizer" in found else set()
        kept = {name: value for name, value in prepared.items() if name not in free}
        return kept | {"ENGINE": "deepspeed", "DEEPSPEED_CONFIG": str(path), "WORLD_SIZE": "8"} | variables

    return make


def _refusal(environment, capsys):
    assert run(environment, check_only=True) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_the_json_fills_what_is_unset(environ):
    config = from_env(Config, merged(environ(PUBLISHED)))
    assert (config.data.batch_size, config.data.gradient_steps) == (4, 2)
    assert config.precision.precision == "bf16"
    assert (config.optim.optimizer, config.optim.max_grad_norm, config.optim.sharded) == ("adamw", 0.5, True)
    adam = config.optim.adam
    assert (adam.beta1, adam.beta2, adam.eps, adam.weight_decay) == (0.8, 0.99, 1e-7, 0.02)
    rates = config.schedule
    assert (rates.schedule, rates.lr, rates.decay_steps, rates.warmup_steps) == ("poly", 0.0007, 900, 20)
    assert config.log_every_steps == 10
    given = config.zero.complete(config.optim, config.numerics, 4, 2)
    assert given["zero_optimization"] == PUBLISHED["zero_optimization"]
    assert (given["gradient_clipping"], given["bf16"]["enabled"], given["fp16"]["enabled"]) == (0.5, True, False)
    assert not given.keys() & {"optimizer", "scheduler", "train_batch_size"}


def test_what_is_auto_or_absent_is_left_to_the_variables(environ):
    found = {"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}
    config = from_env(Config, merged(environ(found, GRADIENT_STEPS="3", PRECISION="bf16")))
    assert (config.data.batch_size, config.data.gradient_steps) == (3, 3)
    assert config.precision.precision == "bf16"


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("BATCHSIZE", "5", "train_micro_batch_size_per_gpu"),
        ("GRADIENT_STEPS", "1", "gradient_accumulation_steps"),
        ("PRECISION", "fp32", "bf16.enabled"),
        ("OPTIMIZER", "lamb", "optimizer.type"),
        ("LR", "0.001", "scheduler.params.warmup_max_lr"),
        ("MAX_GRAD_NORM", "1.0", "gradient_clipping"),
        ("SHARD_OPTIMIZER", "0", "zero_optimization.stage"),
        ("LOG_EVERY_STEPS", "100", "steps_per_print"),
    ],
)
def test_a_contradiction_is_one_line_that_names_both(environ, capsys, name, value, key):
    line = _refusal(environ(PUBLISHED, **{name: value}), capsys)
    assert f"{name}={value} is set" in line
    assert f": {key} means {name}=" in line


def test_the_same_said_twice_is_no_contradiction(environ):
    same = {"BATCHSIZE": "4", "MAX_GRAD_NORM": "0.50", "SHARD_OPTIMIZER": "true", "PRECISION": "auto", "LR": "7e-4"}
    assert from_env(Config, merged(environ(PUBLISHED, **same))).optim.max_grad_norm == 0.5


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("{", "no JSON"),
        ("[]", "expected an object"),
        ({"train_batch_size": 65, "train_micro_batch_size_per_gpu": 4}, "no whole gradient_accumulation_steps"),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
            "64 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 3 x 8 ranks",
        ),
        ({"train_batch_size": "64"}, "expected an integer"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention: nothing here does that"),
        ({"optimizer": {"type": "OneBitAdam"}}, "expected Adam, AdamW or Lamb"),
        ({"optimizer": {"type": "Lamb", "params": {"max_coeff": 10}}}, "max_coeff: our Lamb has no such setting"),
        ({"scheduler": {"type": "WarmupLR"}}, "expected WarmupDecayLR"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}}}, 'expected "linear"'),
        (
            {"fp16": {"enabled": True, "hysteresis": 2}},
            "fp16.hysteresis is 2: with PRECISION=fp16 masters are fp32, and the loss scale halves",
        ),
        (
            {"activation_checkpointing": {"profile": False, "number_checkpoints": 4}},
            "activation_checkpointing.number_checkpoints: RECOMPUTE_LAYERS does that here",
        ),
        ({"zero_optimization": {"stage": 4}}, "stage is 4"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_hpz_partition_size is not supported"),
    ],
)
def test_a_json_that_cannot_be_is_one_line(environ, capsys, found, words):
    assert words in _refusal(environ(found), capsys)


@pytest.mark.parametrize(
    ("found", "variables", "words"),
    [
        ({"zero_optimization": {"stage": 0}}, {}, "zero_optimization.stage is 0"),
        ({}, {"CLIP": "before"}, "CLIP=before: our own engine does that"),
        ({}, {"WARMUP_RUN": "1"}, "WARMUP_RUN=1: our own engine does that"),
        ({}, {"ALLREDUCE_DTYPE": "weights"}, "ALLREDUCE_DTYPE=weights: our own engine does that"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            {},
            "offload_optimizer: device nvme and a ratio are not supported",
        ),
        (
            {"checkpoint": {"tag_validation": "Fail", "use_node_local_storage": True}},
            {"DEEPSPEED_CHECKPOINTS": "1"},
            "DEEPSPEED_CHECKPOINTS=1 and checkpoint.use_node_local_storage in",
        ),
    ],
)
def test_what_deepspeed_cannot_do_is_refused_before_the_start(environ, capsys, monkeypatch, found, variables, words):
    monkeypatch.setattr("bert.zero.settings.load", lambda: None)  # as if it were installed
    assert words in _refusal(environ({"zero_optimization": {"stage": 2}} | found, **variables), capsys)


def test_without_deepspeed_one_line_says_how_to_install_it(environ, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    line = _refusal(environ({"zero_optimization": {"stage": 2}}), capsys)
    assert "pip install -r requirements/deepspeed.txt" in line


def test_the_json_goes_with_the_engine(environ, capsys):
    assert "DEEPSPEED_CONFIG is not set" in _refusal(environ({}, DEEPSPEED_CONFIG=""), capsys)
    assert "ENGINE is not deepspeed" in _refusal(environ({}, ENGINE="own"), capsys)
    own = environ({}, ENGINE="own", DEEPSPEED_CONFIG="", DEEPSPEED_CHECKPOINTS="1")
    assert "DEEPSPEED_CHECKPOINTS=1 and ENGINE is not deepspeed" in _refusal(own, capsys)


def test_our_loss_scale_is_the_one_that_deepspeed_begins_with(environ):
    config = from_env(Config, merged(environ({"fp16": {"enabled": True, "hysteresis": 1, "initial_scale_power": 12}})))
    assert (config.precision.init_loss_scale, config.precision.growth_interval) == (4096, 1000)
    given = config.zero.complete(config.optim, config.numerics, 1, 1)
    assert (given["fp16"]["enabled"], given["fp16"]["loss_scale"]) == (True, 4096)


@pytest.mark.parametrize(("has_fp16", "device"), [(None, "CPU"), (True, "CPU"), (False, "CUDA")])
def test_fp16_that_deepspeed_does_not_find_on_this_processor_is_refused_before_the_start(
    environ, capsys, monkeypatch, has_fp16, device
):
    accelerator = SimpleNamespace(is_fp16_supported=lambda: has_fp16)
    fakes = {
        "deepspeed": SimpleNamespace(accelerator=SimpleNamespace(get_accelerator=lambda: accelerator)),
        "deepspeed.accelerator": SimpleNamespace(),
        "deepspeed.accelerator.cpu_accelerator": SimpleNamespace(CPU_Accelerator=lambda: accelerator),
    }
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    if device == "CUDA":
        with pytest.raises(ConfigError, match="no fp16 on this CUDA: set bf16 or fp32, in the JSON too"):
            check_fp16(fakes["deepspeed"], torch.device("cuda"))
        return
    monkeypatch.setattr("bert.zero.settings.load", lambda: fakes["deepspeed"])
    environment = environ({"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "hysteresis": 1}})
    if has_fp16:
        assert run(environment, check_only=True) == 0
    else:
        words = "PRECISION=fp16: DeepSpeed finds no fp16 on this CPU: set bf16 or fp32, in the JSON too"
        assert words in _refusal(environment, capsys)
