"""Attention of libraries: FlashAttention-2 of PyTorch, and of the package flash-attn, imported at
first use. Arguments: those of ``Attention``.

torch.nn.attention.varlen has no dropout, so its underlying operator is called; PyTorch derives it.
"""

import importlib
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from bert.kernels.support.dropout import ForwardPass


def needs(
    absent: Callable[[], str | None], on_rocm: bool = False
) -> Callable[[torch.device], str | None]:
    """``Backend.missing`` of a library for GPUs from compute capability 8.0 on. absent: why it is
    not here, or None.

    on_rocm: also available on AMD GPUs, whose compute capability is not comparable.
    """

    def missing(device: torch.device) -> str | None:
        if device.type != "cuda":
            return "it needs a GPU"
        # ROCm also calls itself cuda.
        if torch.version.hip:
            return absent() if on_rocm else "it needs an NVIDIA GPU"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0 or later"
        return absent()

    return missing


def package(module: str, name: str) -> Callable[[], str | None]:
    """``absent`` of a package's module. name: the package's for pip."""

    def absent() -> str | None:
        # Found, not imported: an import takes seconds, or fails for reasons of its own.
        found = importlib.util.find_spec(module)
        return None if found else f"the package {name} with {module} is not installed"

    return absent


def flash(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """FlashAttention-2 as built into PyTorch."""
    offsets, longest = forward_pass.cu_seqlens, forward_pass.max_seqlen
    return torch.ops.aten._flash_attention_forward(
        *qkv.unbind(1), offsets, offsets, longest, longest, dropout, False, False
    )[0]


def flash_absent() -> str | None:
    """Why this PyTorch has no such attention, or None."""
    available = torch.backends.cuda.is_flash_attention_available()
    return None if available else "this PyTorch has no FlashAttention"


def flash_attn_2(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """The flash-attn package, version 2: its packed function takes qkv whole, and writes one
    gradient.
    """
    run = importlib.import_module("flash_attn").flash_attn_varlen_qkvpacked_func
    return run(qkv, forward_pass.cu_seqlens, forward_pass.max_seqlen, dropout_p=dropout)
