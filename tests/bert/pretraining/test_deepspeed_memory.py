"""What DeepSpeed takes at least, by stage and offload; --check says it and stops a run that cannot fit."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from bert import kernels
from bert.core.env import ConfigError, from_env
from bert.deepspeed.settings import merged
from bert.model.bert import BertForPreTraining
from bert.model.init import uninitialized
from bert.pretraining import deepspeed_memory, host_memory, memory
from bert.pretraining.config import Config
from bert.pretraining.run import run


@pytest.fixture
def environ(prepared, tmp_path):
    """environ(zero_optimization, **variables) of 8 ranks on two nodes."""

    def make(zero, **variables):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
        places = {"ENGINE": "deepspeed", "DEEPSPEED_CONFIG": str(path), "WORLD_SIZE": "8", "DGXNNODES": "2"}
        return prepared | places | variables

    return make


@pytest.fixture
def needed(environ):
    """needed(zero_optimization, **variables): bytes on GPUs, host memory without that of the processes."""

    def make(zero, **variables):
        config = from_env(Config, merged(environ(zero, **variables)))
        plan = dataclasses.replace(memory.Plan.of(config), device_type="cuda")
        device, host, flat = deepspeed_memory.need(config, plan)
        return device, host - 4 * memory.PROCESS, flat, config

    return make


def test_stages_and_offload_decide_what_is_whole_on_each_rank_and_what_is_on_the_host(needed):
    in_2, host, flat, config = needed({"stage": 2})
    parameters = _sizes(config)
    assert (in_2["weights"], flat, host) == (sum(parameters), sum(parameters), 0)
    assert in_2["states"] * 8 >= 3 * 2 * sum(parameters), "masters and two moments in fp32"
    in_3, host, flat, _ = needed({"stage": 3})
    assert (in_3["weights"], in_3["largest parameter"]) == (sum(parameters) // 8, max(parameters))
    assert (in_3["states"], host, flat) == (in_2["states"], 0, 0)
    everything = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "cpu_offload_param": True}
    away, host, _, _ = needed(everything)
    assert away.keys() == in_3.keys() - {"weights", "states"}
    assert host == 4 * (in_3["weights"] + in_3["states"])
    saving = {"CHECKPOINT_DIR": "/nowhere"}
    assert needed({"stage": 2}, **saving)[1] == 8 * in_2["states"], "rank 0 gathers"
    assert needed({"stage": 2}, DEEPSPEED_CHECKPOINTS="1", **saving)[1] == 0


def _sizes(config):
    """Bytes of the parameters in bf16."""
    with uninitialized():
        model = BertForPreTraining(config.model, kernels.select(kernels.Config(fused="none"), torch.device("cpu")))
    return [2 * parameter.numel() for parameter in model.parameters()]


def test_a_gpu_or_a_host_that_is_too_small_is_named_before_the_run(environ, monkeypatch):
    config = from_env(Config, merged(environ({"stage": 2})))
    on_a_gpu = dataclasses.replace(memory.Plan.of(config), device_type="cuda")
    monkeypatch.setattr(memory.Plan, "of", lambda config: on_a_gpu)
    monkeypatch.setattr(memory, "activations", lambda plan: 0)
    weights = sum(_sizes(config))
    total = sum(deepspeed_memory.need(config, on_a_gpu).device.values())
    for gpu, node, words in (
        (total + weights, 4 * memory.PROCESS, None),
        (total - 1, 1 << 40, "out of memory: at least 1.0 GiB per rank: .*: set another stage"),
        (total, 4 * memory.PROCESS + 8 * weights, None),
        (total, 4 * memory.PROCESS + 8 * weights - 1, "start fewer ranks"),  # no room for two copies on the GPU
        (weights + 1, 1 << 40, "out of memory: .*the GPU has 0.0: set another stage"),
        (total + weights, 4 * memory.PROCESS - 1, "out of memory: .*this machine has 2.0: .* or start fewer ranks"),
    ):
        properties = SimpleNamespace(total_memory=gpu)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        monkeypatch.setattr(host_memory, "capacity", lambda node=node: node)
        if words is None:
            assert "at least 1.0 GiB per rank: " in deepspeed_memory.describe(config)
        else:
            with pytest.raises(ConfigError, match=words):
                deepspeed_memory.describe(config)


def test_the_check_prints_it(environ, capsys, monkeypatch):
    monkeypatch.setattr("bert.deepspeed.settings.Config.check", lambda *_: None)  # as if DeepSpeed were installed
    assert run(environ({"stage": 3}, DEVICE="auto", WORLD_SIZE="1", DGXNNODES="1"), check_only=True) == 0
    assert "memory         at least 0.0 GiB per rank: " in capsys.readouterr().out
