"""Self-attention over a packed batch: every sequence attends to itself alone. One signature, several backends.

A backend maps qkv [T, 3, N, H], cu_seqlens int32 [S+1] and max_seqlen to the context [T, N, H]. Tokens past
cu_seqlens[-1] are padding: their context is zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Attention = Callable[[Tensor, Tensor, int, float], Tensor]


def sdpa_loop(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: float) -> Tensor:
    """One scaled_dot_product_attention a sequence: the oracle, and the fastest on a CPU (no masked-out work)."""
    offsets = cu_seqlens.tolist()
    query, key, value = qkv.permute(1, 2, 0, 3).unsqueeze(1)  # three times (1, N, T, H)
    contexts = [
        F.scaled_dot_product_attention(
            query[:, :, begin:end], key[:, :, begin:end], value[:, :, begin:end], dropout_p=dropout
        )
        for begin, end in itertools.pairwise(offsets)
        if end > begin
    ]
    padding = qkv.shape[0] - offsets[-1]
    if padding:
        contexts.append(query.new_zeros((1, query.shape[1], padding, query.shape[3])))
    return torch.cat(contexts, dim=2)[0].transpose(0, 1)  # (T, N, H)


BACKENDS: dict[str, Attention] = {"sdpa_loop": sdpa_loop}


def default_backend(device: torch.device) -> str:
    """The backend that ATTENTION=auto takes on a device."""
    return "sdpa_loop"
