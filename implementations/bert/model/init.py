"""Random initial weights, drawn in parameter chunks, so that no rank holds all of a large model."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bert.model.bert import BertForPreTraining

# Numbers at a time; a multiple of the 16 that PyTorch draws at once.
CHUNK_SIZE = 1 << 24
META = torch.device("meta")


class Chunk(NamedTuple):
    """Parameter chunk: numbers ``start`` to ``start + len(values)`` of a flattened parameter; fp32,
    on the CPU.
    """

    name: str
    start: int
    values: Tensor


def initialize(model: BertForPreTraining, seed: int) -> None:
    fill(model, first_weights(model, seed))


@torch.no_grad()
def fill(model: nn.Module, chunks: Iterable[Chunk]) -> None:
    """Copies the chunks into the model's parameters; the rest becomes 0."""
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        # A file may have no padding rows of the vocabulary, so that no chunk covers them.
        parameter.zero_()
    for name, start, values in chunks:
        parameters[name].view(-1)[start : start + len(values)].copy_(values)


def first_weights(model: BertForPreTraining, seed: int) -> Iterator[Chunk]:
    """Draws weights from N(0, initializer_range); biases and padding rows are 0 and LayerNorm is
    the identity.

    A seed gives the same weights on every rank and device, as they are drawn on the CPU. Only the
    shapes of ``model`` matter.
    """
    generator = torch.Generator().manual_seed(seed)
    words = model.bert.embeddings.word_embeddings
    size_without_padding = model.config.vocab_size * model.config.hidden_size
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            size, is_weight = parameter.numel(), name.endswith(".weight")
            starts = list(range(0, size, CHUNK_SIZE))
            if len(starts) > 1 and size - starts[-1] < 16:
                starts.pop()  # fewer than 16 numbers would be drawn differently
            for start, end in itertools.pairwise([*starts, size]):
                is_scale = is_weight and isinstance(module, nn.LayerNorm)
                values = torch.full((end - start,), float(is_scale))
                # Drawn in the order of the modules: another order is another model for the same
                # seed.
                if is_weight and isinstance(module, (nn.Linear, nn.Embedding)):
                    values.normal_(
                        0.0, model.config.initializer_range, generator=generator
                    )
                # Padding rows. They stay 0, as no token reads them and the softmax leaves them out.
                if module is words:
                    values[max(0, size_without_padding - start) :] = 0.0
                yield Chunk(name, start, values)


class _NoDraws(TorchFunctionMode):
    """Skips the initialization of PyTorch's modules, which takes seconds, even on the meta
    device.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def uninitialized(device: torch.device = META) -> Iterator[None]:
    """Models made inside are on ``device`` with uninitialized weights; on meta, only shapes."""
    with device, _NoDraws():
        yield


def use_placeholders(
    model: nn.Module, dtype: torch.dtype, device: torch.device
) -> None:
    """Gives a model on the meta device parameters of ``dtype`` on ``device``, each a single number
    expanded.

    They have the right shapes and take almost no memory; the sharded optimizer allocates the real
    ones.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            # Strides of 0: the shape of the parameter over one number.
            placeholder = torch.zeros((), dtype=dtype, device=device).expand(
                parameter.shape
            )
            setattr(module, name, nn.Parameter(placeholder))
