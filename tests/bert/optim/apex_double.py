"""A stand-in for NVIDIA's apex: its public signatures and rules of use, its arithmetic in plain PyTorch.

Written from the documentation and the interface; the real kernels have not been run beside it.
"""

from __future__ import annotations

import sys
import types

import torch


class FusedMixedPrecisionLamb(torch.optim.Optimizer):
    """Learning rate and step count of each group are tensors on the device; a GradScaler gives scale and overflow."""

    def __init__(
        self, params, lr=1e-3, step=0, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01,
        amsgrad=False, adam_w_mode=True, grad_averaging=True, max_grad_norm=1.0, use_nvlamb=False,
        reduced_precision_dtype=None,
    ):  # fmt: skip
        assert not amsgrad
        assert adam_w_mode
        assert grad_averaging
        assert reduced_precision_dtype is None
        assert isinstance(lr, float)
        defaults = {
            "lr": torch.tensor(lr, dtype=torch.float32), "step": torch.tensor([step], dtype=torch.int),
            "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        super().__init__(params, defaults)
        for group in self.param_groups:
            for name in ("lr", "step"):
                group[name] = group[name].clone()
        self.use_nvlamb = use_nvlamb

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        assert closure is None
        device = self.param_groups[0]["params"][0].device
        overflow = (
            torch.zeros(1)
            if grad_scaler is None
            else grad_scaler._check_inf_per_device(self)[device]
        )
        scale = torch.ones(1) if grad_scaler is None else grad_scaler._get_scale_async()
        for tensor in (overflow, scale):  # the kernels read them as one float each
            assert tensor.dtype == torch.float32
            assert tensor.numel() == 1
        gradients = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        assert all(g.dtype == torch.float32 for g in gradients)
        norm = torch.stack([g.norm() for g in gradients]).norm()
        bound = self.defaults["max_grad_norm"] * scale
        clipped = torch.where(norm > bound, norm / bound, torch.ones(1))
        for group in self.param_groups:
            assert group["lr"].dtype == torch.float32
            assert group["step"].dtype == torch.int
            group["step"] += (overflow.int() != 1).to(torch.int)
            if not overflow:
                for parameter in group["params"]:
                    self._update(parameter, group, scale.double().reciprocal().float() / clipped)

    def _update(self, parameter, group, factor):
        state, (beta1, beta2), steps = self.state[parameter], group["betas"], int(group["step"])
        if not state:
            state |= {
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        g, m, v = parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        g.mul_(factor)
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        corrections = (
            (1 - beta1**steps, 1 - beta2**steps) if group["bias_correction"] else (1.0, 1.0)
        )
        decay = group["weight_decay"]
        g.copy_(
            (m / corrections[0]) / ((v / corrections[1]).sqrt() + group["eps"]) + decay * parameter
        )
        ratio = torch.ones(())
        if self.use_nvlamb or decay != 0:
            norms = parameter.norm(), g.norm()
            ratio = norms[0] / norms[1] if all(norms) else ratio
        parameter.sub_(g * ratio * group["lr"])


def install(monkeypatch):
    """Makes ``import apex`` find the double."""
    optimizers = types.ModuleType("apex.optimizers")
    optimizers.FusedMixedPrecisionLamb = FusedMixedPrecisionLamb
    package = types.ModuleType("apex")
    package.optimizers = optimizers
    for name, module in (
        ("apex", package),
        ("apex.optimizers", optimizers),
        ("amp_C", types.ModuleType("amp_C")),
    ):
        monkeypatch.setitem(sys.modules, name, module)
