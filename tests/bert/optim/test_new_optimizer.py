"""An optimizer is a Rule and its line in RULES: here one on whole matrices, and one that knows the
shape of what it has a part of. Both are examples for CONTRIBUTING.md.
"""

import pytest
import torch

from bert import optim
from bert.optim import RULES
from bert.optim.rules import Rule, restored_unless, scaled
from bert.optim.sharded import FlatOptimizer, WholeOptimizer
from common.env import ConfigError

from ..plain import CPU
from ..ranks import run_ranks
from .test_rules import RATES, SHAPES, _engine, _expected, _gradients, _train, _weights
from .whole import Whole


class Muon(Rule):
    """Muon (Jordan et al. 2024): p -= lr U V^T, with U S V^T the momentum of a matrix; other
    parameters move by their momentum. By the SVD, which the usual Newton-Schulz steps approximate.
    """

    needs_whole = True

    def __init__(self, shards, config=None):
        super().__init__(shards, config)
        self.momentum = shards.state("momentum")

    def step(self, gradients, update):
        masters, shapes = self.shards.masters, self.shards.shapes
        gradients = scaled(gradients, masters, update.scale)
        self.count_step(update.apply_update)
        with restored_unless([*masters, *self.momentum], update.apply_update):
            torch._foreach_mul_(self.momentum, 0.9)
            torch._foreach_add_(self.momentum, gradients)
            for p, m, shape in zip(masters, self.momentum, shapes, strict=True):
                direction = m.view(shape)
                if len(shape) == 2:
                    u, _, vh = torch.linalg.svd(direction, full_matrices=False)
                    direction = u @ vh
                p.sub_(self.rate(update.lr) * direction.reshape(p.shape))


class RowNormalised(Rule):
    """p -= lr g / ||g of its row||, on parts of parameters: a row may lie with several ranks."""

    num_sums = max(shape[0] for shape in SHAPES.values())  # of squares, a column a row
    stateless = True

    def step(self, gradients, update):
        masters = self.shards.masters
        gradients = scaled(gradients, masters, update.scale)
        self.count_step(update.apply_update)
        sums = masters[0].new_zeros(len(masters), self.num_sums)
        parts = zip(gradients, self.shards.shapes, self.shards.starts, strict=True)
        rows = []
        for own_sums, (g, shape, start) in zip(sums, parts, strict=True):
            numbers = start + torch.arange(g.numel())
            rows.append(numbers // shape[1:].numel())
            own_sums.index_add_(0, rows[-1], g.flatten().square())
        norms = update.all_reduce_sum(sums).sqrt().clamp(min=1e-12)
        for p, g, row, of_rows in zip(masters, gradients, rows, norms, strict=True):
            p.sub_(self.rate(update.lr) * g / of_rows[row].view(g.shape))


def test_a_rule_on_whole_parameters_sees_shapes_and_is_refused_a_shard(monkeypatch):
    monkeypatch.setitem(RULES, "muon", (Muon, ""))
    parameters = _weights()
    before = parameters["b.weight"].detach().clone()
    optimizer = Whole(parameters.items(), optim.OptimizerConfig(optimizer="muon").rule)
    for name, gradient in _gradients(0).items():
        parameters[name].grad = gradient
    optimizer.step(0.5)
    values = torch.linalg.svdvals((before - parameters["b.weight"].detach()) / 0.5)
    torch.testing.assert_close(values, torch.ones_like(values))
    with pytest.raises(ConfigError, match=r"OPTIMIZER=muon .* set SHARD_OPTIMIZER=0"):
        optim.OptimizerConfig(optimizer="muon", sharded=True).check(CPU)


def _check_rank(world):
    cases = [("muon", WholeOptimizer), ("rows", WholeOptimizer), ("rows", FlatOptimizer)]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "muon", (Muon, ""))
        patch.setitem(RULES, "rows", (RowNormalised, ""))
        for name, kind in cases:
            config = optim.OptimizerConfig(optimizer=name)
            model, optimizer = _engine(world, config, kind)
            _train(world, model, optimizer, range(len(RATES)))
            trained = optimizer.state_dict()
            if world.is_main:
                expected = _expected(config, world.size)
                assert trained.keys() == expected.keys()
                torch.testing.assert_close(trained, expected, atol=1e-12, rtol=1e-12)


def test_new_rules_on_any_ranks_are_those_of_whole_parameters():
    run_ranks(_check_rank, 3, 1)
