"""The encoder: transformer layers over a varlen batch.

Each half of a layer ends in a LayerNorm. Post-LN, as the original: x = LayerNorm(x +
dropout(half(x))). Pre-LN, by bert_config's layer_norm_large_model: a residual stream s, initially
0, s += dropout(half(x)), and x = LayerNorm(s); the embeddings are the first x, but not part of s.
Parameters and their names are the same.

Parameter names are those of Hugging Face's BERT, so that a state dict needs no map. Shapes: T
tokens, D hidden width, F feed-forward width, N heads, H head width.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bert.kernels import Kernels
from bert.kernels.fp8 import INPUT, ROW_MULTIPLE, Scaling, Target
from bert.kernels.fp8.linear import Fp8Linear
from bert.kernels.operations import fp8_feed_forward
from bert.kernels.operations.dropout_add_layer_norm import Operands, fused_with_cast
from bert.kernels.support.dropout import ForwardPass
from bert.kernels.support.weight_gradient import concat_view, linear
from bert.model.config import BertConfig
from bert.model.recompute import Recomputation
from common.env import ConfigError


class Hidden(NamedTuple):
    """Hidden states between two halves of a layer: x [T, D], the input of the next product.

    residual: input of its residual connection, see dropout_add_layer_norm: the same numbers, or in
    Pre-LN the stream (None: 0); x8: x in fp8, if the kernel that computed it also cast it.
    """

    x: Tensor
    residual: Tensor | None
    x8: Tensor | None


class Product(nn.Module):
    """A half of a layer around its matrix product, which may run in fp8."""

    dense: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.fp8: Fp8Linear | None = None

    def weight(self) -> Tensor:
        """Weight of the matrix product, [out, in]."""
        return self.dense.weight

    def project(
        self, x: Tensor, bias: Tensor | None, x8: Tensor | None = None
    ) -> Tensor:
        """x W^T + bias. x8: x in fp8, if available."""
        if self.fp8 is not None and self.fp8.runs(self.training):
            return self.fp8(x, self.weight(), bias, x8)
        return linear(x, self.weight(), bias)


class SelfAttention(Product):
    """Query, key and value projections (one GEMM) and the attention itself."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        width = config.hidden_size
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.num_heads, self.head_size = config.num_attention_heads, config.head_size
        self.dropout = config.attention_probs_dropout_prob
        self.attention = kernels.attention

    def contiguous_groups(self) -> list[tuple[Tensor, ...]]:
        """Groups of parameters that should be adjacent in an optimizer's flat buffers."""
        parts = (self.query, self.key, self.value)
        return [
            tuple(part.weight for part in parts),
            tuple(part.bias for part in parts),
        ]

    def weight(self) -> Tensor:
        """Fused QKV weight, [3D, D]."""
        # Three parameters, because LAMB's trust ratio is per tensor; one GEMM, because it is
        # faster.
        return concat_view(*self.contiguous_groups()[0])

    def forward(self, hidden: Hidden, forward_pass: ForwardPass) -> Tensor:
        """Context [T, D]."""
        bias = concat_view(*self.contiguous_groups()[1])
        # The bias is added by the product here: no kernel of ours reads QKV before attention does.
        qkv = self.project(hidden.x, bias, hidden.x8)  # (T, 3D)
        qkv = qkv.view(-1, 3, self.num_heads, self.head_size)  # (T, 3, N, H)
        dropout = self.dropout if self.training else 0.0
        context = self.attention(qkv, forward_pass, dropout)  # (T, N, H)
        return context.reshape(hidden.x.shape)  # (T, D)


class Residual(Product):
    """LayerNorm(residual + dropout(dense(x))): the end of both halves of a layer; in Pre-LN also
    that sum.
    """

    def __init__(self, config: BertConfig, kernels: Kernels, in_features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = config.hidden_dropout_prob
        self.kernel = kernels.dropout_add_layer_norm
        self.pre_norm = config.layer_norm_large_model
        self.following: Fp8Linear | None = None

    def target(self, num_rows: int) -> Target | None:
        """Cast target for the following fp8 product; None if it casts its input itself, or there is
        none.
        """
        following = self.following
        # An evaluation before the first step runs in 16 bits.
        if following is None or not following.runs(self.training):
            return None
        return following.target(INPUT) if following.takes_cast(num_rows) else None

    def forward(
        self, x: Tensor, residual: Tensor | None, forward_pass: ForwardPass
    ) -> Hidden:
        """x [T, in], residual [T, D] -> [T, D]; also in fp8 if the next product takes it."""
        projected = self.project(x, None)  # the kernel adds the bias
        norm, dropout = self.LayerNorm, self.dropout if self.training else 0.0
        operands = Operands(
            projected, self.dense.bias, residual, norm.weight, norm.bias
        )
        sites, target = forward_pass.sites, self.target(len(projected))
        if target is None:
            return Hidden(
                *self.kernel(*operands, norm.eps, dropout, sites, self.pre_norm), None
            )
        # Cast where the numbers are computed: a cast of its own would read them from memory again.
        return Hidden(
            *fused_with_cast(operands, norm.eps, dropout, sites, target, self.pre_norm)
        )


class Attention(nn.Module):
    """Self-attention with its output projection and residual."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.self = SelfAttention(config, kernels)
        self.output = Residual(config, kernels, config.hidden_size)

    def forward(
        self, hidden: Hidden, forward_pass: ForwardPass, rows: Tensor | None = None
    ) -> Hidden:
        """[T, D] -> [T, D], or only the result's ``rows``."""
        context, residual = self.self(hidden, forward_pass), hidden.residual
        if rows is not None:
            # Keys and values of all tokens are used up here: from here on only rows that the heads
            # read count.
            context = context.index_select(0, rows)
            residual = None if residual is None else residual.index_select(0, rows)
        return self.output(context, residual, forward_pass)


class Intermediate(Product):
    """GELU(dense(x)): the first half of the feed-forward."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.approximation = config.gelu_approximation
        self.kernel = kernels.bias_gelu

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, F]."""
        return self.kernel(self.project(x, None), self.dense.bias, self.approximation)


class Layer(nn.Module):
    """One encoder layer."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.attention = Attention(config, kernels)
        self.intermediate = Intermediate(config, kernels)
        self.output = Residual(config, kernels, config.intermediate_size)

    def forward(
        self, hidden: Hidden, forward_pass: ForwardPass, rows: Tensor | None = None
    ) -> Hidden:
        """The previous layer's result [T, D] -> this layer's, or only its ``rows``."""
        hidden = self.attention(hidden, forward_pass, rows)
        first, second = self.intermediate, self.output
        # Separate functions without a cast input. With one, both products are one function, so that
        # nothing between them is written in 16 bits (operations/fp8_feed_forward.py).
        if hidden.x8 is None:
            return second(first(hidden.x), hidden.residual, forward_pass)
        assert first.fp8 is not None
        assert second.fp8 is not None
        assert hidden.residual is not None  # of the attention before it
        norm, following = second.LayerNorm, second.target(len(hidden.x))
        settings = fp8_feed_forward.Settings(
            first=first.fp8,
            second=second.fp8,
            approximate=first.approximation,
            eps=norm.eps,
            dropout=second.dropout,
            sites=forward_pass.sites,
            following=following,
            pre_norm=second.pre_norm,
        )
        products = (
            first.dense.weight,
            first.dense.bias,
            second.dense.weight,
            second.dense.bias,
        )
        weights = fp8_feed_forward.Weights(*products, norm.weight, norm.bias)
        inputs = hidden.x, hidden.x8, hidden.residual
        return Hidden(*fp8_feed_forward.feed_forward(*inputs, weights, settings))


class Encoder(nn.Module):
    """All layers."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            Layer(config, kernels) for _ in range(config.num_hidden_layers)
        )
        self.pre_norm = config.layer_norm_large_model
        self.sizes = config.hidden_size, config.intermediate_size
        self.cast_in_kernels = kernels.fp8_cast
        self.fp8_scaling: Scaling | None = None
        self.fp8_users: list[Product] = []
        self.recomputation: Recomputation | None = None

    def use_fp8(self, device: torch.device, trials: Collection[str] = ()) -> Scaling:
        """Runs the products in fp8, except attention's output projection. Returns their scales.
        trials: of FP8_TRIALS.

        Raises ConfigError for sizes that a GPU's fp8 products do not take.
        """
        if device.type == "cuda" and any(size % ROW_MULTIPLE for size in self.sizes):
            sizes = "hidden_size={}, intermediate_size={}".format(*self.sizes)
            raise ConfigError(
                f"PRECISION=fp8 takes multiples of {ROW_MULTIPLE}, not {sizes}: use PRECISION=bf16"
            )
        layers = [layer for layer in self.layer if isinstance(layer, Layer)]
        users: list[Product] = []
        for layer in layers:
            users += [layer.attention.self, layer.intermediate, layer.output]
        if "projection" in trials:
            users += [layer.attention.output for layer in layers]
        scaling = Scaling(len(users), device, fast_backward="fast_backward" in trials)
        self.fp8_users, self.fp8_scaling = users, scaling
        for number, user in enumerate(users):
            user.fp8 = Fp8Linear(scaling, number)
        if self.cast_in_kernels:
            for layer, next_layer in zip(layers, [*layers[1:], None], strict=True):
                layer.attention.output.following = layer.intermediate.fp8
                # The last layer feeds the heads, which are not in fp8.
                if next_layer is not None:
                    layer.output.following = next_layer.attention.self.fp8
        return scaling

    @contextlib.contextmanager
    def fp8_evaluation(self, calibrated: bool) -> Iterator[None]:
        """Evaluates in fp8 inside, if the run does: casts the current weights once. See
        Scaling.evaluation.
        """
        scaling = self.fp8_scaling
        if scaling is None:
            yield
            return
        with scaling.evaluation(calibrated):
            # Weights stand still during an evaluation: one cast serves all its batches.
            for user in self.fp8_users if scaling.evaluates else ():
                assert user.fp8 is not None
                user.fp8.hold(user.weight())
            yield

    def forward(
        self, x: Tensor, forward_pass: ForwardPass, rows: Tensor | None = None
    ) -> Tensor:
        """x [T, D] -> [T, D]; with ``rows`` [S] only these tokens' [S, D], which saves most of the
        last layer.
        """
        hidden = Hidden(x, None if self.pre_norm else x, None)
        # Without gradients nothing is kept for a backward pass, so there is nothing to recompute.
        recomputation = (
            self.recomputation if self.training and torch.is_grad_enabled() else None
        )
        calls = [
            functools.partial(layer, forward_pass=forward_pass) for layer in self.layer
        ]
        # The heads read these tokens alone: attention of the last layer needs all keys, the rest
        # does not.
        calls[-1] = functools.partial(calls[-1], rows=rows)
        size = recomputation.layers if recomputation is not None else len(calls)
        for begin in range(0, len(calls), size):
            segment = functools.partial(_run, calls[begin : begin + size])
            if recomputation is None:
                hidden = segment(*hidden)
            else:
                hidden = recomputation.run(segment, hidden, forward_pass.sites)
        return hidden.x


def _run(layers: Sequence[Callable[[Hidden], Hidden]], *hidden: Any) -> Hidden:
    return functools.reduce(lambda state, layer: layer(state), layers, Hidden(*hidden))
