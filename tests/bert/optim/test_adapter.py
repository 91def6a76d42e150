"""Adapter: an optimizer of torch.optim, or a third party's, trains as it does alone, and all of its
state is in checkpoints.
"""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from bert import optim
from bert.optim import RULES
from bert.optim.adapter import Adapter
from bert.optim.flat import ListRule
from bert.optim.rules import Rule, is_decayed
from bert.optim.sharded import WholeOptimizer
from bert.pretraining import resume
from bert.pretraining.config import PretrainingConfig
from bert.pretraining.memory import Plan, estimate
from bert.training.step import preserved
from common.env import ConfigError, from_env

from ..plain import CPU, alone
from ..states import same

SHAPES = {"a.weight": (5, 7), "LayerNorm.weight": (13,), "a.bias": (3,)}
SHAPES["b.weight"] = (9, 3)


class Theirs(torch.optim.Optimizer):
    """In the manner of third parties: a step in the group from the first step on, factors of rows,
    numbers on the host, entries of the optimizer itself, states that each step makes anew.
    """

    def __init__(self, params, lr=0.1, weight_decay=0.1, late=None, adds=None):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.late, self.adds = late, adds

    @torch.no_grad()
    def step(self, closure=None):
        steps = self.state.setdefault("steps", torch.zeros(1))
        self.state["steps"] = steps + 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = p.grad.clone()  # not 0
                    state["rows"] = torch.zeros(p.shape[0], dtype=torch.float64)
                    state["weight"] = 1.0
                state["momentum"] = 0.9 * state["momentum"] + 0.1 * p.grad
                state["rows"] += p.grad.double().view(len(p), -1).square().sum(1)
                state["weight"] = 0.5 * state["weight"] + 0.25
                if group["step"] == self.late:
                    state["late"] = self.adds
                scale = state["rows"].sqrt().float().view(-1, *[1] * (p.dim() - 1))
                p.sub_(group["lr"] * state["momentum"] * state["weight"] / scale)
                p.sub_(group["lr"] * group["weight_decay"] * p / group["step"])
                p.sub_(1e-3 * self.state["steps"])


TORCH = {name: {} for name in ("Adadelta", "Adafactor", "Adamax", "ASGD", "RAdam", "Rprop")}  # fmt: skip
TORCH |= {
    "Adagrad": {"initial_accumulator_value": 0.1},
    "AdamW": {"amsgrad": True, "foreach": True},
    "NAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}


def _maker(name, settings):
    return lambda groups: getattr(torch.optim, name)(groups, **settings)


MAKERS = {
    **{name: _maker(name, settings) for name, settings in TORCH.items()},
    "without state": _maker("SGD", {"lr": 0.1}),
    "rate on the device": _maker("AdamW", {"lr": torch.tensor(0.1)}),
    "third party": Theirs,
}


def _rule(make):
    return type("Made", (Adapter,), {"make": lambda self, groups, config: make(groups)})


def _weights():
    return dict(zip(SHAPES, map(nn.Parameter, _draw(0)), strict=True))


def _draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def _gradients(step):
    return _draw(step + 10)


def _engine(rule):
    in_list = lambda shard: ListRule(shard, rule)  # noqa: E731
    return WholeOptimizer(_weights().items(), in_list, alone())


def _take(optimizer, steps):
    for step in steps:
        views = optimizer.buckets.views
        for view, gradient in zip(views, _gradients(step), strict=True):
            view.copy_(gradient)
        optimizer.step(torch.tensor(0.01 / (step + 1)), torch.tensor(0.5))


def _same(optimizer, other):
    assert optimizer.state_dict().keys() == other.state_dict().keys()
    assert same([*optimizer.state_tensors()], [*other.state_tensors()])


@pytest.mark.parametrize("name", MAKERS)
def test_it_trains_as_alone_and_resumes_or_is_rolled_back_to_the_bit(name):
    make = MAKERS[name]
    optimizer, weights = _engine(_rule(make)), _weights()
    decayed = [weights[key] for key in weights if is_decayed(key)]
    others = [weights[key] for key in weights if not is_decayed(key)]
    theirs = make([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    for step in range(6):
        pairs = zip(weights.values(), _gradients(step), strict=True)
        for parameter, gradient in pairs:
            parameter.grad = 0.5 * gradient
        for group in theirs.param_groups:
            rate = torch.tensor(0.01 / (step + 1))
            group["lr"] = rate if name == "rate on the device" else float(rate)
        theirs.step()
    _take(optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    _take(optimizer, range(3, 6))
    assert same([*optimizer.parameters], [*weights.values()])
    resumed, rolled_back = (_engine(_rule(make)) for _ in range(2))
    resumed.load_state_dict(saved)
    _take(resumed, range(3, 6))
    _same(resumed, optimizer)
    # As an untimed step before the clock is.
    for first in (0, 3):
        with preserved(rolled_back.state_tensors(), CPU):
            _take(rolled_back, [7, 8])
        _take(rolled_back, range(first, first + 3))
    _same(rolled_back, optimizer)


def test_a_step_that_overflows_changes_nothing():
    optimizer = _engine(_rule(Theirs))
    _take(optimizer, range(2))
    before = [tensor.clone() for tensor in optimizer.state_tensors()]
    optimizer.step(torch.tensor(0.1), torch.tensor(float("nan")), torch.tensor(False))
    assert same(before, [*optimizer.state_tensors()])


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (_rule(lambda groups: torch.optim.LBFGS(groups[0]["params"])), "closure"),
        (_rule(lambda groups: Theirs(groups, late=1, adds=[1.0])), "late is a list"),
        # As one that holds an optimizer whose state nobody saves.
        (type("Forgetful", (Rule,), {"needs_whole": True}), "Forgetful registers no state"),
    ],
)  # fmt: skip
def test_what_it_cannot_save_is_refused_before_the_first_step(rule, words):
    with pytest.raises(ConfigError, match=words):
        _engine(rule)


def test_state_that_appears_later_ends_the_run_rather_than_be_lost():
    optimizer = _engine(_rule(lambda groups: Theirs(groups, late=3, adds=1.0)))
    _take(optimizer, range(2))
    with pytest.raises(ConfigError, match="Theirs: late appears after the first step"):
        _take(optimizer, [2])


def test_it_runs_outside_of_graphs_and_starts_cold(monkeypatch, prepared, tmp_path):
    monkeypatch.setitem(RULES, "nadam", (_rule(MAKERS["NAdam"]), ""))
    config = from_env(PretrainingConfig, prepared | {"SHARD_OPTIMIZER": "0"})
    nadam = optim.OptimizerConfig(optimizer="nadam", sharded=False)
    object.__setattr__(config, "optim", nadam)
    assert not config.uses_graph
    with pytest.raises(ConfigError, match="OPTIMIZER=nadam takes steps on the host"):
        config.check_device(uses_graph=True)
    plan = Plan.of(config)
    adamw = optim.OptimizerConfig(optimizer="adamw", sharded=False)
    adamw = dataclasses.replace(plan, optimizer=adamw)
    assert estimate(plan)["states"] == estimate(adamw)["states"]  # moments and masters
    saved = tmp_path / "step_0000000001.pt"
    state = _engine(_rule(MAKERS["NAdam"])).state_dict()
    torch.save({"optimizer": state, "run": {"OPTIMIZER": "nadam"}}, saved)
    with pytest.raises(ConfigError, match="INIT_OPTIMIZER=0"):
        resume.warm_start(saved, "nadam", dict(SHAPES))
