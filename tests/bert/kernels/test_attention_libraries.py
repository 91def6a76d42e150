"""Attention packages, by stand-ins of their interfaces: arguments, results, and what is copied on the way."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bert.kernels.attention import libraries, sdpa_loop
from bert.kernels.support.dropout import ForwardPass

OFFSETS, HEADS, WIDTH = [0, 5, 5, 18, 18], 2, 8


class Joins(TorchDispatchMode):
    """How often tensors are joined or copied inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name.removeprefix("aten::") in (
            "stack",
            "cat",
            "clone",
            "copy_",
            "contiguous",
        )
        return function(*args, **(kwargs or {}))


class _Varlen(torch.autograd.Function):
    """Attention on the three parts, whose gradients lie where ``layout`` says: a library's own memory."""

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, layout):
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert cu_seqlens.dtype == torch.int32
        assert all(part.stride(-1) == 1 for part in (q, k, v))
        ctx.save_for_backward(q, k, v, cu_seqlens)
        ctx.layout = layout
        return sdpa_loop(
            torch.stack((q, k, v), dim=1), ForwardPass(cu_seqlens, 16), 0.0
        ).contiguous()

    @staticmethod
    def backward(ctx, gradient):
        *parts, cu_seqlens = ctx.saved_tensors
        with torch.enable_grad():
            leaf = torch.stack(parts, dim=1).detach().requires_grad_()
            (whole,) = torch.autograd.grad(
                sdpa_loop(leaf, ForwardPass(cu_seqlens, 16), 0.0), leaf, gradient
            )
        found = {
            "side by side": lambda: whole.contiguous().unbind(1),
            "apart": lambda: [part.clone() for part in whole.unbind(1)],
            "end to end": lambda: torch.stack(whole.unbind(1)).unbind(0),
            "heads inside": lambda: [p.mT for p in whole.mT.contiguous().unbind(1)],
            "other order": lambda: whole.flip(1).contiguous().unbind(1)[::-1],
        }[ctx.layout]()
        return (*found, None, None)


def _inputs():
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(OFFSETS[-1], 3, HEADS, WIDTH, generator=generator).bfloat16().requires_grad_()
    return qkv, torch.randn(OFFSETS[-1], HEADS, WIDTH, generator=generator).bfloat16()


def _pass():
    return ForwardPass(torch.tensor(OFFSETS, dtype=torch.int32), 16)


def _expected():
    qkv, upstream = _inputs()
    return torch.autograd.grad(sdpa_loop(qkv, _pass(), 0.0), qkv, upstream)[0]


@pytest.mark.parametrize(
    ("layout", "joins"),
    [("side by side", 0), ("apart", 1), ("end to end", 1), ("heads inside", 1), ("other order", 1)],
)
def test_gradients_become_one_without_a_copy_where_a_library_left_them_side_by_side(layout, joins):
    qkv, upstream = _inputs()
    context = _Varlen.apply(*libraries.parts(qkv), _pass().cu_seqlens, layout)
    counted = []
    plain = libraries._Parts.backward

    def counting(ctx, *gradients):
        with Joins() as seen:
            result = plain(ctx, *gradients)
        counted.append(seen.count)
        return result

    libraries._Parts.backward = staticmethod(counting)
    try:
        context.backward(upstream)
    finally:
        libraries._Parts.backward = staticmethod(plain)
    assert counted == [joins]
    assert torch.equal(qkv.grad, _expected())


class _Packed(torch.autograd.Function):
    """flash-attn's packed function: one gradient, of the packed shape."""

    @staticmethod
    def forward(ctx, qkv, cu_seqlens):
        ctx.save_for_backward(qkv, cu_seqlens)
        return sdpa_loop(qkv, ForwardPass(cu_seqlens, 16), 0.0).contiguous()

    @staticmethod
    def backward(ctx, gradient):
        qkv, cu_seqlens = ctx.saved_tensors
        assert gradient.stride(-1) == 1
        with torch.enable_grad():
            leaf = qkv.detach().requires_grad_()
            (whole,) = torch.autograd.grad(
                sdpa_loop(leaf, ForwardPass(cu_seqlens, 16), 0.0), leaf, gradient
            )
        return whole, None


def test_flash_attn_2_gets_the_packed_projections_and_gives_one_gradient(monkeypatch):
    calls = []

    def flash_attn_varlen_qkvpacked_func(
        qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
        softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        assert qkv.shape[1] == 3
        assert cu_seqlens.dtype == torch.int32
        assert isinstance(max_seqlen, int)
        calls.append((dropout_p, causal, qkv.data_ptr()))
        return _Packed.apply(qkv, cu_seqlens)

    module = types.SimpleNamespace(
        flash_attn_varlen_qkvpacked_func=flash_attn_varlen_qkvpacked_func
    )
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    qkv, upstream = _inputs()
    context = libraries.flash_attn_2(qkv, _pass(), 0.1)
    assert calls == [(0.1, False, qkv.data_ptr())]
    names = []
    node = context.grad_fn
    while node is not None:
        names.append(type(node).__name__)
        node = node.next_functions[0][0] if node.next_functions else None
    assert names == ["_PackedBackward", "AccumulateGrad"], (
        "nothing between the package and the projections"
    )
    context.backward(upstream)
    assert torch.equal(qkv.grad, _expected())


def test_transformer_engine_sees_one_packed_tensor_and_nothing_is_stacked(monkeypatch):
    class DotProductAttention:
        def __init__(self, num_heads, head_size, *, attention_dropout, qkv_format, attn_mask_type):
            assert (num_heads, head_size, attention_dropout) == (HEADS, WIDTH, 0.1)
            assert (qkv_format, attn_mask_type) == ("thd", "padding")

        def __call__(self, q, k, v, *, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv):
            row = HEADS * WIDTH * q.element_size()  # how it knows the packed layout
            assert [part.data_ptr() - q.data_ptr() for part in (q, k, v)] == [0, row, 2 * row]
            assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
            assert q.stride() == k.stride() == v.stride() == (3 * HEADS * WIDTH, WIDTH, 1)
            return _Varlen.apply(q, k, v, cu_seqlens_q, "side by side").flatten(1)

    package = types.SimpleNamespace(DotProductAttention=DotProductAttention)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package)
    libraries._transformer_engine_module.cache_clear()
    qkv, upstream = _inputs()
    context = libraries.transformer_engine(qkv, _pass(), 0.1)
    context.backward(upstream)
    libraries._transformer_engine_module.cache_clear()
    assert torch.equal(qkv.grad, _expected())
