"""Variables of BERT in TensorFlow 2 checkpoints, by the names they had when they were made.

The keys of such a checkpoint are paths through Python objects (model/layer_with_weights-0/..., encoder/
_transformer_layers/0/..., masked_lm/...) and change with every release of tensorflow/models; the variables' own names,
kept in the checkpoint's object graph, do not. They are what that project's converter from TensorFlow 1 matches by
(official/nlp, tf1_checkpoint_converter_lib.py, BERT_V2_NAME_REPLACEMENTS). Attention kernels have an axis of heads:
[hidden, heads, head width], the output's [heads, head width, hidden].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from bert.data.records import DataError
from input_preprocessing.checkpoints.names import Tensors, some_of

_MODULES = {
    "word_embeddings": "bert.embeddings.word_embeddings",
    "position_embedding": "bert.embeddings.position_embeddings",
    "type_embeddings": "bert.embeddings.token_type_embeddings",
    "embeddings/layer_norm": "bert.embeddings.LayerNorm",
    "pooler_transform": "bert.pooler.dense",
    "next_sentence/pooler_dense": "bert.pooler.dense",
    "cls/predictions/transform/dense": "cls.predictions.transform.dense",
    "cls/predictions/transform/LayerNorm": "cls.predictions.transform.LayerNorm",
    "cls/predictions/output_bias": "cls.predictions",
    "predictions/transform/logits": "cls.seq_relationship",
    "next_sentence/logits": "cls.seq_relationship",
}
_LAYER_MODULES = {
    "self_attention/query": "attention.self.query",
    "self_attention/key": "attention.self.key",
    "self_attention/value": "attention.self.value",
    "self_attention/attention_output": "attention.output.dense",
    "self_attention_output": "attention.output.dense",
    "self_attention_layer_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_layer_norm": "output.LayerNorm",
}
_LEAVES = {"embeddings": "weight", "kernel": "weight", "gamma": "weight", "beta": "bias", "bias": "bias"}


def _pattern(modules: Iterable[str], before: str) -> re.Pattern[str]:
    """The names' ends: outer scopes may stand before, and TensorFlow may have numbered a layer (dense_1)."""
    paths = "|".join("/".join(rf"{part}(?:_\d+)?" for part in path.split("/")) for path in modules)
    return re.compile(rf"(?:^|/){before}({paths})/({'|'.join(_LEAVES)})$")


_MODEL = _pattern(_MODULES, "")
_LAYER = _pattern(_LAYER_MODULES, r"transformer/layer_(\d+)(?:_\d+)?/")


def parameter_of(full_name: str) -> str | None:
    """Hugging Face name of the parameter that a variable of this name is; None: of no parameter of BERT."""
    match = _LAYER.search(full_name) or _MODEL.search(full_name)
    if match is None:
        return None
    *layer, module, leaf = match.groups()
    module = re.sub(r"_\d+(?=/|$)", "", module)
    prefix = f"bert.encoder.layer.{layer[0]}.{_LAYER_MODULES[module]}" if layer else _MODULES[module]
    return f"{prefix}.{_LEAVES[leaf]}"


def merge_heads(name: str, tensor: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], int | None]:
    """A variable's value in PyTorch's shape, under its Hugging Face name, and its number of heads where it tells."""
    heads = None
    if ".attention.self." in name and tensor.ndim == (3 if name.endswith("weight") else 2):
        heads = tensor.shape[-2]
        tensor = tensor.reshape(*tensor.shape[:-2], -1)
    elif ".attention.output.dense.weight" in name and tensor.ndim == 3:
        heads = tensor.shape[0]
        tensor = tensor.reshape(-1, tensor.shape[-1])
    transposed = name.endswith("weight") and "embeddings" not in name
    return (tensor.T if transposed else tensor), heads


def unused_poolers(names: dict[str, str]) -> list[str]:
    """Keys of the encoder's own pooler where the next-sentence head has another: then the encoder's is never read.

    Args:
        names: key -> full name of the model's variables.
    """
    encoders, heads = _pattern(["pooler_transform"], ""), _pattern(["next_sentence/pooler_dense"], "")
    if not any(heads.search(full_name) for full_name in names.values()):
        return []
    return [key for key, full_name in names.items() if encoders.search(full_name)]


def from_tf2(names: dict[str, str], read: Callable[[str], npt.NDArray[Any]], where: str) -> tuple[Tensors, int | None]:
    """Parameters under Hugging Face's names, and the number of attention heads where the variables tell it.

    Args:
        names: key -> full name of the variables to take, all of which must be parameters of BERT.
        read: a key's tensor.
        where: the checkpoint, for messages.

    Raises:
        DataError: variables of other names, two of one parameter, or heads that differ; the first are named.
    """
    found: dict[str, str] = {}
    problems = []
    for key, full_name in names.items():
        parameter = parameter_of(full_name)
        if parameter is None:
            problems.append(f"{key} ({full_name or 'without a name'}) is unknown")
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
        tensors[parameter] = np.asarray(tensor, order="C")  # a view would keep what it was made of
        if number is not None:
            heads.setdefault(number, key)
    if len(heads) > 1:
        raise DataError(f"{where}: {' and '.join(f'{n} heads in {key}' for n, key in heads.items())}; copy it again")
    return tensors, next(iter(heads), None)
