"""Cases of the fused operations: inputs, and the allowed error with its reason."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bert.kernels.operations.cross_entropy import IGNORE
from bert.kernels.support.dropout import DropoutSites

# Spacing of the type's numbers just above 1: results are summed in fp32 and rounded (or truncated)
# once.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
ONE_ROUNDING = "one rounding of the result"


class Draw:
    """Random inputs on a device; on the meta device only shapes."""

    def __init__(self, device: torch.device, seed: int) -> None:
        meta = device.type == "meta"
        generator = None if meta else torch.Generator(device).manual_seed(seed)
        self.settings: Any = {"generator": generator, "device": device}

    def normal(self, *shape: int) -> Tensor:
        """Standard normal, fp32."""
        return torch.randn(shape, **self.settings)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Uniform in [0, high), int32."""
        return torch.randint(high, shape, dtype=torch.int32, **self.settings)


Build = Callable[[Draw], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """One comparison of ``fused`` with ``reference``.

    ``build`` makes the arguments in order, floating tensors in fp32, which are cast to ``dtype``.
    The result and the gradient of each floating tensor must be within ``tolerance`` of the
    reference in fp64 on the same numbers, relative to the tensor's largest element (or to 1).
    ``large`` cases have BERT-large's sizes, for GPUs.
    """

    name: str
    dtype: torch.dtype
    tolerance: float
    reason: str
    build: Build
    large: bool = False

    def arguments(self, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """The arguments, floating tensors of ``dtype`` and requiring gradients."""
        return tuple(
            # Ids and lengths stay integers, and have no gradient.
            value.to(self.dtype).detach().requires_grad_()
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for value in self.build(Draw(device, seed))
        )


def each_dtype(
    name: str, build: Build, reason: str = ONE_ROUNDING, factor: float = 1
) -> list[Case]:
    """The case in fp32, bf16 and fp16 with ``factor`` times the usual tolerances."""
    return [
        Case(f"{name}-{str(dtype)[6:]}", dtype, factor * tolerance, reason, build)
        for dtype, tolerance in TOLERANCE.items()
    ]


def large(name: str, build: Build, reason: str = ONE_ROUNDING, factor: float = 1) -> Case:  # fmt: skip
    """A case of real size in bf16."""
    tolerance = factor * TOLERANCE[torch.bfloat16]
    return Case(name, torch.bfloat16, tolerance, reason, build, large=True)


def extreme(name: str, build: Build) -> Case:
    """A case in bf16 of magnitudes that fp16 lacks, whose squares may not fit into fp32."""
    return replace(large(name, build), large=False)


def embeddings(
    tokens: int, vocab_size: int, positions: int, width: int, frequent: float, spread: float = 1.0
) -> Build:  # fmt: skip
    """``frequent``: share of tokens that are one word, such as [MASK]; spread: of the tables."""

    def build(draw: Draw) -> tuple[Any, ...]:
        ids = draw.integers(vocab_size, tokens)
        ids[draw.integers(1000, tokens) < 1000 * frequent] = vocab_size // 2
        places = torch.arange(tokens, dtype=torch.int32, device=ids.device)
        rows = vocab_size, positions, 2  # of words, places, segments
        tables = [draw.normal(count, width) * spread for count in rows]
        segments, norm = draw.integers(2, tokens), (draw.normal(width) for _ in "wb")
        sites = DropoutSites(ids.device)
        return ids, segments, places % positions, *tables, *norm, 1e-12, 0.0, sites

    return build


def layer_norm(
    rows: int, width: int, *, pre_norm: bool = False, first: bool = False, spread: float = 1.0
) -> Build:  # fmt: skip
    """``first``: there is no residual yet."""

    def build(draw: Draw) -> tuple[Any, ...]:
        x, residual = (draw.normal(rows, width) * spread for _ in range(2))
        bias, weight, norm_bias = (draw.normal(width) for _ in range(3))
        operands = x, bias, None if first else residual, weight, norm_bias
        return *operands, 1e-12, 0.0, DropoutSites(x.device), pre_norm

    return build


def bias_gelu(rows: int, width: int, approximate: str, spread: float = 1.0) -> Build:
    def build(draw: Draw) -> tuple[Any, ...]:
        return draw.normal(rows, width) * spread, draw.normal(width), approximate

    return build


def cross_entropy(rows: int, vocab_size: int, width: int, spread: float = 3.0) -> Build:
    def build(draw: Draw) -> tuple[Any, ...]:
        labels = draw.integers(vocab_size, rows).long()
        labels[torch.arange(rows, device=labels.device) % 5 == 3] = IGNORE
        return draw.normal(rows, width) * spread, labels, vocab_size

    return build


_ROUNDED_SUM = "the sum is rounded before it is normalised, and so is the result", 2
_FIRST = layer_norm(7, 24, pre_norm=True, first=True)
_BY_WORD = "the gradient of a row of the sum is rounded, and so are its sums by word", 2
# By operation.
CASES: dict[str, list[Case]] = {
    "embeddings": [
        *each_dtype("primes", embeddings(37, 23, 17, 97, 0.6), *_BY_WORD),
        *each_dtype("one_token", embeddings(1, 3, 2, 24, 0.0), *_BY_WORD),
        extreme("extreme", embeddings(13, 7, 5, 97, 0.3, spread=2.0**58)),
        large("bert_large", embeddings(24_576, 30_528, 512, 1024, 0.12), *_BY_WORD),
    ],
    "dropout_add_layer_norm": [
        *each_dtype("primes", layer_norm(13, 97)),
        *each_dtype("one_row", layer_norm(1, 24)),
        *each_dtype("pre_norm", layer_norm(13, 97, pre_norm=True), *_ROUNDED_SUM),
        *each_dtype("first_pre_norm", _FIRST, *_ROUNDED_SUM),
        extreme("extreme", layer_norm(13, 97, spread=2.0**58)),
        large("bert_large", layer_norm(24_576, 1024)),
        large("bert_1.5b", layer_norm(4_096, 1600, pre_norm=True), *_ROUNDED_SUM),
        large("bert_5b", layer_norm(3_072, 2560, pre_norm=True), *_ROUNDED_SUM),
    ],
    "bias_gelu": [
        *each_dtype("exact", bias_gelu(13, 97, "none")),
        *each_dtype("exact_far_out", bias_gelu(7, 31, "none", spread=8.0)),
        *each_dtype("tanh", bias_gelu(37, 301, "tanh", spread=4.0)),
        extreme("exact_extreme", bias_gelu(7, 31, "none", spread=2.0**120)),
        extreme("tanh_extreme", bias_gelu(7, 31, "tanh", spread=2.0**120)),
        large("bert_large_exact", bias_gelu(12_288, 4096, "none"), "12,288 rows' sum"),
        large("bert_large", bias_gelu(24_576, 4096, "tanh"), "24,576 rows' sum"),
    ],
    "cross_entropy": [
        *each_dtype("padded_vocabulary", cross_entropy(13, 211, 216)),
        *each_dtype("several_blocks_of_large", cross_entropy(5, 9001, 9008, 30.0)),
        extreme("extreme_logits", cross_entropy(5, 211, 216, spread=2.0**120)),
        large("bert_large", cross_entropy(4_096, 30_522, 30_528)),
    ],
}


def _exact(value: Any) -> Any:
    """The same numbers in fp64."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_()
    return value


def _worst(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference relative to the largest element, or to 1; nan counts as infinite."""
    difference = (ours.double() - theirs).abs().max().item()
    worst = difference / max(1.0, theirs.abs().max().item())
    return worst if worst == worst else float("inf")


def tensors(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of an operation that may have several."""
    return result if isinstance(result, tuple) else (result,)


def errors_of(module: Any, case: Case, device: torch.device) -> dict[str, float]:
    """How far result and gradients of ``fused`` are from those of ``reference`` in fp64."""
    ours = case.arguments(device)
    theirs = tuple(_exact(value) for value in ours)
    results, expected = tensors(module.fused(*ours)), tensors(module.reference(*theirs))
    pairs = zip(results, expected, strict=True)
    errors = {"result": max(_worst(a.detach(), b.detach()) for a, b in pairs)}
    generator = torch.Generator().manual_seed(5)
    drawn = (torch.randn(a.shape, generator=generator) for a in results)
    upstream = [x.to(device, a.dtype) for x, a in zip(drawn, results, strict=True)]
    torch.autograd.backward(results, upstream)
    torch.autograd.backward(expected, [gradient.double() for gradient in upstream])
    for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(a, Tensor) and a.requires_grad:
            errors[f"gradient of argument {position}"] = _worst(a.grad, b.grad)
    return errors
