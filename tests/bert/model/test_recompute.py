"""RECOMPUTE_LAYERS: loss and every gradient are bit for bit those of kept activations, and less is kept."""

import contextlib
import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch

from bert import kernels
from bert.data.batch import make_batch
from bert.data.synthetic import synthetic_records
from bert.kernels.support import triton_support
from bert.kernels.support.dropout import DropoutSites
from bert.model.bert import BertForPreTraining
from bert.model.recompute import Recomputation
from bert.pretraining.config import PretrainingConfig
from common.env import ConfigError, from_env

from ..plain import CPU, model_of, step_of
from ..ranks import run_ranks
from ..states import same

IN_GRAPH = "fused, without a random state, as in a CUDA graph"


def _outcome(model, batch, recomputation):
    """Losses and gradients of a pass with dropout, and the bytes kept for its backward pass."""
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    model.bert.encoder.recomputation = recomputation
    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        losses = model(batch)
    sum(losses).backward()
    torch.rand(3)  # whatever comes next draws from the state that the pass left
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return [losses.mlm, losses.nsp, *gradients], sum(kept.values())


@pytest.mark.parametrize(
    ("fused", "pre_norm"),
    [("none", False), ("none", True), ("dropout_add_layer_norm", False), (IN_GRAPH, True)],
)  # fmt: skip
def test_bits_are_those_of_kept_activations(
    fused, pre_norm, tiny, make_model, make_records, batch_of
):
    """With "dropout_add_layer_norm" alone the seed is drawn within the first segment, among PyTorch's own dropout."""
    if fused != "none" and triton_support.triton is None:
        pytest.skip("Triton is not installed")
    layers = 2 if fused == IN_GRAPH else 3  # Triton's interpreter is slow
    shape = {"num_hidden_layers": layers, "layer_norm_large_model": pre_norm}
    config = dataclasses.replace(tiny, **shape)
    in_graph = {"fused": "all", "attention": "triton"}
    chosen = in_graph if fused == IN_GRAPH else {"fused": fused}
    names = kernels.KernelsConfig(**chosen)
    records = make_records(4)
    batch = batch_of(records, [int(np.diff(records.sequence_offsets).argmin())])
    with triton_support.interpreted():
        model = BertForPreTraining(config, kernels.bind_kernels(names, CPU))
        model.load_state_dict(make_model(config, dtype=torch.float32).state_dict())
        plain, all_kept = _outcome(model, batch, None)
        for segment in {1, layers - 1} if fused == "none" else {layers - 1}:
            recomputation = Recomputation(segment, fused != IN_GRAPH)
            again, kept = _outcome(model, batch, recomputation)
            assert kept < 0.8 * all_kept
            assert same(again, plain), segment


def test_a_seed_that_is_drawn_within_a_segment_serves_its_second_run_in_a_graph_too():
    """As with dropout of attention alone: a graph cannot set the random state back."""
    sites, seeds = DropoutSites(CPU), []

    def segment(x):
        seeds.append(sites.next(0.5).seed.clone())
        return (x.exp(),)

    inputs = [torch.ones(1, requires_grad=True)]
    (result,) = Recomputation(1, random_state=False).run(segment, inputs, sites)
    result.backward()
    first, second = seeds
    assert first == second


def _check_steps(world, config, precision):
    """Each rank's states, losses and gradients equal those without recomputation."""
    records = synthetic_records(4, 48, config.vocab_size, packed=True, seed=0)
    rows = [np.arange(begin, begin + 2) for begin in (0, 2, 4, 6)]
    batches = [make_batch(records, row, 48) for row in rows[world.rank :: 2]]
    states = []
    for recomputation in (None, Recomputation(2, random_state=True)):
        torch.manual_seed(1)
        model = model_of(config, seed=None)
        if recomputation:
            model.recompute(recomputation)
        chosen = {"optimizer": "adamw", "sharded": True}
        step = step_of(model, precision, world, True, **chosen)
        for number in range(2):  # of which the first measures the fp8 scales
            torch.manual_seed(10 * number + world.rank)
            found = step(batches, 0.01)
        kept = [step.optimizer.buckets.shard, *step.optimizer.state_tensors()]
        states.append([*found.losses, found.norm, *kept, step.state_dict()])
    assert same(*states)


@pytest.mark.parametrize(("precision", "ranks"), [("bf16", 2), ("fp8", 1)])
def test_sharded_steps_leave_the_same_bits(precision, ranks, tiny):
    config = dataclasses.replace(tiny, num_hidden_layers=3)
    run_ranks(_check_steps, ranks, arguments=(config, precision))


def test_an_evaluation_computes_nothing_twice(tiny, make_model, packed_batch):
    model = make_model(tiny).eval()
    model.recompute(Recomputation(1, random_state=True))
    with torch.no_grad(), mock.patch.object(Recomputation, "run") as run:
        model(packed_batch)
    assert not run.called


@pytest.mark.parametrize("attention", ["triton", "auto", "flash"])
def test_in_a_graph_all_dropout_must_be_our_own(attention, prepared, monkeypatch):
    config = from_env(PretrainingConfig, prepared | {"RECOMPUTE_LAYERS": "1"})
    fused = {"dropout_add_layer_norm"}
    monkeypatch.setattr(kernels.KernelsConfig, "names", lambda *_: fused)
    monkeypatch.setattr("bert.kernels.attention.check", lambda *arguments: None)
    chosen = dataclasses.replace(config.kernels, attention=attention)
    config = dataclasses.replace(config, kernels=chosen)
    assert config.recomputation(uses_graph=True) == Recomputation(1, random_state=False)
    refused = pytest.raises(ConfigError, match="RECOMPUTE_LAYERS in a CUDA graph needs")
    with contextlib.nullcontext() if attention == "triton" else refused:
        config.check_device(uses_graph=True)
