"""OPTIMIZER=apex_lamb is LAMB: on a stand-in for apex, whose kernels need a GPU."""

import sys
import types

import pytest
import torch
from torch import nn

from bert import optim
from bert.optim import apex
from bert.optim.flat import ListRule
from bert.optim.rules import LambConfig
from bert.optim.sharded import WholeOptimizer
from common.env import ConfigError

from ..plain import alone, close
from ..states import same

SHAPES = {"a.weight": (7, 3), "a.bias": (5,), "LayerNorm.weight": (5,)}
SHAPES["zero.weight"] = (4,)
LOW = torch.bfloat16, torch.float16


class FusedMixedPrecisionLamb(torch.optim.Optimizer):
    """In the interface of apex's: rate and step count of each group are tensors on the device; a
    GradScaler gives scale and overflow. The arithmetic is that of its kernels.
    """

    def __init__(
        self, params, lr, betas, eps, max_grad_norm, use_nvlamb, reduced_precision_dtype, weight_decay=0.01
    ):  # fmt: skip
        assert isinstance(lr, float)
        defaults = {"lr": torch.tensor(lr), "step": torch.tensor([0], dtype=torch.int), "betas": betas, "eps": eps,
                    "weight_decay": weight_decay, "max_grad_norm": max_grad_norm}  # fmt: skip
        super().__init__(params, defaults)
        for group in self.param_groups:
            group |= {name: group[name].clone() for name in ("lr", "step")}
        self.use_nvlamb, self.dtype = use_nvlamb, reduced_precision_dtype
        self.param_groups_full_precision = []

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        groups = self.param_groups
        if not self.dtype:
            self.param_groups_full_precision = groups
        gradients = [p.grad for group in groups for p in group["params"]]
        found = grad_scaler._check_inf_per_device(self)[gradients[0].device]
        scale = grad_scaler._get_scale_async()
        norm = torch.stack([g.float().norm() for g in gradients]).norm()
        clip = (norm / (self.defaults["max_grad_norm"] * scale)).clamp(min=1.0)
        for group, full in zip(groups, self.param_groups_full_precision, strict=True):
            # The kernel reads one number each of these on the device.
            for tensor in (group["lr"], found, scale):
                assert (tensor.dtype, tensor.numel()) == (torch.float32, 1)
            assert group["step"].dtype == torch.int32
            group["step"] += (found.int() != 1).to(torch.int)
            for weights, p in zip(group["params"], full["params"], strict=True):
                if not found:
                    self._update(group, weights, p, scale.reciprocal() / clip)

    def _update(self, group, weights, p, factor):
        m, v = (self.state[weights][name] for name in ("exp_avg", "exp_avg_sq"))
        assert p.dtype == m.dtype == v.dtype == torch.float32
        # One type, T of the kernel: of gradients, and of the weights that it writes.
        g = weights.grad
        assert g.dtype == weights.dtype == (self.dtype or torch.float32)
        scaled, (beta1, beta2) = g.float() * factor, group["betas"]
        m.mul_(beta1).add_(scaled, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
        corrections = [1 - beta ** int(group["step"]) for beta in group["betas"]]
        direction = (m / corrections[0]) / ((v / corrections[1]).sqrt() + group["eps"])
        # Kept in the gradient's place and type, between the two passes.
        g.copy_(direction + group["weight_decay"] * p)
        ratio = torch.ones(())
        if self.use_nvlamb or group["weight_decay"] != 0:
            norms = p.norm(), g.float().norm()
            ratio = norms[0] / norms[1] if all(norms) else ratio
        p.sub_(group["lr"] * ratio * g.float())
        weights.copy_(p)


@pytest.fixture
def installed(monkeypatch):
    """``import apex`` finds the stand-in."""
    for name in ("amp_C", "apex", "apex.optimizers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["apex.optimizers"].FusedMixedPrecisionLamb = FusedMixedPrecisionLamb


def _optimizer(name, dtype, accumulate=False, ratio="decayed"):
    generator = torch.Generator().manual_seed(0)
    draw = lambda shape: torch.randn(shape, generator=generator)  # noqa: E731
    full = {key: draw(shape) for key, shape in SHAPES.items()}
    full["zero.weight"].zero_()  # has no norm to scale by
    named = {key: nn.Parameter(value.to(dtype)) for key, value in full.items()}
    lamb = LambConfig(beta1=0.7, beta2=0.85, weight_decay=0.1, ratio=ratio)
    config = optim.OptimizerConfig(optimizer=name, sharded=False, lamb=lamb)
    rule = lambda shard: ListRule(shard, config.rule)  # noqa: E731
    options = {"masters": full, "accumulate": accumulate}
    return WholeOptimizer(named.items(), rule, alone(), **options)


def _take(optimizer, steps):
    """Steps of which number 2 overflows."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for view in optimizer.buckets.views:
            view.copy_(torch.randn(view.shape, generator=generator))
            view.mul_(float("inf") if step == 2 else 1.0)
        scale = torch.tensor(float("nan") if step == 2 else 0.25)
        lr = torch.tensor(0.1 / (step + 1))
        optimizer.step(lr, scale, None if step == 4 else torch.tensor(step != 2))


def _assert_same(ours, theirs, rounding=0.0):
    """rounding: of the directions."""
    assert ours["num_steps"] == theirs["num_steps"]
    close(theirs["masters"], ours["masters"], 1e-6 + rounding, 1e-5)
    for part in ("first_moments", "second_moments"):
        close(theirs[part], ours[part], 1e-6, 1e-5)


@pytest.mark.parametrize("ratio", ["decayed", "all"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["one", "accumulated"])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_it_takes_our_steps_and_skips_an_overflow(dtype, accumulate, ratio, installed):
    given = dtype, accumulate, ratio
    ours, theirs = (_optimizer(name, *given) for name in ("lamb", "apex_lamb"))
    for optimizer in (ours, theirs):
        _take(optimizer, range(6))
    assert int(ours.num_steps) == 5
    in_low = dtype in LOW and not accumulate
    # Directions, of about 1, are rounded to the gradients' 8 or 11 bits; the rates add up to 0.2.
    _assert_same(ours.state_dict(), theirs.state_dict(), 2e-3 if in_low else 0.0)
    rounded = theirs.shard.masters.to(dtype)
    assert torch.equal(theirs.shard.weights, rounded), "apex writes what it should"


def test_checkpoints_resume_to_the_bit_and_go_from_one_to_the_other(installed):
    names = *["apex_lamb"] * 3, "lamb"
    whole, first, second, lamb = (_optimizer(name, torch.bfloat16) for name in names)
    _take(whole, range(6))
    _take(first, range(3))
    for other in (second, lamb):
        other.load_state_dict(first.state_dict())
        _take(other, range(3, 6))
    assert same([*whole.state_tensors()], [*second.state_tensors()])
    _assert_same(whole.state_dict(), lamb.state_dict(), 2e-3)


def test_it_needs_apex_a_gpu_and_whole_parameters_and_logs_lamb(installed, monkeypatch):
    asked, gpu = {"optimizer": "apex_lamb"}, torch.device("cuda")
    whole = optim.OptimizerConfig(**asked, sharded=False)
    with pytest.raises(ConfigError, match="needs a GPU"):
        whole.check(torch.device("cpu"))
    with pytest.raises(ConfigError, match="set SHARD_OPTIMIZER=0"):
        optim.OptimizerConfig(**asked).check(gpu)
    whole.check(gpu)
    assert whole.hyperparameters() == optim.OptimizerConfig().hyperparameters()
    assert apex.ApexRule.capturable
    absent = {
        "amp_C": None,  # built without extensions
        "apex.optimizers": types.ModuleType("apex.optimizers"),  # another package
        "apex": None,
    }
    said = r"^OPTIMIZER=apex_lamb needs .*NGC.*PyPI.*OPTIMIZER=lamb$"
    for name, module in absent.items():
        monkeypatch.setitem(sys.modules, name, module)
        with pytest.raises(ConfigError, match=said):
            whole.check(gpu)
