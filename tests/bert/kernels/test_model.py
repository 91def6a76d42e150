"""The whole model, its step and its evaluation on fused kernels, against the plain operations."""

import dataclasses

import pytest
import torch

from bert import kernels, optim
from bert.core.dist import DistConfig, World
from bert.data.batch import PretrainingCapacity, make_batch
from bert.data.synthetic import synthetic_records
from bert.kernels import OPERATIONS
from bert.kernels.precision import PrecisionConfig
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.init import initialize
from bert.training.evaluate import _count
from bert.training.graph import graph_capacity, static_batch
from bert.training.step import build_step

from ..plain import NO_DROPOUT, close

FUSED = kernels.KernelsConfig(fused="all", attention="triton")
PLAIN = kernels.KernelsConfig(fused="none", attention="sdpa_loop")
CONFIG = BertConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                    max_position_embeddings=16, initializer_range=0.2)  # fmt: skip


@pytest.fixture
def models(tiny, make_model, device) -> list[BertForPreTraining]:
    """The tiny model without dropout: fused in fp32, and references in fp64 with the same weights."""
    fused = BertForPreTraining(tiny, kernels.bind_kernels(FUSED, device))
    reference = make_model(tiny)
    fused.load_state_dict(reference.state_dict())
    return [model.to(device).eval() for model in (fused, reference)]


def test_fused_model_equals_the_reference_model(models, make_records, batch_of, device):
    records = make_records(8)
    # Of the shortest sequences, since Triton's interpreter is slow.
    order = records.sequence_lengths.argsort(kind="stable")
    batch = batch_of(records, order[:3]).to(device)
    sizes = batch.num_tokens + 2, batch.num_sequences + 1, batch.num_masked + 2
    names = "tokens", "sequences", "masked"
    room = PretrainingCapacity(**dict(zip(names, sizes, strict=True)))
    batch = batch.pad_to(room)
    losses = []
    for model in models:
        result = model(batch)
        (result.mlm + result.nsp).backward()
        losses.append([result.mlm.item(), result.nsp.item()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    fused, reference = models
    pairs = zip(fused.named_parameters(), reference.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        scale = max(1e-3, theirs.grad.abs().max().item())
        error = (ours.grad.double() - theirs.grad).abs().max().item() / scale
        assert error < 1e-4, f"{name}: {error}"  # fp32 through two layers
    parts = [part for part in fused.modules() if hasattr(part, "kernel")]
    bound = {part.kernel for part in parts} | {fused.cross_entropy}
    assert bound == {module.fused for module in OPERATIONS.values()}


def _batch():
    records = synthetic_records(1, 16, 61, packed=True, seed=0)
    plain = make_batch(records, range(records.num_sequences), 16)
    masked = plain.num_masked + 3
    sequences = plain.num_sequences
    room = PretrainingCapacity(tokens=24, sequences=sequences, masked=masked)
    return static_batch(plain, graph_capacity(room, 1))


def _build(device, config, choice, precision="fp32"):
    model = BertForPreTraining(config, kernels.bind_kernels(choice, device))
    initialize(model, 0)
    model.to(device)
    # World on the CPU takes tensors on either device: one rank sends nothing.
    world = World(DistConfig(device=device.type))
    numerics = PrecisionConfig(precision=precision).resolve(world.device)
    options = {"accumulate": True, "fused_update": choice is FUSED}
    settings = optim.OptimizerConfig(sharded=True)
    return model, build_step(model, numerics, settings, world, **options)


def test_fused_steps_and_evaluation_are_the_plain_ones(device):
    batch, outcomes = _batch(), []
    for choice in (PLAIN, FUSED):
        config = dataclasses.replace(CONFIG, **NO_DROPOUT)
        model, step = _build(device, config, choice)
        losses = [float(loss) for loss in step([batch, batch], 0.01).losses]
        model.eval()
        with torch.no_grad():
            counts = _count(model, batch.to(device)).tolist()
        weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
        outcomes.append((losses + counts, weights))
    (plain_figures, plain), (figures, weights) = outcomes
    assert figures == pytest.approx(plain_figures, rel=1e-4, abs=1e-4)
    # Whose true gradient is 0.
    del plain["bert.encoder.layer.0.attention.self.key.bias"]
    close(weights, plain, atol=2e-4, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_fused_step_with_dropout_repeats_with_the_seed(precision, device):
    batch, losses = _batch(), []
    for seed in (1, 1, 2):
        _, step = _build(device, CONFIG, FUSED, precision)
        torch.manual_seed(seed)
        losses.append(float(step([batch], 0.01).losses.mlm))
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    assert losses[0] == losses[0]
