"""Names of BERT's parameters in TensorFlow 1 (2: tf2_names.py), Hugging Face and MLPerf's converted .pt files.

Conversions go through Hugging Face's names. The others only spell them differently, but
TensorFlow's dense kernels are transposed.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert.data.records import Array, DataError
from common.lists import first_few
from common.tables import read_table

Tensors = dict[str, Array]

DECODER = "cls.predictions.decoder.weight"
WORDS = "bert.embeddings.word_embeddings.weight"
BIAS = "cls.predictions.bias"
MOST_NAMED = 8  # parameters in an error message

_TABLE = read_table(__file__, "names.yaml")
_ACTIVATED = re.compile(r"((?:intermediate|pooler|transform)\.dense)\.")


class Shape(NamedTuple):
    """Sizes of a BERT model."""

    layers: int
    hidden: int
    feed_forward: int
    vocabulary: int
    positions: int

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name and shape of every parameter, without the tied decoder weight."""
        h, f, v, p = self.hidden, self.feed_forward, self.vocabulary, self.positions
        sizes = {"h": h, "f": f, "v": v, "p": p, "t": 2}
        shapes = dict(_TABLE["shapes"])
        for layer in range(self.layers):
            for name, shape in _TABLE["layer_shapes"].items():
                shapes[f"bert.encoder.layer.{layer}.{name}"] = shape
        return {
            name: tuple(sizes[size] for size in shape) for name, shape in shapes.items()
        }


def left_out_as(name: str) -> str | None:
    """Kind of a variable that is not a model parameter (optimizer, counters, ...); None for
    parameters.
    """
    return next(
        (
            reason
            for pattern, reason in _TABLE["left_out"].items()
            if re.search(pattern, name)
        ),
        None,
    )


def from_tf1(name: str, tensor: Array) -> tuple[str, Array]:
    """Hugging Face name and value of a TensorFlow 1 variable."""
    for pattern, replacement in _TABLE["tensorflow1"].items():
        name = re.sub(pattern, replacement, name)
    # TensorFlow multiplies x W with W [in, out], PyTorch x W^T with W [out, in].
    if name.endswith("/kernel"):
        # A copy, not a view.
        name, tensor = (
            name.removesuffix("kernel") + "weight",
            np.asarray(tensor.T, order="C"),
        )
    return name.replace("/", "."), tensor


def check_complete(tensors: Tensors, where: str) -> Shape:
    """Checks that the tensors of the file `where` are exactly the parameters of a BERT model;
    returns its sizes.

    Raises:
        DataError: parameters are missing, unknown or of another shape; the message lists the first
        ones.
    """
    # Layers are counted by their names: a checkpoint states no sizes.
    layers = {
        int(match[1])
        for name in tensors
        if (match := re.match(r"bert\.encoder\.layer\.(\d+)\.", name))
    }
    try:
        vocabulary, hidden = tensors[WORDS].shape
        feed_forward = tensors["bert.encoder.layer.0.intermediate.dense.weight"].shape[
            0
        ]
        positions = tensors["bert.embeddings.position_embeddings.weight"].shape[0]
        shape = Shape(max(layers) + 1, hidden, feed_forward, vocabulary, positions)
    except (KeyError, ValueError, IndexError) as error:
        raise DataError(
            f"{where} is not a BERT checkpoint: it lacks {error}"
        ) from error
    wanted = shape.parameters()
    both = wanted.keys() & tensors.keys()
    problems = [f"{name} is missing" for name in wanted.keys() - both]
    problems += [f"{name} is unknown" for name in tensors.keys() - both]
    problems += [
        f"{name} is {tensors[name].shape}, not {wanted[name]}"
        for name in both
        if tensors[name].shape != wanted[name]
    ]
    if problems:
        raise DataError(
            f"{where} does not fit BERT: {first_few(sorted(problems), MOST_NAMED)}"
        )
    return shape


def check_config(shape: Shape, heads: int | None, path: Path) -> int:
    """Compares the checkpoint's sizes (with the vocabulary before padding, and heads, if it shows
    them) with bert_config.json; returns the number of heads.

    Raises:
        DataError: not a BERT configuration, or of another model; the message lists all differences.
    """
    try:
        config = json.loads(path.read_text())
        if heads is None:
            heads = int(config["num_attention_heads"])
        wanted = {
            "num_attention_heads": heads,
            "num_hidden_layers": shape.layers,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.feed_forward,
            "vocab_size": shape.vocabulary,
            "max_position_embeddings": shape.positions,
        }
        odd = [
            f"{name} {int(config[name])}, not {size}"
            for name, size in wanted.items()
            if int(config[name]) != size
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a BERT configuration ({error}); replace it"
        ) from error
    if odd:
        raise DataError(
            f"{path} is of another model than the checkpoint: {', '.join(odd)}"
        )
    return heads


def resize_vocabulary(tensors: Tensors, size: int) -> Tensors:
    """Truncates word embeddings and their bias to `size` rows, or pads them with zeros."""
    # The benchmark pads its vocabulary of 30,522 to 30,528, a multiple of 8 for tensor cores.
    missing = max(0, size - tensors[WORDS].shape[0])
    words = np.pad(tensors[WORDS][:size], ((0, missing), (0, 0)))
    bias = np.pad(tensors[BIAS][:size], (0, missing))
    return {**tensors, WORDS: words, BIAS: bias}


def to_mlperf(tensors: Tensors) -> Tensors:
    """MLPerf's names: dense layers with an activation are `dense_act`, the tied decoder is
    included.
    """
    renamed = {
        _ACTIVATED.sub(r"\1_act.", name): tensor for name, tensor in tensors.items()
    }
    return {**renamed, DECODER: tensors[WORDS]}


def to_huggingface(tensors: Tensors) -> Tensors:
    """Names of Hugging Face's BertForPreTraining, including tied entries."""
    return {
        **tensors,
        DECODER: tensors[WORDS],
        "cls.predictions.decoder.bias": tensors[BIAS],
    }


def from_pytorch(tensors: Tensors) -> Tensors:
    """Hugging Face's names without tied entries, from Hugging Face's or MLPerf's.

    Raises:
        DataError: tied entries differ.
    """
    renamed = {
        re.sub(r"dense_act\.", "dense.", name): tensor
        for name, tensor in tensors.items()
    }
    for tied, original in ((DECODER, WORDS), ("cls.predictions.decoder.bias", BIAS)):
        copy = renamed.pop(tied, None)
        # A state dict may hold either of the tied tensors, or both.
        if copy is not None and original not in renamed:
            renamed[original] = copy
        elif copy is not None and not np.array_equal(copy, renamed[original]):
            raise DataError(
                f"the checkpoint's {tied} differs from {original}; BERT ties the two"
            )
    return renamed
