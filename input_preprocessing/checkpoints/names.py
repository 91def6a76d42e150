"""Names of BERT's parameters: TensorFlow 1, Hugging Face and MLPerf's converted .pt files (TensorFlow 2: tf2_names).

The three differ in spelling only, but for TensorFlow's dense kernels, which are transposed. All go by way of Hugging
Face's names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert.data.records import DataError

Tensors = dict[str, npt.NDArray[Any]]

DECODER = "cls.predictions.decoder.weight"
WORDS = "bert.embeddings.word_embeddings.weight"
BIAS = "cls.predictions.bias"
MOST_NAMED = 8  # of the parameters that do not fit, in a message

# What is not a parameter, by the last part of its name (TensorFlow 1) or by its path (TensorFlow 2), and what it is.
_COUNTERS = "global_step|good_steps|current_loss_scale|loss_scale|beta\\d_power|save_counter"
_LEFT_OUT = {
    r"(/(LAMB|Adam)\w*|/(adam|lamb)_[mv])$|/\.OPTIMIZER_SLOT/|^optimizer/": "optimizer",
    r"/GradientAccumulator\w*(/\.ATTRIBUTES/VARIABLE_VALUE)?$": "gradient accumulator",
    rf"(^|/)({_COUNTERS})(/\.ATTRIBUTES/VARIABLE_VALUE)?$": "counters",
    r"^_CHECKPOINTABLE_OBJECT_GRAPH$": "object graph",
    r"/\.ATTRIBUTES/OBJECT_CONFIG_JSON$": "settings of Keras",
}
_TF1_RENAMES = {
    r"^cls/seq_relationship/output_(weights|bias)$": r"cls/seq_relationship/\1",
    r"^cls/predictions/output_bias$": "cls/predictions/bias",
    r"/weights$": "/weight", r"/layer_(\d+)/": r"/layer/\1/", r"/gamma$": "/weight", r"/beta$": "/bias",
    r"_embeddings$": "_embeddings/weight",
}  # fmt: skip
_ACTIVATED = re.compile(r"((?:intermediate|pooler|transform)\.dense)\.")


@dataclass(frozen=True)
class Shape:
    """The sizes of a BERT, as its tensors tell them."""

    layers: int
    hidden: int
    feed_forward: int
    vocabulary: int
    positions: int

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's Hugging Face name and shape; the decoder's weight is the word embeddings."""
        h, f = self.hidden, self.feed_forward
        shapes: dict[str, tuple[int, ...]] = {
            WORDS: (self.vocabulary, h),
            "bert.embeddings.position_embeddings.weight": (self.positions, h),
            "bert.embeddings.token_type_embeddings.weight": (2, h),
            BIAS: (self.vocabulary,),
        }

        def dense(name: str, outputs: int, inputs: int) -> None:
            shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

        def norm(name: str) -> None:
            shapes[f"{name}.LayerNorm.weight"] = shapes[f"{name}.LayerNorm.bias"] = (h,)

        norm("bert.embeddings")
        for layer in range(self.layers):
            prefix = f"bert.encoder.layer.{layer}."
            for part in ("query", "key", "value"):
                dense(f"{prefix}attention.self.{part}", h, h)
            dense(f"{prefix}attention.output.dense", h, h)
            norm(f"{prefix}attention.output")
            dense(f"{prefix}intermediate.dense", f, h)
            dense(f"{prefix}output.dense", h, f)
            norm(f"{prefix}output")
        dense("bert.pooler.dense", h, h)
        dense("cls.predictions.transform.dense", h, h)
        norm("cls.predictions.transform")
        dense("cls.seq_relationship", 2, h)
        return shapes


def left_out_as(name: str) -> str | None:
    """What a variable is that is not a parameter of the model: an optimizer's, a counter...; None for the others."""
    return next((what for pattern, what in _LEFT_OUT.items() if re.search(pattern, name)), None)


def from_tf1(name: str, tensor: npt.NDArray[Any]) -> tuple[str, npt.NDArray[Any]]:
    """Hugging Face name and value of a TensorFlow 1 variable."""
    for pattern, replacement in _TF1_RENAMES.items():
        name = re.sub(pattern, replacement, name)
    if name.endswith("/kernel"):
        name, tensor = name[: -len("kernel")] + "weight", tensor.T
    return name.replace("/", "."), tensor


def some_of(problems: Iterable[str]) -> str:
    """The first problems by name, and how many there are beside them: a line that can still be read."""
    listed = sorted(problems)
    more = len(listed) - MOST_NAMED
    return "; ".join(listed[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def check_complete(tensors: Tensors, where: str) -> Shape:
    """Checks that the tensors of the file `where` are exactly the parameters of one BERT; returns its sizes.

    Raises:
        DataError: parameters are missing, unknown or of another shape; the first are named.
    """
    layers = {int(match[1]) for name in tensors if (match := re.match(r"bert\.encoder\.layer\.(\d+)\.", name))}
    try:
        shape = Shape(
            layers=max(layers) + 1,
            hidden=tensors[WORDS].shape[1],
            feed_forward=tensors["bert.encoder.layer.0.intermediate.dense.weight"].shape[0],
            vocabulary=tensors[WORDS].shape[0],
            positions=tensors["bert.embeddings.position_embeddings.weight"].shape[0],
        )
    except (KeyError, ValueError, IndexError) as error:
        raise DataError(f"{where} is no BERT: {error} is not in it") from error
    wanted = shape.parameters()
    problems = [f"{name} is missing" for name in wanted if name not in tensors]
    problems += [f"{name} is unknown" for name in tensors if name not in wanted]
    for name in wanted.keys() & tensors.keys():
        if tensors[name].shape != wanted[name]:
            problems.append(f"{name} is {tensors[name].shape}, not {wanted[name]}")
    for head, prefix in (("masked-LM", "cls.predictions."), ("next-sentence", "cls.seq_relationship.")):
        if not any(name.startswith(prefix) for name in tensors):
            problems = [problem for problem in problems if not problem.startswith(prefix)]
            problems.append(f"it has no {head} head, which training starts from")
    if problems:
        raise DataError(f"{where} does not fit BERT: {some_of(problems)}")
    return shape


def check_config(shape: Shape, heads: int | None, path: Path) -> None:
    """Checks the checkpoint's sizes, its vocabulary not padded yet, against bert_config.json.

    Raises:
        DataError: no configuration of BERT, or one of another model; all differences are named.
    """
    try:
        config = json.loads(path.read_text())
        wanted = {
            "num_hidden_layers": shape.layers,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.feed_forward,
            "vocab_size": shape.vocabulary,
            "max_position_embeddings": shape.positions,
            "num_attention_heads": heads or int(config["num_attention_heads"]),
        }
        odd = [f"{name} {int(config[name])}, not {size}" for name, size in wanted.items() if int(config[name]) != size]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no BERT configuration ({error}); replace it") from error
    if odd:
        raise DataError(f"{path} is of another model than the checkpoint: {', '.join(odd)}")


def resize_vocabulary(tensors: Tensors, size: int) -> Tensors:
    """Word embeddings and their bias cut, or filled up with zeros, to `size` rows."""
    missing = max(0, size - tensors[WORDS].shape[0])
    resized = dict(tensors)
    resized[WORDS] = np.pad(tensors[WORDS][:size], ((0, missing), (0, 0)))
    resized[BIAS] = np.pad(tensors[BIAS][:size], (0, missing))
    return resized


def to_mlperf(tensors: Tensors) -> Tensors:
    """MLPerf's names: dense layers with an activation are `dense_act`, the decoder has an entry of its own."""
    renamed = {_ACTIVATED.sub(r"\1_act.", name): tensor for name, tensor in tensors.items()}
    return {**renamed, DECODER: tensors[WORDS]}


def to_huggingface(tensors: Tensors) -> Tensors:
    """Names of Hugging Face's BertForPreTraining, tied entries included."""
    return {**tensors, DECODER: tensors[WORDS], "cls.predictions.decoder.bias": tensors[BIAS]}


def from_pytorch(tensors: Tensors) -> Tensors:
    """Hugging Face names without tied entries, from those or MLPerf's.

    Raises:
        DataError: tied entries differ.
    """
    renamed = {re.sub(r"dense_act\.", "dense.", name): tensor for name, tensor in tensors.items()}
    for tied, original in ((DECODER, WORDS), ("cls.predictions.decoder.bias", BIAS)):
        copy = renamed.pop(tied, None)
        if copy is not None and original not in renamed:
            renamed[original] = copy
        elif copy is not None and not np.array_equal(copy, renamed[original]):
            raise DataError(f"the checkpoint has a {tied} that is not {original}; BERT ties the two")
    return renamed
