"""The encoder: post-LayerNorm transformer layers over a varlen batch.

Parameter names are those of Hugging Face's BERT, so that a state dict needs no map. Shapes: T tokens, D hidden width,
F feed-forward width, N heads, H head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert.kernels import Kernels
from bert.kernels.fp8_linear import Fp8Linear, Fp8Scaling
from bert.model.config import BertConfig


def project(module: SelfAttention | Residual | Intermediate, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The module's matrix product: in training through its fp8 product where it has one."""
    if module.fp8 is not None and module.training:
        return module.fp8(x, weight, bias)
    return F.linear(x, weight, bias)


class SelfAttention(nn.Module):
    """Query, key and value projections (one GEMM) and the attention itself."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.num_heads, self.head_size = config.num_attention_heads, config.head_size
        self.dropout = config.attention_probs_dropout_prob
        self.attention = kernels.attention
        self.fp8: Fp8Linear | None = None

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """x [T, D] -> context [T, D]."""
        # Three parameters, because LAMB's trust ratio is per tensor; one GEMM, because it is faster.
        weight = torch.cat([self.query.weight, self.key.weight, self.value.weight])  # (3D, D)
        bias = torch.cat([self.query.bias, self.key.bias, self.value.bias])
        qkv = project(self, x, weight, bias).view(-1, 3, self.num_heads, self.head_size)  # (T, 3, N, H)
        context = self.attention(qkv, cu_seqlens, max_seqlen, self.dropout if self.training else 0.0)
        return context.reshape(x.shape)


class Residual(nn.Module):
    """LayerNorm(residual + dropout(dense(x))): the end of both halves of a layer."""

    def __init__(self, config: BertConfig, kernels: Kernels, in_features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = config.hidden_dropout_prob
        self.kernel = kernels.dropout_add_layer_norm
        self.fp8: Fp8Linear | None = None

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, in], residual [T, D] -> the result [T, D] for what comes next, and again as the next residual."""
        projected = project(self, x, self.dense.weight, None)  # the bias is added by the kernel
        norm = self.LayerNorm
        dropout = self.dropout if self.training else 0.0
        return self.kernel(projected, self.dense.bias, residual, norm.weight, norm.bias, norm.eps, dropout)


class Attention(nn.Module):
    """Self-attention with its output projection and residual."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.self = SelfAttention(config, kernels)
        self.output = Residual(config, kernels, config.hidden_size)

    def forward(self, x: Tensor, residual: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> tuple[Tensor, Tensor]:
        """x, residual [T, D] -> the result, twice."""
        return self.output(self.self(x, cu_seqlens, max_seqlen), residual)


class Intermediate(nn.Module):
    """GELU(dense(x)): the widening half of the feed-forward."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.approximation = config.gelu_approximation
        self.kernel = kernels.bias_gelu
        self.fp8: Fp8Linear | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, F]."""
        return self.kernel(project(self, x, self.dense.weight, None), self.dense.bias, self.approximation)


class Layer(nn.Module):
    """One encoder layer."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.attention = Attention(config, kernels)
        self.intermediate = Intermediate(config, kernels)
        self.output = Residual(config, kernels, config.intermediate_size)

    def forward(self, x: Tensor, residual: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> tuple[Tensor, Tensor]:
        """x, residual [T, D]: the last layer's result, twice -> this layer's, twice."""
        x, residual = self.attention(x, residual, cu_seqlens, max_seqlen)
        return self.output(self.intermediate(x), residual)


class Encoder(nn.Module):
    """All layers."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config, kernels) for _ in range(config.num_hidden_layers))
        self.fp8_scaling: Fp8Scaling | None = None

    def use_fp8(self, recipe: str, device: torch.device) -> None:
        """Runs the QKV and feed-forward products in fp8; the output projection, too small to gain, stays as it is."""
        users: list[SelfAttention | Intermediate | Residual] = []
        for layer in self.layer:
            assert isinstance(layer, Layer)
            users += [layer.attention.self, layer.intermediate, layer.output]
        self.fp8_scaling = Fp8Scaling(recipe, len(users), device)
        for number, module in enumerate(users):
            module.fp8 = self.fp8_scaling.linear(number)

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """x [T, D] -> [T, D]."""
        residual = x
        for layer in self.layer:
            x, residual = layer(x, residual, cu_seqlens, max_seqlen)
        return x
