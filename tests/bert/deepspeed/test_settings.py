"""DEEPSPEED_CONFIG: the JSON fills unset variables, and contradictions are errors of one line naming both."""

import copy
import json
import logging
import re
import sys
from operator import attrgetter
from types import SimpleNamespace

import pytest

from bert.deepspeed.settings import merged
from bert.pretraining.config import PretrainingConfig
from bert.pretraining.run import run
from common.env import from_env

DEEPSPEED = SimpleNamespace(  # as if it were installed, and heeded everything
    runtime=SimpleNamespace(
        zero=SimpleNamespace(config=SimpleNamespace(DeepSpeedZeroConfig=dict))
    )
)
PUBLISHED = {  # the recipe of the 5B model of the published DeepSpeed BERT, in its users' words
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 0.0015, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.02}},
    "scheduler": {"type": "WarmupDecayLR", "params": {
        "total_num_steps": 900, "warmup_max_lr": 0.0007, "warmup_num_steps": 20, "warmup_type": "linear"}},
    "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 1.5e8},
    "zero_allow_untested_optimizer": True,
}  # fmt: skip


ZERO = {"zero_optimization": {"stage": 2}}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {"warmup_type": "linear", "warmup_max_lr": 0.001, "warmup_num_steps": 10, "total_num_steps": 100},
}  # fmt: skip


@pytest.fixture
def environ(prepared, tmp_path):
    """environ(JSON, **variables): of a run with DeepSpeed; the variables that the JSON sets are unset."""

    def make(found, **variables):
        path = tmp_path / "ds.json"
        path.write_text(found if isinstance(found, str) else json.dumps(found))
        free = {"BATCHSIZE", "LR", "LOG_EVERY_STEPS"} if "optimizer" in found else set()
        kept = {name: value for name, value in prepared.items() if name not in free}
        engine = {"ENGINE": "deepspeed", "DEEPSPEED_CONFIG": str(path)}
        return kept | engine | {"WORLD_SIZE": "8"} | variables

    return make


def _refusal(environment, capsys):
    assert run(environment, check_only=True) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


FILLED = {
    "data.batch_size": 4, "data.gradient_steps": 2, "precision.precision": "bf16", "optim.optimizer": "adamw",
    "optim.max_grad_norm": 0.5, "optim.sharded": True, "optim.adam.beta1": 0.8, "optim.adam.beta2": 0.99,
    "optim.adam.eps": 1e-7, "optim.adam.weight_decay": 0.02, "schedule.schedule": "poly", "schedule.lr": 0.0007,
    "schedule.decay_steps": 900, "schedule.warmup_steps": 20, "log_every_steps": 10,
}  # fmt: skip


def test_the_json_fills_what_is_unset(environ):
    config = from_env(PretrainingConfig, merged(environ(PUBLISHED)))
    assert {name: attrgetter(name)(config) for name in FILLED} == FILLED
    given = config.zero.complete(config.optim, config.numerics, 4, 2)
    assert given["zero_optimization"] == PUBLISHED["zero_optimization"]
    assert given["gradient_clipping"] == 0.5
    assert (given["bf16"]["enabled"], given["fp16"]["enabled"]) == (True, False)
    assert not given.keys() & {"optimizer", "scheduler", "train_batch_size"}
    unclipped = merged(environ(PUBLISHED | {"gradient_clipping": 0}))
    assert from_env(PretrainingConfig, unclipped).optim.max_grad_norm == 1e30


SECTIONS = "zero_optimization optimizer optimizer.params bf16 fp16 scheduler activation_checkpointing"
WRONG = {
    **{name: [True, [], "AdamW", 1, None] for name in SECTIONS.split()},
    "gradient_clipping": ["1.0", -1, None, True],
    "optimizer.params.lr": ["1e-3", float("nan"), -1],
    "optimizer.params.betas": [[0.9], 0.9, [0.9, "0.99"]],
    "optimizer.params.weight_decay": ["0.1", float("inf")],
    "optimizer.params.bias_correction": ["yes"],
    "scheduler.params.total_num_steps": ["100", 0, 1.5],
    "scheduler.params.warmup_num_steps": ["9", -1],
    "fp16.initial_scale_power": ["x", 2000, -1],
    "steps_per_print": ["ten", 0, -1],
    "zero_optimization.cpu_offload": ["yes"],
}  # fmt: skip


@pytest.mark.parametrize("where", WRONG)
def test_a_value_of_another_type_or_out_of_range_is_named(environ, capsys, where):
    for value in WRONG[where]:
        line = _refusal(environ(_put(where.split("."), value)), capsys)
        assert re.search(rf"{where} is .*: expected (an? |two |true or )", line), line


def _put(where, value):
    """A JSON that is right but for one value."""
    found = {
        "fp16": {"enabled": True, "hysteresis": 1},
        "optimizer": {"type": "AdamW", "params": {}},
        "scheduler": copy.deepcopy(DECAY),
        "zero_optimization": {"stage": 1},
    }
    inner = found
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    return found


def test_a_scheduler_says_all_of_its_settings(environ, capsys):
    for name in DECAY["params"]:
        params = {key: value for key, value in DECAY["params"].items() if key != name}
        line = _refusal(environ({"scheduler": DECAY | {"params": params}}), capsys)
        assert f"scheduler.params.{name} is not set" in line


REFUSED = [
    ({"overlap_comm": "yes please"}, "zero_optimization.overlap_comm: Input should be a valid"),
    ({"reduce_bucket_size": -1}, "zero_optimization.reduce_bucket_size: Input should be gr"),
    ({"overlap_com": True}, "zero_optimization.overlap_com: Extra inputs are not"),
    ({"offload_optimizer": {"devise": "cpu"}}, "zero_optimization.offload_optimizer.devise: Extra"),
    ({"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}, ""),
]  # fmt: skip


@pytest.mark.deepspeed
@pytest.mark.parametrize(("zero", "words"), REFUSED)
def test_what_deepspeed_refuses_is_one_line(environ, capsys, monkeypatch, zero, words):
    # DeepSpeed's log goes to where stdout went when a test imported it, which may be closed.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    given = {"zero_optimization": {"stage": 2} | zero}
    line = _refusal(environ(given, WORLD_SIZE="1"), capsys)
    assert f"DeepSpeed refuses {words}" in line


def test_what_is_auto_or_absent_is_left_to_the_variables(environ):
    found = {"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}  # fmt: skip
    given = environ(found, GRADIENT_STEPS="3", PRECISION="bf16")
    config = from_env(PretrainingConfig, merged(given))
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
    ],
)
def test_a_contradiction_is_one_line_that_names_both(environ, capsys, name, value, key):
    line = _refusal(environ(PUBLISHED, **{name: value}), capsys)
    assert f"{name}={value} is set" in line
    assert f": {key} means {name}=" in line


@pytest.mark.parametrize(
    ("found", "name", "unset"),
    [
        ({"steps_per_print": 48}, "LOG_EVERY_STEPS", "48"),
        ({"activation_checkpointing": {"partition_activations": True}}, "RECOMPUTE_LAYERS", "1"),
        ({"activation_checkpointing": {"profile": False}}, "RECOMPUTE_LAYERS", None),
        ({"activation_checkpointing": {}}, "RECOMPUTE_LAYERS", None),
    ],
)  # fmt: skip
def test_intervals_of_printing_and_recomputation_are_defaults_that_the_variable_overrides(
    environ, found, name, unset
):
    environment = environ(found)
    del environment["LOG_EVERY_STEPS"]
    assert merged(environment).get(name) == unset
    for mine in ("0", "10"):
        assert merged(environment | {name: mine})[name] == mine


def _batch(*sizes):
    names = (
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"
    )
    return dict(zip(names.split(), sizes, strict=False))


def test_agreeing_settings_are_no_contradiction(environ):
    same = {"BATCHSIZE": "4", "MAX_GRAD_NORM": "0.50", "SHARD_OPTIMIZER": "true"}
    same |= {"PRECISION": "auto", "LR": "7e-4"}
    agreeing = from_env(PretrainingConfig, merged(environ(PUBLISHED, **same)))
    assert agreeing.optim.max_grad_norm == 0.5


@pytest.mark.parametrize(
    "case",
    [
        ("{", "no JSON"),
        ("[]", "expected an object"),
        (_batch(65, 4), "65 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x 8 ranks"),
        (_batch(7), "7 is not train_micro_batch_size_per_gpu 0 x gradient_accumulation_steps 1 x 8 ranks"),
        (_batch(64, 4, 3), "64 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 3 x 8 ranks"),
        ({"train_batch_size": "64"}, 'train_batch_size is "64": expected an integer, at least 1'),
        ({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0}}}, "LR='0'"),
        ({"train_batch_size": 64.5}, "train_batch_size is 64.5: expected an integer, at least 1"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention: unsupported key: fix or remove it"),
        ({"optimizer": {"type": "OneBitAdam"}}, "expected Adam, AdamW or Lamb"),
        ({"optimizer": {"type": "Lamb", "params": {"max_coeff": 10}}}, "optimizer.params.max_coeff: unsupported key"),
        ({"scheduler": {"type": "WarmupLR"}}, "expected WarmupDecayLR"),
        ({"scheduler": DECAY | {"params": DECAY["params"] | {"warmup_type": "log"}}}, 'set "linear"'),
        ({"fp16": {"enabled": True, "hysteresis": 2}}, "fp16.hysteresis is 2: with PRECISION=fp16 masters are fp32"),
        ({"zero_optimization": {"stage": 3}}, "stage is 3: our rules run in stages 1 and 2"),
        ({"zero_optimization": {"stage": True}}, "stage is true"),
        ({"zero_optimization": {"stage": 1, "compute_grad_norm": False}}, "compute_grad_norm is false"),
        ({"bf16": {"enabled": "false"}}, 'bf16.enabled is "false": expected true or false'),
        ({"bf16": {"enabld": True}}, "bf16.enabld: unsupported key"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "masters and states are fp32"),
        ({"fp16": {"enabled": True, "initial_scal_power": 3}}, "fp16.initial_scal_power: unsupported key"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16.enabled and fp16.enabled are both true"),
        ({"optimizer": {"type": "AdamW", "legacy_fusion": True}}, "optimizer.legacy_fusion: unsupported key"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "adam_w_mode is false: decay is decoupled"),
        ({"optimizer": {"type": "Lamb", "params": {"eps": 1e-8}}}, "optimizer.params.eps is 1e-08"),
        ({"zero_optimization": {}}, "no zero_optimization.stage"),
        (ZERO, "CLIP=before: our own engine does that", {"CLIP": "before"}),
        (ZERO, "ALLREDUCE_DTYPE=weights: our own engine does that", {"ALLREDUCE_DTYPE": "weights"}),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, 'offload_optimizer.device is "nvme"'),
        (ZERO | {"fp16": {"enabled": True, "hysteresis": 1, "loss_scale_window": 1000}}, "fp16.loss_scale_window is 1000"),
    ],
)  # fmt: skip
def test_an_invalid_json_or_what_deepspeed_cannot_do_is_refused_in_one_line(
    environ, capsys, monkeypatch, case
):
    found, words, *variables = case
    monkeypatch.setattr("bert.deepspeed.settings.load", lambda: DEEPSPEED)
    assert words in _refusal(environ(found, **dict(*variables)), capsys)


def test_the_json_goes_with_engine_and_deepspeed(environ, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for environment, said in (
        (environ({}, DEEPSPEED_CONFIG=""), "DEEPSPEED_CONFIG is not set"),
        (environ({}, ENGINE="own"), "ENGINE is not deepspeed"),
        (environ({}, ENGINE="own", DEEPSPEED_CONFIG="", DEEPSPEED_CHECKPOINTS="1"), "ENGINE is not deepspeed"),
        (environ(ZERO), "pip install -r requirements/deepspeed.txt"),
    ):  # fmt: skip
        assert said in _refusal(environment, capsys)


def test_our_loss_scale_is_the_one_that_deepspeed_begins_with(environ):
    fp16 = {"enabled": True, "hysteresis": 1, "initial_scale_power": 12}
    config = from_env(PretrainingConfig, merged(environ({"fp16": fp16})))
    assert config.precision.init_loss_scale == 4096
    given = config.zero.complete(config.optim, config.numerics, 1, 1)
    assert (given["fp16"]["enabled"], given["fp16"]["loss_scale"]) == (True, 4096)
