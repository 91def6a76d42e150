"""First weights: drawn at random, piece by piece, so that nobody needs to hold the whole of a large model."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bert.model.bert import BertForPreTraining

PIECE = 1 << 24  # numbers at a time; a multiple of the 16 that PyTorch's generator makes at once


class Piece(NamedTuple):
    """Numbers ``start`` to ``start + len(values)`` of a parameter laid flat: fp32, on the CPU."""

    name: str
    start: int
    values: Tensor


def initialize(model: BertForPreTraining, seed: int, only: Collection[str] | None = None) -> None:
    """Gives the model, or the parameters that ``only`` names, the weights that ``first_weights`` draws."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, start, values in first_weights(model, seed):
            if only is None or name in only:
                parameters[name].view(-1)[start : start + len(values)].copy_(values)


def first_weights(model: BertForPreTraining, seed: int) -> Iterator[Piece]:
    """Draws weights from N(0, initializer_range), biases are 0 and LayerNorm is the identity; padding rows are 0.

    The same seed gives the same weights on every rank and device, because the draw is made on the CPU. Only the shapes
    of ``model`` matter.
    """
    generator = torch.Generator().manual_seed(seed)
    words, used = model.bert.embeddings.word_embeddings, model.config.vocab_size * model.config.hidden_size
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            size = parameter.numel()
            drawn = isinstance(module, (nn.Linear, nn.Embedding)) and name.endswith(".weight")
            value = 1.0 if isinstance(module, nn.LayerNorm) and name.endswith(".weight") else 0.0
            for start, length in _pieces(size):
                values = torch.full((length,), value)
                if drawn:
                    values.normal_(0.0, model.config.initializer_range, generator=generator)
                if module is words:
                    values[max(0, used - start) :] = 0.0
                yield Piece(name, start, values)


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """(start, length): no piece but a whole parameter is shorter than 16, which would be drawn in another way."""
    starts = list(range(0, size, PIECE))
    if len(starts) > 1 and size - starts[-1] < 16:
        starts.pop()
    yield from zip(starts, [b - a for a, b in zip(starts, [*starts[1:], size], strict=True)], strict=True)


class _NoDraws(TorchFunctionMode):
    """Inside, PyTorch's modules leave their parameters as they come: their draws take seconds, also on no device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def blank(device: torch.device) -> Iterator[None]:
    """Models made inside lie on the device, and their weights have no values: who makes them gives them theirs."""
    with device, _NoDraws():
        yield


def on_meta() -> contextlib.AbstractContextManager[None]:
    """Models made inside have shapes and no numbers."""
    return blank(torch.device("meta"))


def hollow(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Gives a model that was built on the meta device parameters of ``dtype`` on ``device``, all of a single number.

    They have the right shapes and next to no memory: the optimizer that shards them gives them theirs.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            number = torch.zeros((), dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(number.expand(parameter.shape)))
