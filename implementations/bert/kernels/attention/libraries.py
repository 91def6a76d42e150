"""Attention of libraries: PyTorch's varlen kernels, and optional packages: flash-attn 2, TransformerEngine. Arguments
as in attention.py.

torch.nn.attention.varlen has neither dropout nor cuDNN, so its underlying operators are called; PyTorch derives them.
Packages are imported at first use.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bert.kernels.support.dropout import ForwardPass

CUDNN_VARLEN_SINCE = (2, 14)


def needs(
    capability: tuple[int, int], absent: Callable[[], str | None], on_rocm: bool = False
) -> Callable[[torch.device], str | None]:
    """``Backend.missing`` for a minimum compute capability and another requirement, which ``absent`` names if missing.

    on_rocm: also available on AMD GPUs, whose compute capability is not comparable.
    """

    def missing(device: torch.device) -> str | None:
        if device.type != "cuda":
            return "it needs a GPU"
        # ROCm also calls itself cuda.
        if torch.version.hip:
            return absent() if on_rocm else "it needs an NVIDIA GPU"
        if torch.cuda.get_device_capability(device) < capability:
            return f"it needs compute capability {capability[0]}.{capability[1]} or later"
        return absent()

    return missing


def package(module: str, name: str = "") -> Callable[[], str | None]:
    """``absent`` of a package's module. name: the package's for pip, if different."""

    def absent() -> str | None:
        try:
            # Found, not imported: an import takes seconds, or fails for reasons of its own.
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # for the parent package
            found = None
        return (
            None
            if found
            else f"the package {name or module.split('.')[0]} with {module} is not installed"
        )

    return absent


def cudnn(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """cuDNN's fused attention, in PyTorch."""
    # Contiguous, since PyTorch computes cuDNN's offsets into the gradients from the strides of the inputs.
    query, key, value = (part.contiguous() for part in qkv.unbind(1))
    offsets, longest = forward_pass.cu_seqlens, forward_pass.max_seqlen
    return torch.ops.aten._cudnn_attention_forward(
        query, key, value, None, offsets, offsets, longest, longest, True, dropout, False, False
    )[0]


def cudnn_absent() -> str | None:
    """Why this PyTorch has no such attention, or None."""
    # Its backward pass used the head size as the longest length and wrote out of bounds (pytorch pull 186142); support
    # for sequences of length 0, which pad a graph's batch, came even later (pull 194818).
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < CUDNN_VARLEN_SINCE:
        return "its backward pass needs PyTorch {}.{} or later".format(*CUDNN_VARLEN_SINCE)
    return None if torch.backends.cudnn.is_available() else "this PyTorch has no cuDNN"


def flash(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """FlashAttention-2 as built into PyTorch."""
    offsets, longest = forward_pass.cu_seqlens, forward_pass.max_seqlen
    return torch.ops.aten._flash_attention_forward(
        *qkv.unbind(1), offsets, offsets, longest, longest, dropout, False, False
    )[0]


def flash_absent() -> str | None:
    """Why this PyTorch has no such attention, or None."""
    return (
        None
        if torch.backends.cuda.is_flash_attention_available()
        else "this PyTorch has no FlashAttention"
    )


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
        # As queries, keys and values lie in qkv [T, 3, N, H]: a row apart, three rows a token.
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
    """Queries, keys and values [T, N, H] as views of qkv [T, 3, N, H].

    Their gradients are combined without a copy if a library has written them side by side into one tensor; else they
    are stacked.
    """
    return _Parts.apply(qkv)


def flash_attn_2(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """The flash-attn package, version 2: its packed function takes qkv whole, and writes one gradient."""
    run = importlib.import_module("flash_attn").flash_attn_varlen_qkvpacked_func
    return run(qkv, forward_pass.cu_seqlens, forward_pass.max_seqlen, dropout_p=dropout)


def transformer_engine(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """TransformerEngine's attention, which chooses among its fused kernels."""
    _, _, num_heads, head_size = qkv.shape
    offsets, longest = forward_pass.cu_seqlens, forward_pass.max_seqlen
    # Self-attention: keys have the queries' offsets.
    context: Tensor = _transformer_engine_module(num_heads, head_size, dropout)(
        *parts(qkv),
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return context.view(-1, num_heads, head_size)


# It has no weights: one module serves all layers.
@functools.cache
def _transformer_engine_module(num_heads: int, head_size: int, dropout: float) -> Any:
    return importlib.import_module("transformer_engine.pytorch").DotProductAttention(
        num_heads, head_size, attention_dropout=dropout, qkv_format="thd", attn_mask_type="padding"
    )
