"""Every rule: its formula written out again in fp64, LAMB's first step by hand, and the same update
however its state is sharded.
"""

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from torch import nn

from bert import optim
from bert.optim import RULES, rules
from bert.optim.clipping import Clipping, Gradients
from bert.optim.flat import ListRule, _turns
from bert.optim.sharded import FlatOptimizer, WholeOptimizer

from ..plain import close
from ..ranks import run_ranks
from ..states import same
from .whole import Whole

SHAPES = {"a.weight": (5, 67), "LayerNorm.weight": (130,), "a.bias": (1,)}
SHAPES |= {"b.weight": (129, 3), "zero.weight": (7, 11)}
RATES = [0.02, 0.015, 0.01, 0.005]
CONFIG = {
    "lamb": rules.LambConfig(beta1=0.6, beta2=0.85, weight_decay=0.1),
    "lans": rules.LansConfig(beta1=0.6, beta2=0.85, weight_decay=0.1),
    "adam": rules.AdamConfig(beta1=0.6, beta2=0.85, weight_decay=0.1),
    "acclip": rules.ACClipConfig(beta1=0.6, beta2=0.85, weight_decay=0.1, alpha=1.5),
    "madgrad": rules.MadgradConfig(weight_decay=0.1),
}


NVLAMB = {"lamb": dataclasses.replace(CONFIG["lamb"], ratio="all")}
# apex_lamb is by kernels of its own, on GPUs alone: test_apex.py.
OURS = [name for name in RULES if name != "apex_lamb"]


def _config(name, **changes):
    return optim.OptimizerConfig(optimizer=name, **(CONFIG | changes))


def _drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    draw = {"dtype": torch.float64, "generator": generator}
    return {name: torch.randn(shape, **draw) for name, shape in SHAPES.items()}


def _weights(dtype=torch.float64):
    drawn = _drawn(0)
    drawn["zero.weight"].zero_()  # has no norm to scale by
    return {name: nn.Parameter(value.to(dtype)) for name, value in drawn.items()}


def _gradients(step, share=0):
    drawn = _drawn(100 * step + share + 1)
    if step == 2:
        drawn["a.bias"].zero_()  # a gradient without a norm
    return drawn


# --- the formulas


@pytest.mark.parametrize(
    ("name", "decayed"),
    [
        ("bert.encoder.layer.0.attention.self.query.weight", True),
        ("bert.encoder.layer.0.attention.self.query.bias", False),
        ("bert.encoder.layer.0.output.LayerNorm.weight", False),
        ("cls.predictions.bias", False),
        ("bert.embeddings.word_embeddings.weight", True),
    ],
)
def test_biases_and_layer_norms_are_not_decayed(name, decayed):
    assert rules.is_decayed(name) is decayed


def test_first_step_is_the_closed_form():
    """On step 1 the corrected moments are g and g^2, so the update is g / (|g| + eps) + wd p."""
    weight, bias = (
        nn.Parameter(torch.tensor(values, dtype=torch.float64))
        for values in ([3.0, -4.0], [1.0])
    )
    lamb = rules.LambConfig(eps=1e-6, weight_decay=0.1)
    config = optim.OptimizerConfig(optimizer="lamb", lamb=lamb)
    optimizer = Whole([("dense.weight", weight), ("dense.bias", bias)], config.rule)
    weight.grad = torch.tensor([0.5, 0.25], dtype=torch.float64)
    bias.grad = torch.tensor([-2.0], dtype=torch.float64)
    optimizer.step(lr=0.01)
    u = [0.5 / (0.5 + 1e-6) + 0.3, 0.25 / (0.25 + 1e-6) - 0.4]
    ratio = 5.0 / math.hypot(*u)
    expected = [3.0 - 0.01 * ratio * u[0], -4.0 - 0.01 * ratio * u[1]]
    assert weight.tolist() == pytest.approx(expected, abs=1e-12)
    # No decay: no trust ratio.
    assert bias.tolist() == pytest.approx([1.0 + 0.01 * 2.0 / (2.0 + 1e-6)], abs=1e-12)


def _decay(name):
    return 0.0 if name.endswith("bias") or "LayerNorm" in name else 0.1


def _ratio(p, u):
    return float(p.norm() / u.norm()) if p.norm() > 0 and u.norm() > 0 else 1.0


def _lans(name, p, g, state, t, lr):
    m, v = (state.get(key, torch.zeros_like(p)) for key in ("m", "v"))
    n = g / (g.norm() + 1e-6) if float(g.norm()) > 0 else g
    state["m"], state["v"] = m, v = 0.6 * m + 0.4 * n, 0.85 * v + 0.15 * n**2
    d = torch.sqrt(v / (1 - 0.85**t)) + 1e-6
    r = m / (1 - 0.6**t) / d + _decay(name) * p
    c = n / d + _decay(name) * p
    return p - lr * (0.6 * _ratio(p, r) * r + 0.4 * _ratio(p, c) * c)


def _acclip(name, p, g, state, t, lr):
    m, v, tau = (state.get(key, torch.zeros_like(p)) for key in ("m", "v", "tau"))
    state["m"], state["v"], state["tau"] = m, v, tau = (
        0.6 * m + 0.4 * g, 0.85 * v + 0.15 * g**2, 0.85 * tau + 0.15 * g.abs() ** 1.5
    )  # fmt: skip
    clipped = (tau ** (1 / 1.5) / (m.abs() + 1e-5)).clamp(0, 1)
    k = clipped / (torch.sqrt(0.85 * v / (1 - 0.85**t)) + 1e-5)
    return (p - lr / (1 - 0.6**t) * k * m) * (1 - lr * _decay(name))


def _madgrad(name, p, g, state, t, lr):
    first = state.setdefault("x0", p.clone())
    weight = (lr + 1e-6) * math.sqrt(t)
    p = p * (1 - (lr + 1e-6) * _decay(name))
    state["nu"] = state.get("nu", torch.zeros_like(p)) + weight * g**2
    state["s"] = state.get("s", torch.zeros_like(p)) + weight * g
    z = first - state["s"] / (state["nu"] ** (1 / 3) + 1e-6)
    return 0.9 * p + 0.1 * z


def _moments(p, g, state):
    m, v = (state.get(key, torch.zeros_like(p)) for key in ("m", "v"))
    state["m"], state["v"] = 0.6 * m + 0.4 * g, 0.85 * v + 0.15 * g**2
    return state["m"], state["v"]


def _nvlamb(name, p, g, state, t, lr):
    m, v = _moments(p, g, state)
    u = m / (1 - 0.6**t) / (torch.sqrt(v / (1 - 0.85**t)) + 1e-6) + _decay(name) * p
    return p - lr * _ratio(p, u) * u


def _lamb(name, p, g, state, t, lr):
    """Without decay there is no trust ratio."""
    if _decay(name):
        return _nvlamb(name, p, g, state, t, lr)
    m, v = _moments(p, g, state)
    return p - lr * m / (1 - 0.6**t) / (torch.sqrt(v / (1 - 0.85**t)) + 1e-6)


def _bertadam(name, p, g, state, t, lr):
    m, v = _moments(p, g, state)
    return p - lr * (m / (torch.sqrt(v) + 1e-8) + _decay(name) * p)


def _adamw(name, p, g, state, t, lr):
    m, v = _moments(p, g, state)
    direction = m / (1 - 0.6**t) / (torch.sqrt(v / (1 - 0.85**t)) + 1e-8)
    return p - lr * (direction + _decay(name) * p)


FORMULAS = _lamb, _lans, _acclip, _madgrad, _nvlamb, _adamw, _bertadam


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda of: of.__name__[1:])
def test_rule_equals_its_formula(formula):
    name = formula.__name__[1:]
    config = _config("lamb", **NVLAMB) if formula is _nvlamb else _config(name)
    parameters = _weights()
    optimizer = Whole(parameters.items(), config.rule)
    expected = {name: p.detach().clone() for name, p in parameters.items()}
    states = {name: {} for name in SHAPES}
    for step, lr in enumerate(RATES):
        for name, gradient in _gradients(step).items():
            parameters[name].grad = gradient
            given = expected[name], 0.5 * gradient, states[name], step + 1, lr
            expected[name] = formula(name, *given)
        optimizer.step(*torch.tensor([lr, 0.5], dtype=torch.float64))
    found = {name: p.detach() for name, p in parameters.items()}
    close(found, expected, 1e-12, 1e-12)


@pytest.mark.parametrize("name", OURS)
def test_a_step_not_kept_changes_nothing(name):
    parameters = _weights(torch.float32)
    optimizer = Whole(parameters.items(), _config(name).rule)
    for step, keep in ((0, True), (1, False)):
        before = [tensor.clone() for tensor in optimizer.state_tensors()]
        for key, gradient in _gradients(step).items():
            parameters[key].grad = gradient.float() * (1.0 if keep else float("inf"))
        factor = torch.tensor(1.0 if keep else float("nan"))
        optimizer.step(torch.tensor(0.1), factor, torch.tensor(keep))
        assert same(before, [*optimizer.state_tensors()]) is not keep


def test_within_a_turn_each_parameter_is_added_once():
    """So that the order of summation is fixed, on a GPU, too."""
    assert _turns([0, 0, 1, 0, 1]) == [[0, 2], [1, 4], [3]]


# --- ranks


class _Sum(nn.Module):
    """A loss with given gradients."""

    def __init__(self, parameters):
        super().__init__()
        self.parts = nn.ParameterList(parameters.values())

    def forward(self, gradients):
        pairs = zip(self.parts, gradients.values(), strict=True)
        return sum((p * g).sum() for p, g in pairs)


def _engine(world, config, kind):
    parameters = _weights()
    rule = lambda shard: ListRule(shard, config.rule)  # noqa: E731
    return _Sum(parameters), kind(parameters.items(), rule, world, bucket_bytes=2400)


def _train(world, model, optimizer, steps):
    gradients = Gradients(model, optimizer, Clipping(max_norm=5.0), world, False)
    one = torch.ones((), dtype=torch.float64)
    for step in steps:
        with gradients.micro_batch(True, True, one):
            gradients.forward(_gradients(step, world.rank)).backward()
        _, factor = gradients.finish(one)
        optimizer.step(torch.tensor(RATES[step], dtype=torch.float64), factor)
    optimizer.gather()


def _expected(config, num_ranks):
    """One process with the gradients of all ranks."""
    parameters = _weights()
    optimizer = Whole(parameters.items(), config.rule)
    for step, lr in enumerate(RATES):
        for name, parameter in parameters.items():
            shares = [_gradients(step, rank)[name] for rank in range(num_ranks)]
            parameter.grad = sum(shares) / num_ranks
        norm = torch.stack([p.grad.norm() for p in parameters.values()]).norm()
        factor = Clipping(max_norm=5.0).coefficient(norm)
        optimizer.step(torch.tensor(lr, dtype=torch.float64), factor)
    return optimizer.state_dict()


def _check_rank(world):
    all_rules = [*map(_config, OURS), _config("lamb", **NVLAMB)]
    kinds, whole = (FlatOptimizer, WholeOptimizer), functools.cache(_expected)
    for config, kind in itertools.product(all_rules, kinds):
        model, optimizer = _engine(world, config, kind)
        _train(world, model, optimizer, range(2))
        saved = [optimizer.state_dict()]
        if world.size > 1:
            torch.distributed.broadcast_object_list(saved, 0)
        again, resumed = _engine(world, config, kind)
        resumed.load_state_dict(saved[0])
        for one, its in ((model, optimizer), (again, resumed)):
            _train(world, one, its, range(2, len(RATES)))
        assert same([*model.parameters()], [*again.parameters()]), config
        found = optimizer.state_dict()
        if world.is_main:
            expected = whole(config, world.size)
            assert found.keys() == expected.keys()
            for part in expected.keys() - {"num_steps"}:
                close(found[part], expected[part], 1e-12, 1e-12)


def test_every_rule_sharded_or_not_is_that_of_whole_parameters_on_any_ranks_and_resumes():
    run_ranks(_check_rank, 3, 1)
