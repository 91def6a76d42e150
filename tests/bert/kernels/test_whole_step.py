"""All fused kernels together in the model, the sharded optimizer and the evaluation, against the
plain operations.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from bert import kernels, optim
from bert.core.dist import DistConfig, World
from bert.data.batch import PretrainingCapacity, make_batch
from bert.data.synthetic import synthetic_records
from bert.kernels.precision import PrecisionConfig
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.init import initialize
from bert.training.evaluate import _count
from bert.training.graph import graph_capacity, static_batch
from bert.training.step import build_step

from ..plain import NO_DROPOUT

CONFIG = BertConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                    max_position_embeddings=16, initializer_range=0.2)  # fmt: skip
PLAIN_CONFIG = dataclasses.replace(CONFIG, **NO_DROPOUT)


def _batch():
    records = synthetic_records(1, 16, 61, packed=True, seed=0)
    plain = make_batch(records, range(records.num_sequences), 16)
    masked = plain.num_masked + 3
    sequences = plain.num_sequences
    room = PretrainingCapacity(tokens=24, sequences=sequences, masked=masked)
    return static_batch(plain, graph_capacity(room, 1))


def _build(device, config, fused, precision="fp32"):
    names = {"fused": "none", "attention": "sdpa_loop"}
    if fused:
        names = {"fused": "all", "attention": "triton"}
    choice = kernels.KernelsConfig(**names)
    model = BertForPreTraining(config, kernels.bind_kernels(choice, device))
    initialize(model, 0)
    model.to(device)
    # World on the CPU takes tensors on either device: one rank sends nothing.
    world = World(DistConfig(device=device.type))
    settings = optim.OptimizerConfig(sharded=True)
    numerics = PrecisionConfig(precision=precision).resolve(world.device)
    options = {"accumulate": True, "fused_update": fused}
    step = build_step(model, numerics, settings, world, **options)
    return model, step


def test_fused_steps_and_evaluation_are_the_plain_ones(device):
    batch = _batch()
    outcomes = []
    for fused in (False, True):
        model, step = _build(device, PLAIN_CONFIG, fused)
        losses = [[float(x) for x in step([batch, batch], lr).losses] for lr in (0.01,)]
        model.eval()
        with torch.no_grad():
            counts = _count(model, batch.to(device)).tolist()
        weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
        outcomes.append((losses, counts, weights))
    (plain_losses, plain_counts, plain), (losses, counts, weights) = outcomes
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(torch.tensor(losses), torch.tensor(plain_losses))
    assert counts == pytest.approx(plain_counts, rel=1e-4)
    # Whose true gradient is 0.
    for name in plain.keys() - {n for n in plain if n.endswith("key.bias")}:
        close(weights[name], plain[name], atol=2e-4, rtol=2e-3, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_fused_step_with_dropout_repeats_with_the_seed(precision, device):
    batch = _batch()
    losses = []
    for seed in (1, 1, 2):
        _, step = _build(device, CONFIG, True, precision)
        torch.manual_seed(seed)
        losses.append([float(step([batch], 0.01).losses.mlm) for _ in range(1)])
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    assert all(loss == loss for loss in losses[0])
