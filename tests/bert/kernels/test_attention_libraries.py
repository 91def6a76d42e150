"""Attention packages, by stand-ins of their interfaces: arguments, results, and what is copied on
the way.
"""

from __future__ import annotations

import sys
import types

import torch

from bert.kernels.attention import libraries, sdpa_loop
from bert.kernels.support.dropout import ForwardPass

OFFSETS, HEADS, WIDTH = [0, 5, 5, 18, 18], 2, 8


def _inputs():
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(OFFSETS[-1], 3, HEADS, WIDTH, generator=generator)
    qkv = qkv.bfloat16().requires_grad_()
    return qkv, torch.randn(OFFSETS[-1], HEADS, WIDTH, generator=generator).bfloat16()


def _pass():
    return ForwardPass(torch.tensor(OFFSETS, dtype=torch.int32), 16)


def _expected():
    qkv, upstream = _inputs()
    return torch.autograd.grad(sdpa_loop(qkv, _pass(), 0.0), qkv, upstream)[0]


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
            context = sdpa_loop(leaf, ForwardPass(cu_seqlens, 16), 0.0)
            (whole,) = torch.autograd.grad(context, leaf, gradient)
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

    function = flash_attn_varlen_qkvpacked_func
    module = types.SimpleNamespace(flash_attn_varlen_qkvpacked_func=function)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    qkv, upstream = _inputs()
    context = libraries.flash_attn_2(qkv, _pass(), 0.1)
    assert calls == [(0.1, False, qkv.data_ptr())]
    names = []
    node = context.grad_fn
    while node is not None:
        names.append(type(node).__name__)
        node = node.next_functions[0][0] if node.next_functions else None
    # Nothing between the package and the projections.
    assert names == ["_PackedBackward", "AccumulateGrad"]
    context.backward(upstream)
    assert torch.equal(qkv.grad, _expected())
