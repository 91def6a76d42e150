"""Weight gradients written where the optimizer wants them, and weights of several layers taken as one.

An optimizer with a flat buffer offers each parameter its part of it for the time of a backward pass. The product that
computes the gradient takes the offer and writes there, so that nothing is copied afterwards; what takes no offer (sums,
a parameter that is used twice) returns a gradient of its own, which the optimizer copies as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

OFFER, SOURCES = "gradient_offer", "gradient_sources"  # attributes of parameters, and of tensors made of them


def offer(parameters: Iterable[Tensor], places: Iterable[Tensor | None]) -> None:
    """Offers the parameters memory for their gradients, of their shapes and types; None takes an offer back."""
    for parameter, place in zip(parameters, places, strict=True):
        setattr(parameter, OFFER, place)


def is_offered(weight: Tensor) -> bool:
    """Whether there is memory for the gradient of a parameter, or of what ``joined`` made of some."""
    return all(getattr(source, OFFER, None) is not None for source in sources(weight))


def sources(weight: Tensor) -> tuple[Tensor, ...]:
    """The parameters that ``weight`` consists of: itself, or those that were joined."""
    found: tuple[Tensor, ...] = getattr(weight, SOURCES, (weight,))
    return found


def take(parameters: Sequence[Tensor]) -> Tensor | None:
    """The memory for the gradient of these, one after the other; None where there is none in one piece.

    An offer is taken once: a second product of the same weight gets None, and autograd adds both up elsewhere.
    """
    places = [getattr(parameter, OFFER, None) for parameter in parameters]
    offer(parameters, [None] * len(places))
    return _in_one_piece(places)


def into(place: Tensor | None, compute: Callable[[Tensor | None], Tensor]) -> Tensor:
    """``compute(out)`` with the place as ``out``; as a tensor that autograd may keep as the gradient."""
    if place is None:
        return compute(None)
    compute(place)
    return place.view_as(place)  # of the place itself, which others hold, autograd would make a copy


def _in_one_piece(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Tensors that lie one after the other in the same memory as one, along their first dimension."""
    first = parts[0]
    if first is None or len(parts) == 1:
        return first
    end = first.storage_offset()
    rows = 0
    for part in parts:
        if part is None or not part.is_contiguous() or part.dtype != first.dtype:
            return None
        if part.storage_offset() != end or part.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return None
        end, rows = end + part.numel(), rows + part.shape[0]
    shape = (rows, *first.shape[1:])
    return first.detach().new_empty(0).set_(first.untyped_storage(), first.storage_offset(), shape, first.stride())


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same numbers: type, shape and place."""
    shares = a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()
    return shares and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, *parts: Tensor) -> Tensor:
        ctx.rows = [len(part) for part in parts]
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *gradient.split(ctx.rows))


def joined(*parameters: Tensor) -> Tensor:
    """torch.cat(parameters): without a copy where they lie one after the other."""
    whole = _in_one_piece(parameters)
    made: Tensor = torch.cat(parameters) if whole is None else _Joined.apply(whole, *parameters)
    setattr(made, SOURCES, parameters)
    return made


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sources = sources(weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_gradient = gradient @ weight if ctx.needs_input_grad[0] else None
        weight_gradient = into(take(ctx.sources), lambda out: torch.mm(gradient.t(), x, out=out))
        return x_gradient, weight_gradient, gradient.sum(0) if ctx.needs_input_grad[2] else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of x [T, K], weight [N, K], whose gradient goes where it was offered."""
    if torch.is_grad_enabled() and is_offered(weight):
        result: Tensor = _Linear.apply(x, weight, bias)
        return result
    return F.linear(x, weight, bias)
