"""Self-attention over a packed batch: every sequence attends only to itself. One signature, several
backends.

A backend maps qkv [T, 3, N, H], the forward pass (its sequences) and the dropout probability to the
context [T, N, H], which is undefined at tokens beyond cu_seqlens[-1]; batches for a graph have none
(graph.py). benchmark.py tests backends on a GPU.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bert.kernels.attention import cudnn_frontend, libraries, triton_attention
from bert.kernels.attention.libraries import needs, package
from bert.kernels.support import triton_support
from bert.kernels.support.dropout import ForwardPass
from common.env import ConfigError
from common.process import one_line, say

Attention = Callable[[Tensor, ForwardPass, float], Tensor]


def sdpa_loop(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """One scaled_dot_product_attention per sequence: the reference, and the fastest on a CPU (no
    masked-out work).
    """
    offsets = forward_pass.cu_seqlens.tolist()
    # The last length is that of the tokens beyond all sequences.
    lengths = [
        end - begin for begin, end in itertools.pairwise([*offsets, qkv.shape[0]])
    ]
    # Split, not sliced: gradients of the parts are concatenated; those of slices would each take a
    # pass over all tokens.
    query, key, value = (
        part.split(lengths, dim=2) for part in qkv.permute(1, 2, 0, 3).unsqueeze(1)
    )  # (1, N, L, H)
    contexts = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        for q, k, v in zip(query[:-1], key[:-1], value[:-1], strict=True)
        if q.shape[2]
    ]
    # Undefined by the contract; zeros cannot spread nan.
    if lengths[-1]:
        contexts.append(torch.zeros_like(query[-1]))
    return torch.cat(contexts, dim=2)[0].transpose(0, 1)  # (T, N, H)


@dataclass(frozen=True)
class Backend:
    """An implementation. ``missing(device)``: why it cannot run there in a few words, or None."""

    run: Attention
    missing: Callable[[torch.device], str | None]
    has_fp32: bool = False
    # The host does not read the lengths, so that it can be part of a CUDA graph.
    on_device: bool = True
    # For each size of batch, so that auto uses it for CUDA graphs only.
    compiles: bool = False


# Another module may add its own.
BACKENDS: dict[str, Backend] = {
    "cudnn_frontend": Backend(
        cudnn_frontend.attention,
        needs(package("cudnn", "nvidia-cudnn-frontend")),
        compiles=True,
    ),
    "flash": Backend(libraries.flash, needs(libraries.flash_absent, on_rocm=True)),
    "triton": Backend(
        triton_attention.attention, triton_support.missing, has_fp32=True
    ),
    "flash_attn_2": Backend(
        libraries.flash_attn_2, needs(package("flash_attn", "flash-attn"), on_rocm=True)
    ),
    "sdpa_loop": Backend(
        sdpa_loop, lambda device: None, has_fp32=True, on_device=False
    ),
}


def backend_of(name: str) -> Backend:
    """Raises ConfigError for a name that is none."""
    if name not in BACKENDS:
        raise ConfigError(
            f"ATTENTION={name}: expected auto or one of {', '.join(BACKENDS)}"
        )
    return BACKENDS[name]


def check(name: str, device: torch.device, dtype: torch.dtype, in_graph: bool) -> None:
    """Raises ConfigError if the backend named by ATTENTION cannot run here."""
    if name == "auto":
        return
    backend = backend_of(name)
    if reason := backend.missing(device):
        raise ConfigError(f"ATTENTION={name} cannot run here: {reason}; use auto")
    if dtype == torch.float32 and not backend.has_fp32:
        raise ConfigError(
            f"ATTENTION={name} computes in bf16 or fp16: not with PRECISION=fp32"
        )
    if in_graph and not backend.on_device:
        raise ConfigError(
            f"ATTENTION={name} reads the lengths on the host: set CUDA_GRAPH=0, or use auto"
        )


def candidates(device: torch.device) -> list[str]:
    """The backends available with this device and the installed packages, except the reference."""
    return [
        name
        for name, backend in BACKENDS.items()
        if backend.on_device and backend.missing(device) is None
    ]


def with_fallback(first: str, second: str) -> Attention:
    """Backend ``first``, until it raises an error: then ``second`` replaces it for good, which is
    printed.
    """
    failed = False

    def run(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
        nonlocal failed
        if not failed:
            # The second backend takes the place of the first in the count of sites, too.
            num_sites = forward_pass.sites.num_sites
            try:
                return BACKENDS[first].run(qkv, forward_pass, dropout)
            except Exception as error:  # whatever a library raises
                failed = True
                forward_pass.sites.num_sites = num_sites
                reason = one_line(error)
                say(f"attention: {first} failed, {second} takes its place: {reason}")
        return BACKENDS[second].run(qkv, forward_pass, dropout)

    return run
