"""Attention packages, by stand-ins of their interfaces: arguments, results, and what is copied on
the way.
"""

from __future__ import annotations

import sys
import types

import torch

from bert.kernels.attention import libraries
from bert.kernels.support.dropout import ForwardPass


def test_flash_attn_2_gets_the_projections_whole_and_gives_one_gradient(monkeypatch):
    """Nothing lies between the package and the projections."""
    calls, theirs = [], torch.ones(18, 2, 8)

    def flash_attn_varlen_qkvpacked_func(
        qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
        softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        assert (softmax_scale, causal, return_attn_probs) == (None, False, False)
        assert cu_seqlens.dtype == torch.int32
        assert isinstance(max_seqlen, int)
        calls.append((qkv, cu_seqlens, max_seqlen, dropout_p))
        return theirs

    function = flash_attn_varlen_qkvpacked_func
    module = types.SimpleNamespace(flash_attn_varlen_qkvpacked_func=function)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    qkv = torch.randn(18, 3, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([0, 5, 5, 18, 18], dtype=torch.int32)
    forward_pass = ForwardPass(offsets, 16)
    assert libraries.flash_attn_2(qkv, forward_pass, 0.1) is theirs
    ((given, *rest),) = calls
    assert given is qkv
    assert rest == [forward_pass.cu_seqlens, 16, 0.1]
