"""Cross-entropy of the masked-LM head over a vocabulary that is padded for speed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


def reference(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """Loss of each row: logits [M, V], labels int [M] (-100 = no label) -> float [M], 0 where there is no label.

    Columns from ``vocab_size`` on are padding and take no part in the softmax. At least fp32 throughout.
    """
    logits = logits[:, :vocab_size]
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")


def supported(device: torch.device) -> bool:
    """True where the fused kernel runs."""
    return False
