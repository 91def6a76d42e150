"""BERT's parameters in checkpoints of TensorFlow 2, by Hugging Face's names.

Keys there are paths through Python objects (model/layer_with_weights-0/...), which change with
every release of tensorflow/models. The variables' own names, in the checkpoint's graph of objects,
do not, and that project's converter from TensorFlow 1 goes by them too (official/nlp/tools,
tf1_bert_checkpoint_converter_lib.py). Written are the keys of its BertPretrainer of release 2.2,
which made the benchmark's tf2_ckpt. Attention kernels have an axis of heads: [D, N, H], and in the
output [N, H, D].
"""

import re
from collections.abc import Callable, Iterable

import numpy as np

from bert.data.records import Array, DataError
from common.lists import first_few
from common.tables import read_table
from input_preprocessing.checkpoints.tf_names import MOST_NAMED, Tensors

ATTRIBUTE = ".ATTRIBUTES/VARIABLE_VALUE"

_TABLE = read_table(__file__, "names.yaml")
_WEIGHTS = ("embeddings", "kernel", "gamma")
_MODULES: dict[str, list[str]] = _TABLE["modules"]
_LAYER_MODULES: dict[str, list[str]] = _TABLE["layer_modules"]


def _pattern(names: Iterable[str], before: str) -> re.Pattern[str]:
    """Pattern of the ends of names, after any outer scopes."""
    # TensorFlow numbers layers that share a name: dense_1.
    paths = "|".join(name.replace("/", r"(?:_\d+)?/") for name in names)
    leaves = "|".join((*_WEIGHTS, "beta", "bias"))
    return re.compile(rf"(?:^|/){before}({paths})(?:_\d+)?/({leaves})$")


def _by_variable(table: dict[str, list[str]]) -> dict[str, str]:
    return {name: module for module, (_, *names) in table.items() for name in names}


_OF_MODEL, _OF_LAYER = _by_variable(_MODULES), _by_variable(_LAYER_MODULES)
_MODEL = _pattern(_OF_MODEL, "")
_LAYER = _pattern(_OF_LAYER, r"transformer/layer_(\d+)(?:_\d+)?/")


def parameter_of(variable: str) -> str | None:
    """Hugging Face's name of a variable's parameter; None if it is none of BERT."""
    match = _LAYER.search(variable) or _MODEL.search(variable)
    if match is None:
        return None
    *layer, name, leaf = match.groups()
    name = re.sub(r"_\d+(?=/|$)", "", name)
    module = _OF_MODEL[name] if not layer else f"bert.encoder.layer.{layer[0]}.{_OF_LAYER[name]}"  # fmt: skip
    return f"{module}.{'weight' if leaf in _WEIGHTS else 'bias'}"


def unused_poolers(variables: dict[str, str]) -> list[str]:
    """Keys of the encoder's pooler where the next-sentence head has its own, which is then the one
    in use.

    variables: key -> name of the variable.
    """
    poolers = {key: name for key, name in variables.items() if parameter_of(name) in _POOLER}  # fmt: skip
    own = [name for name in poolers.values() if "pooler_dense" in name]
    return [key for key, name in poolers.items() if own and name not in own]


_POOLER = ("bert.pooler.dense.weight", "bert.pooler.dense.bias")


def from_tf2(
    variables: dict[str, str], read: Callable[[str], Array], where: str
) -> tuple[Tensors, int | None]:
    """Parameters by Hugging Face's names, and the number of attention heads if a shape shows it.

    variables: key -> name, all of parameters; read: a key's tensor. Raises DataError for variables
    that are unknown, or two of one parameter.
    """
    keys: dict[str, str] = {}
    problems = []
    for key, variable in variables.items():
        parameter = parameter_of(variable)
        if parameter is None:
            problems.append(f"{key} ({variable or 'unnamed'}) is unknown")
        elif parameter in keys:
            problems.append(f"{key} and {keys[parameter]} are both {parameter}")
        else:
            keys[parameter] = key
    if problems:
        raise DataError(f"{where} does not fit BERT: {first_few(sorted(problems), MOST_NAMED)}")  # fmt: skip
    tensors, found = {}, set()
    for parameter, key in keys.items():
        tensor = read(key)
        axis = _axis_of_heads(parameter)
        if axis is not None and tensor.ndim > axis + 1:
            found.add(tensor.shape[axis])
            shape = tensor.shape
            tensor = tensor.reshape(*shape[:axis], -1, *shape[axis + 2 :])
        # A view would keep the original in memory, too.
        tensors[parameter] = np.asarray(_transposed(parameter, tensor), order="C")
    if len(found) > 1:
        raise DataError(f"{where} has layers of {sorted(found)} heads; copy it again")
    return tensors, next(iter(found), None)


def to_tf2(tensors: Tensors, num_heads: int) -> dict[str, tuple[str, Array]]:
    """Key -> name and value of each variable of the official BertPretrainer."""
    number = r"bert\.encoder\.layer\.(\d+)\."
    last = max(int(match[1]) for name in tensors if (match := re.match(number, name)))
    made = {}
    for parameter, tensor in tensors.items():
        module, kind = parameter.rsplit(".", 1)
        if match := re.match(number, parameter):
            layer = int(match[1])
            place, name, *_ = _LAYER_MODULES[module[match.end() :]]
            # After the four layers of the embeddings.
            place, name = f"0/{4 + layer}/{place}", f"transformer/layer_{layer}/{name}"
        else:
            place, name, *_ = _MODULES[module]
            place = place.replace("pooler", str(5 + last))
        value = _transposed(parameter, tensor)
        if (axis := _axis_of_heads(parameter)) is not None:
            shape = value.shape
            value = value.reshape(*shape[:axis], num_heads, -1, *shape[axis + 1 :])
        is_norm, is_table = module.endswith("LayerNorm"), module.endswith("_embeddings")
        leaf = ("beta" if is_norm else "bias") if kind == "bias" else (
            "gamma" if is_norm else "embeddings" if is_table else "kernel")  # fmt: skip
        path = re.sub(r"(?<![^/])(?=\d)", "layer_with_weights-", place)
        made[f"model/{path}/{leaf}/{ATTRIBUTE}"] = f"{name}/{leaf}", value
    return made


def _axis_of_heads(parameter: str) -> int | None:
    """The axis of a variable that is split by heads."""
    if ".attention.self." in parameter:
        return 1 if parameter.endswith("weight") else 0
    return 0 if parameter.endswith(".attention.output.dense.weight") else None


def _transposed(parameter: str, tensor: Array) -> Array:
    """TensorFlow multiplies x W with W [in, out], PyTorch x W^T; tables are alike in both."""
    is_table = parameter.endswith("_embeddings.weight")
    return tensor if is_table or tensor.ndim != 2 else tensor.T
