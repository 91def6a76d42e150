"""The varlen attention kernels that PyTorch carries: cuDNN's and FlashAttention-2, both with dropout.

torch.nn.attention.varlen offers neither dropout nor cuDNN, so the operators below it are called; their derivatives are
PyTorch's own. Arguments as in attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bert.kernels.forward_pass import ForwardPass

LOW_PRECISION = (torch.float16, torch.bfloat16)
CUDNN_VARLEN_SINCE = (2, 14)


def cudnn(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """cuDNN's fused attention."""
    _require_low_precision(qkv, "cudnn")
    # Contiguous: cuDNN's offsets into the gradients are computed from the strides of the inputs.
    query, key, value = (part.contiguous() for part in qkv.unbind(1))
    offsets, longest = forward_pass.cu_seqlens, forward_pass.max_seqlen
    outputs = torch.ops.aten._cudnn_attention_forward(
        query, key, value, None, offsets, offsets, longest, longest, True, dropout, False, False
    )
    context: Tensor = outputs[0]
    return context


def cudnn_missing(device: torch.device) -> str | None:
    """See attention.Backend."""
    if device.type != "cuda":
        return "it needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "its varlen form needs compute capability 9.0 (Hopper) or later"
    # Its backward pass took the head size for the longest length and wrote out of bounds (pytorch pull 186142), and
    # sequences of length 0, which fill up a graph's batch, came later still (pull 194818).
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < CUDNN_VARLEN_SINCE:
        return "its backward pass needs PyTorch {}.{} or later".format(*CUDNN_VARLEN_SINCE)
    return None if torch.backends.cudnn.is_available() else "this PyTorch has no cuDNN"


def flash(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """FlashAttention-2 as built into PyTorch."""
    _require_low_precision(qkv, "flash")
    query, key, value = qkv.unbind(1)
    offsets, longest = forward_pass.cu_seqlens, forward_pass.max_seqlen
    outputs = torch.ops.aten._flash_attention_forward(
        query, key, value, offsets, offsets, longest, longest, dropout, False, False
    )
    context: Tensor = outputs[0]
    return context


def flash_missing(device: torch.device) -> str | None:
    """See attention.Backend."""
    if device.type != "cuda":
        return "it needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 (Ampere) or later"
    return None if torch.backends.cuda.is_flash_attention_available() else "this PyTorch has no FlashAttention"


def _require_low_precision(qkv: Tensor, name: str) -> None:
    if qkv.dtype not in LOW_PRECISION:
        raise TypeError(f"ATTENTION={name} computes in bf16 or fp16, not in {qkv.dtype}")
