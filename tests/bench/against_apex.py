"""Ours beside PyTorch's and NVIDIA apex's, the kernels that both have, at BERT-large's sizes: LAMB,
LayerNorm, cross-entropy and GELU between two products.

apex's own are in NGC's PyTorch image. Each entry: milliseconds of a step, or of forward and
backward, and the megabytes that it holds at most; or why it does not run.

usage: python tests/bench/against_apex.py [--tiny]   (a small size, on a CPU too)
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from lib import Parser, emit
from torch_lib import TINY, device, median_milliseconds, synchronize

from bert.core.dist import DistConfig, World
from bert.kernels.operations import bias_gelu, cross_entropy, dropout_add_layer_norm
from bert.kernels.support.dropout import DropoutSites
from bert.model.config import BertConfig
from bert.optim import OptimizerConfig
from bert.optim.sharded import WholeOptimizer
from bert.pretraining.memory import meta_model
from common.process import one_line

Run = Callable[[], object]


def compare(ways: dict[str, Callable[[], Run]]) -> dict[str, Any]:
    """Each way's figures: made, run once, and measured, one after the other."""
    return {name: _measured(make) for name, make in ways.items()}


def _measured(make: Callable[[], Run]) -> dict[str, Any]:
    on_gpu, before = torch.cuda.is_available(), torch.cuda.memory_allocated()
    try:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        run = make()
        run()
        synchronize()
    except Exception as error:  # a package that is absent or built without a kernel
        return {"does_not_run": one_line(f"{type(error).__name__}: {error}")}
    figures: dict[str, Any] = {"ms": round(median_milliseconds(run), 4)}
    if on_gpu:
        figures["mb"] = round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)
    return figures


def operation(module: Any) -> Any:
    """Its kernel on a GPU, else its reference."""
    return module.fused if torch.cuda.is_available() else module.reference


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    options: dict[str, Any] = {"device": device(), "dtype": torch.bfloat16}
    return [torch.randn(shape, **options).requires_grad_() for shape in shapes]


def both_passes(forward: Callable[[], Tensor]) -> Run:
    gradient = torch.ones_like(forward())
    return lambda: forward().backward(gradient)


def compare_layers(
    ours: Callable[[], Tensor],
    pytorch: Callable[[], Tensor],
    apex: Callable[[], Callable[[], Tensor]],
) -> dict[str, Any]:
    """Forward and backward pass. apex: makes its own, as it may be absent."""
    ways = {"ours": lambda: ours, "pytorch": lambda: pytorch, "apex": apex}
    return compare(
        {name: lambda make=make: both_passes(make()) for name, make in ways.items()}
    )


def lamb(tiny: bool) -> dict[str, Any]:
    """A step on bf16 weights and gradients with fp32 masters, all of them on one rank."""
    shapes = meta_model(BertConfig(**TINY) if tiny else BertConfig()).named_parameters()
    sizes = {name: tuple(parameter.shape) for name, parameter in shapes}

    def made(name: str, fused: bool) -> Run:
        config = OptimizerConfig(optimizer=name, sharded=False)
        optimizer = WholeOptimizer(
            {key: nn.Parameter(*tensors(size)) for key, size in sizes.items()}.items(),
            lambda shard: config.flat_rule(shard, fused),
            World(DistConfig(device=device().type)),
        )
        optimizer.buckets.shard.normal_()
        lr, scale = (torch.tensor(x, device=device()) for x in (1e-4, 1e-3))
        return lambda: optimizer.step(lr, scale)

    on_gpu = torch.cuda.is_available()
    on_gpu = torch.cuda.is_available()
    runs = {"ours": ("lamb", on_gpu), "pytorch": ("lamb", False), "apex": ("apex_lamb", False)}  # fmt: skip
    return compare({way: lambda run=run: made(*run) for way, run in runs.items()})


def layer_norm(rows: int, width: int) -> dict[str, Any]:
    """Ours alone adds bias and residual as well, as the model needs it."""
    x, residual = tensors((rows, width), (rows, width))
    bias, weight, norm_bias = tensors((width,), (width,), (width,))
    operands = x, bias, residual, weight, norm_bias, 1e-12, 0.0, DropoutSites(device())

    def apex() -> Any:
        from apex.contrib.layer_norm import FastLayerNorm

        norm = FastLayerNorm(width, eps=1e-12).to(x)
        return lambda: norm(x)

    return compare_layers(
        lambda: operation(dropout_add_layer_norm)(*operands)[0],
        lambda: F.layer_norm(x, (width,), weight, norm_bias, 1e-12),
        apex,
    )


def xentropy(rows: int, size: int) -> dict[str, Any]:
    """Losses in fp32 of bf16 logits; a fifth of the rows has no label."""
    (logits,) = tensors((rows, size))
    labels = torch.randint(size, (rows,), device=device())
    labels[::5] = cross_entropy.IGNORE

    def apex() -> Any:
        from apex.contrib.xentropy import SoftmaxCrossEntropyLoss

        options = 0.0, cross_entropy.IGNORE, True
        return lambda: SoftmaxCrossEntropyLoss.apply(logits, labels, *options)

    return compare_layers(
        lambda: operation(cross_entropy)(logits, labels, size),
        lambda: cross_entropy.reference(logits, labels, size),
        apex,
    )


def dense_gelu(rows: int, width: int, inner: int) -> dict[str, Any]:
    """The feed-forward half of a layer: two products with bias, GELU (tanh) between them."""
    x, weight_1, weight_2 = tensors((rows, width), (inner, width), (width, inner))
    bias_1, bias_2 = tensors((inner,), (width,))

    def ours() -> Tensor:
        hidden: Tensor = operation(bias_gelu)(F.linear(x, weight_1), bias_1, "tanh")
        return F.linear(hidden, weight_2, bias_2)

    def pytorch() -> Tensor:
        hidden = F.gelu(F.linear(x, weight_1, bias_1), approximate="tanh")
        return F.linear(hidden, weight_2, bias_2)

    def apex() -> Any:
        from apex.fused_dense import FusedDenseGeluDense

        layer = FusedDenseGeluDense(width, inner, width).to(x)
        values = weight_1, bias_1, weight_2, bias_2
        for parameter, value in zip(layer.parameters(), values, strict=True):
            parameter.data.copy_(value.detach())
        return lambda: layer(x)

    return compare_layers(ours, pytorch, apex)


def measure(tiny: bool) -> dict[str, Any]:
    """All of them, of 48 packed rows."""
    rows, masked, vocabulary, sizes = 24_576, 4_096, 30_528, (1024, 4096)
    if tiny:
        rows, masked, vocabulary, sizes = 8, 8, 24, (32, 64)
    widths = 768, 1024, 2048
    norms = {f"layer_norm_{width}": layer_norm(rows, width) for width in widths}
    return {
        "lamb": lamb(tiny),
        **norms,
        "xentropy": xentropy(masked, vocabulary),
        "dense_gelu_dense": dense_gelu(rows, *sizes),
    }


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU too")
    is_tiny = parser.parse_args().tiny
    if not (is_tiny or torch.cuda.is_available()):
        parser.exit(2, "against_apex.py: no GPU: it measures GPU kernels; try --tiny\n")
    emit("apex", measure(is_tiny), data="random bf16")
