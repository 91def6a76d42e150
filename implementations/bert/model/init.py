"""Random initialisation."""

from __future__ import annotations

import torch
from torch import nn

from bert.model.bert import BertForPreTraining


def initialize(model: BertForPreTraining, seed: int) -> None:
    """Draws weights from N(0, initializer_range), sets biases to 0 and LayerNorm to identity; padding rows are 0.

    The same seed gives the same weights on every rank and device, because the draw is made on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    std = model.config.initializer_range
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                draw = torch.empty(module.weight.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
                module.weight.copy_(draw)
            if isinstance(module, nn.Linear):
                module.bias.zero_()
            if isinstance(module, nn.LayerNorm):
                module.weight.fill_(1.0)
                module.bias.zero_()
        model.bert.embeddings.word_embeddings.weight[model.config.vocab_size :].zero_()
        model.cls.predictions.bias.zero_()
