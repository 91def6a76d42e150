"""Weight gradients written directly into the optimizer's buffer, and weights of several layers used
as one.

During a backward pass an optimizer with a flat buffer sets each parameter's part of it as the
target of its gradient. The product that computes the gradient writes there (``GradientTarget``),
which saves a copy; other operations (sums, a parameter used twice) leave it and return a new
tensor, which the optimizer copies as usual. The buffer is an attribute of the parameter, since
autograd's functions get tensors and no optimizer.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Attributes of parameters, and of tensors made of them.
BUFFER, PARAMETERS = "gradient_buffer", "gradient_parameters"


def set_grad_buffers(
    parameters: Iterable[Tensor], buffers: Iterable[Tensor | None] = ()
) -> None:
    """Sets memory for the parameters' gradients, of their shapes and types; without any there is
    none any more.
    """
    for parameter, buffer in itertools.zip_longest(parameters, buffers):
        setattr(parameter, BUFFER, buffer)


class GradientTarget:
    """Where the gradient of a weight goes: the memory that is set for the weight, or for the
    parameters of which ``concat_view`` made it.
    """

    def __init__(self, weight: Tensor) -> None:
        self.parameters: tuple[Tensor, ...] = getattr(weight, PARAMETERS, (weight,))

    @property
    def is_set(self) -> bool:
        return all(buffer is not None for buffer in self._buffers())

    def _buffers(self) -> list[Tensor | None]:
        return [getattr(parameter, BUFFER, None) for parameter in self.parameters]

    def write(self, compute: Callable[[Tensor | None], Tensor]) -> Tensor:
        """``compute(out)`` with that memory as ``out``, or with None; returns a tensor that
        autograd can keep as the gradient.

        The memory serves once: a second product of the same weight gets None, and autograd adds
        both up elsewhere.
        """
        out = _in_one_piece(self._buffers())
        set_grad_buffers(self.parameters)
        if out is None:
            return compute(None)
        compute(out)
        # A view, as autograd would copy the tensor itself, which others hold.
        return out.view_as(out)


def _in_one_piece(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Tensors that are adjacent in memory as one, joined along the first dimension; else None."""
    first = parts[0]
    if first is None or len(parts) == 1:
        return first
    # In elements: where the next part must begin.
    end = first.storage_offset()
    rows = 0
    for part in parts:
        if part is None or not part.is_contiguous() or part.dtype != first.dtype:
            return None
        if (
            part.storage_offset() != end
            or part.untyped_storage()._cdata != first.untyped_storage()._cdata
        ):
            return None
        end, rows = end + part.numel(), rows + part.shape[0]
    shape = (rows, *first.shape[1:])
    # By set_, not as a view of the first part, which autograd would track as its base.
    return (
        first.detach()
        .new_empty(0)
        .set_(first.untyped_storage(), first.storage_offset(), shape, first.stride())
    )


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same memory with the same type, shape and strides."""
    shares = (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() == b.storage_offset()
    )
    alike = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    return bool(shares and alike)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, *parts: Tensor) -> Tensor:
        ctx.rows = [len(part) for part in parts]
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The whole shares memory with its parts, which alone are parameters.
        return (None, *gradient.split(ctx.rows))


def concat_view(*parameters: Tensor) -> Tensor:
    """torch.cat(parameters), without a copy if they are adjacent in memory."""
    # As the optimizer lays them out (contiguous_groups); before it exists they are apart.
    whole = _in_one_piece(parameters)
    made: Tensor = (
        torch.cat(parameters) if whole is None else _Joined.apply(whole, *parameters)
    )
    setattr(made, PARAMETERS, parameters)
    return made


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.target = GradientTarget(weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_gradient = gradient @ weight if ctx.needs_input_grad[0] else None
        # (N, T) times (T, K): in the layout of the weight, as the buffer has it.
        weight_gradient = ctx.target.write(
            lambda out: torch.mm(gradient.t(), x, out=out)
        )
        return (
            x_gradient,
            weight_gradient,
            gradient.sum(0) if ctx.needs_input_grad[2] else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of x [T, K], weight [N, K], whose gradient is written to the buffer set for it."""
    # Without a buffer PyTorch's own function does the same with less overhead.
    if torch.is_grad_enabled() and GradientTarget(weight).is_set:
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)
