"""Attention from packages that are used where they are installed, never required: flash-attn 2 to 4, TransformerEngine.

Arguments as in attention.py. A package is imported at its first use.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bert.kernels.forward_pass import ForwardPass


def package_missing(
    module: str, capability: tuple[int, int], package: str = ""
) -> Callable[[torch.device], str | None]:
    """``attention.Backend.missing`` of a package's module that needs a compute capability. package: its name to pip."""

    def missing(device: torch.device) -> str | None:
        if device.type != "cuda":
            return "it needs an NVIDIA GPU"
        if torch.cuda.get_device_capability(device) < capability:
            return f"it needs compute capability {capability[0]}.{capability[1]}"
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # of the package that should hold it
            found = None
        return None if found else f"the package {package or module.split('.')[0]} with {module} is not installed"

    return missing


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.unbind(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        first = gradients[0]
        num_tokens, num_heads, width = first.shape
        row = num_heads * width
        memory = first.untyped_storage()
        beside = all(
            part.untyped_storage()._cdata == memory._cdata
            and part.storage_offset() == first.storage_offset() + number * row
            and part.stride() == (3 * row, width, 1)
            for number, part in enumerate(gradients)
        )
        if not beside:
            return torch.stack(gradients, dim=1)
        shape, strides = (num_tokens, 3, num_heads, width), (3 * row, row, width, 1)
        return first.new_empty(0).set_(memory, first.storage_offset(), shape, strides)


def parts(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [T, N, H] of qkv [T, 3, N, H], which lie in it.

    Their gradients, too, become one without a copy where a library has left them side by side in one tensor; else they
    are stacked.
    """
    found: tuple[Tensor, Tensor, Tensor] = _Parts.apply(qkv)
    return found


def flash_attn_2(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """The flash-attn package, version 2: its packed function reads qkv as it is, and writes one gradient."""
    run = importlib.import_module("flash_attn").flash_attn_varlen_qkvpacked_func
    context: Tensor = run(qkv, forward_pass.cu_seqlens, forward_pass.max_seqlen, dropout_p=dropout)
    return context


def flash_attn_3(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """FlashAttention-3 (the hopper folder of flash-attention); no dropout."""
    assert not dropout
    run = importlib.import_module("flash_attn_interface").flash_attn_varlen_func
    offsets, longest = forward_pass.cu_seqlens, forward_pass.max_seqlen
    return _first(run(*parts(qkv), offsets, offsets, longest, longest))


def flash_attn_4(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """FlashAttention-4 (the flash-attn-4 package); no dropout."""
    assert not dropout
    run = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    return _first(
        run(
            *parts(qkv),
            cu_seqlens_q=forward_pass.cu_seqlens,
            cu_seqlens_k=forward_pass.cu_seqlens,
            max_seqlen_q=forward_pass.max_seqlen,
            max_seqlen_k=forward_pass.max_seqlen,
        )
    )


def transformer_engine(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """TransformerEngine's choice among its fused attentions."""
    _, _, num_heads, head_size = qkv.shape
    module = _transformer_engine_module(num_heads, head_size, dropout)
    context: Tensor = module(
        *parts(qkv),
        cu_seqlens_q=forward_pass.cu_seqlens,
        cu_seqlens_kv=forward_pass.cu_seqlens,
        max_seqlen_q=forward_pass.max_seqlen,
        max_seqlen_kv=forward_pass.max_seqlen,
    )
    return context.view(-1, num_heads, head_size)


@functools.cache
def _transformer_engine_module(num_heads: int, head_size: int, dropout: float) -> Any:
    pytorch = importlib.import_module("transformer_engine.pytorch")
    return pytorch.DotProductAttention(
        num_heads, head_size, attention_dropout=dropout, qkv_format="thd", attn_mask_type="padding"
    )


def _first(result: Any) -> Tensor:
    """Some versions return the context, others the context and the log-sum-exp."""
    context: Tensor = result[0] if isinstance(result, tuple) else result
    return context
