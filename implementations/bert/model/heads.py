"""The two pretraining heads: masked words, and whether B follows A."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert.kernels import Kernels
from bert.kernels.precision import LOW_PRECISION
from bert.model.config import BertConfig


class Pooler(nn.Module):
    """tanh(dense(x)) of the first token of every sequence."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [S, D] -> [S, D]."""
        return torch.tanh(self.dense(x))


class Transform(nn.Module):
    """Dense, GELU, LayerNorm before the decoder."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.approximation = config.gelu_approximation
        self.kernel = kernels.bias_gelu

    def forward(self, x: Tensor) -> Tensor:
        """x [M, D] -> [M, D]."""
        return self.LayerNorm(self.kernel(F.linear(x, self.dense.weight), self.dense.bias, self.approximation))


class MaskedLanguageModel(nn.Module):
    """Scores of every word at the masked positions; the decoder's weights are the word embeddings."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.transform = Transform(config, kernels)
        self.bias = nn.Parameter(torch.zeros(config.padded_vocab_size))

    def forward(self, x: Tensor, word_embeddings: Tensor) -> Tensor:
        """x [M, D], word_embeddings [V, D] -> logits [M, V]."""
        return F.linear(self.transform(x), word_embeddings, self.bias)

    def scores(self, x: Tensor, word_embeddings: Tensor) -> Tensor:
        """The logits in fp32 at least, as the product sums them up; without gradients.

        Rounded to bf16, close ones become equal, and the accuracy is off by some 6e-5.
        """
        return wide_linear(self.transform(x), word_embeddings, self.bias)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + bias in fp32 at least, whatever the operands' precision; without gradients."""
    if x.dtype not in LOW_PRECISION:
        return F.linear(x, weight, bias)
    if x.is_cuda and "dtype" in torch.ops.aten.mm.overloads():  # PyTorch 2.8 or later
        return torch.mm(x, weight.t(), out_dtype=torch.float32).add_(bias)
    return F.linear(x.float(), weight.float(), bias.float())


class PretrainingHeads(nn.Module):
    """Both heads."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.predictions = MaskedLanguageModel(config, kernels)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)
