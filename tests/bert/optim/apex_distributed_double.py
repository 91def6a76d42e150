"""Stands in for apex.contrib's DistributedFusedLAMB: its signature, its rules of use and its layout of state, on a CPU.

Written from the interface; the arithmetic is plain PyTorch on whole buffers, over the default process group.
"""

from __future__ import annotations

import sys
import types

import torch
import torch.distributed as distributed


class DistributedFusedLAMB(torch.optim.Optimizer):
    """Two lazy initialisations around the first backward pass; then complete_reductions() and step() each time."""

    def __init__(
        self, params, lr=1e-3, bias_correction=True, grad_averaging=True, betas=(0.9, 0.999), eps=1e-8,
        weight_decay=0.0, max_grad_norm=0.0, adam_w_mode=True, use_nvlamb=False, step_supports_amp_scaling=True,
        overlap_reductions=True, dwu_group_size=0, dwu_num_blocks=4, dwu_num_chunks=4, dwu_num_rs_pg=1,
        dwu_num_ar_pg=4, dwu_num_ag_pg=0, fused_norm=False, e5m2_allgather=False, verbose=False, clip_after_ar=True,
        full_ar=False, set_param_views_to_flat_buffer=False, skip_allgather=False, fuse_scale=False,
        param_order=None, nccl_allgather_channels=0,
    ):  # fmt: skip
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        super().__init__(params, defaults)
        assert bias_correction
        assert grad_averaging
        assert adam_w_mode
        assert not use_nvlamb
        assert clip_after_ar == overlap_reductions
        assert clip_after_ar or dwu_num_blocks == 1, "clips once a block"
        assert fused_norm, "the other norm is taken in fp16"
        self._clip_after_ar, self._num_blocks, self._num_chunks = clip_after_ar, dwu_num_blocks, dwu_num_chunks
        self._world_size, self._group_size = distributed.get_world_size(), dwu_group_size
        assert self._world_size == self._group_size
        self._rank_in_group = distributed.get_rank() % self._group_size
        self._ag_pg = [distributed.group.WORLD]
        self._global_scale, self._L2_grad_norm = None, None
        self._lr, self._step = torch.tensor(0.0), torch.zeros(1, dtype=torch.int32)
        self._first_step, self._is_accumulation_step, self._stage = True, False, 0
        self._model_params = [p for group in self.param_groups for p in group["params"]]
        self._decays = [group["weight_decay"] for group in self.param_groups for _ in group["params"]]
        self._order, self._reduced = [], False
        assert all(p.dtype == torch.float16 for p in self._model_params)
        page = 256 * self._num_blocks * self._num_chunks * self._group_size
        size = sum(p.numel() + 64 for p in self._model_params)
        self._total = -(-size // page) * page

    def set_is_accumulation_step(self, is_accumulation_step):
        self._is_accumulation_step = is_accumulation_step

    def set_global_scale(self, global_scale):
        assert global_scale.shape == (1,)
        self._global_scale = global_scale

    @property
    def L2_grad_norm(self):
        return self._L2_grad_norm

    def _lazy_init_stage1(self):
        assert self._stage == 0
        self._stage, self._hooked = 1, []
        for number, parameter in enumerate(self._model_params):
            accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            accumulator.register_hook(lambda *_, number=number, parameter=parameter: self._hook(number, parameter))
            self._hooked.append(accumulator)
        shard = self._total // self._group_size
        self._fp32_p, self._fp32_m, self._fp32_v = (torch.zeros(shard) for _ in range(3))
        self._flat_grads = torch.zeros(self._total, dtype=torch.float16)

    def _hook(self, number, parameter):
        if self._first_step:
            self._order.append(number)
        elif not self._is_accumulation_step:
            self._generated.add(id(parameter))

    def _lazy_init_stage2(self):
        assert self._stage == 1
        assert sorted(self._order) == list(range(len(self._model_params))), "a backward pass over all parameters"
        self._stage = 2
        order = self._order[::-1]
        self._model_params, self._decays = ([x[i] for i in order] for x in (self._model_params, self._decays))
        self._grads_info, offset = [], 0
        for parameter in self._model_params:
            assert parameter.grad is not None
            self._grads_info.append({"param_grads_size": parameter.numel(), "param_offset": offset})
            offset = -(-(offset + parameter.numel()) // 64) * 64
        flat = torch.zeros(self._total)
        for parameter, view in zip(self._model_params, self._views(flat), strict=True):
            view.copy_(parameter.detach().reshape(-1))
        self._fp32_p.copy_(flat[self._own()])
        self._generated = {id(p) for p in self._model_params}
        self.complete_reductions()
        self._first_step = False

    def _views(self, flat):
        return [flat[i["param_offset"] : i["param_offset"] + i["param_grads_size"]] for i in self._grads_info]

    def _own(self, rank=None):
        """Places in the flat buffer of a rank's shard."""
        rank = self._rank_in_group if rank is None else rank
        piece = self._total // (self._num_blocks * self._num_chunks * self._group_size)
        numbers = range(self._num_blocks * self._num_chunks)
        return torch.cat([torch.arange(piece) + (n * self._group_size + rank) * piece for n in numbers])

    def _whole(self, shard):
        shards = [torch.empty_like(shard) for _ in range(self._group_size)]
        distributed.all_gather(shards, shard)
        flat = torch.empty(self._total)
        for rank, one in enumerate(shards):
            flat[self._own(rank)] = one
        return flat

    @torch.no_grad()
    def complete_reductions(self):
        assert self._stage == 2
        assert self._generated == {id(p) for p in self._model_params}, "gradients of all parameters"
        self._generated = set()
        for parameter, view in zip(self._model_params, self._views(self._flat_grads), strict=True):
            view.copy_(parameter.grad.reshape(-1))
        if not self._clip_after_ar:
            self._L2_grad_norm = self._flat_grads.float().norm().reshape(1)
            bound = self._global_scale * self.defaults["max_grad_norm"]
            coefficient = torch.nan_to_num(bound / (1e-6 + self._L2_grad_norm), nan=1.0).clamp(max=1.0)
            self._flat_grads.mul_((coefficient / self._world_size).half())
            distributed.all_reduce(self._flat_grads)
        else:
            self._flat_grads.mul_(1 / self._world_size)
            distributed.all_reduce(self._flat_grads)
            self._L2_grad_norm = self._flat_grads.float().norm()
        self._reduced = True

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        assert closure is None
        assert self._reduced, "complete_reductions() first"
        self._reduced = False
        finite = (self._L2_grad_norm + 1 > self._L2_grad_norm).int().reshape(1)
        distributed.all_reduce(finite, op=distributed.ReduceOp.MIN)
        self._step += finite
        if not finite:
            return
        norm, scale = self._L2_grad_norm, self._global_scale
        bound = self.defaults["max_grad_norm"] * self._clip_after_ar * scale
        clipped = norm / bound if self._clip_after_ar and norm > bound else torch.ones(1)
        buffers = [self._whole(shard) for shard in (self._fp32_p, self._fp32_m, self._fp32_v)]
        parts = zip(*(self._views(flat) for flat in (*buffers, self._flat_grads)), strict=True)
        for (p, m, v, g), parameter, decay in zip(parts, self._model_params, self._decays, strict=True):
            self._update(p, m, v, g.float() / (scale * clipped), parameter, decay)
        for shard, flat in zip((self._fp32_p, self._fp32_m, self._fp32_v), buffers, strict=True):
            shard.copy_(flat[self._own()])

    def _update(self, p, m, v, g, parameter, decay):
        (beta1, beta2), steps = self.defaults["betas"], int(self._step)
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        u = (m / (1 - beta1**steps)) / ((v / (1 - beta2**steps)).sqrt() + self.defaults["eps"]) + decay * p
        norms = parameter.float().norm(), u.norm()  # of the weight in fp16
        ratio = norms[0] / norms[1] if decay and all(norms) else 1.0
        p.sub_(self._lr * ratio * u)
        parameter.copy_(p.view_as(parameter))


def install(monkeypatch):
    """Makes ``import apex.contrib.optimizers.distributed_fused_lamb`` find the double."""
    name = ""
    for part in ("apex", "contrib", "optimizers", "distributed_fused_lamb"):
        name = f"{name}.{part}".removeprefix(".")
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
    module.DistributedFusedLAMB = DistributedFusedLAMB
    monkeypatch.setitem(sys.modules, "amp_C", types.ModuleType("amp_C"))
