"""A stand-in for nvidia-cudnn-frontend: its graph interface as documented, computed by PyTorch on a
CPU.

As strict as the library: steps in their order, every tensor given and no other, of the declared
type, each at a multiple of 16 bytes. As unkind: what no sequence covers is left as it was, the sums
there are not numbers, and dropout goes by seed and offset alone.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

data_type = types.SimpleNamespace(
    BFLOAT16=torch.bfloat16,
    HALF=torch.float16,
    FLOAT=torch.float32,
    INT32=torch.int32,
    INT64=torch.int64,
)
heur_mode = types.SimpleNamespace(A="A", FALLBACK="FALLBACK")
STEPS = [
    "validate",
    "build_operation_graph",
    "create_execution_plans",
    "check_support",
    "build_plans",
]
WORKSPACE = 160
built: list[pygraph] = []


class cudnnGraphNotSupportedError(RuntimeError):
    """No kernel does that."""


class Described:
    """A tensor of a graph."""

    def __init__(
        self, name: str = "", dim: Any = None, stride: Any = None, data_type: Any = None
    ) -> None:
        self.name, self.dim, self.stride, self.dtype = name, dim, stride, data_type
        self.ragged: Described | None = None
        self.is_output = False

    def set_output(self, value: bool) -> Described:
        self.is_output = value
        return self

    def set_dim(self, dim: list[int]) -> Described:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Described:
        self.stride = stride
        return self

    def set_data_type(self, dtype: Any) -> Described:
        self.dtype = dtype
        return self

    def set_ragged_offset(self, ragged: Described) -> Described:
        self.ragged = ragged
        return self

    def sequence(
        self, given: dict[Described, Tensor], number: int, length: int
    ) -> Tensor:
        """[length, N, H]: one sequence, where strides and offsets say that it lies."""
        data = given[self]
        begin = number * self.stride[0]
        if self.ragged is not None:
            begin = int(given[self.ragged][number])
        shape = (length, self.dim[1], self.dim[3])
        strides = (self.stride[2], self.stride[1], self.stride[3])
        return torch.as_strided(data, shape, strides, data.storage_offset() + begin)


class pygraph:
    """A graph of one operation."""

    def __init__(
        self,
        *,
        io_data_type: Any,
        intermediate_data_type: Any,
        compute_data_type: Any,
        handle: Any,
    ) -> None:
        assert intermediate_data_type == compute_data_type == torch.float32
        assert handle == "handle"
        self.io, self.done, self.tensors = io_data_type, 0, []
        self.runs = 0
        built.append(self)

    def _step(self, name: str) -> None:
        assert STEPS[self.done] == name, f"{name} after {STEPS[: self.done]}"
        self.done += 1

    def validate(self) -> None:
        self._step("validate")
        assert all(len(t.dim) == len(t.stride) == 4 for t in self.tensors)
        assert all(t.dtype is not None for t in self.tensors)
        assert all(t.is_output for t in self.outputs)

    def build_operation_graph(self) -> None:
        self._step("build_operation_graph")

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes
        self._step("create_execution_plans")

    def check_support(self) -> None:
        self._step("check_support")
        if self.q.dim[3] % 8:
            raise cudnnGraphNotSupportedError("hidden_dim should be\n multiple of 8")

    def build_plans(self) -> None:
        self._step("build_plans")

    def get_workspace_size(self) -> int:
        assert self.done == len(STEPS)
        return WORKSPACE

    def tensor(
        self, *, name: str, dim: list[int], stride: list[int], data_type: Any
    ) -> Described:
        self.tensors.append(Described(name, dim, stride, data_type))
        return self.tensors[-1]

    def _settings(
        self, attn_scale, use_padding_mask, seq_len_q, seq_len_kv, dropout
    ) -> None:
        assert use_padding_mask
        self.scale, self.lengths, self.dropout = attn_scale, seq_len_q, dropout
        assert seq_len_kv is seq_len_q

    def _results(self, *names: str) -> list[Described]:
        self.outputs = [Described(name) for name in names]
        self.tensors += self.outputs
        return self.outputs

    def sdpa(self, *, q, k, v, is_inference, **settings) -> list[Described]:
        assert not is_inference
        self.q, self.k, self.v, self.run = q, k, v, self._forward
        self._settings(**({"dropout": None} | settings))
        return self._results("O", "Stats")

    def sdpa_backward(
        self,
        *,
        q,
        k,
        v,
        o,
        dO,
        stats,
        max_total_seq_len_q,
        max_total_seq_len_kv,
        **settings,
    ):
        assert max_total_seq_len_q == max_total_seq_len_kv > 0
        self.q, self.k, self.v, self.run = q, k, v, self._backward
        self.o, self.gradient, self.stats = o, dO, stats
        self._settings(**({"dropout": None} | settings))
        return self._results("dQ", "dK", "dV")

    def execute(
        self, given: dict[Described, Tensor], workspace: Tensor, handle: Any
    ) -> None:
        assert self.done == len(STEPS)
        assert handle == "handle"
        assert workspace.numel() == WORKSPACE
        assert workspace.dtype == torch.uint8
        assert given.keys() == set(self.tensors), "every tensor, and no other"
        for described, data in given.items():
            assert data.dtype == described.dtype, described.name
            assert data.data_ptr() % 16 == 0, f"{described.name} is not aligned"
            assert not data.requires_grad
        workspace.fill_(255)
        self.runs += 1
        self.run(given)

    def _probabilities(self, given, number: int, length: int) -> tuple[Tensor, Tensor]:
        """Softmax [N, L, L] in fp32, and what dropout multiplies it by."""
        q, k = (t.sequence(given, number, length).float() for t in (self.q, self.k))
        p = torch.einsum("inh,jnh->nij", q, k).mul(self.scale).softmax(-1)
        if self.dropout is None:
            return p, torch.ones_like(p)
        probability, seed, offset = self.dropout
        drawn = int(given[seed]) + 31 * int(given[offset]) + 7 * number
        generator = torch.Generator().manual_seed(drawn % 2**63)
        kept = torch.rand(p.shape, generator=generator) >= probability
        return p, kept.float() / (1 - probability)

    def _forward(self, given) -> None:
        context, stats = self.outputs
        given[stats].fill_(float("nan"))
        for number, length in enumerate(given[self.lengths].flatten().tolist()):
            p, keep = self._probabilities(given, number, length)
            v = self.v.sequence(given, number, length).float()
            attended = torch.einsum("nij,jnh->inh", p * keep, v)
            context.sequence(given, number, length).copy_(attended)
            rows = stats.sequence(given, number, length)
            # Some number: the backward pass is to get the same back.
            rows.copy_(p.square().sum(-1).t()[..., None])

    def _backward(self, given) -> None:
        for number, length in enumerate(given[self.lengths].flatten().tolist()):
            p, keep = self._probabilities(given, number, length)
            q, k, v, o, do = (
                t.sequence(given, number, length).float()
                for t in (self.q, self.k, self.v, self.o, self.gradient)
            )
            stats = self.stats.sequence(given, number, length)[..., 0]
            assert torch.equal(stats, p.square().sum(-1).t())
            dp = torch.einsum("inh,jnh->nij", do, v) * keep
            ds = p * (dp - (do * o).sum(-1).t()[..., None]) * self.scale
            results = (
                torch.einsum("nij,jnh->inh", ds, k),
                torch.einsum("nij,inh->jnh", ds, q),
                torch.einsum("nij,inh->jnh", p * keep, do),
            )
            for described, values in zip(self.outputs, results, strict=True):
                described.sequence(given, number, length).copy_(values)


def create_handle() -> str:
    return "handle"
