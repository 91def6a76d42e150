"""A stand-in for NVIDIA's apex: the two functions of its extension ``amp_C`` that its LAMB calls, in
plain PyTorch, and a class with that LAMB's interface.

Where apex's own Python sources are at hand (APEX_SOURCES, a checkout), its class is tested on the
same two functions instead.
"""

from __future__ import annotations

import importlib
import os
import sys
import types

import torch


def multi_tensor_l2norm_mp(chunk_size, noop_flag, tensor_lists, per_tensor):
    (tensors,) = tensor_lists
    norms = torch.stack([tensor.float().norm() for tensor in tensors])
    return norms.norm().reshape(1), norms if per_tensor else norms[:0]


def multi_tensor_lamb_mp(
    chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, eps, step, bias_correction, weight_decay,
    grad_averaging, mode, global_grad_norm, max_grad_norm, use_nvlamb, found_inf, inv_scale,
):  # fmt: skip
    """The kernel reads one number each of rate, step, norms, overflow and scale on the device."""
    for tensor in (lr, global_grad_norm, max_grad_norm, found_inf, inv_scale):
        assert (tensor.dtype, tensor.numel()) == (torch.float32, 1)
    assert step.dtype == noop_flag.dtype == torch.int32
    assert mode == grad_averaging == bias_correction == 1
    if noop_flag:
        return
    clip = torch.where(
        global_grad_norm > max_grad_norm, global_grad_norm / max_grad_norm, 1.0
    )
    corrections = [1 - beta ** int(step) for beta in (beta1, beta2)]
    for g, p, m, v, *low in zip(*tensor_lists, strict=True):
        assert p.dtype == m.dtype == v.dtype == torch.float32
        # One type, T of the kernel: of gradients, and of the weights that it writes.
        assert [g.dtype] == [t.dtype for t in low or [p]]
        scaled = g.float() * inv_scale / clip
        m.mul_(beta1).add_(scaled, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
        direction = (m / corrections[0]) / ((v / corrections[1]).sqrt() + eps)
        # Kept in the gradient's place and type, between the two passes.
        g.copy_(direction + weight_decay * p)
        ratio = torch.ones(())
        if use_nvlamb or weight_decay != 0:
            norms = p.norm(), g.float().norm()
            ratio = norms[0] / norms[1] if all(norms) else ratio
        p.sub_(lr * ratio * g.float())
        for weights in low:
            weights.copy_(p)


class FusedMixedPrecisionLamb(torch.optim.Optimizer):
    """Rate and step count of each group are tensors on the device; a GradScaler gives scale and
    overflow; masters are made in the first step.
    """

    def __init__(
        self, params, lr=1e-3, step=0, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01,
        amsgrad=False, adam_w_mode=True, grad_averaging=True, max_grad_norm=1.0, use_nvlamb=False,
        reduced_precision_dtype=None,
    ):  # fmt: skip
        assert isinstance(lr, float)
        defaults = {
            "lr": torch.tensor(lr), "step": torch.tensor([step], dtype=torch.int), "betas": betas, "eps": eps,
            "bias_correction": bias_correction, "weight_decay": weight_decay, "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        super().__init__(params, defaults)
        for group in self.param_groups:
            group |= {name: group[name].clone() for name in ("lr", "step")}
        self.use_nvlamb, self.dtype = use_nvlamb, reduced_precision_dtype
        self.param_groups_full_precision = []

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        groups = self.param_groups
        if not self.param_groups_full_precision:
            self.param_groups_full_precision = [
                {"params": [p.detach().float() for p in group["params"]]}
                for group in groups
            ]
        gradients = [p.grad for group in groups for p in group["params"]]
        found = grad_scaler._check_inf_per_device(self)[gradients[0].device]
        scale = grad_scaler._get_scale_async()
        norm = multi_tensor_l2norm_mp(0, None, [gradients], False)[0]
        for group, full in zip(groups, self.param_groups_full_precision, strict=True):
            group["step"] += (found.int() != 1).to(torch.int)
            lists = [[p.grad for p in group["params"]]]
            lists += [full["params"] if self.dtype else group["params"]]
            for name in ("exp_avg", "exp_avg_sq"):
                lists.append([self.state[p][name] for p in group["params"]])
            lists += [group["params"]] if self.dtype else []
            multi_tensor_lamb_mp(
                0, found.int(), lists, group["lr"], *group["betas"], group["eps"], group["step"], 1,
                group["weight_decay"], 1, 1, norm, self.defaults["max_grad_norm"] * scale, self.use_nvlamb, found,
                scale.double().reciprocal().float(),
            )  # fmt: skip


def install(monkeypatch, own_sources=False):
    """Makes ``import apex`` find the stand-in; own_sources: apex's class, on its functions."""
    extension = types.ModuleType("amp_C")
    extension.multi_tensor_l2norm_mp = multi_tensor_l2norm_mp
    extension.multi_tensor_lamb_mp = multi_tensor_lamb_mp
    monkeypatch.setitem(sys.modules, "amp_C", extension)
    package, optimizers = types.ModuleType("apex"), types.ModuleType("apex.optimizers")
    optimizers.FusedMixedPrecisionLamb = FusedMixedPrecisionLamb
    monkeypatch.setitem(sys.modules, "apex", package)
    if own_sources:
        # The package without its first lines, which ask for more of the extensions.
        package.__path__ = [os.path.join(os.environ["APEX_SOURCES"], "apex")]
        name = "apex.optimizers.fused_mixed_precision_lamb"
        optimizers.__path__ = [os.path.join(package.__path__[0], "optimizers")]
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    if own_sources:
        theirs = importlib.import_module(name)
        optimizers.FusedMixedPrecisionLamb = theirs.FusedMixedPrecisionLamb
