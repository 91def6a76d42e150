"""A stand-in for nvidia-cudnn-frontend: its graph interface as documented, computed by PyTorch on a
CPU.

As strict as the library: steps in their order, every tensor given and no other, of the declared
type, each at a multiple of 16 bytes. As unkind: what no sequence covers is left as it was, the sums
there are not numbers, and dropout goes by seed and offset alone.
"""

from __future__ import annotations

import functools
import types

import torch

data_type = types.SimpleNamespace(
    BFLOAT16=torch.bfloat16, HALF=torch.float16, FLOAT=torch.float32,
    INT32=torch.int32, INT64=torch.int64,
)  # fmt: skip
heur_mode = types.SimpleNamespace(A="A", FALLBACK="FALLBACK")
STEPS = [
    "validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans",
]  # fmt: skip
WORKSPACE = 160
built: list[pygraph] = []


class cudnnGraphNotSupportedError(RuntimeError):
    """No kernel does that."""


class Described:
    """A tensor of a graph."""

    def __init__(self, name="", dim=None, stride=None, data_type=None):
        self.name, self.dim, self.stride, self.data_type = name, dim, stride, data_type
        self.ragged_offset, self.output = None, False

    def _set(self, name, value):
        setattr(self, name, value)
        return self

    set_output = functools.partialmethod(_set, "output")
    set_dim = functools.partialmethod(_set, "dim")
    set_stride = functools.partialmethod(_set, "stride")
    set_data_type = functools.partialmethod(_set, "data_type")
    set_ragged_offset = functools.partialmethod(_set, "ragged_offset")

    def sequence(self, given, number, length):
        """[length, N, H]: one sequence, where strides and offsets say that it lies."""
        data, begin = given[self], number * self.stride[0]
        if self.ragged_offset is not None:
            begin = int(given[self.ragged_offset][number])
        shape = (length, self.dim[1], self.dim[3])
        strides = (self.stride[2], self.stride[1], self.stride[3])
        return torch.as_strided(data, shape, strides, data.storage_offset() + begin)


class pygraph:
    """A graph of one operation."""

    def __init__(
        self, *, io_data_type, intermediate_data_type, compute_data_type, handle
    ):
        assert intermediate_data_type == compute_data_type == torch.float32
        assert handle == "handle"
        self.done, self.tensors, self.runs = 0, [], 0
        built.append(self)

    def _step(self, name):
        assert STEPS[self.done] == name, f"{name} after {STEPS[: self.done]}"
        self.done += 1

    build_operation_graph = functools.partialmethod(_step, "build_operation_graph")
    build_plans = functools.partialmethod(_step, "build_plans")

    def validate(self):
        self._step("validate")
        assert all(len(t.dim) == len(t.stride) == 4 for t in self.tensors)
        assert all(t.data_type is not None for t in self.tensors)
        assert all(t.output for t in self.outputs)

    def create_execution_plans(self, modes):
        assert modes
        self._step("create_execution_plans")

    def check_support(self):
        self._step("check_support")
        if self.q.dim[3] % 8:
            raise cudnnGraphNotSupportedError("hidden_dim should be\n multiple of 8")

    def get_workspace_size(self):
        assert self.done == len(STEPS)
        return WORKSPACE

    def tensor(self, *, name, dim, stride, data_type):
        self.tensors.append(Described(name, dim, stride, data_type))
        return self.tensors[-1]

    def _settings(
        self, attn_scale, use_padding_mask, seq_len_q, seq_len_kv, dropout=None
    ):
        assert use_padding_mask
        self.scale, self.lengths, self.dropout = attn_scale, seq_len_q, dropout
        assert seq_len_kv is seq_len_q

    def _results(self, *names):
        self.outputs = [Described(name) for name in names]
        self.tensors += self.outputs
        return self.outputs

    def sdpa(self, *, q, k, v, is_inference, **settings):
        assert not is_inference
        self.q, self.k, self.v, self.run = q, k, v, self._forward
        self._settings(**settings)
        return self._results("O", "Stats")

    def sdpa_backward(self, *, q, k, v, o, dO, stats, **settings):
        longest = [settings.pop(f"max_total_seq_len_{side}") for side in ("q", "kv")]
        assert longest[0] == longest[1] > 0
        self.q, self.k, self.v, self.run = q, k, v, self._backward
        self.o, self.gradient, self.stats = o, dO, stats
        self._settings(**settings)
        return self._results("dQ", "dK", "dV")

    def execute(self, given, workspace, handle):
        assert self.done == len(STEPS)
        assert handle == "handle"
        assert workspace.numel() == WORKSPACE
        assert workspace.dtype == torch.uint8
        assert given.keys() == set(self.tensors), "every tensor, and no other"
        for described, data in given.items():
            assert data.dtype == described.data_type, described.name
            assert data.data_ptr() % 16 == 0, f"{described.name} is not aligned"
            assert not data.requires_grad
        workspace.fill_(255)
        self.runs += 1
        self.run(given)

    def _probabilities(self, given, number, q, k):
        """Softmax [N, L, L] in fp32, and what dropout multiplies it by."""
        p = torch.einsum("inh,jnh->nij", q, k).mul(self.scale).softmax(-1)
        if self.dropout is None:
            return p, torch.ones_like(p)
        probability, seed, offset = self.dropout
        drawn = int(given[seed]) + 31 * int(given[offset]) + 7 * number
        generator = torch.Generator().manual_seed(drawn % 2**63)
        kept = torch.rand(p.shape, generator=generator) >= probability
        return p, kept.float() / (1 - probability)

    def _forward(self, given):
        context, stats = self.outputs
        given[stats].fill_(float("nan"))
        for number, length in enumerate(given[self.lengths].flatten().tolist()):
            place = given, number, length
            q, k, v = (t.sequence(*place).float() for t in (self.q, self.k, self.v))
            p, keep = self._probabilities(given, number, q, k)
            attended = torch.einsum("nij,jnh->inh", p * keep, v)
            context.sequence(*place).copy_(attended)
            # Some number: the backward pass is to get the same back.
            stats.sequence(*place).copy_(p.square().sum(-1).t()[..., None])

    def _backward(self, given):
        operands = self.q, self.k, self.v, self.o, self.gradient
        for number, length in enumerate(given[self.lengths].flatten().tolist()):
            place = given, number, length
            q, k, v, o, do = (t.sequence(*place).float() for t in operands)
            p, keep = self._probabilities(given, number, q, k)
            stats = self.stats.sequence(*place)[..., 0]
            assert torch.equal(stats, p.square().sum(-1).t())
            dp = torch.einsum("inh,jnh->nij", do, v) * keep
            ds = p * (dp - (do * o).sum(-1).t()[..., None]) * self.scale
            dq = torch.einsum("nij,jnh->inh", ds, k)
            dk = torch.einsum("nij,inh->jnh", ds, q)
            dv = torch.einsum("nij,inh->jnh", p * keep, do)
            for described, values in zip(self.outputs, (dq, dk, dv), strict=True):
                described.sequence(*place).copy_(values)


def create_handle():
    return "handle"
