"""What the fp8 kernels are checked on: the casts against PyTorch's own, the casts in kernels against separate ones."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from bert.core.dist import DistConfig, World
from bert.kernels.fp8 import BACKWARD, FORWARD, INPUT, Scaling, Target
from bert.kernels.fp8.cast import cast_rows, cast_transpose, transpose
from bert.kernels.fp8.linear import Fp8Linear
from bert.kernels.operations import bias_gelu, dropout_add_layer_norm
from bert.kernels.operations.dropout_add_layer_norm import Operands
from bert.kernels.operations.fp8_feed_forward import Settings, Weights, feed_forward
from bert.kernels.support.dropout import DropoutSites

# Tokens, hidden and feed-forward width of 24 rows of BERT-large.
LARGE = 12_288, 1024, 4096
# Norm of a difference relative to the tensor's. Where a compiler contracts the arithmetic of two
# kernels differently, one number in some thousands is rounded to its neighbour in fp8, an eighth
# away.
TOLERANCE = 2e-3
ORDER_TOLERANCE = 2.0**-7  # a sum in fp32 in another order, then one rounding to bf16
OTHER_ORDER = "gradient of bias_1"


def new_target(dtype: torch.dtype, scale: float, device: torch.device) -> Target:
    """A target that has seen nothing."""
    tensor = torch.tensor(scale, device=device)
    largest = torch.zeros((), device=device)
    return Target(dtype=dtype, scale=tensor, inverse=1 / tensor, largest=largest)


def _normal(device: torch.device, seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return functools.partial(torch.randn, generator=generator, device=device)


def cast_problems(device: torch.device, rows: int, columns: int) -> dict[str, str]:
    """Differences from PyTorch's cast, in bits, in both orders; wrong magnitudes and column sums."""
    problems = {}
    x = _normal(device, 0)(rows, columns)
    x[::7, ::5] *= 2.0**14  # beyond the ends of both formats
    x[1::5] *= 2.0**-16  # down to their smallest numbers
    x = x.bfloat16()
    for dtype in (FORWARD, BACKWARD):
        target = new_target(dtype, 37.0, device)
        cast, transposed, sums = cast_transpose(x, target, column_sums=True)
        expected = (x.float() * 37.0).clamp(-target.maximum, target.maximum).to(dtype)
        alone = cast_rows(x, dataclasses.replace(target, largest=None))
        pairs = {
            "row order": (cast, expected),
            "row order alone": (alone, expected),
            "transposed": (transposed, expected.t()),
            "transposed in fp8": (transpose(cast), expected.t()),
        }
        wrong = [name for name, pair in pairs.items() if not same_bits(*pair)]
        if target.largest != x.abs().max():
            wrong.append("largest magnitude")
        exact = x.double().sum(0)
        if sums is None or relative_difference(sums, exact) > ORDER_TOLERANCE:
            wrong.append("column sums")
        if wrong:
            problems[str(dtype).removeprefix("torch.")] = "wrong: " + ", ".join(wrong)
    return problems


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Equal, the sign of zero and NaN included."""
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (ours, theirs)))


def evaluation_differences(
    device: torch.device, tokens: int, width: int, inner: int
) -> dict[str, float]:
    """Relative differences between an evaluation in fp8 and the forward pass of training without dropout, by name."""
    layer = _Chain(device, tokens, width, inner, "tanh", dropout=0.0)
    return _between(*(layer.results(evaluates) for evaluates in (True, False)))


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference relative to the norm of ``theirs``; nan counts as infinite."""
    theirs = theirs.double()
    norms = (ours.double() - theirs).norm(), theirs.norm().clamp(min=1e-300)
    difference = (norms[0] / norms[1]).item()
    return difference if difference == difference else float("inf")


def differences(
    device: torch.device, tokens: int, width: int, inner: int, approximate: str = "tanh", dropout: float = 0.1
) -> dict[str, float]:  # fmt: skip
    """Relative differences between the casts in kernels and separate ones, by name: results,
    gradients, magnitudes.

    The layer's chain from the end of its attention to the next layer's QKV product.
    """
    layer = _Chain(device, tokens, width, inner, approximate, dropout)
    return _between(*(layer.trained(in_kernels) for in_kernels in (False, True)))


def _between(found: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, float]:
    """Of each tensor of the first from its namesake."""
    return {name: relative_difference(others[name], x) for name, x in found.items()}


class _Chain:
    def __init__(
        self, device: torch.device, tokens: int, width: int, inner: int, approximate: str, dropout: float
    ) -> None:  # fmt: skip
        normal = _normal(device, 1)
        shapes = {
            "x": (tokens, width), "bias": (width,), "residual": (tokens, width), "norm_weight": (width,),
            "norm_bias": (width,), "weight_1": (inner, width), "bias_1": (inner,), "weight_2": (width, inner),
            "bias_2": (width,), "norm_weight_2": (width,), "norm_bias_2": (width,), "weight_3": (3 * width, width),
            "bias_3": (3 * width,),
        }  # fmt: skip
        self.leaves: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            spread = 0.05 if name.startswith("weight") else 1.0
            drawn = (spread * normal(*shape)).bfloat16()
            self.leaves[name] = drawn.requires_grad_()
        upstream = (1e-4 * normal(tokens, size) for size in (3 * width, width))
        self.upstream = [gradient.bfloat16() for gradient in upstream]
        self.device, self.approximate, self.dropout = device, approximate, dropout

    def _scaling(self) -> Scaling:
        """As after a step that has seen about these magnitudes, of inputs, weights and gradients."""
        scaling = Scaling(3, self.device)
        scaling.largest[:] = torch.tensor([8.0, 0.25, 1e-3])
        scaling.update(World(DistConfig(device="cpu")))
        return scaling

    def results(self, evaluates: bool) -> dict[str, Tensor]:
        """Of a forward pass that casts in the kernels, of an evaluation or of training."""
        scaling = self._scaling()
        mode = scaling.evaluation() if evaluates else contextlib.nullcontext()
        with mode, torch.no_grad():
            result, _, qkv = self._forward(scaling, True, held=evaluates)
        return {"result": result, "qkv": qkv}

    def trained(self, in_kernels: bool) -> dict[str, Tensor]:
        """Results, gradients and the magnitudes seen."""
        scaling = self._scaling()
        y, again, qkv = self._forward(scaling, in_kernels, held=False)
        leaves = [*self.leaves.values()]
        gradients = torch.autograd.grad([qkv, again], leaves, self.upstream)
        names = (f"gradient of {name}" for name in self.leaves)
        found = {"result": y.detach(), "qkv": qkv.detach()}
        found["magnitudes"] = scaling.largest.clone()
        return found | dict(zip(names, gradients, strict=True))

    def _forward(
        self, scaling: Scaling, in_kernels: bool, held: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        first, second, following = (Fp8Linear(scaling, number) for number in range(3))
        leaf, eps = self.leaves, 1e-12
        if held:
            for number, product in enumerate((first, second, following), start=1):
                product.hold(leaf[f"weight_{number}"])
        torch.manual_seed(2)
        sites = DropoutSites(self.device)
        names = "x", "bias", "residual", "norm_weight", "norm_bias"
        begin = Operands(*(leaf[name] for name in names))
        end = (leaf["bias_2"], leaf["norm_weight_2"], leaf["norm_bias_2"])
        y8: Tensor | None = None
        if in_kernels:
            h, residual, h8 = dropout_add_layer_norm.fused_with_cast(
                begin, eps, self.dropout, sites, first.target(INPUT)
            )
            settings = Settings(
                first, second, self.approximate, eps, self.dropout, sites, following.target(INPUT)
            )  # fmt: skip
            weights = Weights(leaf["weight_1"], leaf["bias_1"], leaf["weight_2"], *end)
            y, again, y8 = feed_forward(h, h8, residual, weights, settings)
        else:
            h, residual = dropout_add_layer_norm.fused(*begin, eps, self.dropout, sites)
            wide = first(h, leaf["weight_1"], None)
            inner = bias_gelu.fused(wide, leaf["bias_1"], self.approximate)
            projected = second(inner, leaf["weight_2"], None)
            y, again = dropout_add_layer_norm.fused(
                projected, end[0], residual, *end[1:], eps, self.dropout, sites
            )
        return y, again, following(y, leaf["weight_3"], leaf["bias_3"], y8)
