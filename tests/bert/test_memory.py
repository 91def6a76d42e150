"""The memory that --check announces, against what a step on this machine takes; and a GPU that is too small."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bert import kernels, memory, optim
from bert.config import Config
from bert.dist import Config as DistConfig
from bert.dist import World
from bert.env import ConfigError, from_env
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.init import initialize
from bert.model.recompute import Recomputation
from bert.peak import Peak
from bert.precision import Precision
from bert.step import build_step

CPU = torch.device("cpu")
SHAPE = BertConfig(
    vocab_size=211, hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=384,
    max_position_embeddings=48,
)  # fmt: skip


def _plan(batch, **settings):
    common = {
        "model": SHAPE, "optimizer": optim.Config(sharded=True), "dtype": torch.float32, "fused": False, "num_ranks": 1,
        "tokens": batch.num_tokens, "masked": batch.num_masked, "length": 48, "accumulate": False,
        "recompute_layers": 0, "device_type": "cpu",
    }  # fmt: skip
    return memory.Plan(**{**common, **settings})


def _measured(plan, batch):
    """The most bytes that tensors hold in a step."""
    model = BertForPreTraining(plan.model, kernels.select(kernels.Config(fused="none"), CPU))
    initialize(model, 0)
    if plan.recompute_layers:
        model.recompute(Recomputation(plan.recompute_layers, random_state=True))
    step = build_step(
        model, Precision(dtype=plan.dtype), plan.optimizer, World(DistConfig(device="cpu")),
        accumulate=plan.accumulate, fused_update=False,
    )  # fmt: skip
    buffers = [step.optimizer.buckets.whole] if plan.optimizer.sharded else []
    with Peak([*step.optimizer.state_tensors(), *buffers]) as peak:
        step([batch], 0.01)
    return peak.most


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (24, {}),
        (24, {"recompute_layers": 1}),
        (4, {"recompute_layers": 2, "dtype": torch.bfloat16, "accumulate": True}),
        (24, {"model": dataclasses.replace(SHAPE, layer_norm_large_model=True, attention_probs_dropout_prob=0.0)}),
        (4, {"optimizer": optim.Config(optimizer="lans", sharded=False)}),
    ],
    ids=["plain", "recompute", "bf16", "pre_norm", "replicated"],
)
def test_the_estimate_is_within_a_tenth_of_what_a_step_takes(rows, settings, make_records, batch_of):
    records = make_records(rows, packed=False)
    batch = batch_of(records, np.arange(rows))
    plan = _plan(batch, length=_mean_length(batch), **settings)
    assert sum(memory.estimate(plan).values()) == pytest.approx(_measured(plan, batch), rel=0.1)


def _mean_length(batch):
    """Of the sequence in which a token is, on average: the probabilities of attention are as many as that."""
    lengths = batch.cu_seqlens.diff().double()
    return float(lengths.square().sum() / lengths.sum())


def test_a_gpu_that_is_too_small_is_named_before_the_run(prepared, monkeypatch):
    config = from_env(Config, prepared | {"CHECKPOINT_DIR": "/nowhere"})
    assert "this machine has" in memory.describe(config)
    on_a_gpu = dataclasses.replace(memory.Plan.of(config), device_type="cuda")
    monkeypatch.setattr(memory.Plan, "of", lambda config: on_a_gpu)
    for total, message in ((2 * memory.GIB, None), (memory.GIB, "out of memory: 1.0 GiB per rank")):
        properties = SimpleNamespace(total_memory=total)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
        if message is None:
            assert "the GPU has 2.0" in memory.describe(config)
            continue
        with pytest.raises(ConfigError, match=message):
            memory.describe(config)


def test_every_published_size_fits_where_its_configs_run(repository):
    """H100 with 80 GB; the sizes of docs/large_models.md."""
    for name, ranks, rows, layers in (("1.5b", 8, 32, 0), ("5b", 8, 32, 1), ("5b", 128, 24, 1)):
        model = BertConfig.from_json(repository / "configs" / "models" / f"bert_{name}.json")
        batch = SimpleNamespace(num_tokens=rows * 128, num_masked=rows * 20)
        settings = {"dtype": torch.bfloat16, "fused": True, "accumulate": True, "device_type": "cuda", "length": 128}
        parts = {}
        for shard_gradients in (False, True):
            optimizer = optim.Config(optimizer="lans", sharded=True, shard_gradients=shard_gradients)
            plan = _plan(batch, model=model, num_ranks=ranks, recompute_layers=layers, optimizer=optimizer, **settings)
            parts[shard_gradients] = memory.estimate(plan)
            assert sum(parts[shard_gradients].values()) < 80e9
        whole, shard = parts[False], parts[True]
        assert shard["gradients"] * ranks == pytest.approx(whole["gradients"] - shard["gradients"], rel=0.01)
        assert whole["states"] * ranks == pytest.approx(3 * 2 * whole["weights"] * ranks / (ranks + 1), rel=0.01)
