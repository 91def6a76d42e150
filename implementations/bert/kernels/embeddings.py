"""Embeddings: word + position + segment, LayerNorm, dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference(
    input_ids: Tensor,
    segment_ids: Tensor,
    position_ids: Tensor,
    word: Tensor,
    position: Tensor,
    segment: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout: float,
) -> Tensor:
    """Embedded tokens.

    input_ids, segment_ids, position_ids: int [T]; word [V, D], position [P, D], segment [2, D]; weight, bias [D].
    Returns [T, D].
    """
    x = F.embedding(input_ids, word) + F.embedding(position_ids, position) + F.embedding(segment_ids, segment)
    x = F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return F.dropout(x, dropout) if dropout else x


def supported(device: torch.device) -> bool:
    """True where the fused kernel runs."""
    return False
