"""Names of BERT's parameters in TensorFlow 1 and 2, Hugging Face and MLPerf's converted .pt files.

Conversions go through Hugging Face's names. TensorFlow 1 and MLPerf only spell them differently, but TensorFlow's dense
kernels are transposed. The keys of a TensorFlow 2 checkpoint are paths through Python objects
(model/layer_with_weights-0/..., encoder/_transformer_layers/0/..., masked_lm/...) and change with every release of
tensorflow/models; the variable names in the checkpoint's object graph do not, and that project's converter from
TensorFlow 1 uses them as well (official/nlp, tf1_checkpoint_converter_lib.py, BERT_V2_NAME_REPLACEMENTS). Attention
kernels have an axis of heads there: [hidden, heads, head width], the output's [heads, head width, hidden].
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert.data.records import DataError
from common.tables import read_table

Tensors = dict[str, npt.NDArray[Any]]

DECODER = "cls.predictions.decoder.weight"
WORDS = "bert.embeddings.word_embeddings.weight"
BIAS = "cls.predictions.bias"
MOST_NAMED = 8  # parameters in an error message

_TABLE = read_table(__file__, "names.yaml")
_ACTIVATED = re.compile(r"((?:intermediate|pooler|transform)\.dense)\.")


def _pattern(modules: Iterable[str], before: str) -> re.Pattern[str]:
    """Pattern of the names' ends, after any outer scopes; TensorFlow may have numbered a layer (dense_1)."""
    paths = "|".join("/".join(rf"{part}(?:_\d+)?" for part in path.split("/")) for path in modules)
    return re.compile(rf"(?:^|/){before}({paths})/({'|'.join(_TABLE['leaves'])})$")


_MODEL = _pattern(_TABLE["modules"], "")
_LAYER = _pattern(_TABLE["layer_modules"], r"transformer/layer_(\d+)(?:_\d+)?/")


@dataclass(frozen=True)
class Shape:
    """Sizes of a BERT model."""

    layers: int
    hidden: int
    feed_forward: int
    vocabulary: int
    positions: int

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name and shape of every parameter, without the tied decoder weight."""
        sizes = {
            "h": self.hidden,
            "f": self.feed_forward,
            "v": self.vocabulary,
            "p": self.positions,
            "t": 2,
        }
        shapes = dict(_TABLE["shapes"])
        for layer in range(self.layers):
            shapes |= {
                f"bert.encoder.layer.{layer}.{name}": shape
                for name, shape in _TABLE["layer_shapes"].items()
            }
        return {name: tuple(sizes[size] for size in shape) for name, shape in shapes.items()}


def left_out_as(name: str) -> str | None:
    """Kind of a variable that is not a model parameter (optimizer, counters, ...); None for parameters."""
    return next(
        (what for pattern, what in _TABLE["left_out"].items() if re.search(pattern, name)), None
    )


def from_tf1(name: str, tensor: npt.NDArray[Any]) -> tuple[str, npt.NDArray[Any]]:
    """Hugging Face name and value of a TensorFlow 1 variable."""
    for pattern, replacement in _TABLE["tensorflow1"].items():
        name = re.sub(pattern, replacement, name)
    if name.endswith("/kernel"):
        name, tensor = (
            name[: -len("kernel")] + "weight",
            np.asarray(tensor.T, order="C"),
        )  # a copy, not a view
    return name.replace("/", "."), tensor


def some_of(problems: Iterable[str]) -> str:
    """The first problems, and the number of others."""
    listed = sorted(problems)
    more = len(listed) - MOST_NAMED
    return "; ".join(listed[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def check_complete(tensors: Tensors, where: str) -> Shape:
    """Checks that the tensors of the file `where` are exactly the parameters of a BERT model; returns its sizes.

    Raises:
        DataError: parameters are missing, unknown or of another shape; the message lists the first ones.
    """
    layers = {
        int(match[1])
        for name in tensors
        if (match := re.match(r"bert\.encoder\.layer\.(\d+)\.", name))
    }
    try:
        vocabulary, hidden = tensors[WORDS].shape
        feed_forward = tensors["bert.encoder.layer.0.intermediate.dense.weight"].shape[0]
        positions = tensors["bert.embeddings.position_embeddings.weight"].shape[0]
        shape = Shape(max(layers) + 1, hidden, feed_forward, vocabulary, positions)
    except (KeyError, ValueError, IndexError) as error:
        raise DataError(f"{where} is not a BERT checkpoint: it lacks {error}") from error
    wanted = shape.parameters()
    both = wanted.keys() & tensors.keys()
    problems = [f"{name} is missing" for name in wanted.keys() - both]
    problems += [f"{name} is unknown" for name in tensors.keys() - both]
    problems += [f"{name} is {tensors[name].shape}, not {wanted[name]}" for name in both
                 if tensors[name].shape != wanted[name]]  # fmt: skip
    # A checkpoint without a head (Google's TensorFlow 2 encoders have none) is told so in one
    # phrase instead of by the names of its parameters.
    for head, prefix in (
        ("masked-LM", "cls.predictions."),
        ("next-sentence", "cls.seq_relationship."),
    ):
        if not any(name.startswith(prefix) for name in tensors):
            problems = [problem for problem in problems if not problem.startswith(prefix)]
            problems.append(f"it has no {head} head, which training needs")
    if problems:
        raise DataError(f"{where} does not fit BERT: {some_of(problems)}")
    return shape


def check_config(shape: Shape, heads: int | None, path: Path) -> None:
    """Compares the checkpoint's sizes (with the vocabulary before padding) with bert_config.json.

    Raises:
        DataError: not a BERT configuration, or of another model; the message lists all differences.
    """
    try:
        config = json.loads(path.read_text())
        wanted = {
            "num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "intermediate_size": shape.feed_forward,
            "vocab_size": shape.vocabulary, "max_position_embeddings": shape.positions,
            "num_attention_heads": heads or int(config["num_attention_heads"]),
        }  # fmt: skip
        odd = [
            f"{name} {int(config[name])}, not {size}"
            for name, size in wanted.items()
            if int(config[name]) != size
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a BERT configuration ({error}); replace it") from error
    if odd:
        raise DataError(f"{path} is of another model than the checkpoint: {', '.join(odd)}")


def resize_vocabulary(tensors: Tensors, size: int) -> Tensors:
    """Truncates word embeddings and their bias to `size` rows, or pads them with zeros."""
    missing = max(0, size - tensors[WORDS].shape[0])
    words, bias = (
        np.pad(tensors[WORDS][:size], ((0, missing), (0, 0))),
        np.pad(tensors[BIAS][:size], (0, missing)),
    )
    return {**tensors, WORDS: words, BIAS: bias}


def to_mlperf(tensors: Tensors) -> Tensors:
    """MLPerf's names: dense layers with an activation are `dense_act`, the tied decoder is included."""
    renamed = {_ACTIVATED.sub(r"\1_act.", name): tensor for name, tensor in tensors.items()}
    return {**renamed, DECODER: tensors[WORDS]}


def to_huggingface(tensors: Tensors) -> Tensors:
    """Names of Hugging Face's BertForPreTraining, including tied entries."""
    return {**tensors, DECODER: tensors[WORDS], "cls.predictions.decoder.bias": tensors[BIAS]}


def from_pytorch(tensors: Tensors) -> Tensors:
    """Hugging Face's names without tied entries, from Hugging Face's or MLPerf's.

    Raises:
        DataError: tied entries differ.
    """
    renamed = {re.sub(r"dense_act\.", "dense.", name): tensor for name, tensor in tensors.items()}
    for tied, original in ((DECODER, WORDS), ("cls.predictions.decoder.bias", BIAS)):
        copy = renamed.pop(tied, None)
        # A state dict may hold either of the tied tensors, or both.
        if copy is not None and original not in renamed:
            renamed[original] = copy
        elif copy is not None and not np.array_equal(copy, renamed[original]):
            raise DataError(f"the checkpoint's {tied} differs from {original}; BERT ties the two")
    return renamed


def parameter_of(full_name: str) -> str | None:
    """Hugging Face name of the parameter in a TensorFlow 2 variable; None if it is not a parameter of BERT."""
    match = _LAYER.search(full_name) or _MODEL.search(full_name)
    if match is None:
        return None
    *layer, module, leaf = match.groups()
    # TensorFlow numbers layers that share a name (dense_1); the tables have the plain names.
    module = re.sub(r"_\d+(?=/|$)", "", module)
    prefix = (
        f"bert.encoder.layer.{layer[0]}.{_TABLE['layer_modules'][module]}"
        if layer
        else _TABLE["modules"][module]
    )
    return f"{prefix}.{_TABLE['leaves'][leaf]}"


def merge_heads(name: str, tensor: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], int | None]:
    """A variable in PyTorch's shape, and the number of heads if its shape shows it. name: Hugging Face's."""
    heads, is_weight = None, name.endswith("weight")
    # Query, key, value: kernels (D, N, H) and biases (N, H) become (D, N * H) and (N * H).
    if ".attention.self." in name and tensor.ndim == (3 if is_weight else 2):
        heads, tensor = tensor.shape[-2], tensor.reshape(*tensor.shape[:-2], -1)
    # Output: (N, H, D) becomes (N * H, D).
    elif ".attention.output.dense.weight" in name and tensor.ndim == 3:
        heads, tensor = tensor.shape[0], tensor.reshape(-1, tensor.shape[-1])
    # TensorFlow multiplies x W, PyTorch x W^T; tables of embeddings are alike in both.
    return (tensor.T if is_weight and "embeddings" not in name else tensor), heads


def unused_poolers(names: dict[str, str]) -> list[str]:
    """Keys of the encoder's pooler if the next-sentence head has its own, so that the encoder's is unused.

    Args:
        names: key -> full name of the model's variables.
    """
    encoders, heads = (
        _pattern(["pooler_transform"], ""),
        _pattern(["next_sentence/pooler_dense"], ""),
    )
    if not any(heads.search(full_name) for full_name in names.values()):
        return []
    return [key for key, full_name in names.items() if encoders.search(full_name)]


def from_tf2(
    names: dict[str, str], read: Callable[[str], npt.NDArray[Any]], where: str
) -> tuple[Tensors, int | None]:
    """Parameters under Hugging Face's names, and the number of attention heads if the variables show it.

    Args:
        names: key -> full name of the variables, all of which must be parameters of BERT.
        read: reads the tensor of a key.
        where: the checkpoint, for messages.

    Raises:
        DataError: unknown variables, two of the same parameter, or different numbers of heads; lists the first ones.
    """
    found: dict[str, str] = {}
    problems = []
    for key, full_name in names.items():
        parameter = parameter_of(full_name)
        if parameter is None:
            problems.append(f"{key} ({full_name or 'unnamed'}) is unknown")
        elif parameter in found:
            problems.append(f"{key} and {found[parameter]} are both {parameter}")
        else:
            found[parameter] = key
    if problems:
        raise DataError(f"{where} does not fit BERT: {some_of(problems)}")
    tensors: Tensors = {}
    heads: dict[int, str] = {}
    for parameter, key in found.items():
        tensor, number = merge_heads(parameter, read(key))
        tensors[parameter] = np.asarray(
            tensor, order="C"
        )  # a view would keep the original in memory
        if number is not None:
            heads.setdefault(number, key)
    if len(heads) > 1:
        raise DataError(
            f"{where}: {' and '.join(f'{n} heads in {key}' for n, key in heads.items())}; copy it again"
        )
    return tensors, next(iter(heads), None)
