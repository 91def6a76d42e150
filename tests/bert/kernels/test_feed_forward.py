"""Both products with GELU between them are what separate kernels compute, and are taken only where that is so."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect

import pytest
import torch

from bert.kernels import Config, feed_forward, select, trials
from bert.kernels.precision import Recipe
from bert.kernels.weight_gradient import offer
from bert.model.bert import BertForPreTraining
from common.env import ConfigError

from . import fake_quack

CPU = torch.device("cpu")
HEADS = trials.Heads(num_heads=2, head_size=8, dtype=torch.bfloat16)


def _inputs():
    shapes = (13, 24), (40, 24), (40,), (24, 40)
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("offered", [False, True])
def test_result_and_gradients_are_the_references_and_go_where_they_are_offered(
    quack, approximate, offered
):
    inputs, upstream = _inputs(), torch.randn(13, 24, dtype=torch.float64)
    expected = feed_forward.reference(*inputs, approximate)
    gradients = torch.autograd.grad(expected, inputs, upstream)
    weights = inputs[1], inputs[3]
    places = [torch.zeros_like(weight) for weight in weights]
    if offered:
        offer(weights, places)
    result = feed_forward.fused(*inputs, approximate)
    found = torch.autograd.grad(result, inputs, upstream)
    for one, other in zip((result, *found), (expected, *gradients), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
    for place, gradient in zip(places, (found[1], found[3]), strict=True):
        assert (place.data_ptr() == gradient.data_ptr()) == offered
    with torch.no_grad():
        torch.testing.assert_close(feed_forward.fused(*inputs, approximate), expected)


def test_a_model_in_16_bits_uses_it_in_every_layer_and_no_other(
    quack, tiny, make_records, batch_of, monkeypatch
):
    shape = dataclasses.replace(tiny, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    calls = []

    def counted(*arguments):
        calls.append(len(arguments[0]))
        return feed_forward.fused(*arguments)

    plain = select(Config(fused="none"), CPU)
    model = BertForPreTraining(shape, dataclasses.replace(plain, feed_forward=counted)).bfloat16()
    separate = BertForPreTraining(shape, plain).bfloat16()
    separate.load_state_dict(model.state_dict())
    batch = batch_of(make_records(4), range(6))
    torch.testing.assert_close(sum(model(batch)), sum(separate(batch)), atol=0.02, rtol=0.01)
    assert len(calls) == shape.num_hidden_layers
    calls.clear()
    model.use_fp8(Recipe(), CPU)
    model(batch)
    model.float()(batch)
    assert not calls


@pytest.mark.parametrize("fault", ["", "gemm_act", "gelu_backward_of_product", "slow"])
def test_a_trial_finds_what_is_wrong_or_slower(quack, monkeypatch, fault):
    times = iter([2.0, 3.0 if fault == "slow" else 1.0])
    monkeypatch.setattr(trials, "_milliseconds", lambda run, device: (run(1), next(times))[1])
    if fault.startswith("ge"):
        place = quack if fault == "gemm_act" else importlib.import_module(fake_quack.EPILOGUES)
        right = getattr(place, fault)

        def wrong(*arguments, **named):
            one, other, *rest = right(*arguments, **named)
            return one, other * 1.1, *rest

        monkeypatch.setattr(place, fault, wrong)
    expected = {
        "": "", "slow": "slower: 3.00 ms, ours 2.00 ms", "gemm_act": "its result differs from fp32's by 0.",
        "gelu_backward_of_product": "its second weight's gradient differs from fp32's by 0.",
    }  # fmt: skip
    assert trials.attempt("feed_forward", CPU, HEADS).problem.startswith(expected[fault])


def test_it_is_named_only_where_it_is_there(device):
    with pytest.raises(ConfigError, match="FUSED names feed_forward, but "):
        Config(fused="feed_forward,lamb").names(device)


@pytest.mark.skipif(
    importlib.util.find_spec("quack") is None, reason="quack-kernels is not installed"
)
def test_the_stand_in_takes_what_the_package_takes():
    theirs = inspect.signature(importlib.import_module("quack.gemm_interface").gemm_act).parameters
    assert set(inspect.signature(fake_quack.gemm_act).parameters) <= set(theirs)
    epilogue = importlib.import_module("quack.epilogue.frontend").EpiMod
    for name in ("gemm", "__call__"):
        theirs = inspect.signature(getattr(epilogue, name)).parameters
        assert set(inspect.signature(getattr(fake_quack.Epilogue, name)).parameters) <= set(theirs)
