"""The whole model on fused kernels: same losses and gradients as on the references."""

from __future__ import annotations

import pytest
import torch

from bert import kernels
from bert.data.batch import PretrainingCapacity
from bert.kernels import OPERATIONS
from bert.model.bert import BertForPreTraining


@pytest.fixture
def models(tiny, make_model, device) -> list[BertForPreTraining]:
    """The tiny model without dropout: fused in fp32, and references in fp64 with the same
    weights.
    """
    choice = kernels.KernelsConfig(fused="all", attention="triton")
    fused = BertForPreTraining(tiny, kernels.bind_kernels(choice, device))
    reference = make_model(tiny)
    fused.load_state_dict(reference.state_dict())
    return [model.to(device).eval() for model in (fused, reference)]


@pytest.fixture
def short(make_records, batch_of, device):
    """short(count): a batch of the shortest sequences, since Triton's interpreter is slow."""
    records = make_records(8)
    order = records.sequence_lengths.argsort(kind="stable")
    return lambda count: batch_of(records, order[:count]).to(device)


def test_fused_model_equals_the_reference_model(models, short):
    batch = short(3)
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


def test_every_operation_of_the_model_is_fused(models):
    parts = [part for part in models[0].modules() if hasattr(part, "kernel")]
    bound = {part.kernel for part in parts} | {models[0].cross_entropy}
    assert bound == {module.fused for module in OPERATIONS.values()}


def test_dropout_of_a_training_pass_is_fixed_by_the_seed(models, short):
    batch = short(1)
    model = models[0].train()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            losses.append(sum(loss.item() for loss in model(batch)))
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
