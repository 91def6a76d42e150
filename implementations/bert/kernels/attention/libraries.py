"""Attention of libraries: PyTorch's varlen kernels, and the package flash-attn 2, imported at first use. Arguments:
those of ``Attention``.

torch.nn.attention.varlen has neither dropout nor cuDNN, so its underlying operators are called; PyTorch derives them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

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


def flash_attn_2(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """The flash-attn package, version 2: its packed function takes qkv whole, and writes one gradient."""
    run = importlib.import_module("flash_attn").flash_attn_varlen_qkvpacked_func
    return run(qkv, forward_pass.cu_seqlens, forward_pass.max_seqlen, dropout_p=dropout)
